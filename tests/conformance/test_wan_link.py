"""What every driver does: delay, rate, queue, live change, limits, read-back, counters.

Tolerances. The VM that brings netem is emulated in software on a machine that others use: a packet takes a fraction of
a millisecond per hop, timers are 0.1 to 5 ms late, and now and then everything stands still for tens of milliseconds.
Nothing of that makes a packet early, so no probe may be, and the fastest of many shows what the link itself adds: it
may exceed the fastest of the unimpaired line by SLACK_MS. Medians are recorded. Rates are judged over seconds, to 2 %.
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from line import MTU, SLACK_MS, Line

from testbed.links.base import LinkError
from testbed.links.rig import HOST_B
from testbed.model.drivers import refusal
from testbed.model.impairment import BernoulliLoss, GilbertElliottLoss, Impairment, Jitter

MS = 1_000_000
UDP_HEADERS = 28
Record = Callable[[str, object], None]
pytestmark = pytest.mark.root


def assert_round_trips(times_ms: list[float], floor_ms: float, asked_ms: float) -> None:
    """None is early; the fastest takes what was asked and the floor."""
    assert min(times_ms) >= asked_ms
    assert min(times_ms) - floor_ms - asked_ms <= SLACK_MS


@pytest.mark.parametrize("delay_ms", [1, 20, 200])
def test_a_ping_takes_both_delays(line: Line, delay_ms: int, record_property: Record) -> None:
    line.set(Impairment(delay_ns=delay_ms * MS))
    times_ms = line.round_trips_ms(count=30)
    for name, of in (("fastest", min), ("median", statistics.median)):
        record_property(f"{name} round trip - floor - asked, ms", of(times_ms) - line.floor_ms - 2 * delay_ms)
    assert_round_trips(times_ms, line.floor_ms, 2 * delay_ms)


def test_the_two_directions_are_separate(line: Line) -> None:
    line.set(Impairment(delay_ns=10 * MS), delay_ns=70 * MS)
    assert_round_trips(line.round_trips_ms(count=10), line.floor_ms, 80)


@pytest.mark.nightly
def test_two_seconds_each_way_lose_nothing(line: Line) -> None:
    line.set(Impairment(delay_ns=2000 * MS))
    dropped = line.count("dropped_unasked")
    # ping prints whole milliseconds above 1 s
    assert_round_trips(line.round_trips_ms(count=300, interval_s=0.01), line.floor_ms, 4000)
    assert line.count("dropped_unasked") == dropped


def test_a_lone_packet_takes_the_time_of_its_bits(line: Line) -> None:
    line.set(Impairment(rate_bps=1_000_000, queue_bytes=100_000))
    # 1,500 IP bytes at 1 Mbit/s: 12 ms each way; netem serializes 0.1 % faster (see testbed/links/shaping.py)
    times_ms = line.round_trips_ms(count=10, payload_bytes=MTU - UDP_HEADERS)
    assert_round_trips(times_ms, line.floor_ms, 2 * 12 / 1.001)


def assert_rate(report: dict[str, Any], expected_bps: float, record_property: Record) -> None:
    """The median of the receiver's seconds is within 2 %: a machine that stands still spoils a second or two, a wrong
    link all of them. A packet more or less in a second is one in 83 at the slowest rate."""
    seconds = [second["sum"] for second in report["intervals"] if not second["sum"]["omitted"]]
    shares = [second["bits_per_second"] / expected_bps for second in seconds if second["seconds"] > 0.9]
    record_property("share of the expected rate", " ".join(f"{share:.4f}" for share in shares))
    assert len(shares) >= 4
    assert statistics.median(shares) == pytest.approx(1, abs=0.02), shares


@pytest.mark.quiet
def test_tcp_gets_the_rate_minus_its_headers(line: Line, record_property: Record) -> None:
    rate_bps = 10_000_000
    line.set(Impairment(rate_bps=rate_bps, delay_ns=5 * MS, queue_bytes=125_000))
    report = line.iperf("-O", "3", seconds=5)  # slow start is the sender's affair
    assert_rate(report, rate_bps * (MTU - 52) / MTU, record_property)


@pytest.mark.parametrize(
    ("rate_bps", "ip_bytes"), [(1_000_000, 1500), (2_000_000, 100), (10_000_000, 1500), (20_000_000, 1500)]
)
def test_rate_counts_ip_bytes_whatever_the_size_of_packets(
    line: Line, rate_bps: int, ip_bytes: int, record_property: Record
) -> None:
    """Counting Ethernet headers as well would give packets of 100 bytes 12 % less."""
    line.set(Impairment(rate_bps=rate_bps, queue_bytes=max(20_000, rate_bps // 8 // 20)))
    dropped = line.count("dropped_queue"), line.count("dropped_unasked")
    payload = ip_bytes - UDP_HEADERS
    offered = int(1.3 * rate_bps * payload / ip_bytes)
    report = line.iperf("-u", "-l", str(payload), "-b", str(offered), "-O", "1", seconds=5)
    assert_rate(report, rate_bps * payload / ip_bytes, record_property)
    assert line.count("dropped_queue") > dropped[0]
    assert line.count("dropped_unasked") == dropped[1]


BURST = """
import socket, sys
out = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
out.connect((sys.argv[1], 9000))
for number in range(int(sys.argv[2])):
    out.send(number.to_bytes(4, "big") + bytes(int(sys.argv[3]) - 4))
