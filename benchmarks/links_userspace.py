"""Figures of the userspace WAN driver against those asked of it: a table, and JSON with --out.

    python -m benchmarks.links_userspace [--only lateness,rate,...] [--quick] [--out FILE]

Root; makes its own namespaces and leaves nothing. Each row is one figure: asked, measured, verdict.
"""

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median, pstdev
from typing import Any

from benchmarks import harness, tcp, udp
from benchmarks.harness import require
from testbed.links.rig import HOST_B, Rig, rig
from testbed.links.userspace import UserspaceLink
from testbed.model.impairment import BernoulliLoss, GilbertElliottLoss, Impairment, Jitter

MS = 1_000_000
MBIT = 1_000_000
GBIT = 1_000_000_000
RATES = (1, 10, 100, 1000, 5000)  # Mbit/s
TCP_SHARE = (1500 - 52) / 1500  # payload of an IP packet with TCP timestamps


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. `ok` is the verdict; `detail` what a reader may want beside it."""

    figure: str
    asked: str
    measured: str
    ok: bool
    detail: dict[str, Any] = field(default_factory=dict)


@contextmanager
def link(forward: Impairment, backward: Impairment | None = None) -> Iterator[tuple[Rig, UserspaceLink]]:
    with tempfile.TemporaryDirectory(prefix="links-") as run_dir:
        with rig(UserspaceLink, Path(run_dir), forward, backward) as bed:
            assert isinstance(bed.link, UserspaceLink)
            yield bed, bed.link


@contextmanager
def hogs(count: int) -> Iterator[None]:
    """Processes that want a whole CPU each."""
    processes = [
        subprocess.Popen([sys.executable, "-c", "import os; os.setpriority(os.PRIO_PROCESS, 0, 0)\nwhile True: pass"])
        for _ in range(count)
    ]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def limited(rate_bps: int, delay_ns: int, **more: Any) -> Impairment:
    """A queue of one BDP, at least 100 packets."""
    return Impairment(
        rate_bps=rate_bps,
        delay_ns=delay_ns,
        queue_bytes=max(150_000, rate_bps * 2 * delay_ns // (8 * 10**9)),
        **more,
    )


def iperf3(bed: Rig, *options: str) -> dict[str, Any]:
    """`end` of iperf3's report, host_a to host_b."""
    with bed.popen(bed.host_b, ["iperf3", "-s", "-1", "--forceflush"], stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        while "listening" not in server.stdout.readline():
            pass
        report = json.loads(bed.run(bed.host_a, ["iperf3", "-J", "-c", HOST_B, *options], timeout_s=120))
        server.stdout.read()
    end: dict[str, Any] = report["end"]
    return end


def lateness(quick: bool) -> Iterator[Row]:
    """Actual minus logical departure, half of 1 Gbit/s in use (UDP, MTU packets), two CPU hogs."""
    for delay_ms in (1, 20, 200, 2000):
        with link(limited(GBIT, delay_ms * MS)) as (bed, driver), hogs(2):
            with udp.Load(bed, GBIT // 2):
                time.sleep(delay_ms / 1000 + 0.5)
                driver.forget()
                before = driver.counters()["forward"]["bytes"]
                start = time.monotonic()
                time.sleep(3 if quick else 8)
                result = driver.lateness()["forward"]
                counters = driver.counters()["forward"]
                used_bps = (counters["bytes"] - before) * 8 / (time.monotonic() - start)
                health = driver.health()
        p50, p99 = result["p50_ns"] / 1e6, result["p99_ns"] / 1e6
        yield Row(
            f"lateness at {delay_ms} ms, {used_bps / 1e6:.0f} Mbit/s UDP, 2 hogs",
            "p50 <= 0.1 ms, p99 <= 1 ms",
            f"p50 {p50:.3f} ms, p99 {p99:.3f} ms, max {result['max_ns'] / 1e6:.1f} ms",
            p50 <= 0.1 and p99 <= 1 and used_bps > 0.45e9,
            {"frames": result["count"], "busy": health["busy_max"], "dropped_unasked": counters["dropped_unasked"]},
        )


def lateness_tcp(quick: bool) -> Iterator[Row]:
    """The same with one TCP flow held at 500 Mbit/s: super-packets."""
    with link(limited(GBIT, 20 * MS)) as (bed, driver), hogs(2):
        end = iperf3(bed, "-b", "500M", "-O", "1", "-t", "3" if quick else "8")
        result = driver.lateness()["forward"]
    p50, p99 = result["p50_ns"] / 1e6, result["p99_ns"] / 1e6
    yield Row(
        f"lateness at 20 ms, {end['sum_received']['bits_per_second'] / 1e6:.0f} Mbit/s TCP, 2 hogs",
        "p50 <= 0.1 ms, p99 <= 1 ms",
        f"p50 {p50:.3f} ms, p99 {p99:.3f} ms, max {result['max_ns'] / 1e6:.1f} ms",
        p50 <= 0.1 and p99 <= 1,
        {"frames": result["count"]},
    )


def probes(quick: bool) -> Iterator[Row]:
    """One-way delay of sparse probes on an idle link, send call to kernel receive stamp."""
    for delay_ms in (0, 1, 20, 200, 2000):
        with link(Impairment(delay_ns=delay_ms * MS)) as (bed, _):
            udp.probe(bed, 20, 50, 1 + delay_ms / 1000)  # neighbours resolved, code warm
            arrivals = udp.probe(bed, 200 if quick else 500, 100, 1 + delay_ms / 1000, port=7101)
        excess = sorted(arrival.delay_ns / 1e6 - delay_ms for arrival in arrivals)
        p50, p99 = median(excess), excess[int(len(excess) * 0.99)]
        yield Row(
            f"end to end, idle, {delay_ms} ms one-way: excess",
            "p50 <= 0.3 ms, p99 <= 1 ms",
            f"p50 {p50:.3f} ms, p99 {p99:.3f} ms, min {excess[0]:.3f} ms",
            excess[0] >= 0 and p50 <= 0.3 and p99 <= 1,
            {"probes": len(excess)},
        )


def rate(quick: bool) -> Iterator[Row]:
    """Steady goodput at the receiver against rate x (MTU-52)/MTU."""
    seconds = 3.0 if quick else 6.0
    for rate_mbit in RATES:
        # A queue of 50 ms: hosts that wait for a CPU for a moment must not show as a slow link.
        deep = Impairment(rate_mbit * MBIT, 2 * MS, queue_bytes=max(30_000, rate_mbit * MBIT // 160))
        with link(deep) as (bed, driver):
            goodput = tcp.goodput_bps(bed, 3 if rate_mbit == 1 else 1, seconds)
            yield _rate_row(f"rate {rate_mbit} Mbit/s, one cubic flow", rate_mbit * MBIT, 0.0, goodput, driver)
    with link(limited(GBIT, MS, loss=BernoulliLoss(0.01)), Impairment(delay_ns=MS)) as (bed, driver):
        goodput = tcp.goodput_bps(bed, 1, seconds, congestion="bbr", flows=4)
        yield _rate_row("rate 1 Gbit/s, 1 % loss, 4 bbr flows", GBIT, 0.01, goodput, driver)


def _rate_row(figure: str, rate_bps: int, loss: float, goodput: float, driver: UserspaceLink) -> Row:
    counters = driver.counters()["forward"]
    ratio = goodput / (rate_bps * TCP_SHARE * (1 - loss))
    return Row(
        figure,
        "within 2 %",
        f"{goodput / 1e6:.2f} Mbit/s goodput, {100 * (ratio - 1):+.2f} %",
        abs(ratio - 1) <= 0.02,
        {
            "busy": driver.health()["busy_max"],
            "lost": counters["lost"],
            "dropped_queue": counters["dropped_queue"],
            "dropped_unasked": counters["dropped_unasked"],
        },
    )


def unlimited(quick: bool) -> Iterator[Row]:
    """A window of 8 MB: enough here, and small enough for the caches."""
    for delay_ms in (0, 1):
        with link(Impairment(delay_ns=delay_ms * MS)) as (bed, driver):
            end = iperf3(bed, "-C", "cubic", "-w", "8M", "-O", "1", "-t", "2" if quick else "4")
            health = driver.health()
        goodput = end["sum_received"]["bits_per_second"] / 1e9
        asked = ">= 8 Gbit/s" if delay_ms == 0 else "(reported)"
        yield Row(
            f"no rate limit, {delay_ms} ms, one TCP flow",
            asked,
            f"{goodput:.2f} Gbit/s",
            goodput >= 8 or delay_ms > 0,
            {"busy": health["busy_max"]},
        )


def warm(quick: bool) -> Iterator[Row]:
    """64 MB through a warm cubic connection, first to last byte."""
    cases = [(400 * MBIT, 20 * MS, 0.97)] + ([] if quick else [(GBIT, 2000 * MS, 0.90)])
    for rate_bps, delay_ns, share in cases:
        ceiling = rate_bps * TCP_SHARE
        with link(limited(rate_bps, delay_ns)) as (bed, driver):
            rtt_s = 2 * delay_ns / 1e9
            timed = tcp.warm_transfer(bed, 64 << 20, "cubic", 0.98 * ceiling, 120, pause_s=2 * rtt_s)
            counters = driver.counters()["forward"]
        ratio = timed.bits_per_second / ceiling
        yield Row(
            f"64 MB warm, {rate_bps / 1e6:.0f} Mbit/s x {rtt_s * 1000:.0f} ms RTT, cubic",
            f">= {share:.0%} of rate x (MTU-52)/MTU",
            f"{ratio:.1%} ({timed.bits_per_second / 1e6:.0f} Mbit/s)",
            ratio >= share,
            {"warm_up_s": round(timed.warm_up_s, 1), "dropped_unasked": counters["dropped_unasked"]},
        )


def small_packets(quick: bool) -> Iterator[Row]:
    """64-byte probes at a third of 10 Mbit/s through 500 ms."""
    count = 6510 * (1 if quick else 3)
    with link(limited(10 * MBIT, 500 * MS)) as (bed, _):
        arrivals = udp.probe(bed, count, 10e6 / 3 / 8 / 64, 1.5)
    in_order = all(a.number < b.number for a, b in pairwise(arrivals))
    yield Row(
        "small packets at a third of 10 Mbit/s, 500 ms",
        "none lost, in order",
        f"{count - len(arrivals)} of {count} lost",
        len(arrivals) == count and in_order,
    )


def jitter(quick: bool) -> Iterator[Row]:
    """50 +- 10 ms at 1,200 packets/s."""
    with link(Impairment(delay_ns=50 * MS, jitter=Jitter(10 * MS)), Impairment()) as (bed, _):
        arrivals = udp.probe(bed, 1200 * (10 if quick else 30), 1200, 1)
    delays = [arrival.delay_ns / 1e6 for arrival in arrivals]
    inversions = sum(a.number > b.number for a, b in pairwise(arrivals))
    yield Row(
        "jitter 50 +- 10 ms normal at 1,200 packets/s",
        "mean within 2 %, order kept",
        f"mean {fmean(delays):.2f} ms, deviation {pstdev(delays):.2f} ms, {inversions} inversions",
        abs(fmean(delays) / 50 - 1) <= 0.02 and inversions == 0,
        {"probes": len(delays)},
    )


def loss(quick: bool) -> Iterator[Row]:
    count = 40_000 if quick else 120_000
    for percent in (0.1, 1, 5):
        p = percent / 100
        lost = count - len(_survivors(BernoulliLoss(p), count))
        half = 2.576 * math.sqrt(p * (1 - p) / count)
        yield Row(
            f"loss {percent} % over {count:,} packets",
            f"{100 * (p - half):.3f} to {100 * (p + half):.3f} % (99 %)",
            f"{100 * lost / count:.3f} %",
            abs(lost / count - p) <= half,
        )


def bursts(quick: bool) -> Iterator[Row]:
    """Lengths of runs of lost packets against the model's distribution."""
    model = GilbertElliottLoss(0.01, 0.1, 0.7, 0.001)
    count = 60_000 if quick else 300_000
    survivors = _survivors(model, count)
    lengths = Counter(later - earlier - 1 for earlier, later in pairwise([-1, *survivors, count]))
    del lengths[0]
    runs = sum(lengths.values())
    bins = _binned(lengths, _run_length_probabilities(model), runs)
    statistic = sum((seen - expected) ** 2 / expected for seen, expected in bins)
    freedom = len(bins) - 1
    limit = freedom * (1 - 2 / (9 * freedom) + 2.326 * math.sqrt(2 / (9 * freedom))) ** 3  # Wilson-Hilferty
    lost = count - len(survivors)
    yield Row(
        f"Gilbert-Elliott 1 % 10 % 70 % 0.1 % over {count:,} packets",
        f"chi-square < {limit:.1f} (99 %, {freedom} degrees), loss near {100 * model.mean:.2f} %",
        f"chi-square {statistic:.1f} over {runs} bursts, loss {100 * lost / count:.2f} %",
        statistic < limit,
    )


def _survivors(model: BernoulliLoss | GilbertElliottLoss, count: int) -> list[int]:
    """Numbers of the packets that crossed, rising."""
    with link(Impairment(loss=model, delay_ns=MS), Impairment()) as (bed, driver):
        arrivals = udp.probe(bed, count, 15_000, 1)
        unasked = driver.counters()["forward"]["dropped_unasked"]
        lost = driver.counters()["forward"]["lost"]
    if unasked or len(arrivals) + lost != count:
        raise RuntimeError(f"{count} sent, {lost} lost as asked, {len(arrivals)} received, {unasked} dropped unasked")
    return sorted(arrival.number for arrival in arrivals)


def _run_length_probabilities(model: GilbertElliottLoss, longest: int = 400) -> list[float]:
    """P(a run of losses has length k), k = 0.. (index 0 unused), by following the two states."""
    p, r = model.good_to_bad, model.bad_to_good
    good, bad = r / (p + r), p / (p + r)
    # State before the first loss of a run: stationary, a packet that survived, then the change of state.
    good, bad = good * (1 - model.loss_good), bad * (1 - model.loss_bad)
    good, bad = good * (1 - p) + bad * r, good * p + bad * (1 - r)
    probabilities = [0.0]
    good, bad = good * model.loss_good, bad * model.loss_bad
    total = good + bad
    for _ in range(longest):
        good, bad = good * (1 - p) + bad * r, good * p + bad * (1 - r)
        probabilities.append((good * (1 - model.loss_good) + bad * (1 - model.loss_bad)) / total)
        good, bad = good * model.loss_good, bad * model.loss_bad
    return probabilities


def _binned(lengths: Counter[int], probabilities: list[float], runs: int) -> list[tuple[float, float]]:
    """(seen, expected) per bin, each expecting at least 10."""
    bins: list[tuple[float, float]] = []
    seen = expected = 0.0
    for length, probability in enumerate(probabilities):
        seen += lengths[length]
        expected += runs * probability
        if expected >= 10:
            bins.append((seen, expected))
            seen = expected = 0.0
    rest = sum(n for length, n in lengths.items() if length >= len(probabilities))
    last_seen, last_expected = bins[-1]
    bins[-1] = (last_seen + seen + rest, last_expected + expected)
    return bins


PARTS: dict[str, Callable[[bool], Iterator[Row]]] = {
    part.__name__: part
    for part in (lateness, lateness_tcp, probes, rate, unlimited, warm, small_packets, jitter, loss, bursts)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), help="comma-separated: " + ", ".join(PARTS))
    parser.add_argument("--quick", action="store_true", help="shorter runs, for a look")
    harness.add_option(parser)
    parser.add_argument("--nice", type=int, default=0, help="of the measuring hosts, where others use the machine too")
    arguments = parser.parse_args()
    require("iperf3", "ip", "unshare")
    os.setpriority(os.PRIO_PROCESS, 0, arguments.nice)
    rows = []
    for name in arguments.only.split(","):
        for row in PARTS[name](arguments.quick):
            rows.append({**asdict(row), "load_average": os.getloadavg()[0], "nice": arguments.nice})
            print(
                f"{'ok  ' if row.ok else 'FAIL'} {row.figure}: {row.measured}  [asked {row.asked}]  {row.detail}",
                flush=True,
            )
    machine = {"kernel": platform.release(), "cpus": os.cpu_count(), "python": platform.python_version()}
    harness.write(arguments.out, {"machine": machine, "rows": rows})
    sys.exit(0 if all(row["ok"] for row in rows) else 1)


if __name__ == "__main__":
    main()
