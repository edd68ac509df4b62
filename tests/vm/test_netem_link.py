"""What only the netem driver has: qdiscs that other tools can read, kernel limits, neighbours known for good.

What every driver does is in tests/conformance, which runs here as well.
"""

import json
import time

import pytest
from line import Line

from testbed.links.base import LinkError
from testbed.model.impairment import BernoulliLoss, GilbertElliottLoss, Impairment, Jitter

MS = 1_000_000


def test_another_tool_reads_the_same_values(netem_line: Line) -> None:
    asked = Impairment(
        rate_bps=10_000_000, delay_ns=40 * MS, queue_bytes=60_000, loss=GilbertElliottLoss(0.01, 0.1, 0.7, 0.001)
    )
    netem_line.set(asked)
    tbf = json.loads(netem_line.run("router_a", "tc", "-j", "qdisc", "show", "dev", "wan-a"))[0]
    assert tbf["kind"] == "tbf"
    assert tbf["options"]["rate"] == 10_000_000 // 8
    netem = json.loads(netem_line.run("node", "tc", "-j", "qdisc", "show", "dev", "port-b"))[0]
    assert netem["options"]["delay"]["delay"] == 0.04
    assert netem["options"]["loss-gemodel"] == pytest.approx({"p": 0.01, "r": 0.1, "1-h": 0.7, "1-k": 0.001}, abs=1e-6)


@pytest.mark.parametrize(
    ("impossible", "message"),
    [
        (Impairment(rate_bps=200_000_000_000, queue_bytes=1 << 20), "above the netem driver's limit of 100gbit"),
        (Impairment(rate_bps=50_000_000_000, delay_ns=100 * MS, queue_bytes=5 << 30), "exceed tbf's limit"),
        (Impairment(rate_bps=50_000_000_000, delay_ns=30_000 * MS, queue_bytes=1 << 20), "smallest packets"),
        (Impairment(rate_bps=10_000_000_000, delay_ns=5_000 * MS, queue_bytes=1 << 20), "10gbit x 5 s in flight"),
    ],
)
def test_the_impossible_is_refused_and_changes_nothing(netem_line: Line, impossible: Impairment, message: str) -> None:
    netem_line.set(Impairment(delay_ns=7 * MS))
    before = netem_line.link.applied()
    with pytest.raises(LinkError, match=message):
        netem_line.link.apply("forward", impossible)
    assert netem_line.link.applied() == before


def test_neighbours_are_known_for_good(netem_line: Line) -> None:
    """ARP would have to cross the delay, and give up after 3 s."""
    for router, interface in (("router_a", "wan-a"), ("router_b", "wan-b")):
        neighbours = netem_line.run(router, "ip", "neigh", "show", "dev", interface)
        assert "PERMANENT" in neighbours
        assert len(neighbours.splitlines()) == 1


def test_jitter_moves_the_delay_and_leaves_it_alone_when_it_ends(netem_line: Line) -> None:
    netem_line.set(Impairment(delay_ns=50 * MS, jitter=Jitter(10 * MS)))
    time.sleep(1)
    moved = netem_line.link.applied()["forward"]
    assert moved["delay_changes"] > 10
    assert moved["delay_now_ns"] != moved["delay_ns"] == 50 * MS
    netem_line.set(Impairment(delay_ns=20 * MS))
    still = netem_line.link.applied()
    assert "delay_now_ns" not in still["forward"]
    time.sleep(0.3)
    assert netem_line.link.applied() == still


def test_jitter_with_bursty_loss_is_refused(netem_line: Line) -> None:
    before = netem_line.link.applied()
    with pytest.raises(LinkError, match="starts the two-state model anew"):
        netem_line.link.apply("forward", Impairment(jitter=Jitter(MS), loss=GilbertElliottLoss(0.1, 0.1)))
    assert netem_line.link.applied() == before


def test_what_was_lost_on_purpose_stays_so_when_the_loss_ends(netem_line: Line) -> None:
    netem_line.set(Impairment(loss=BernoulliLoss(1.0)))
    before = netem_line.link.counters()["forward"]
    assert len(netem_line.ping(count=5, interval_s=0.05).lost) == 5
    lost = netem_line.link.counters()["forward"]["lost"] - before["lost"]
    netem_line.set(Impairment(delay_ns=MS))
    after = netem_line.link.counters()["forward"]
    assert lost == 5
    assert after["lost"] - before["lost"] == 5
    assert after["dropped_unasked"] == before["dropped_unasked"], "asked loss became unasked when it was taken back"


def test_what_a_full_delay_line_dropped_stays_unasked_when_a_loss_is_asked(netem_line: Line) -> None:
    netem_line.set(Impairment(delay_ns=100 * MS))
    before = netem_line.link.counters()["forward"]
    netem_line.run("node", "tc", "qdisc", "change", "dev", "port-b", "root", "netem", "limit", "2", "delay", "100ms")
    netem_line.ping(count=20, interval_s=0.01)
    netem_line.set(Impairment(loss=BernoulliLoss(0.01)))
    after = netem_line.link.counters()["forward"]
    assert after["dropped_unasked"] - before["dropped_unasked"] > 5
    netem_line.set(Impairment())
    assert netem_line.link.counters()["forward"]["dropped_unasked"] == after["dropped_unasked"]


def test_an_asked_loss_hides_no_full_delay_line(netem_line: Line) -> None:
    netem_line.set(Impairment(delay_ns=100 * MS, loss=BernoulliLoss(0.01)))
    before = netem_line.link.counters()["forward"]
    change = "tc qdisc change dev port-b root netem limit 2 delay 100ms loss 1%"
    netem_line.run("node", *change.split())
    netem_line.ping(count=60, interval_s=0.01)
    after = netem_line.link.counters()["forward"]
    assert after["dropped_unasked"] - before["dropped_unasked"] > 10


def test_bucket_and_queue_are_the_files_buffer_together(netem_line: Line) -> None:
    netem_line.set(Impairment(rate_bps=400_000_000, queue_bytes=100_000))
    applied = netem_line.link.applied()["forward"]
    assert applied["buffer_bytes"] == pytest.approx(100_000, abs=100)
    assert applied["queue_bytes"] == 100_000