"""
COUNT = """
import socket
into = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
into.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
into.setsockopt(socket.SOL_SOCKET, 35, 1)  # SO_TIMESTAMPNS: when the kernel got it, however late this process is
into.bind(("", 9000))
print("listening", flush=True)
into.settimeout(30)
times = []
try:
    while True:
        stamp = into.recvmsg(2000, 64)[1][0][2]
        times.append(int.from_bytes(stamp[:8], "little") + int.from_bytes(stamp[8:], "little") / 1e9)
        into.settimeout(2)
except TimeoutError:
    print(*(time - times[0] for time in times))
"""


def test_the_queue_holds_its_bytes_and_drops_the_rest(line: Line) -> None:
    rate_bps, queue_bytes, ip_bytes = 1_000_000, 30_000, 1000
    line.set(Impairment(rate_bps=rate_bps, queue_bytes=queue_bytes))
    before = line.link.counters()["forward"]
    receiver = subprocess.Popen(line.inside("host_b", sys.executable, "-c", COUNT), stdout=subprocess.PIPE, text=True)
    assert receiver.stdout is not None
    assert receiver.stdout.readline() == "listening\n"
    line.run("host_a", sys.executable, "-c", BURST, HOST_B, "100", str(ip_bytes - UDP_HEADERS))
    stamps = [float(stamp) for stamp in receiver.communicate(timeout=30)[0].split()]
    received = len(stamps)
    after = line.link.counters()["forward"]
    dropped = after["dropped_queue"] - before["dropped_queue"]
    # 30 packets wait, some of netem's before its bucket and some behind it; the line takes one packet every
    # 8 ms while the sender is still at it.
    fits = queue_bytes // ip_bytes
    assert fits <= received <= fits + 10
    assert received + dropped == 100
    assert after["dropped_unasked"] == before["dropped_unasked"]
    # They leave one after another, 8 ms each, the bucket's burst included. Nothing is early; a standstill makes late:
    # the least late packet of each half tells when that half left.
    late_s = [stamp - number * 0.008 for number, stamp in enumerate(stamps)]
    half = len(late_s) // 2
    assert min(late_s[half:]) - min(late_s[:half]) == pytest.approx(0, abs=0.02 * half * 0.008)


@pytest.mark.nightly
def test_small_packets_at_a_third_of_the_rate_fill_the_delay_line_without_loss(
    line: Line, record_property: Record
) -> None:
    rate_bps, ip_bytes = 10_000_000, 100
    line.set(Impairment(rate_bps=rate_bps, delay_ns=500 * MS, queue_bytes=60_000))
    dropped, arrived = line.count("dropped_unasked"), line.arrived()
    payload = ip_bytes - UDP_HEADERS
    report = line.iperf("-u", "-l", str(payload), "-b", str(rate_bps // 3 * payload // ip_bytes), seconds=4)
    end = report["end"]["sum"]
    assert end["packets"] > 15_000 * 0.9, "the emulated sender was too slow for this test to mean anything"
    record_property("small packets, none lost", end["packets"])
    line.settle()  # the sender has ended, the last of its packets may still be on their way
    assert line.arrived() - arrived >= end["packets"]  # what the receiver's own buffers then lose is not the link's
    assert line.count("dropped_unasked") == dropped


def test_a_change_keeps_what_is_in_flight_and_its_order(line: Line, record_property: Record) -> None:
    """The delay falls by 280 ms and the rate changes twice while packets are on their way."""
    steps = [
        Impairment(rate_bps=8_000_000, delay_ns=300 * MS, queue_bytes=200_000),
        Impairment(rate_bps=8_000_000, delay_ns=20 * MS, queue_bytes=200_000),
        Impairment(rate_bps=3_000_000, delay_ns=20 * MS, queue_bytes=200_000),
        Impairment(delay_ns=20 * MS),
        Impairment(rate_bps=5_000_000, delay_ns=50 * MS, queue_bytes=200_000),
    ]
    line.set(steps[0])
    dropped = line.count("dropped_queue") + line.count("dropped_unasked")
    server = line.iperf_server()
    client = subprocess.Popen(
        line.inside("host_a", *f"iperf3 -c {HOST_B} -u -l 472 -b 1M -t 7".split()), stdout=subprocess.DEVNULL
    )
    time.sleep(2)
    for step in steps[1:]:
        line.link.apply("forward", step)
        time.sleep(1)
    assert client.wait(timeout=60) == 0
    end = json.loads(server.communicate(timeout=60)[0])["end"]
    stream = end["streams"][0]["udp"]
    record_property("packets during changes", stream["packets"])
    assert stream["packets"] > 1500
    assert (stream["lost_packets"], stream["out_of_order"]) == (0, 0)
    assert line.count("dropped_queue") + line.count("dropped_unasked") == dropped


def test_counters_count_ip_bytes(line: Line) -> None:
    line.settle()
    before = line.link.counters()["forward"]
    line.round_trips_ms(count=10, payload_bytes=1000)
    after = line.link.counters()["forward"]
    assert after["packets"] - before["packets"] == 10
    assert after["bytes"] - before["bytes"] == 10 * 1028


def test_a_link_is_changed_and_read_from_any_thread(line: Line) -> None:
    """The lab changes links from the threads of its control socket, and timelines from one of their own."""
    line.set(Impairment(delay_ns=5 * MS))
    wanted = Impairment(delay_ns=30 * MS, rate_bps=50_000_000, queue_bytes=200_000)

    def change_and_read() -> int:
        line.link.apply("forward", wanted)
        delay: int = line.link.applied()["forward"]["delay_ns"]
        return delay + 0 * line.link.counters()["forward"]["packets"]

    with ThreadPoolExecutor(4) as threads:
        found = [future.result() for future in [threads.submit(change_and_read) for _ in range(8)]]
    assert found == [30 * MS] * 8
    assert_round_trips(line.round_trips_ms(count=10), line.floor_ms, 35)


@pytest.mark.parametrize(
    "asked",
    [
        Impairment(rate_bps=1_500_000_000, delay_ns=750 * MS, queue_bytes=8 << 20),
        Impairment(rate_bps=40_960_000_000, delay_ns=1 * MS, queue_bytes=20_000_000),
        Impairment(rate_bps=1_000, delay_ns=0, queue_bytes=1_500),
        Impairment(rate_bps=1_000_000, delay_ns=300_000 * MS + 1, queue_bytes=60_000),
        Impairment(delay_ns=2_000 * MS),
        Impairment(delay_ns=1 * MS, jitter=Jitter(5 * MS, "paretonormal")),
        Impairment(
            rate_bps=10_000_000,
            delay_ns=40 * MS,
            queue_bytes=60_000,
            loss=BernoulliLoss(0.015),
            duplication=0.001,
            corruption=0.0005,
            reordering=0.02,
        ),
        Impairment(delay_ns=40 * MS, loss=GilbertElliottLoss(0.01, 0.1, 0.7, 0.001)),
    ],
    ids=lambda asked: f"{asked.rate_bps}-{asked.delay_ns}-{type(asked.loss or asked.jitter).__name__}",
)
def test_what_is_done_is_exactly_what_was_asked_or_it_is_refused(line: Line, asked: Impairment) -> None:
    """Never wrapped, never rounded to something else."""
    refused = refusal(line.driver, asked, MTU)
    if refused is not None:
        assert "limit of" in refused
        with pytest.raises(LinkError, match="limit of"):
            line.link.apply("forward", asked)
        return
    line.set(asked)
    for got in line.link.applied().values():
        for name in ("rate_bps", "queue_bytes", "delay_ns"):
            assert got[name] == getattr(asked, name)
        for name, value in asked.to_dict().items():
            assert _plain(got.get(name)) == _plain(value), name


def _plain(value: Any) -> Any:
    """A value of an impairment with fractions as the kernel has them: 32 bits."""
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    return pytest.approx(value, abs=1e-9) if isinstance(value, float) else value


def test_a_silent_line_carries_nothing(line: Line) -> None:
    """No ARP, no IPv6, no spanning tree."""
    line.settle()
    before = line.link.counters()
    time.sleep(1.5)
    assert line.link.counters() == before
