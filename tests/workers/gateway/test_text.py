"""Text for the client: whole characters, and nothing of a stop string, wherever tokens cut it."""

from hypothesis import given
from hypothesis import strategies as st

from workers.gateway.text import AnswerText
from workers.models.tokenizer import ByteTokenizer

words = st.text(alphabet="ab€é", max_size=30)
stops = st.lists(st.text(alphabet="ab€", min_size=1, max_size=4), max_size=3)


@given(words, stops)
def test_text_ends_before_the_first_stop_string_and_is_complete_otherwise(text: str, stop: list[str]) -> None:
    answer = AnswerText(ByteTokenizer().detokenizer(), stop)
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
        assert out == text[: min(text.find(s) for s in stop if s in text[:complete])]


@given(words, stops)
def test_nothing_that_was_sent_belongs_to_a_stop_string_that_came_later(text: str, stop: list[str]) -> None:
    answer = AnswerText(ByteTokenizer().detokenizer(), stop)
    sent = ""
    for byte in text.encode():
        sent += answer.push(byte)
        assert not any(s in sent for s in stop)
    assert text.startswith(sent)


def test_an_unfinished_character_at_the_end_becomes_one_replacement() -> None:
    answer = AnswerText(ByteTokenizer().detokenizer(), [])
    assert answer.push("€".encode()[0]) == ""
    assert answer.flush() == "\ufffd"
