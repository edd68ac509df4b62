"""Control connections: order, liveness, and what a lost one says."""

import asyncio

import pytest

from tests.workers.proxy import Proxy
from tests.workers.serving import eventually, run
from tests.workers.wire.pair import End
from workers.wire.deadlines import Path
from workers.wire.kv_pool import PeerUnreachable
from workers.wire.messages import HandOver, TokenIds


def test_messages_arrive_in_the_order_in_which_they_were_posted_both_ways() -> None:
    async def test() -> None:
        rld0, md0 = End("rld0", "relay-decode"), End("md0", "main-decode")
        async with md0.connect(rld0), rld0.connect(md0):
            await rld0.peers.wait_connected(["md0"], 3)
            await md0.peers.wait_connected(["rld0"], 3)
            for index in range(300):
                rld0.peers.post("md0", TokenIds(request=str(index), position=0, ids=[index], stopped_ns=0))
                md0.peers.post("rld0", HandOver(request=str(index)))
            await eventually(lambda: len(md0.messages) == len(rld0.messages) == 300, 3, "all arrived")
            assert [m.request for m in md0.messages] == [str(i) for i in range(300)]  # type: ignore[attr-defined]
            assert [m.request for m in rld0.messages] == [str(i) for i in range(300)]  # type: ignore[attr-defined]

    run(test())


def test_a_silent_peer_is_lost_after_its_deadline_and_posting_to_it_says_so() -> None:
    async def test() -> None:
        rld0, md0 = End("rld0", "relay-decode"), End("md0", "main-decode")
        async with Proxy(md0.port) as proxy, md0.connect(rld0), rld0.connect(md0, md0=proxy.port):
            await rld0.peers.wait_connected(["md0"], 3)
            proxy.pause(both_ways=True)  # half-open: the connection stands, nothing comes through
            took = await eventually(lambda: rld0.lost != [], 4, "rld0 gives md0 up")
            assert 0.9 < took < 2.5
            assert "silent" in rld0.lost[0]
            with pytest.raises(PeerUnreachable, match=r"md0 is not connected: .*silent"):
                rld0.peers.post("md0", HandOver(request="r"))
            proxy.resume()
            await rld0.peers.wait_connected(["md0"], 5)

    run(test())


def test_round_trips_are_measured() -> None:
    async def test() -> None:
        rld0, md0 = End("rld0", "relay-decode"), End("md0", "main-decode")
        async with md0.connect(rld0), rld0.connect(md0):
            await rld0.peers.wait_connected(["md0"], 3)
            link = rld0.peers.link("md0")
            assert link is not None
            await eventually(lambda: link.rtt_ns is not None, 2, "a pong came")
            assert link.rtt_ns is not None
            assert 0 < link.rtt_ns < 0.5e9

    run(test())


def test_a_bug_in_what_follows_a_loss_does_not_keep_the_peer_away(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        rld0, md0 = End("rld0", "relay-decode"), End("md0", "main-decode")

        def broken(peer: str, reason: str) -> None:
            raise KeyError(peer)

        monkeypatch.setattr(rld0, "on_lost", broken)
        async with md0.connect(rld0), rld0.connect(md0):
            await rld0.peers.wait_connected(["md0"], 3)
            old = rld0.peers.link("md0")
            assert old is not None
            old.close("cut by the test")
            await eventually(lambda: rld0.peers.link("md0") not in (None, old), 3, "dialled again")

    run(test())


def test_a_peer_that_comes_back_replaces_its_old_connection() -> None:
    async def test() -> None:
        first, md0 = End("rld0", "relay-decode"), End("md0", "main-decode")
        async with md0.connect(first):
            await first.connect(md0).__aenter__()
            await md0.peers.wait_connected(["rld0"], 3)
            old = md0.peers.link("rld0")
            again = End("rld0", "relay-decode")
            async with again.connect(md0):
                await eventually(lambda: md0.peers.link("rld0") not in (None, old), 3, "the new one took over")
                assert md0.lost
            await first.peers.close()

    run(test())


def test_deadlines_grow_with_the_round_trip() -> None:
    near, far = Path(0), Path(rtt_ns=4_000_000_000)
    assert far.connect_s - near.connect_s == pytest.approx(16)
    assert far.stall_s - near.stall_s == pytest.approx(32)
    assert far.reply_s - near.reply_s == pytest.approx(16)
    assert near.ping_every_s == 1.0
    assert far.ping_every_s == 4.0
    assert Path(rtt_ns=40 * 10**9).ping_every_s == 5.0, "a link that becomes short must not miss pings"
    assert Path(rate_bps=64_000).ping_every_s == 2.0
    assert [near.retry_s(n) for n in (0, 1, 2, 20)] == [0.0, 0.05, 0.1, 2.0]


def test_deadlines_grow_as_a_link_is_slow_and_shrink_with_patience() -> None:
    slow = Path(rtt_ns=40_000_000, rate_bps=1_000_000)
    assert slow.stall_s - Path(rtt_ns=40_000_000).stall_s == pytest.approx(3 * 2 * 64 * 1500 * 8 / 1e6)
    full = Path(rtt_ns=40_000_000, rate_bps=500_000, queue_ns=32_000_000_000)
    assert full.stall_s - Path(rtt_ns=40_000_000).stall_s == pytest.approx(3 * 32)
    assert full.connect_s - Path(rtt_ns=40_000_000).connect_s == pytest.approx(3 * 32)
    assert full.reply_s - Path(rtt_ns=40_000_000).reply_s == pytest.approx(2 * 32)
    quick = Path(rtt_ns=40_000_000, patience=0.1)
    assert quick.stall_s == pytest.approx(1.5 + 8 * 0.04), "patience is for the peer's CPU, not for the link"
    assert quick.connect_s == pytest.approx(3.2 + 4 * 0.04), "a lost SYN is sent again after 1 s, and 2 s later"
    assert quick.ping_every_s == 0.1
    assert quick.retry_s(20) == 0.2


def test_posting_to_a_worker_never_seen_names_it() -> None:
    async def test() -> None:
        rld0, md0 = End("rld0", "relay-decode"), End("md0", "main-decode")
        rld0.connect(md0)
        with pytest.raises(PeerUnreachable, match="md0 is not connected: it has not been seen yet"):
            rld0.peers.post("md0", HandOver(request="r"))
        await asyncio.sleep(0)

    run(test())
