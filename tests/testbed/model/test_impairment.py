"""The Impairment value: what it refuses, what it derives, and its way through JSON."""

import json

import pytest

from testbed.model.impairment import BernoulliLoss, CoDel, GilbertElliottLoss, Impairment, Jitter

MS = 1_000_000


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Impairment(rate_bps=0, queue_bytes=1), "rate: 0 bit/s"),
        (lambda: Impairment(delay_ns=-1), "delay: -1 ns"),
        (lambda: Impairment(rate_bps=1, queue_bytes=0), "queue: 0 bytes"),
        (lambda: Impairment(duplication=1.5), r"duplication: probability 1\.5"),
        (lambda: Impairment(corruption=-0.1), "corruption"),
        (lambda: Impairment(reordering=float("nan")), "reordering"),
        (lambda: Impairment(codel=CoDel()), "codel: without a rate"),
        (lambda: BernoulliLoss(2), "loss: probability 2"),
        (lambda: GilbertElliottLoss(0.1, 7), r"loss\.bad_to_good: probability 7"),
        (lambda: GilbertElliottLoss(0, 0), "never changes"),
        (lambda: Jitter(0), "jitter: standard deviation 0 ns"),
        (lambda: Jitter(1, "gamma"), "unknown distribution 'gamma'; use uniform, normal"),  # type: ignore[arg-type]
        (lambda: CoDel(10, 10), "codel: target 10 ns"),
    ],
)
def test_nonsense_is_refused_with_its_name_and_value(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]


@pytest.mark.parametrize(
    "impairment",
    [
        Impairment(),
        Impairment(rate_bps=10**9, delay_ns=20 * MS, queue_bytes=10**6, loss=BernoulliLoss(0.01), codel=CoDel()),
        Impairment(
            delay_ns=MS,
            jitter=Jitter(MS, "pareto"),
            loss=GilbertElliottLoss(0.01, 0.1, 0.7, 0.001),
            duplication=0.1,
            corruption=0.2,
            reordering=0.3,
        ),
    ],
)
def test_json_keeps_every_value(impairment: Impairment) -> None:
    assert Impairment.from_dict(json.loads(json.dumps(impairment.to_dict()))) == impairment


def test_unknown_keys_are_refused() -> None:
    with pytest.raises(TypeError, match="delay_ms"):
        Impairment.from_dict({"delay_ms": 3})


def test_mean_loss_follows_the_model() -> None:
    assert GilbertElliottLoss(0.01, 0.10, 0.70, 0.001).mean == pytest.approx(0.0645, abs=0.0001)
    assert BernoulliLoss(0.25).mean == 0.25


def test_the_delay_line_holds_rate_times_the_longest_delay() -> None:
    assert Impairment(rate_bps=8_000_000, queue_bytes=1, delay_ns=500 * MS).delay_line_bytes() == 500_000
    jittery = Impairment(rate_bps=8_000_000, queue_bytes=1, delay_ns=500 * MS, jitter=Jitter(100 * MS))
    assert jittery.delay_line_bytes() == 1_100_000
    assert Impairment(delay_ns=MS).delay_line_bytes() is None
