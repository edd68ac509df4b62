"""Deadlines follow the link that is, also of what is under way, and count from the last byte that moved."""

import asyncio
import socket
import time
from dataclasses import dataclass

import pytest

from tests.workers.proxy import Proxy
from tests.workers.serving import eventually, run
from tests.workers.wire.pair import End, Memory, outgoing
from workers.wire.connection import dial
from workers.wire.deadlines import DeadlineExceeded, Link, Path, within
from workers.wire.kv_pool import PeerUnreachable
from workers.wire.messages import CacheNotice
from workers.wire.stream import await_handshakes, configure

S = 10**9
PATIENCE = 0.07  # without delay connecting takes 3.14 s at most, stalling 1.05 s


@dataclass
class Changing:
    """A link that a test changes."""

    link: Link = Link()  # noqa: RUF009 - immutable

    def now(self) -> Link:
        return self.link

    longest = now


@pytest.mark.parametrize(
    ("before", "after", "expected_s"),
    [(0.0, 0.6, 3.14 + 4 * 0.6), (20.0, 0.0, 3.14)],
    ids=["longer", "shorter"],
)
def test_a_handshake_under_way_has_the_time_of_the_link_that_is(before: float, after: float, expected_s: float) -> None:
    async def test() -> None:
        deaf = socket.create_server(("127.0.0.1", 0))  # the kernel accepts, and nobody answers
        link = Changing(Link(int(before * S)))
        path, start = Path(patience=PATIENCE, present=link), time.monotonic()
        p0 = End("p0", "prefill")
        dialling = asyncio.create_task(dial(*deaf.getsockname(), "md0", "control", p0.local, path))
        await asyncio.sleep(0.5)
        link.link = Link(int(after * S))
        # what ends it may be the handshake's whole time, or that no byte of the answer came
        with pytest.raises(DeadlineExceeded, match="handshake"):
            await dialling
        took = time.monotonic() - start
        assert took < expected_s + 0.5, "back down as well"
        assert after == 0 or took > 3.5, "not within the time of the link that was"
        deaf.close()

    run(test())


def test_a_silent_peer_is_lost_by_the_link_that_is_and_the_kernel_is_told() -> None:
    def user_timeout_ms(end: End, peer: str) -> int:
        link = end.peers.link(peer)
        assert link is not None
        sock = link._connection._stream._sock
        return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)

    async def test() -> None:
        rld0, md0, link = End("rld0", "relay-decode"), End("md0", "main-decode"), Changing()
        path = Path(patience=PATIENCE, present=link)
        async with Proxy(md0.port) as proxy, md0.connect(rld0, path=path), rld0.connect(md0, path=path, md0=proxy.port):
            await rld0.peers.wait_connected(["md0"], 3)
            assert (user_timeout_ms(rld0, "md0"), user_timeout_ms(md0, "rld0")) == (1050, 1050)
            link.link = Link(S, None, 5 * S)
            longer = round((1.05 + 8 + 15) * 1000)
            await eventually(lambda: user_timeout_ms(rld0, "md0") == user_timeout_ms(md0, "rld0") == longer, 2, "both")
            proxy.pause()
            await asyncio.sleep(2)
            assert not rld0.lost
            assert not md0.lost
            link.link = Link()
            await eventually(lambda: bool(rld0.lost), 2, "the link is short again")

    run(test())


@pytest.mark.parametrize("link", [Link(), Link(40 * S), Link(40 * S, 64_000, 500 * S), Link(10**15, 1, 10**18)])
def test_the_kernel_takes_the_deadlines_of_every_link(link: Link) -> None:
    path = Path(present=Changing(link))
    with socket.socket() as sock, socket.create_server(("127.0.0.1", 0)) as listener:
        configure(sock, path)
        await_handshakes(listener, path.connect_s)
        retries = listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_SYNCNT)
        assert sum(min(2**n, 120) for n in range(retries)) >= min(path.connect_s, 10_000)


