"""What the unmodified `openai` client gets: log probabilities, several choices, usage, errors; streamed and whole.

The control is one engine alone, whose tokens and log probabilities the answers must carry.
"""

from collections.abc import Iterator
from typing import Any, Self

import openai
import pytest

from tests.workers.serving import Served, prompt_of
from workers.engine import BlockPool, Generated, Sampling, Sequence, generate
from workers.engine.engine import Chunk, Engine
from workers.models import LoadedModel

PROMPT = prompt_of(40)


class Client(Served):
    """A cluster, and OpenAI's client of it."""

    release_within_s = 5.0

    def __enter__(self) -> Self:
        super().__enter__()
        url = f"{self.wan.cluster.base_url}/v1"
        self.client = openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0)
        return self

    def __exit__(self, *given: object) -> None:
        self.run(self.client.close())
        super().__exit__(*given)

    def completion(self, **fields: Any) -> Any:
        return self.run(
            self.client.completions.create(**{"model": "tiny", "prompt": PROMPT, "temperature": 0} | fields)
        )

    def chat(self, **fields: Any) -> Any:
        given = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "temperature": 0} | fields
        return self.run(self.client.chat.completions.create(**given))

    def chunks(self, stream: Any) -> list[Any]:
        async def all_of() -> list[Any]:
            return [chunk async for chunk in stream]

        found: list[Any] = self.run(all_of())
        return found


@pytest.fixture(scope="module")
def served(tiny: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with Client(tiny, tmp_path_factory.mktemp("openai")) as served:
        yield served


def control(loaded: LoadedModel, prompt: list[int], sampling: Sampling) -> list[Generated]:
    """Every token of an answer with its log probabilities, from one engine alone."""
    engine = Engine(loaded, BlockPool(loaded.config, 32, 16))
    sequence = Sequence("control", list(prompt), len(prompt), sampling)
    engine.admit(sequence)
    generated: list[Generated] = []
    while sequence.finish_reason is None:
        generated += [token for token in engine.step([Chunk(sequence, sequence.pending)]) if token is not None]
    return generated


def name(loaded: LoadedModel, token: int) -> str:
    data = loaded.tokenizer.token_bytes(token)
    try:
        return data.decode() if data else f"token_id:{token}"
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("top", [0, 3])
def test_a_completions_log_probabilities_are_the_models(
    tiny: LoadedModel, served: Client, stream: bool, top: int
) -> None:
    """Also of the first token, which prefill samples, and of those before and after the hand-over."""
    expected = control(tiny, PROMPT, Sampling(max_tokens=24, logprobs=top))
    if stream:
        chunks = served.chunks(served.completion(max_tokens=24, logprobs=top, stream=True))
        parts = [chunk.choices[0].logprobs for chunk in chunks]
    else:
        parts = [served.completion(max_tokens=24, logprobs=top).choices[0].logprobs]
    tokens = [entry for part in parts for entry in part.tokens]
    assert tokens == [name(tiny, token.token_id) for token in expected]
    values = [entry for part in parts for entry in part.token_logprobs]
    assert values == pytest.approx([token.logprob for token in expected], abs=1e-4)
    likeliest = [entry for part in parts for entry in part.top_logprobs]
    for shown, token in zip(likeliest, expected, strict=True):
        wanted = {name(tiny, other): value for other, value in token.top_logprobs or ()}
        wanted[name(tiny, token.token_id)] = token.logprob or 0.0
        assert shown == pytest.approx(wanted, abs=1e-4)
        assert len(shown) == max(top, 1), "greedy: the token itself is the likeliest"
    offsets = [entry for part in parts for entry in part.text_offset]
    whole = served.completion(max_tokens=24).choices[0].text
    assert offsets[0] == 0
    assert offsets == sorted(offsets)
    assert all(offset <= len(whole) for offset in offsets)
    valid = [(o, t) for o, t in zip(offsets, tokens, strict=True) if not t.startswith(("bytes:", "token_id:"))]
    assert all(whole[offset:].startswith(text) for offset, text in valid if "\ufffd" not in whole[:offset])


def test_a_sampled_token_is_listed_beside_likelier_ones(tiny: LoadedModel, served: Client) -> None:
    sampling = Sampling(max_tokens=20, temperature=1.0, seed=4, logprobs=2)
    expected = control(tiny, PROMPT, sampling)
    answer = served.completion(max_tokens=20, temperature=1.0, seed=4, logprobs=2).choices[0].logprobs
    assert answer.tokens == [name(tiny, token.token_id) for token in expected]
    unlikely = [
        shown
        for shown, token in zip(answer.top_logprobs, expected, strict=True)
        if token.token_id not in dict(token.top_logprobs or ())
    ]
    assert unlikely, "a sampled token is not always among the two likeliest"
    assert all(len(shown) == 3 for shown in unlikely)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_chats_log_probabilities_are_objects_with_bytes(tiny: LoadedModel, served: Client, stream: bool) -> None:
    prompt = tiny.tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}])
    expected = control(tiny, prompt, Sampling(max_tokens=16, logprobs=2))
    fields = {"max_completion_tokens": 16, "logprobs": True, "top_logprobs": 2}
    if stream:
        chunks = served.chunks(served.chat(**fields, stream=True))
        entries = [entry for chunk in chunks for entry in chunk.choices[0].logprobs.content]
    else:
        entries = served.chat(**fields).choices[0].logprobs.content
    assert [entry.logprob for entry in entries] == pytest.approx([token.logprob for token in expected], abs=1e-4)
    for entry, token in zip(entries, expected, strict=True):
        data = tiny.tokenizer.token_bytes(token.token_id)
        assert entry.bytes == (list(data) if data else None)
        likeliest = token.top_logprobs or ()
        assert [other.logprob for other in entry.top_logprobs] == pytest.approx([p for _, p in likeliest], abs=1e-4)
        assert entry.token
    plain = served.chat(max_completion_tokens=16, logprobs=True).choices[0].logprobs.content
    assert all(entry.top_logprobs == [] for entry in plain)
    assert served.chat(max_completion_tokens=2).choices[0].logprobs is None


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_n_sampled_choices_are_those_of_consecutive_seeds(tiny: LoadedModel, served: Client, stream: bool) -> None:
    expected = [generate(tiny, PROMPT, Sampling(max_tokens=20, temperature=1.0, seed=seed)) for seed in (7, 8, 9)]
    texts = [tiny.tokenizer.decode(ids) for ids in expected]
    fields = {"n": 3, "max_tokens": 20, "temperature": 1.0, "seed": 7}
    if stream:
        chunks = served.chunks(served.completion(**fields, stream=True, stream_options={"include_usage": True}))
        *chunks, last = chunks
        assert len({chunk.id for chunk in chunks}) == 1
        found = ["".join(c.choices[0].text for c in chunks if c.choices[0].index == index) for index in range(3)]
        finishes = [c.choices[0].index for c in chunks if c.choices[0].finish_reason]
        assert sorted(finishes) == [0, 1, 2]
        assert all(chunk.usage is None for chunk in chunks)
        usage = last.usage
    else:
        answer = served.completion(**fields)
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        found, usage = [choice.text for choice in answer.choices], answer.usage
    assert found == texts
    assert len(set(texts)) == 3
    assert (usage.prompt_tokens, usage.completion_tokens) == (40, sum(map(len, expected)))


