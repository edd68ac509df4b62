"""Chat templates and special tokens of checkpoints, as transformers' `apply_chat_template` renders the same files."""

# ruff: noqa: E501 - templates have long lines

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers import models as tokenizer_models
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from workers.gateway.errors import ApiError
from workers.gateway.prompts import Prompts
from workers.models import ChatRefusal, LoadedModel, ModelConfig, ModelError, TemplateFault
from workers.models.chat import ChatTemplate
from workers.models.hf_tokenizer import hf_tokenizer

SPECIAL = ["<s>", "</s>", "<unk>", "<|im_start|>", "<|im_end|>", "<|tool|>"]
CONFIG = ModelConfig("m", 1, 8, 8, 1, 1, 8, 300, 64, bos_id=1, eos_ids=(2,))  # ids that are no special tokens here

CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEMPLATES = {
    "chatml": CHATML,
    "generation tags": """{{ bos_token }}{% for m in messages %}
{% if m.role == 'assistant' %}
    {% generation %}
    {{ m.content }}{{ eos_token }}
    {% endgeneration %}
{% else %}[{{ m.role }}] {{ m.content }}
{% endif %}
{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}""",
    "generation tags that trim": "{% for m in messages %}<{{ m.role }}> {%- generation -%} {{ m.content }} {%- endgeneration -%} \n"
    "{% endfor %}",
    "mistral": """{{ bos_token }}{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}
{% if m['role'] == 'user' %}{{ ' [INST] ' + m['content'] + ' [/INST]' }}
{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'] + ' ' + eos_token }}
{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}""",
    "llama 3": """{% set loop_messages = messages %}{% for message in loop_messages %}
{% set content = '<|im_start|>' + message['role'] + '\n\n'+ message['content'] | trim + '<|im_end|>' %}
{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}
{{ '<|im_start|>assistant\n\n' if add_generation_prompt }}""",
    "tools and documents": """{%- if tools is not none and tools %}Tools:
{%- for tool in tools %}
{{ tool | tojson(indent=2) }}
{{ tool.function | tojson(separators=(',', ':'), sort_keys=True) }}
{%- endfor %}{%- endif %}
{%- if documents %}{%- for d in documents %}<doc {{ d.title }}>{{ d.text }}</doc>{%- endfor %}{%- endif %}
{%- for m in messages %}{{ m.role }}:
{%- if m.content is defined %} {{ m.content }}{%- endif %}
{%- for call in m.tool_calls or [] %}<call>{{ call.function.name }}({{ call.function.arguments | tojson }})</call>{%- endfor %}
{%- if m.tool_call_id %}<{{ m.tool_call_id }}>{%- endif %}{%- endfor %}""",
    "loop controls": """{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}
{% if loop.index > 2 %}{% break %}{% endif %}{{ m.role }}/{{ m.content }};{% endfor %}""",
    "thinking": """{%- set ns = namespace(last=-1) %}{%- for m in messages[::-1] %}{%- if m.role == 'user' and ns.last < 0 %}
{%- set ns.last = messages | length - 1 - loop.index0 %}{%- endif %}{%- endfor %}{{ ns.last }}
{%- for m in messages %}{%- if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{%- endif %}
{{- m.content.split('</think>')[-1].lstrip('\n') }}{%- endfor %}
{%- if enable_thinking is defined and enable_thinking is false %}<think></think>{%- endif %}""",
    "macros and dates": """{% macro turn(m) -%}{{ m.role | upper }}={{ m.content | replace('a', 'b') }}{%- endmacro %}
{{ strftime_now('%Y') }}{% set extra = dict(a=1) %}{{ extra.a }}{% for m in messages %}{{ turn(m) }} {{ loop.last }}
{% endfor %}{{ pad_token is defined }}{{ unk_token }}{{ sep_token is defined }}""",
    "json of anything": "{{ messages | tojson }}{{ messages[0] | tojson(ensure_ascii=True) }}{{ '<a href=\"x\">' | tojson }}",
    "parts": """{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}
{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{% endif %}
{% endfor %}""",
    "arithmetic": """{% for i in range(3, 0, -1) %}{{ i * 2 ** 40 }} {{ '=' * i }}{{ messages * 1 == messages }}{% endfor %}
{{ 1700000000 * 1000000 }} {{ 1.5 * 2 }} {{ 2 ** 0.5 }} {{ messages | length * 3 }} {{ [0] * 2 }}""",
    "filters": """{{ messages | map(attribute='role') | join(',') }} {{ messages | selectattr('role', 'equalto', 'user') | list | length }}
{{ (messages | last).content[:3] }} {{ messages[0]['name'] | default('nobody') }}{{ undefined_thing }}""",
}
CHATS: dict[str, dict[str, Any]] = {
    "one": {"messages": [{"role": "user", "content": "Hällo 'a' <b> & \"c\"\n"}]},
    "three": {
        "messages": [
            {"role": "user", "content": " Hi "},
            {"role": "assistant", "content": "<think>x</think>\n\nHo", "reasoning_content": "because"},
            {"role": "user", "content": "And?"},
        ],
        "add_generation_prompt": False,
    },
    "system": {
        "messages": [{"role": "system", "content": "Be."}, {"role": "user", "content": "a"}],
        "enable_thinking": False,
    },
    "parts": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "t"}, {"type": "text", "text": "u"}]}]
    },
    "tools": {
        "messages": [
            {"role": "user", "content": "w?"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"x": [1, "ü"]}}}],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "7", "name": None},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"z": 1, "a": "<>"}}}],
        "documents": [{"title": "T", "text": "body"}],
    },
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(tokenizer_models.BPE({character: id for id, character in enumerate(alphabet)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    raw.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def describe(checkpoint: Path, **about: Any) -> None:
    """Writes `tokenizer_config.json`."""
    about = {"tokenizer_class": "PreTrainedTokenizerFast"} | about
    (checkpoint / "tokenizer_config.json").write_text(json.dumps(about))


def theirs(checkpoint: Path, **chat: Any) -> Any:
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(checkpoint)
    arguments = {"add_generation_prompt": True} | chat
    return tokenizer.apply_chat_template(arguments.pop("messages"), return_dict=False, **arguments)


def rendered(checkpoint: Path, render: Any, **chat: Any) -> Any:
    """What `render` makes of a chat, or what it fails with: refused or broken."""
    try:
        return render(checkpoint, **chat)
    except ChatRefusal:
        return "refused"
    except TemplateFault:
        return "broken"
    except Exception as error:
        return "refused" if "roles" in str(error) else "broken"


def ours(checkpoint: Path, **chat: Any) -> list[int]:
    return hf_tokenizer(checkpoint, CONFIG).apply_chat_template(**chat)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_renders_as_in_transformers(name: str, checkpoint: Path) -> None:
    describe(
        checkpoint,
        chat_template=TEMPLATES[name],
        bos_token="<s>",
        eos_token={"__type": "AddedToken", "content": "</s>", "special": True},
        unk_token="<unk>",
        pad_token=None,
    )
    results = {chat: rendered(checkpoint, ours, **arguments) for chat, arguments in CHATS.items()}
    assert results == {chat: rendered(checkpoint, theirs, **arguments) for chat, arguments in CHATS.items()}
    assert sum(isinstance(result, list) for result in results.values()) >= 2


CHAT = [{"role": "user", "content": "x"}]
NAMED = "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}"


@pytest.mark.parametrize(
    ("about", "legacy"),
    [
        ({"bos_token": "<s>", "eos_token": "<|im_end|>"}, None),
        ({"bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<unk>"}, None),
        ({"eos_token": "</s>"}, None),
        ({"eos_token": "</s>"}, {"eos_token": "<|im_end|>", "bos_token": {"content": "<s>", "lstrip": False}}),
        ({"eos_token": "</s>", "added_tokens_decoder": {}}, {"eos_token": "<|im_end|>"}),
        ({"tokenizer_class": "LlamaTokenizer"}, None),
        ({"tokenizer_class": "LlamaTokenizerFast", "bos_token": None}, None),
        ({"tokenizer_class": "Qwen2Tokenizer"}, None),
        ({"bos_token": "<s>", "additional_special_tokens": ["<|tool|>"]}, None),
    ],
)
def test_special_tokens_are_those_of_transformers_and_not_ids(about: Any, legacy: Any, checkpoint: Path) -> None:
    describe(checkpoint, chat_template=NAMED, **about)
    if legacy is not None:
        (checkpoint / "special_tokens_map.json").write_text(json.dumps(legacy))
    their = AutoTokenizer.from_pretrained(checkpoint).apply_chat_template(CHAT, tokenize=False)
    template = ChatTemplate({"default": NAMED}, {}, "m")
    assert hf_tokenizer(checkpoint, CONFIG)._chat_template is not None
    text = hf_tokenizer(checkpoint, CONFIG)._chat_template.render(CHAT)  # type: ignore[union-attr]
    assert text == their
    assert template.render(CHAT) == "||"


def test_where_a_template_comes_from_is_what_transformers_takes(checkpoint: Path) -> None:
    tool_use = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "tools {{ tools | length }}"},
    ]
    describe(checkpoint, chat_template=tool_use)
    for more in ({}, {"tools": [{"a": 1}]}, {"tools": []}):
        assert ours(checkpoint, messages=CHAT, **more) == theirs(checkpoint, messages=CHAT, **more)
    (checkpoint / "chat_template.jinja").write_text("a file")
    assert ours(checkpoint, messages=CHAT) == theirs(checkpoint, messages=CHAT)
    (checkpoint / "additional_chat_templates").mkdir()
    (checkpoint / "additional_chat_templates/tool_use.jinja").write_text("another file")
    for more in ({}, {"tools": [{"a": 1}]}):
        assert ours(checkpoint, messages=CHAT, **more) == theirs(checkpoint, messages=CHAT, **more)


def test_a_tokenizer_that_transformers_saved_is_the_same(checkpoint: Path, tmp_path: Path) -> None:
    describe(checkpoint, chat_template=TEMPLATES["generation tags"], bos_token="<s>", eos_token="</s>")
    AutoTokenizer.from_pretrained(checkpoint).save_pretrained(tmp_path / "saved")
    chat = CHATS["three"]
    assert ours(tmp_path / "saved", **chat) == ours(checkpoint, **chat) == theirs(tmp_path / "saved", **chat)
    assert hf_tokenizer(tmp_path / "saved", CONFIG).eos_ids == {2, 257}  # the configuration's and its own


def test_without_a_default_template_or_any_a_chat_is_refused_and_text_is_not(checkpoint: Path) -> None:
    describe(checkpoint, chat_template=[{"name": "rag", "template": "x"}])
    with pytest.raises(ChatRefusal, match="templates are rag, and none is the default"):
        ours(checkpoint, messages=CHAT)
    describe(checkpoint)
    with pytest.raises(ChatRefusal, match="has no chat template"):
        ours(checkpoint, messages=CHAT)
    (checkpoint / "chat_template.json").write_text(json.dumps({"chat_template": "of a processor"}))
    assert len(ours(checkpoint, messages=CHAT)) == len("of a processor")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for m in messages %}", r"is broken \(line 1"),
        ("a\n{{ messages | no_such_filter }}", r"is broken \(line 2: No filter named 'no_such_filter'"),
        ("a\nb{{ nobody() }}", r"fails at its line 2 \(UndefinedError: 'nobody' is undefined\)"),
        ("{{ messages[0].content + 1 }}", "fails at its line 1 .TypeError"),
        ("{% include 'other' %}", "fails at its line 1"),
        ("{% for i in range(10**9) %}x{% endfor %}", "OverflowError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ 'x' * 10 ** 10 }}", "OverflowError"),
        ("{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}", "OverflowError"),
        ("{{ 9 ** 99999999 }}", "OverflowError"),
        ("{% for m in messages if m.role == 'system' %}\n{{ m.content.nothing.at_all }}{% endfor %}", "its line 2"),
        ("{{ '(' * 3 }}" + "(" * 5000, None),
        ("{{ " + "(" * 5000, "is broken"),
    ],
)
def test_a_fault_of_the_template_is_told_at_load(template: str, message: str | None, checkpoint: Path) -> None:
    describe(checkpoint, chat_template=template)
    if message is None:
        assert ours(checkpoint, messages=CHAT)
        return
    with pytest.raises(TemplateFault, match=message) as error:
        hf_tokenizer(checkpoint, CONFIG)
    assert "tokenizer_config.json" in str(error.value)
    assert "\n" not in str(error.value)


