"""The guest's output is passed on byte for byte, live, whatever it contains and however it is cut."""

from hypothesis import given
from hypothesis import strategies as st

from testbed.vm.run import TrailedStream

NONCE = b"0123abcd"
# Output that looks like pieces of the trailer is what could go wrong.
outputs = (
    st.lists(
        st.one_of(
            st.binary(max_size=20), st.sampled_from([b"\0", b"\x000123", b"\x000123abc", b"\x000123abcd", b"d 7\n"])
        )
    )
    .map(b"".join)
    .filter(lambda output: b"\0" + NONCE + b" " not in output)
)


@given(outputs, st.integers(0, 255), st.lists(st.integers(1, 30), min_size=1))
def test_output_and_status_survive_any_cut(output: bytes, status: int, cuts: list[int]) -> None:
    sent = output + b"\0%s %d\n" % (NONCE, status)
    stream = TrailedStream(NONCE)
    received = b""
    position = 0
    while position < len(sent):
        size = cuts[position % len(cuts)]
        received += stream.feed(sent[position : position + size])
        position += size
    assert received == output
    assert stream.status == status


@given(outputs)
def test_a_stream_without_trailer_gives_everything_and_no_status(output: bytes) -> None:
    stream = TrailedStream(NONCE)
    assert stream.feed(output) + stream.rest() == output
    assert stream.status is None


def test_output_is_passed_on_before_the_line_ends() -> None:
    assert TrailedStream(NONCE).feed(b"password: ") == b"password: "


def test_nothing_after_the_trailer_is_output() -> None:
    stream = TrailedStream(NONCE)
    assert stream.feed(b"a\0" + NONCE + b" 3\nnoise") == b"a"
    assert stream.feed(b"more") == b""