def test_a_pool_waits_for_its_peer_as_long_as_the_link_that_is() -> None:
    async def test() -> None:
        gone = socket.create_server(("127.0.0.1", 0))
        p0, md0, link = End("p0", "prefill"), End("md0", "main-decode"), Changing()
        async with p0.connect(md0, path=Path(patience=PATIENCE, present=link), md0=gone.getsockname()[1]):
            waiting = asyncio.create_task(p0.peers.pools["md0"].acquire())
            start = time.monotonic()
            await asyncio.sleep(0.3)
            link.link = Link(int(0.3 * S))
            with pytest.raises(PeerUnreachable):
                await waiting
            assert 3.14 + 1.1 < time.monotonic() - start < 3.14 + 1.2 + 1
        gone.close()

    run(test())


@pytest.mark.parametrize("sender", ["p0", "md0"], ids=["from the dialler", "to the dialler"])
def test_a_long_message_on_a_slow_link_keeps_the_link(sender: str) -> None:
    """A first notice of 20,000 blocks: 360 KB, here in 3 s, three times the deadline for silence."""

    async def test() -> None:
        p0, md0, path = End("p0", "prefill"), End("md0", "main-decode"), Path(patience=PATIENCE)
        ends = {"p0": p0, "md0": md0}
        receiver = "md0" if sender == "p0" else "p0"
        async with Proxy(md0.port, 8 << 10) as proxy:
            md0.connect(p0, path=path)
            p0.connect(md0, connections=1, path=path, md0=proxy.port)
            async with md0, p0:
                await p0.peers.wait_connected(["md0"], 3)
                await md0.peers.wait_connected(["p0"], 3)
                proxy.rate_bytes_per_s = proxy.back_bytes_per_s = 120e3
                names = [index.to_bytes(16, "big") for index in range(20_000)]
                ends[sender].peers.post(receiver, CacheNotice(inserted=names, reset=True))
                await eventually(lambda: bool(ends[receiver].messages or p0.lost or md0.lost), 15, "it is there")
                assert [*p0.lost, *md0.lost] == []

    run(test())


def test_kv_that_moves_says_that_the_peer_is_there_while_its_pongs_wait_behind_it() -> None:
    """Both connections cross one bottleneck: while KV fills it, no control message comes through."""

    async def test() -> None:
        p0, md0 = End("p0", "prefill"), End("md0", "main-decode", blocks=64)
        path = Path(patience=PATIENCE)
        async with Proxy(md0.port, 8 << 10) as proxy:
            md0.connect(p0, path=path)
            p0.connect(md0, connections=1, path=path, md0=proxy.port)
            async with md0, p0:
                await p0.peers.wait_connected(["md0"], 3)
                pool = p0.peers.pools["md0"]
                control = p0.peers.link("md0")
                assert control is not None
                proxy.rate_bytes_per_s = 300e3
                proxy.held = control._connection._stream._sock.getsockname()[1]
                await outgoing(Memory(64, fill=1), "r", 1000).deliver(pool)
                lost = [*p0.lost, *md0.lost]
                proxy.held = None
                assert lost == [], "1 MB took 3 s, in which nothing but KV came through"

    run(test())


def test_a_stopped_peer_is_lost_though_its_kernel_takes_pings() -> None:
    async def test() -> None:
        rld0, md0 = End("rld0", "relay-decode"), End("md0", "main-decode")
        path = Path(patience=PATIENCE)
        async with md0.connect(rld0, path=path), rld0.connect(md0, path=path):
            await rld0.peers.wait_connected(["md0"], 3)
            link = md0.peers.link("rld0")
            assert link is not None
            reading = link._connection._stream
            reading._loop.remove_reader(reading._fd)  # md0 reads no more; its kernel goes on
            await eventually(lambda: bool(rld0.lost), 2, "rld0 hears no pong")
            assert "silent" in rld0.lost[0]

    run(test())


def test_a_limit_is_asked_again_and_progress_begins_it_anew() -> None:
    async def test() -> None:
        start = time.monotonic()
        with pytest.raises(TimeoutError):
            async with within(lambda: 0.4, lambda: min(10, (time.monotonic() - start) // 0.1)):
                await asyncio.sleep(10)
        assert 1.2 < time.monotonic() - start < 2.0
        start = time.monotonic()
        with pytest.raises(TimeoutError):
            async with within(lambda: 0.2 if time.monotonic() > start + 0.3 else 10.0):
                await asyncio.sleep(10)
        assert 0.3 < time.monotonic() - start < 0.8

    run(test())