def test_what_only_the_request_can_trigger_is_told_apart() -> None:
    template = ChatTemplate(
        {
            "default": "{% if messages[0].role == 'tool' %}{{ raise_exception('no\nrole tool') }}{% endif %}{{ x.y.z if x }}"
        },
        {},
        "m/tokenizer_config.json",
    )
    with pytest.raises(ChatRefusal, match="refuses these messages: no role tool; change the messages"):
        template.render([{"role": "tool", "content": ""}])
    with pytest.raises(TemplateFault, match=r"^m/tokenizer_config\.json: the chat template fails at its line 2"):
        template.render(CHAT, x=1)


@pytest.mark.parametrize("given", [7, {"default": 7}, [{"name": "default", "template": None}]])
def test_a_template_that_is_no_text_is_one_sentence(given: Any, checkpoint: Path) -> None:
    describe(checkpoint, chat_template=given)
    with pytest.raises(ModelError, match="chat_template is neither a text nor texts by name"):
        hf_tokenizer(checkpoint, CONFIG)


def test_settings_of_a_training_in_tokenizer_json_cut_and_pad_nothing(checkpoint: Path) -> None:
    raw = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    raw.enable_truncation(4)
    raw.enable_padding(length=64)
    raw.save(str(checkpoint / "tokenizer.json"))
    assert len(hf_tokenizer(checkpoint, CONFIG).encode("more than four")) == len("more than four")


