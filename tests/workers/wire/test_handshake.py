"""Who is let in: the secret in both directions, and every fact compared with both values named."""

import asyncio
import re
import secrets
import socket
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.workers.serving import eventually, run
from tests.workers.wire.pair import SECRET, End, QuickPath, facts
from workers.wire import frames, handshake
from workers.wire.codec import decode, encode, kind_of
from workers.wire.connection import Connection, Local, dial
from workers.wire.frames import HEADER, PROTOCOL_VERSION, WireError, pack, parse_header
from workers.wire.handshake import AuthenticationFailed, Facts, Hello, Incompatible, Proof, Refused, Welcome
from workers.wire.stream import ConnectionLost, Stream


async def dial_as(local: Local, to: End, channel: str = "control") -> Connection:
    return await dial("127.0.0.1", to.port, to.local.facts.name, channel, local, QuickPath())


def ends() -> tuple[End, End]:
    p0, md0 = End("p0", "prefill"), End("md0", "main-decode")
    return p0, md0.connect(p0)


def test_two_workers_of_a_lab_connect_and_know_each_other() -> None:
    async def test() -> None:
        p0, md0 = ends()
        async with md0:
            connection = await dial_as(p0.local, md0)
            await eventually(lambda: md0.peers.link("p0") is not None, 2, "md0 knows p0")
            connection.close("done")
            await eventually(lambda: md0.lost != [], 2, "md0 notices the end")

    run(test())


def test_a_dialer_with_another_secret_is_refused_by_name_and_learns_why() -> None:
    async def test() -> None:
        p0, md0 = ends()
        stranger = Local(p0.local.facts, secrets.token_bytes(32))
        async with md0:
            with pytest.raises(AuthenticationFailed, match="md0 does not know this lab's secret"):
                await dial_as(stranger, md0)
            assert md0.peers.link("p0") is None

    run(test())


def test_a_dialer_that_does_not_check_the_listener_is_refused_by_the_listener() -> None:
    async def test() -> None:
        p0, md0 = ends()
        async with md0:
            answer = await raw_handshake(md0, p0.local.facts, secrets.token_bytes(32))
            assert isinstance(answer, Refused)
            assert "does not know this lab's secret" in answer.reason
            assert md0.local.counters.rows() == [], "strangers leave no counters"

    run(test())


def test_a_proof_cannot_be_reflected() -> None:
    async def test() -> None:
        p0, md0 = ends()
        async with md0:
            answer = await raw_handshake(md0, p0.local.facts, None)  # sends the listener's own proof back
            assert isinstance(answer, Refused)

    run(test())


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"protocol": 9}, f"wire protocol is {PROTOCOL_VERSION} on md0 and 9 on p0"),
        ({"model": "other"}, "model is m on md0 and other on p0"),
        ({"fingerprint": "e" * 32}, f"model fingerprint is {'f' * 32} on md0 and {'e' * 32} on p0"),
        ({"block_size": 32}, "block size is 16 on md0 and 32 on p0"),
        ({"kv_shape": [4, 2, 1, 8]}, r"KV shape of a token is \[2, 2, 1, 8\] on md0 and \[4, 2, 1, 8\] on p0"),
        ({"kv_dtype": "bfloat16"}, "KV dtype is float32 on md0 and bfloat16 on p0"),
    ],
)
def test_a_worker_that_differs_is_refused_with_both_values(change: dict[str, Any], expected: str) -> None:
    async def test() -> None:
        _, md0 = ends()
        differs = facts("p0", "prefill", **change)
        async with md0:
            with pytest.raises(Incompatible) as dialer_side:
                await dial_as(Local(differs, SECRET), md0)
            for field, value in change.items():
                assert str(value) in str(dialer_side.value)
                assert str(getattr(md0.local.facts, field)) in str(dialer_side.value)
            answer = await raw_handshake(md0, differs, SECRET)
            assert isinstance(answer, Refused)
            assert re.search(expected, answer.reason), answer.reason
            assert md0.peers.link("p0") is None

    run(test())


def test_all_differences_are_named_at_once() -> None:
    with pytest.raises(Incompatible, match=r"block size is 16 .* 8 .*; KV dtype is float32 .* float16"):
        handshake.check_facts(facts("a", "prefill"), facts("b", "prefill", block_size=8, kv_dtype="float16"))


