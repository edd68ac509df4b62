"""Frames and messages: what was packed comes back, and nothing else gets in."""

import struct

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from workers.wire import frames
from workers.wire.codec import Control, Handshake, Ids, decode, encode, kind_of
from workers.wire.frames import HEADER, LIMITS, FrameError, Kind, pack, parse_header
from workers.wire.kv_messages import KvBlocks, KvEnd
from workers.wire.messages import HandOver, Message, RequestSpec, SamplingSpec, TokenIds, Tokens

kinds = st.sampled_from(list(Kind))


def all_messages() -> list[type[Message]]:
    return [*Handshake.__args__, *Control.__args__, *Ids.__args__, KvBlocks]  # type: ignore[attr-defined]


@given(kinds, st.binary(max_size=4096), st.integers(0, 1 << 20))
def test_what_was_packed_is_parsed(kind: Kind, message: bytes, body_bytes: int) -> None:
    body_bytes = min(body_bytes, LIMITS[kind].body)
    message = message[: LIMITS[kind].message]
    packed = pack(kind, message, body_bytes)
    header = parse_header(packed[: HEADER.size])
    assert (header.kind, header.message_bytes, header.body_bytes) == (kind, len(message), body_bytes)
    header.verify(packed[HEADER.size :])


@given(st.binary(min_size=HEADER.size, max_size=HEADER.size))
def test_random_headers_are_refused(raw: bytes) -> None:
    with pytest.raises(FrameError):
        parse_header(raw)


@given(kinds, st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1))
def test_sizes_beyond_the_limit_of_the_kind_are_refused_by_the_header_alone(
    kind: Kind, message_bytes: int, body_bytes: int
) -> None:
    raw = struct.pack("!4sHHIQI", frames.MAGIC, frames.PROTOCOL_VERSION, kind, message_bytes, body_bytes, 0)
    limit = LIMITS[kind]
    if message_bytes <= limit.message and body_bytes <= limit.body:
        parse_header(raw)
    else:
        with pytest.raises(FrameError, match="exceeds the limit"):
            parse_header(raw)


def test_another_protocol_version_is_refused_with_both_versions() -> None:
    raw = struct.pack("!4sHHIQI", frames.MAGIC, 7, Kind.CONTROL, 0, 0, 0)
    with pytest.raises(FrameError, match=rf"speaks wire protocol 7, this worker {frames.PROTOCOL_VERSION}"):
        parse_header(raw)


@given(st.integers(0, 8 * 60 - 1))
def test_a_flipped_bit_in_header_or_message_is_noticed(bit: int) -> None:
    packed = bytearray(pack(Kind.CONTROL, encode(HandOver(request="a-request-id-of-some-length"))))
    packed[bit // 8 % len(packed)] ^= 1 << bit % 8
    with pytest.raises(FrameError):
        parse_header(packed[: HEADER.size]).verify(bytes(packed[HEADER.size :]))


@given(kinds, st.binary(max_size=300))
@example(Kind.PADDING, b"\x80")  # a map without a tag
def test_random_messages_are_refused(kind: Kind, data: bytes) -> None:
    with pytest.raises(FrameError):
        decode(kind, data)


@given(st.data())
def test_mutilated_messages_are_refused_or_still_valid(data: st.DataObject) -> None:
    spec = RequestSpec(
        id="r", gateway="g", prefill="p", relay="rl", main=None, prompt=[1, 2, 300], deadline_s=3.0,
        sampling=SamplingSpec(max_tokens=5),
    )  # fmt: skip
    tagged = [
        Tokens(request="r", position=3, ids=[1, 2, 70_000]),
        TokenIds(request="r", position=7, ids=[1] * 20, stopped_ns=-5, finish_reason="stop"),
        KvBlocks(transfer="t", first_block=1, tokens=[16, 3], checksums=[2**64 - 1, 0]),
        KvEnd(transfer="t", first_token=9),
        msgspec.convert({"t": "prefill", "spec": msgspec.to_builtins(spec)}, Control),
    ]
    message: Message = data.draw(st.sampled_from(tagged))
    raw = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        index = data.draw(st.integers(0, len(raw) - 1))
        raw[index] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(raw)))
    try:
        decoded = decode(kind_of(message), bytes(raw[:cut]) if data.draw(st.booleans()) else bytes(raw))
    except FrameError:
        return
    assert decode(kind_of(decoded), encode(decoded)) == decoded


def test_every_message_belongs_to_exactly_one_kind_of_frame() -> None:
    by_tag = dict.fromkeys(Kind, msgspec.inspect.type_info)
    assert len(by_tag) == len(Kind)
    for message in all_messages():
        tag = message.__struct_config__.tag
        accepted = []
        for kind in Kind:
            try:
                decode(kind, msgspec.msgpack.encode({"t": tag}))
                accepted.append(kind)
            except FrameError as error:
                unknown = any(words in str(error) for words in ("Invalid value", "is to say nothing"))
                if not unknown:  # the tag was known: only fields were missing
                    accepted.append(kind)
        assert len(accepted) == 1, f"{tag} is accepted by {accepted}"


def test_a_claimed_array_of_four_billion_ids_allocates_nothing() -> None:
    with pytest.raises(FrameError, match="truncated"):
        decode(Kind.TOKEN_IDS, b"\x84\xa1t\xa6tokens\xa7request\xa1a\xa8position\n\xa3ids\xdd\xff\xff\xff\xff\x01")


@pytest.mark.parametrize(
    ("field", "value"),
    [("deadline_s", float("nan")), ("deadline_s", 0.0), ("deadline_s", float("inf")), ("deadline_s", -1.0)],
)
def test_a_request_with_a_deadline_that_no_clock_can_keep_is_refused(field: str, value: float) -> None:
    """Not-a-number among an event loop's timers puts all of them out of order."""
    spec = {"id": "r", "gateway": "g", "prefill": "p", "relay": None, "main": None, "prompt": [1], "deadline_s": 3.0}
    raw = msgspec.msgpack.encode({"t": "prefill", "spec": {**spec, "sampling": {"max_tokens": 1}, field: value}})
    with pytest.raises(FrameError, match="does not decode"):
        decode(Kind.CONTROL, raw)


@pytest.mark.parametrize("sampling", [{"temperature": float("nan")}, {"temperature": -1.0}, {"top_p": float("nan")}])
def test_sampling_that_means_nothing_is_refused(sampling: dict[str, float]) -> None:
    spec = {"id": "r", "gateway": "g", "prefill": "p", "relay": None, "main": None, "prompt": [1], "deadline_s": 3.0}
    raw = msgspec.msgpack.encode({"t": "prefill", "spec": {**spec, "sampling": {"max_tokens": 1, **sampling}}})
    with pytest.raises(FrameError, match="does not decode"):
        decode(Kind.CONTROL, raw)