def test_added_tokens_of_tokenizer_config_are_added(checkpoint: Path) -> None:
    added = {"262": {"content": "<think>", "special": False}, "263": {"content": "<|eot|>", "special": True}}
    describe(checkpoint, added_tokens_decoder=added)
    ids = hf_tokenizer(checkpoint, CONFIG).encode("<think>a<|eot|>")
    assert (ids[0], ids[-1], len(ids)) == (262, 263, 3)
    assert ids == AutoTokenizer.from_pretrained(checkpoint).encode("<think>a<|eot|>")
    describe(checkpoint, added_tokens_decoder={"270": {"content": "<think>", "special": False}})
    with pytest.raises(ModelError, match="added token '<think>' has id 270 there and 262"):
        hf_tokenizer(checkpoint, CONFIG)


def test_a_post_processor_of_tokenizer_json_is_kept_whatever_tokenizer_config_says(checkpoint: Path) -> None:
    raw = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    raw.save(str(checkpoint / "tokenizer.json"))
    describe(checkpoint, add_bos_token=False, add_eos_token=True, bos_token="<s>", eos_token="</s>")
    ids = hf_tokenizer(checkpoint, CONFIG).encode("a")
    assert ids == AutoTokenizer.from_pretrained(checkpoint).encode("a")
    assert ids[0] == 256


def test_the_client_is_blamed_for_its_messages_only(tiny: LoadedModel, checkpoint: Path) -> None:
    describe(
        checkpoint, chat_template="{% if messages | length > 3 %}{{ nobody() }}{% endif %}{{ messages[0].content }}"
    )
    prompts = Prompts(replace(tiny, tokenizer=hf_tokenizer(checkpoint, CONFIG)), "m")
    with pytest.raises(ApiError, match="the chat template fails at its line 1") as fault:
        asyncio.run(prompts.of_messages([{"role": "user", "content": "x"}] * 4, {}))
    describe(checkpoint, chat_template="{{ raise_exception('no') }}")
    prompts = Prompts(replace(tiny, tokenizer=hf_tokenizer(checkpoint, CONFIG)), "m")
    with pytest.raises(ApiError, match="refuses these messages: no") as refusal:
        asyncio.run(prompts.of_messages([{"role": "user", "content": "x"}], {}))
    assert (fault.value.status, refusal.value.status) == (500, 400)