def test_another_protocol_version_is_refused_so_that_both_sides_name_both_versions(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        p0, md0 = ends()
        async with md0:
            sock = socket.create_connection(("127.0.0.1", md0.port))
            hello = Hello(facts=p0.local.facts, channel="control", nonce=bytes(32))
            other = bytearray(pack(kind_of(hello), encode(hello)))
            other[5] = 9  # the version's low byte
            sock.sendall(other)
            stream = Stream(sock, QuickPath())
            raw = await stream.read_bytes(HEADER.size, lambda: 2.0)
            stream.close("enough")
            assert f"speaks wire protocol 9, this worker {PROTOCOL_VERSION}" in caplog.text
            monkeypatch.setattr(frames, "PROTOCOL_VERSION", 9)
            with pytest.raises(frames.FrameError, match=f"speaks wire protocol {PROTOCOL_VERSION}, this worker 9"):
                parse_header(raw)

    run(test())


def test_an_unknown_worker_is_refused() -> None:
    async def test() -> None:
        _, md0 = ends()
        async with md0:
            answer = await raw_handshake(md0, facts("p9", "prefill"), SECRET)
            assert isinstance(answer, Refused)
            assert "p9 is not among the peers of md0" in answer.reason

    run(test())


def test_a_listener_that_is_someone_else_is_noticed() -> None:
    async def test() -> None:
        p0, md0 = ends()
        async with md0:
            with pytest.raises(Incompatible, match="is in fact md0"):
                await dial("127.0.0.1", md0.port, "md7", "control", p0.local, QuickPath())

    run(test())


def test_a_silent_listener_is_given_up_with_its_name_and_address() -> None:
    async def test() -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            port = silent.getsockname()[1]
            with pytest.raises(WireError, match=rf"md0 at 127.0.0.1:{port} did not finish the handshake within 1.0 s"):
                await dial("127.0.0.1", port, "md0", "control", End("p0", "prefill").local, QuickPath())

    run(test())


def test_nobody_listening_is_one_sentence() -> None:
    async def test() -> None:
        with socket.create_server(("127.0.0.1", 0)) as gone:
            port = gone.getsockname()[1]
        with pytest.raises(ConnectionLost, match=rf"cannot connect to md0 at 127.0.0.1:{port}: .*refused"):
            await dial("127.0.0.1", port, "md0", "control", End("p0", "prefill").local, QuickPath())

    run(test())


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.binary(min_size=1, max_size=200), min_size=1, max_size=4), st.booleans())
def test_garbage_closes_its_own_connection_and_nothing_else(chunks: list[bytes], valid_start: bool) -> None:
    async def test() -> None:
        p0, md0 = ends()
        async with md0:
            hello = Hello(facts=p0.local.facts, channel="kv", nonce=bytes(32))
            reader, writer = await asyncio.open_connection("127.0.0.1", md0.port)
            writer.write((pack(kind_of(hello), encode(hello)) if valid_start else b"") + b"".join(chunks))
            writer.write_eof()
            await asyncio.wait_for(reader.read(), 5)  # until md0 closes
            writer.close()
            (await dial_as(p0.local, md0)).close("the listener still works")

    run(test())


async def raw_handshake(listener: End, as_facts: Facts, secret: bytes | None) -> object:
    """A dialer that checks nothing; returns what the listener says after the proof. Secret None: reflect its proof."""
    sock = socket.create_connection(("127.0.0.1", listener.port))
    stream = Stream(sock, QuickPath())

    async def read() -> Any:
        header = parse_header(await stream.read_bytes(HEADER.size, lambda: 2.0))
        return decode(header.kind, await stream.read_bytes(header.message_bytes, lambda: 2.0))

    async def write(message: Any) -> None:
        sock.setblocking(True)
        sock.sendall(pack(kind_of(message), encode(message)))
        sock.setblocking(False)

    hello = Hello(facts=as_facts, channel="control", nonce=secrets.token_bytes(32))
    await write(hello)
    welcome = await read()
    assert isinstance(welcome, Welcome)
    proof = welcome.proof
    if secret is not None:
        proof = handshake.dialer_proof(secret, hello, welcome.facts, welcome.nonce)
    await write(Proof(proof=proof))
    try:
        return await read()
    finally:
        stream.close("test over")
