"""Random decisions: seeded, per segment, with the statistics of their models. Fixed seeds: no luck involved."""

from collections import Counter
from itertools import groupby, pairwise
from math import sqrt
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.links.emulator.chance import NEVER, Hits, bernoulli_gaps, gilbert_elliott_gaps, loss_gaps
from testbed.model.impairment import BernoulliLoss, GilbertElliottLoss, Loss

COUNT = 200_000


def fates(loss: Loss, count: int = COUNT, seed: int = 1) -> list[bool]:
    """For each of `count` segments: is it lost?"""
    lost = set(Hits(loss_gaps(loss, Random(seed))).among(count))
    return [segment in lost for segment in range(count)]


@pytest.mark.parametrize("probability", [0.001, 0.01, 0.05, 0.5])
def test_bernoulli_loss_has_its_probability(probability: float) -> None:
    deviation = sqrt(probability * (1 - probability) / COUNT)
    assert abs(sum(fates(BernoulliLoss(probability))) / COUNT - probability) < 2.6 * deviation


def test_bernoulli_losses_are_independent() -> None:
    lost = fates(BernoulliLoss(0.2))
    after_loss = [now for before, now in pairwise(lost) if before]
    assert sum(after_loss) / len(after_loss) == pytest.approx(0.2, abs=0.01)


@given(st.lists(st.integers(1, 44), max_size=60), st.floats(0, 1))
def test_how_segments_are_grouped_does_not_change_which_are_hit(groups: list[int], probability: float) -> None:
    together = Hits(bernoulli_gaps(probability, Random(7))).among(sum(groups))
    apart, hits, passed = Hits(bernoulli_gaps(probability, Random(7))), [], 0
    for size in groups:
        hits += [passed + index for index in apart.among(size)]
        passed += size
    assert list(together) == hits


def test_certain_and_impossible() -> None:
    assert list(Hits(bernoulli_gaps(1.0, Random(1))).among(5)) == [0, 1, 2, 3, 4]
    assert list(Hits(bernoulli_gaps(0.0, Random(1))).among(10**12)) == []
    assert next(gilbert_elliott_gaps(GilbertElliottLoss(0.1, 0.1, 0.0, 0.0), Random(1))) == NEVER
    never_bad = GilbertElliottLoss(good_to_bad=0.0, bad_to_good=0.5)
    assert list(Hits(gilbert_elliott_gaps(never_bad, Random(1))).among(10**9)) == []


def naive_gilbert_elliott(model: GilbertElliottLoss, count: int, seed: int) -> list[bool]:
    """net/sched/sch_netem.c, loss_gilb_ell(), segment by segment."""
    random, bad, lost = Random(seed), False, []
    for _ in range(count):
        lost.append(random.random() < (model.loss_bad if bad else model.loss_good))
        if random.random() < (model.bad_to_good if bad else model.good_to_bad):
            bad = not bad
    return lost


MODELS = [
    GilbertElliottLoss(0.01, 0.1, 0.7, 0.001),
    GilbertElliottLoss(0.02, 0.3),
    GilbertElliottLoss(0.5, 0.5, 0.2, 0.1),
]


@pytest.mark.parametrize("model", MODELS)
def test_gilbert_elliott_loses_its_mean(model: GilbertElliottLoss) -> None:
    assert sum(fates(model)) / COUNT == pytest.approx(model.mean, rel=0.05)


@pytest.mark.parametrize("model", MODELS)
def test_gilbert_elliott_runs_are_distributed_as_netems(model: GilbertElliottLoss) -> None:
    """Two-sample chi-square on lengths of runs of losses, and of runs without."""
    ours, theirs = fates(model, seed=3), naive_gilbert_elliott(model, COUNT, seed=4)
    for kind in (True, False):
        statistic, freedom = chi_square(run_lengths(ours, kind), run_lengths(theirs, kind))
        # Wilson-Hilferty: the 99.9 % point of chi-square
        assert statistic < freedom * (1 - 2 / (9 * freedom) + 3.09 * sqrt(2 / (9 * freedom))) ** 3


def run_lengths(lost: list[bool], kind: bool) -> list[int]:
    return [len(list(run)) for value, run in groupby(lost) if value is kind]


def chi_square(a: list[int], b: list[int]) -> tuple[float, int]:
    """Statistic and degrees of freedom over bins with at least 20 runs of both samples together."""
    counts_a, counts_b = Counter(a), Counter(b)
    bins: list[list[int]] = [[0, 0]]
    for length in sorted(counts_a | counts_b):
        bins[-1][0] += counts_a[length]
        bins[-1][1] += counts_b[length]
        if sum(bins[-1]) >= 20:
            bins.append([0, 0])
    if sum(bins[-1]) < 20:
        tail = bins.pop()
        bins[-1] = [bins[-1][0] + tail[0], bins[-1][1] + tail[1]]
    ratio = sqrt(len(b) / len(a))
    return sum((x * ratio - y / ratio) ** 2 / (x + y) for x, y in bins), len(bins) - 1


def test_the_same_seed_decides_the_same_and_another_otherwise() -> None:
    loss = GilbertElliottLoss(0.01, 0.1, 0.7, 0.001)
    assert fates(loss, 10_000, seed=5) == fates(loss, 10_000, seed=5)
    assert fates(loss, 10_000, seed=5) != fates(loss, 10_000, seed=6)