def test_n_greedy_choices_are_equal_and_the_prompt_counts_once(tiny: LoadedModel, served: Client) -> None:
    answer = served.chat(n=4, max_tokens=12)
    contents = [choice.message.content for choice in answer.choices]
    assert len(contents) == 4
    assert len(set(contents)) == 1
    ids = tiny.tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}])
    assert answer.usage.prompt_tokens == len(ids)
    assert answer.usage.completion_tokens == 48


def test_several_prompts_are_answered_in_their_order(tiny: LoadedModel, served: Client) -> None:
    prompts = [prompt_of(length, seed=length) for length in (5, 33)]
    answer = served.completion(prompt=prompts, n=2, max_tokens=8)
    expected = [tiny.tokenizer.decode(generate(tiny, prompt, Sampling(max_tokens=8))) for prompt in prompts]
    assert [choice.text for choice in answer.choices] == [expected[0]] * 2 + [expected[1]] * 2
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage.prompt_tokens == 38


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_echo_puts_the_prompt_first(tiny: LoadedModel, served: Client, stream: bool) -> None:
    expected = "Hi there" + tiny.tokenizer.decode(
        generate(tiny, tiny.tokenizer.encode("Hi there"), Sampling(max_tokens=6))
    )
    answer = served.completion(prompt="Hi there", max_tokens=6, echo=True, stream=stream)
    chunks = served.chunks(answer) if stream else [answer]
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected
    tokens = served.completion(prompt=list(b"Hi there"), max_tokens=1, echo=True)
    assert tokens.choices[0].text.startswith("Hi there")


def test_the_first_of_several_stop_strings_ends_each_choice(tiny: LoadedModel, served: Client) -> None:
    text = tiny.tokenizer.decode(generate(tiny, PROMPT, Sampling(max_tokens=60)))
    late, early = text[40:43], text[20:23]
    answer = served.completion(max_tokens=60, stop=[late, early], n=2)
    assert [choice.text for choice in answer.choices] == [text[: text.index(early)]] * 2
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}


def test_one_prompt_that_does_not_fit_refuses_them_all(served: Client) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        served.completion(prompt=[[1, 2, 3], [1] * 4090], max_tokens=20)


def test_errors_are_the_clients_own_exceptions(served: Client) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        served.completion(model="gpt-5")
    assert missing.value.code == "model_not_found"
    assert missing.value.param == "model"
    with pytest.raises(openai.BadRequestError) as bad:
        served.chat(n=0)
    assert (bad.value.param, bad.value.type) == ("n", "invalid_request_error")
    with pytest.raises(openai.BadRequestError, match="top_logprobs goes with"):
        served.chat(top_logprobs=2)


def test_usage_comes_last_and_only_when_asked_for(served: Client) -> None:
    plain = served.chunks(served.chat(max_tokens=3, stream=True))
    assert all(chunk.choices and chunk.usage is None for chunk in plain)
    *_, last = served.chunks(served.chat(max_tokens=3, stream=True, stream_options={"include_usage": True}))
    assert last.choices == []
    assert last.usage.completion_tokens == 3
