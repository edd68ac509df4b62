"""The wire under input that nobody means well with: any bytes, real frames spoilt, and frames with right checksums."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.workers.fuzz.record import SEEDS
from tests.workers.fuzz.scripts import from_stream, to_stream, without_handshake
from tests.workers.fuzz.targets import Wire, dissect, messages

STREAMS = {path.stem: path.read_bytes() for path in sorted(SEEDS.glob("*.bin"))}
SCRIPTS = {name: from_stream(without_handshake(stream)) for name, stream in STREAMS.items()}
KV = "catch-up-p0-md0-1-there"
TAILS = "kv-rld0-md0-1-there"

few = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def wire() -> Iterator[Wire]:
    wire = Wire()
    yield wire
    wire.close()


@st.composite
def spoilt(draw: st.DrawFn, seeds: dict[str, bytes]) -> bytes:
    """A real input with bytes changed, cut out, repeated or put in."""
    data = bytearray(draw(st.sampled_from(list(seeds.values()))))
    for _ in range(draw(st.integers(0, 6))):
        # headers and messages are at the beginning of frames, and those are what matters
        at = draw(st.integers(0, min(len(data), 2000)))
        kind = draw(st.integers(0, 3))
        if kind == 0 and at < len(data):
            data[at] = draw(st.integers(0, 255))
        elif kind == 1:
            del data[at : at + draw(st.integers(1, 300))]
        elif kind == 2:
            data[at:at] = data[at : at + draw(st.integers(1, 300))]
        else:
            data[at:at] = draw(st.binary(min_size=1, max_size=20))
    return bytes(data[: draw(st.integers(0, len(data)))]) if draw(st.booleans()) else bytes(data)


def test_the_seeds_are_of_this_protocol_and_are_taken(wire: Wire) -> None:
    """Else mutating them would test nothing."""
    receiver = wire.transfers(SCRIPTS[KV])
    assert [sink.ended for sink in receiver.sinks] == ["complete", "complete"]
    assert wire.tails(SCRIPTS[TAILS]).tails == 2
    for name, stream in STREAMS.items():
        assert to_stream(from_stream(stream)) == stream
        messages(from_stream(stream))
        if "-0-" in name:
            assert wire.control(SCRIPTS[name]) >= 1, name


@few
@given(st.binary(max_size=600) | spoilt(STREAMS))
def test_captured_bytes_are_taken_apart_without_loss(data: bytes) -> None:
    dissect(data)


@few
@given(st.binary(max_size=600) | spoilt(SCRIPTS))
def test_what_decodes_encodes_to_the_same(data: bytes) -> None:
    messages(data)


@few
@given(st.binary(max_size=600) | spoilt(STREAMS))
def test_strangers_do_not_get_in(data: bytes) -> None:
    wire = Wire()
    wire.handshake(data)
    wire.handshake_script(data)
    wire.close()


@few
@given(st.binary(max_size=600) | spoilt(SCRIPTS))
@pytest.mark.parametrize("kind", ["transfers", "tails", "control"])
def test_a_connection_ends_by_name_whatever_it_carries(kind: str, data: bytes) -> None:
    wire = Wire()
    target: Callable[[bytes], object] = getattr(wire, kind)
    target(data)
    wire.close()


def test_seeds_exist() -> None:
    assert len(STREAMS) >= 10
    assert all(Path(SEEDS / f"{name}.bin").stat().st_size < 64 << 10 for name in STREAMS)
