"""Text for the client: whole characters, and nothing of a stop string, wherever tokens cut it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.gateway.text import AnswerText
from workers.models import LoadedModel
from workers.models.tokenizer import ByteTokenizer

words = st.text(alphabet="ab€é", max_size=30)
stops = st.lists(st.text(alphabet="ab€", min_size=1, max_size=4), max_size=3)


@given(words, stops)
def test_text_ends_before_the_first_stop_string_and_is_complete_otherwise(text: str, stop: list[str]) -> None:
    answer = AnswerText(ByteTokenizer(), stop)
    out = "".join(answer.push(byte) for byte in text.encode())
    assert "\ufffd" not in out, "never half a character"
    out += answer.flush()
    ends = [text.find(s) for s in stop if s in text]
    # tokens are bytes here, so the first stop string to be complete wins; of those, the one that begins first
    complete = min((text.find(s) + len(s) for s in stop if s in text), default=None)
    assert answer.stopped == bool(ends)
    if complete is None:
        assert out == text
    else:
        assert out == text[: min(text.find(s) for s in stop if s in text and text.find(s) + len(s) == complete)]


@given(words, stops)
def test_nothing_that_was_sent_belongs_to_a_stop_string_that_came_later(text: str, stop: list[str]) -> None:
    answer = AnswerText(ByteTokenizer(), stop)
    sent = ""
    for byte in text.encode():
        sent += answer.push(byte)
        assert not any(s in sent for s in stop)
    assert text.startswith(sent)


def test_an_unfinished_character_at_the_end_becomes_one_replacement() -> None:
    answer = AnswerText(ByteTokenizer(), [])
    assert answer.push("€".encode()[0]) == ""
    assert answer.flush() == "\ufffd"


class Marked(ByteTokenizer):
    """Bytes, and the special tokens <|im_start|> (300) and <|im_end|> (301)."""

    def special_text(self, token_id: int) -> str:
        return {300: "<|im_start|>", 301: "<|im_end|>"}.get(token_id, "")


@pytest.mark.parametrize(
    ("tokens", "stop", "hidden", "shown"),
    [
        ("ab 301 c", "<|im_end|>", "ab", "ab"),
        ("ab 300 c", "<|im_end|>", "abc", "ab<|im_start|>c"),
        ("ab 301 c", "end|>", "ab", "ab<|im_"),
        ("ab 301 c", "b<|im_end|>c", "a", "a"),
        ("ab 300 301 c", "|><|", "ab", "ab<|im_start"),
        ("ab 301 cd", "bc", "a", "ab<|im_end|>cd"),
        ("ab 301", "<|im_end|>c", "ab", "ab<|im_end|>"),
        ("é 301 é", "é<|im_end|>é", "", ""),
        ("301 ab", "b", "a", "<|im_end|>a"),
    ],
)
def test_a_stop_string_is_found_in_special_tokens_whether_they_are_shown_or_not(
    tokens: str, stop: str, hidden: str, shown: str
) -> None:
    ids = [token for word in tokens.split() for token in ([int(word)] if word.isdigit() else word.encode())]
    for special, expected in ((False, hidden), (True, shown)):
        answer = AnswerText(Marked(), [stop], special=special)
        assert "".join([answer.push(token) for token in ids]) + answer.flush() == expected


@given(st.text(alphabet="abc", max_size=30), st.text(alphabet="abc", min_size=1, max_size=3), st.data())
def test_where_a_stop_string_ends_an_answer_does_not_depend_on_how_tokens_cut_it(
    text: str, stop: str, data: st.DataObject
) -> None:
    """Also with the stop string as part of the answer."""

    class Cut(ByteTokenizer):
        def token_bytes(self, token_id: int) -> bytes:
            return pieces[token_id].encode()

    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    for with_stop in (False, True):
        answer = AnswerText(Cut(), [stop, "aab"], with_stop=with_stop)
        out = "".join([answer.push(index) for index in range(len(pieces))]) + answer.flush()
        ends = [(at + len(s), at) for s in (stop, "aab") if (at := text.find(s)) >= 0]
        expected = text if not ends else text[: min(ends)[0 if with_stop else 1]]
        assert out == expected


@pytest.mark.parametrize("stop", ["<|im_end|>", "<|im_start|>", "<|endoftext|>"])
def test_a_models_own_special_tokens_stop_an_answer(smollm2: LoadedModel, stop: str) -> None:
    tokenizer = smollm2.tokenizer
    ids = tokenizer.encode(f"Hello{stop} there")
    answer = AnswerText(tokenizer, [stop])
    assert "".join([answer.push(token) for token in ids]) + answer.flush() == "Hello"
    assert answer.stopped
