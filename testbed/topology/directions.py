"""Impairment of one direction of a WAN link: overrides, halves of an RTT and the default queue filled in.

Owns the arithmetic from the file's keys to an `Impairment`, shared by the checks (which must say where a value
came from) and by `resolve`. Values that could not be read stay UNREADABLE.
"""

from dataclasses import dataclass
from typing import Any

from testbed.model.direction import Direction as DirectionName
from testbed.model.impairment import BernoulliLoss, CoDel, GilbertElliottLoss, Impairment, Jitter, Loss, bdp_bytes
from testbed.topology.problems import Path
from testbed.topology.salvage import readable
from testbed.topology.schema import Direction, GilbertElliott, Queue, Wan

DEFAULT_QUEUE_BDP = 1.0
# Below the BDP's own size a short link needs room for what several connections send at once:
# 8 connections with an initial window of 10 segments in two halves.
DEFAULT_QUEUE_PACKETS = 64


@dataclass(frozen=True, slots=True)
class Effective:
    """The values that hold for one direction (as the schema reads them), and the path each came from."""

    name: DirectionName
    values: dict[str, Any]
    paths: dict[str, Path]

    def __getitem__(self, key: str) -> Any:
        return self.values[key]


def effective(wan: Wan, index: int, name: DirectionName) -> Effective:
    """Override what the direction's own section gives; `delay` is never None (half of `rtt`, or 0)."""
    override: Direction | None = getattr(wan, name)
    values: dict[str, Any] = {}
    paths: dict[str, Path] = {}
    for key in Direction.model_fields:
        overridden = override is not None and key in override.model_fields_set
        values[key] = getattr(override if overridden else wan, key)
        paths[key] = ("wan", index, name, key) if overridden else ("wan", index, key)
    if values["delay"] is None:
        values["delay"] = _half(wan.rtt, name)
        paths["delay"] = ("wan", index, "rtt" if wan.rtt is not None else "delay")
    return Effective(name, values, paths)


def rtt_ns(forward: Effective, backward: Effective) -> int | None:
    """Propagation both ways; None when a delay could not be read."""
    if not readable(forward["delay"], backward["delay"]):
        return None
    rtt: int = forward["delay"] + backward["delay"]
    return rtt


def queue_bytes(rate_bps: int, rtt: int, queue: Queue | None, mtu: int) -> int:
    """The bottleneck buffer in bytes: as asked, or 1 BDP and at least 64 packets."""
    if queue is not None and queue.bytes is not None:
        return queue.bytes
    if queue is not None and queue.bdp is not None:
        return int(bdp_bytes(rate_bps, rtt) * queue.bdp)
    return default_queue_bytes(rate_bps, rtt, mtu)


def default_queue_bytes(rate_bps: int, rtt: int, mtu: int) -> int:
    """1 BDP, at least 64 packets of the MTU."""
    return max(int(bdp_bytes(rate_bps, rtt) * DEFAULT_QUEUE_BDP), DEFAULT_QUEUE_PACKETS * mtu)


def impairment(direction: Effective, rtt: int, mtu: int) -> Impairment:
    """The runtime value of a direction whose values are all readable. Raises ValueError where they contradict."""
    rate, queue, jitter = direction["rate"], direction["queue"], direction["jitter"]
    return Impairment(
        rate_bps=rate,
        delay_ns=direction["delay"],
        queue_bytes=None if rate is None else queue_bytes(rate, rtt, queue, mtu),
        jitter=Jitter(jitter.std, jitter.distribution) if jitter is not None and jitter.std > 0 else None,
        loss=loss_of(direction["loss"]),
        duplication=direction["duplicate"] or 0.0,
        corruption=direction["corrupt"] or 0.0,
        reordering=direction["reorder"] or 0.0,
        codel=CoDel() if queue is not None and queue.codel else None,
    )


def loss_of(loss: float | GilbertElliott | None) -> Loss | None:
    """The runtime value of `loss:`; None for 0%. Raises ValueError where its two states never change."""
    if isinstance(loss, GilbertElliott):
        return GilbertElliottLoss(loss.good_to_bad, loss.bad_to_good, loss.loss_bad, loss.loss_good)
    return BernoulliLoss(loss) if loss else None


def _half(rtt: Any, name: DirectionName) -> Any:
    """Half of a round trip; the odd nanosecond goes forward."""
    if rtt is None or not readable(rtt):
        return 0 if rtt is None else rtt
    return rtt // 2 if name == "backward" else rtt - rtt // 2
