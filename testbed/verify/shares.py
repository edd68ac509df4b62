"""Shares of probes that are lost, doubled, corrupted or overtaken, against what the driver does when it is asked to."""

from collections.abc import Sequence

from testbed.model.impairment import GilbertElliottLoss, Impairment
from testbed.verify import judge
from testbed.verify.judge import Verdict
from testbed.verify.measure import Probes
from testbed.verify.stamps import UDP_HEADERS

MOST, FEWEST, LONGEST_NS = 20_000, 500, 60_000_000_000
INTERVAL_NS = 50_000
CORRUPTION_PROBE = 200  # IP bytes: of a small probe, most flipped bits would be in the headers
ETHERNET_HEADER = 14  # netem flips bits there too
# A sender that moves to another CPU may overtake itself (see testbed/links/ordering.py).
UNASKED_OVERTAKING = 0.001
SHORTEST_TOLD_NS = 2_000_000  # a delay below which a packet that skipped it cannot be told


def count(interval_ns: int) -> int:
    """Probes of one direction: on slow links as many as there is time for."""
    return max(FEWEST, min(MOST, LONGEST_NS // interval_ns))


def few(samples: Sequence[Probes], asked: Impairment) -> list[Verdict]:
    """Shares of the quick form, from its other probes. Corrupted ones are missing as well."""
    sent = sum(probes.sent for probes in samples)
    missing = sum(probes.sent - len(probes.first) for probes in samples)
    gone = 1 - (1 - _mean(asked)) * (1 - asked.corruption)
    bursty = isinstance(asked.loss, GilbertElliottLoss)
    loss = judge.judge_share("loss", gone, missing, sent)
    if bursty:
        loss = Verdict("loss", "share", gone, None, None, None, f"not measured: {sent} probes are too few for bursts")
    found = [loss]
    if asked.corruption:
        found.append(
            Verdict("corruption", "share", asked.corruption, None, None, None, "not measured: the full form does")
        )
    arrived = sum(len(probes.first) for probes in samples)
    if not arrived:
        return found
    doubled = judge.judge_share("duplicates", asked.duplication, sum(one.duplicates for one in samples), arrived)
    return [*found, doubled, _overtaking(asked, sum(one.overtaken() for one in samples), arrived)]


def many(probes: Probes, asked: Impairment, driver: str, ip_bytes: int, floor_ns: float) -> list[Verdict]:
    """Shares of the full form."""
    loss, doubled, in_headers = _mean(asked), asked.duplication, UDP_HEADERS / ip_bytes
    missing, twice = loss, doubled
    if driver == "netem":  # it decides about a copy of its own again, and a lost packet's copy is sent
        in_headers = (UDP_HEADERS + ETHERNET_HEADER) / (ip_bytes + ETHERNET_HEADER)
        missing, twice = loss * (1 - doubled), doubled * (1 - loss) ** 2 / (1 - loss * (1 - doubled) or 1)
    unseen = asked.corruption * in_headers  # a flipped bit of a header: dropped on the way
    lost = probes.missing()
    gone = 1 - (1 - missing) * (1 - unseen)
    verdicts = [judge.judge_loss(gone, lost, isinstance(asked.loss, GilbertElliottLoss))]
    arrived = len(probes.first) + probes.corrupted
    if not arrived:
        return verdicts
    verdicts.append(judge.judge_share("duplicates", twice, probes.duplicates, arrived))
    seen = asked.corruption * (1 - in_headers) / (1 - unseen)
    verdicts.append(judge.judge_share("corruption", seen, probes.corrupted, arrived))
    if not asked.reordering:
        return [*verdicts, _overtaking(asked, probes.overtaken(), arrived)]
    if asked.delay_ns < SHORTEST_TOLD_NS or (asked.jitter and asked.delay_ns < 12 * asked.jitter.std_ns):
        return [*verdicts, _overtaking(asked, 0, arrived)]
    early = sum(delay - floor_ns < asked.delay_ns / 2 for delay in probes.delays_ns)
    return [*verdicts, judge.judge_share("reordering", asked.reordering, early, arrived)]


def _overtaking(asked: Impairment, overtaken: int, arrived: int) -> Verdict:
    if asked.reordering:
        note = "not measured: the delay is too short, or the sample"
        return Verdict("reordering", "share", asked.reordering, None, None, None, note)
    return judge.judge_share("reordering", 0.0, overtaken, arrived, spare=UNASKED_OVERTAKING)


def _mean(asked: Impairment) -> float:
    return asked.loss.mean if asked.loss else 0.0
