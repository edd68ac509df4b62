"""Impairment of packets in one direction of a WAN link: one immutable value that both drivers apply.

Owns the vocabulary (rate, delay, jitter, loss, duplication, corruption, reordering, queue), its validation
and the limits derived from it; knows no kernel and no driver. Probabilities are fractions, 0 to 1.
"""

from dataclasses import asdict, dataclass
from typing import Any, Literal

NS_PER_S = 1_000_000_000
# The smallest packets that can fill a delay line: an IPv4 header and a UDP header without payload.
SMALLEST_PACKET_BYTES = 28

Distribution = Literal["uniform", "normal", "pareto", "paretonormal"]
DISTRIBUTIONS: tuple[Distribution, ...] = ("uniform", "normal", "pareto", "paretonormal")


@dataclass(frozen=True, slots=True)
class Jitter:
    """Variation of the one-way delay around its mean. `std_ns` is the standard deviation whatever the shape."""

    std_ns: int
    distribution: Distribution = "normal"

    def __post_init__(self) -> None:
        if self.std_ns <= 0:
            raise ValueError(f"jitter: standard deviation {self.std_ns} ns must be positive; leave jitter out")
        if self.distribution not in DISTRIBUTIONS:
            raise ValueError(f"jitter: unknown distribution {self.distribution!r}; use {', '.join(DISTRIBUTIONS)}")


@dataclass(frozen=True, slots=True)
class BernoulliLoss:
    """Each MTU segment is lost with the same probability, independently. 1.0 is an outage."""

    probability: float

    def __post_init__(self) -> None:
        _check_probability("loss", self.probability)

    @property
    def mean(self) -> float:
        """Long-run share of segments lost."""
        return self.probability


@dataclass(frozen=True, slots=True)
class GilbertElliottLoss:
    """Two states; per segment: lost with the state's probability, then perhaps a change of state.

    As in net/sched/sch_netem.c (loss_gilb_ell). `tc ... loss gemodel p r 1-h 1-k` takes the same four in
    the order good_to_bad, bad_to_good, loss_bad, loss_good.
    """

    good_to_bad: float
    bad_to_good: float
    loss_bad: float = 1.0
    loss_good: float = 0.0

    def __post_init__(self) -> None:
        for name in ("good_to_bad", "bad_to_good", "loss_bad", "loss_good"):
            _check_probability(f"loss.{name}", getattr(self, name))
        if self.good_to_bad + self.bad_to_good == 0:
            raise ValueError(
                "loss: good_to_bad and bad_to_good are both 0, so the state never changes; use a plain loss"
            )

    @property
    def mean(self) -> float:
        """Long-run share of segments lost."""
        bad = self.good_to_bad / (self.good_to_bad + self.bad_to_good)
        return bad * self.loss_bad + (1 - bad) * self.loss_good


Loss = BernoulliLoss | GilbertElliottLoss


@dataclass(frozen=True, slots=True)
class CoDel:
    """Active queue management (RFC 8289) in front of the tail drop: only in the userspace driver."""

    target_ns: int = 5_000_000
    interval_ns: int = 100_000_000

    def __post_init__(self) -> None:
        if not 0 < self.target_ns < self.interval_ns:
            raise ValueError(
                f"codel: target {self.target_ns} ns must be positive and below the interval of {self.interval_ns} ns"
            )


@dataclass(frozen=True, slots=True)
class Impairment:
    """One direction. `rate_bps` counts IP bytes; None means no limit. `delay_ns` is one-way.

    Stages in a packet's order: queue (tail drop, perhaps CoDel) and rate; then loss, duplication and
    corruption; then delay and jitter, which a reordered packet skips. Raises ValueError.
    """

    rate_bps: int | None = None
    delay_ns: int = 0
    queue_bytes: int | None = None  # bottleneck buffer, tail drop; None only where rate_bps is None
    jitter: Jitter | None = None
    loss: Loss | None = None
    duplication: float = 0.0
    corruption: float = 0.0  # one bit of the packet is flipped after its checksum was finished
    reordering: float = 0.0  # share of packets that overtake by skipping the delay
    codel: CoDel | None = None

    def __post_init__(self) -> None:
        if self.rate_bps is not None and self.rate_bps <= 0:
            raise ValueError(f"rate: {self.rate_bps} bit/s must be positive; for an outage use a loss of 100%")
        if self.delay_ns < 0:
            raise ValueError(f"delay: {self.delay_ns} ns must not be negative")
        if self.queue_bytes is not None and self.queue_bytes <= 0:
            raise ValueError(f"queue: {self.queue_bytes} bytes must be positive")
        for name in ("duplication", "corruption", "reordering"):
            _check_probability(name, getattr(self, name))
        if self.rate_bps is None and self.codel is not None:
            raise ValueError("codel: without a rate there is no queue to manage; give the link a rate")

    def serialization_ns(self, ip_bytes: int) -> int:
        """Time that `ip_bytes` occupy the bottleneck."""
        return 0 if self.rate_bps is None else ip_bytes * 8 * NS_PER_S // self.rate_bps

    def delay_line_bytes(self) -> int | None:
        """Bytes in flight on the delay line when the bottleneck is full; None without a rate limit."""
        return None if self.rate_bps is None else self.rate_bps * self.longest_delay_ns() // (8 * NS_PER_S)

    def longest_delay_ns(self) -> int:
        """Delay plus six standard deviations of jitter, beyond which no distribution is sampled."""
        return self.delay_ns + (6 * self.jitter.std_ns if self.jitter else 0)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; `from_dict` reads them back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "Impairment":
        """The inverse of `to_dict`; absent keys take their defaults. Raises ValueError or TypeError."""
        fields = dict(values)
        if fields.get("jitter") is not None:
            fields["jitter"] = Jitter(**fields["jitter"])
        if fields.get("codel") is not None:
            fields["codel"] = CoDel(**fields["codel"])
        loss = fields.get("loss")
        if loss is not None:
            fields["loss"] = BernoulliLoss(**loss) if "probability" in loss else GilbertElliottLoss(**loss)
        return cls(**fields)


def bdp_bytes(rate_bps: int, rtt_ns: int) -> int:
    """Bandwidth-delay product in bytes."""
    return rate_bps * rtt_ns // (8 * NS_PER_S)


def _check_probability(name: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{name}: probability {value} is outside 0 to 1")
