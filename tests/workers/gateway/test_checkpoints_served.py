"""Checkpoints as clients meet them: the model's name, its chat template, and whose fault a failure is."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.workers.models.checkpoints import random_model, save
from tests.workers.serving import SlowWan, run
from workers.models import ModelSpec, load_model

TEMPLATE = """{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}
{{ m.content }}{% if m.role == 'assistant' %}{% generation %}!{% endgeneration %}{% endif %}{% endfor %}
{% if style or messages | length > 4 %}{{ style.of.nothing }}{% endif %}"""


def test_a_checkpoint_is_served_by_its_name_with_its_template(tmp_path: Path) -> None:
    path = save(random_model("llama"), tmp_path / "Llama-3.2-1B")
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    loaded = load_model(ModelSpec(f"{path}/"))

    async def scenario() -> None:
        async with SlowWan(loaded, tmp_path, None) as wan:
            listed = (await wan.http.get("/v1/models")).json()["data"]
            assert [model["id"] for model in listed] == ["Llama-3.2-1B"]
            assert (await wan.http.get("/v1/models/Llama-3.2-1B")).status_code == 200
            ask = {"role": "user", "content": "a"}
            body = {
                "model": "Llama-3.2-1B",
                "max_tokens": 2,
                "messages": [ask, {"role": "assistant", "content": "b"}, ask],
            }
            answer = await wan.http.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            assert answer.json()["model"] == "Llama-3.2-1B"
            assert answer.json()["usage"]["prompt_tokens"] == len("ab!a")
            refused = await wan.http.post(
                "/v1/chat/completions", json=body | {"messages": [{"role": "system", "content": "x"}, ask]}
            )
            assert (refused.status_code, "no system role" in refused.text) == (400, True)
            for more, status in (({"messages": [ask] * 5}, 500), ({"chat_template_kwargs": {"style": 1}}, 400)):
                broken = await wan.http.post("/v1/chat/completions", json=body | more)
                assert (broken.status_code, "chat template fails at its line 3" in broken.text) == (status, True)

    run(scenario())


def test_a_request_that_says_nothing_gets_what_generation_config_json_has(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As with vLLM's `--generation-config auto`: a field of the request wins, and null is as good as none."""
    path = save(random_model("llama"), tmp_path / "m")
    given = {"temperature": 1.5, "top_p": 0.9, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.2}
    told = {**given, "max_new_tokens": 40, "do_sample": False, "eos_token_id": 255}
    (path / "generation_config.json").write_text(json.dumps(told))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages[0].content }}"}))
    loaded = load_model(ModelSpec(str(path)))

    async def scenario() -> None:
        async with SlowWan(loaded, tmp_path, None) as wan:

            async def answer(chat: bool = True, **fields: Any) -> list[int]:
                asked = {"messages": [{"role": "user", "content": "a"}]} if chat else {"prompt": "a"}
                body = asked | {"ignore_eos": True, "seed": 3, "return_token_ids": True} | fields
                found = await wan.http.post("/v1/chat/completions" if chat else "/v1/completions", json=body)
                assert found.status_code == 200, found.text
                ids: list[int] = found.json()["choices"][0]["token_ids"]
                return ids

            for place in ("/v1/models", "/v1/models/m"):
                card = (await wan.http.get(place)).json()
                assert card.get("data", [card])[0]["default_sampling_params"] == {**given, "max_tokens": 40}
            silent = await answer()
            assert len(silent) == 40
            assert silent == await answer(**dict.fromkeys((*given, "max_tokens"))) == await answer(**given)
            neutral = {"temperature": 1, "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1}
            plain = await answer(**neutral)
            assert plain == await answer(**neutral | {"top_k": -1})
            for field, value in given.items():
                others = {name: neutral[name] for name in neutral if name != field}
                assert plain != await answer(**others) == await answer(**others, **{field: value}), field
            assert len(await answer(max_completion_tokens=50)) == 50
            assert await answer(chat=False) == silent[:16]
            assert await answer(chat=False, max_tokens=40) == silent

    with caplog.at_level("INFO"):
        run(scenario())
    defaults = "temperature 1.5, top_p 0.9, top_k 20, min_p 0.05, repetition_penalty 1.2, max_tokens 40"
    line = f"generation_config.json of m: defaults of requests: {defaults}; not applied, as in vLLM: do_sample = False"
    assert line in caplog.text
