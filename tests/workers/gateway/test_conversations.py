"""A chat whose earlier answer comes back as other tokens is told so: in its record."""

from pathlib import Path
from typing import Any

from tests.workers.serving import SlowWan, run
from workers.gateway.conversations import Conversations
from workers.models import LoadedModel

ASK = [{"role": "user", "content": "Hi"}]


def turn(answer: str) -> list[dict[str, str]]:
    return [*ASK, {"role": "assistant", "content": answer}, {"role": "user", "content": "And?"}]


def test_what_no_longer_matches_is_counted() -> None:
    chats = Conversations({9})
    chats.note(ASK, "yes", [1, 2, 3, 4, 5])
    assert chats.retokenised(turn("yes"), [1, 2, 3, 4, 5, 6]) == 0
    assert chats.retokenised(turn("yes"), [1, 2, 3, 7, 8, 6]) == 2
    assert chats.retokenised(turn("yes"), [1, 2]) == 3
    assert chats.retokenised(turn("no"), [1, 2, 3]) is None, "an answer of another's, or one edited by the client"
    assert chats.retokenised(ASK, [1, 2, 3]) is None


def test_the_end_of_text_is_the_templates_business() -> None:
    chats = Conversations({9})
    chats.note(ASK, "yes", [1, 2, 3, 9])
    assert chats.retokenised(turn("yes"), [1, 2, 3, 7]) == 0


def test_the_latest_known_turn_counts_and_old_ones_are_forgotten() -> None:
    chats = Conversations({9}, remembered_tokens=10)
    chats.note(ASK, "a", [1, 2, 3])
    chats.note(turn("a"), "b", [1, 2, 3, 4, 5, 6])
    later = [*turn("a"), {"role": "assistant", "content": "b"}, {"role": "user", "content": "?"}]
    assert chats.retokenised(later, [1, 2, 3, 4, 5, 0]) == 1
    chats.note(ASK, "c", [1, 2])
    assert chats.retokenised(turn("a"), [1, 2, 3]) is None
    assert chats.retokenised(later, [1, 2, 3, 4, 5, 6, 7]) == 0


async def retokenised(lab: SlowWan, **sampling: Any) -> int | None:
    """What the record of a second turn says of the first one's answer."""
    messages = [{"role": "user", "content": "Tell me about rivers."}]
    for _ in range(2):
        body = {"messages": messages, "ignore_eos": True, **sampling}
        response = await lab.http.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        answer = response.json()
        messages += [answer["choices"][0]["message"], {"role": "user", "content": "And?"}]
        for message in messages:
            message.pop("refusal", None)
    count: int | None = answer["pdd"]["record"]["pdd_retokenised_tokens"]
    return count


def test_an_answer_of_bytes_comes_back_as_it_was(tiny: LoadedModel, tmp_path: Path) -> None:
    async def test() -> None:
        async with SlowWan(tiny, tmp_path, None) as lab:
            assert await retokenised(lab, max_tokens=20, temperature=0) == 0

    run(test())


def test_an_answer_of_odd_words_comes_back_as_other_tokens_and_the_record_says_so(
    smollm2: LoadedModel, tmp_path: Path
) -> None:
    async def test() -> None:
        async with SlowWan(smollm2, tmp_path, None, model={"name": "smollm2-135m"}, kv_bytes=256 << 20) as lab:
            assert await retokenised(lab, max_tokens=5, temperature=0) == 0
            count = await retokenised(lab, max_tokens=24, temperature=2, seed=2)
            assert count is not None
            assert 0 < count <= 24

    run(test())
