"""Lies on the way of a netem link, told by further netem qdiscs on every device of the path: the quick form finds each.

Timers of the VM's emulated CPU are too late for the tolerance of an honest delay; honest shares are judged here.
"""

from typing import Any

import pytest
from line import Line

from testbed.links.rig import HOST_A, HOST_B
from testbed.model.impairment import Impairment, Jitter
from testbed.verify.link import Target, floor_ns, verify_link

MS = 1_000_000
ASKED = Impairment(rate_bps=5_000_000, delay_ns=20 * MS, queue_bytes=100_000)
# What a packet leaves through on its way forward, the link's own qdiscs apart.
DEVICES = (("host_a", "eth0"), ("router_a", "wan-a"), ("router_b", "lan0"))
LIES = (
    (("delay", "30ms"), {"delay"}),
    (("loss", "30%"), {"loss"}),
    (("duplicate", "30%"), {"duplicates"}),
    (("corrupt", "30%"), {"loss"}),
    (("delay", "10ms", "reorder", "50%"), {"delay", "reordering"}),
)


@pytest.fixture(scope="module")
def floor(netem_line: Line) -> dict[Any, float | None]:
    netem_line.set(Impairment())
    return floor_ns(target(netem_line, Impairment(), {"forward": None, "backward": None}))


def target(line: Line, asked: Impairment, floor: dict[Any, float | None]) -> Target:
    ends = ((line.pids["host_a"], HOST_A), (line.pids["host_b"], HOST_B))
    return Target("line", ends, 1500, {"forward": asked, "backward": asked}, floor, "netem")


def failures(line: Line, asked: Impairment, floor: dict[Any, float | None]) -> set[str]:
    result = verify_link(target(line, asked, floor), True, lambda _: None)
    return {figure["figure"] for figure in result["directions"]["forward"] if not figure["ok"]}


@pytest.mark.parametrize("jitter", [None, Jitter(MS)], ids=["still", "with jitter"])
@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device[1])
def test_each_lie_on_each_device_is_found(
    netem_line: Line, floor: dict[Any, float | None], device: tuple[str, str], jitter: Jitter | None
) -> None:
    asked = Impairment(ASKED.rate_bps, ASKED.delay_ns, ASKED.queue_bytes, jitter)
    netem_line.set(asked)
    assert not failures(netem_line, asked, floor) & {"loss", "duplicates", "reordering"}
    host, interface = device
    # The link's own tbf is the root at wan-a: a lie goes below it.
    place = ("parent", "1:1") if interface == "wan-a" else ("root",)
    for lie, figures in LIES:
        netem_line.run(host, "tc", "qdisc", "replace", "dev", interface, *place, "netem", "limit", "9999", *lie)
        try:
            assert failures(netem_line, asked, floor) & figures, f"{' '.join(lie)} at {host}'s {interface}"
        finally:
            if interface == "wan-a":
                netem_line.run(host, "tc", "qdisc", "replace", "dev", interface, *place, "bfifo", "limit", "100000")
            else:
                netem_line.run(host, "tc", "qdisc", "del", "dev", interface, "root")
