"""The byte tokenizer and what all tokenizers share: streaming, chat templates, robustness."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.workers.models.texts import TEXTS
from workers.models import LoadedModel
from workers.models.tokenizer import BOS, EOS, ByteTokenizer, Tokenizer


def stream(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    detokenizer = tokenizer.detokenizer()
    return [*[detokenizer.push(token) for token in ids], detokenizer.flush()]


@given(st.text())
def test_bytes_go_there_and_back(text: str) -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(text)
    assert ids[0] == BOS
    assert len(ids) == 1 + len(text.encode())
    assert tokenizer.decode(ids) == text


@given(st.lists(st.integers(0, 257)))
def test_streamed_bytes_add_up_to_the_text_whatever_they_are(ids: list[int]) -> None:
    tokenizer = ByteTokenizer()
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("text", TEXTS)
def test_a_stream_of_smollm2_never_splits_a_character(smollm2: LoadedModel, text: str) -> None:
    ids = smollm2.tokenizer.encode(text)
    pieces = stream(smollm2.tokenizer, ids)
    assert "".join(pieces) == smollm2.tokenizer.decode(ids)
    assert "\ufffd" not in "".join(pieces)


def test_random_ids_of_smollm2_stream_to_the_same_text_as_at_once(smollm2: LoadedModel) -> None:
    chance = random.Random(0)
    for _ in range(50):
        ids = [chance.randrange(smollm2.config.vocab) for _ in range(60)]
        assert "".join(stream(smollm2.tokenizer, ids)) == smollm2.tokenizer.decode(ids)


def test_an_unfinished_character_is_held_back_until_it_is_known_to_be_broken() -> None:
    euro = "€".encode()
    assert stream(ByteTokenizer(), [*euro, *euro[:2]]) == ["", "", "€", "", "", "\ufffd"]
    assert stream(ByteTokenizer(), [*euro[:2], EOS]) == ["", "", "", "\ufffd"]


def test_lone_surrogates_from_json_do_not_raise(smollm2: LoadedModel) -> None:
    for tokenizer in (ByteTokenizer(), smollm2.tokenizer):
        assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a?b"


def test_ids_outside_the_vocabulary_are_no_text(smollm2: LoadedModel) -> None:
    for tokenizer in (ByteTokenizer(), smollm2.tokenizer):
        assert tokenizer.decode([10**6, -1]) == ""


def test_the_chat_prompt_of_tiny_ends_where_the_assistant_begins() -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])
    assert tokenizer.decode(ids) == "user: hi\nassistant: "
