"""Verification against real links: it passes a link that does what it is asked, and finds each kind of lie."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from testbed.links.rig import HOST_A, HOST_B, Rig, rig
from testbed.links.userspace import UserspaceLink
from testbed.model.impairment import BernoulliLoss, Impairment, Jitter
from testbed.verify.link import Target, floor_ns, verify_link
from tests.conftest import run_pddbed

pytestmark = [pytest.mark.root, pytest.mark.quiet]
HONEST = Impairment(rate_bps=100_000_000, delay_ns=10_000_000, queue_bytes=250_000)


@pytest.fixture(scope="module")
def rigged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Rig, dict[Any, float]]]:
    with rig(UserspaceLink, Path(tmp_path_factory.mktemp("rig")), Impairment()) as built:
        floor = floor_ns(target_of(built, Impairment(), {}))
        yield built, floor


def target_of(built: Rig, asked: Impairment, floor: dict[Any, float]) -> Target:
    ends = ((built.host_a, HOST_A), (built.host_b, HOST_B))
    return Target("rig", ends, 1500, {"forward": asked, "backward": asked}, floor)


def failures(result: dict[str, Any]) -> set[str]:
    return {figure["figure"] for figures in result["directions"].values() for figure in figures if not figure["ok"]}


def verify(rigged: tuple[Rig, dict[Any, float]], real: Impairment, asked: Impairment, quick: bool) -> dict[str, Any]:
    built, floor = rigged
    for direction in ("forward", "backward"):
        built.link.apply(direction, real)
    return verify_link(target_of(built, asked, floor), quick, lambda _: None)


def test_an_honest_link_passes_the_full_verification(rigged: tuple[Rig, dict[Any, float]]) -> None:
    result = verify(rigged, HONEST, HONEST, quick=False)
    assert failures(result) == set(), result
    judged = {figure["figure"] for figure in result["directions"]["forward"] if figure["judged"]}
    shares = {"loss", "duplicates", "corruption", "reordering"}
    assert judged == {"delay", "rate (UDP)", "rate (TCP)", "queue", *shares}


@pytest.mark.parametrize(
    ("lie", "found"),
    [
        (replace(HONEST, delay_ns=11_000_000), "delay"),
        (replace(HONEST, delay_ns=9_000_000), "delay"),
        (replace(HONEST, rate_bps=95_000_000), "rate (UDP)"),
        (replace(HONEST, rate_bps=106_000_000), "rate (UDP)"),
    ],
)
def test_the_quick_verification_finds_a_wrong_delay_or_rate(
    rigged: tuple[Rig, dict[Any, float]], lie: Impairment, found: str
) -> None:
    assert failures(verify(rigged, lie, HONEST, quick=True)) == {found}


def test_the_full_verification_finds_loss_that_nobody_asked_for(rigged: tuple[Rig, dict[Any, float]]) -> None:
    assert "loss" in failures(verify(rigged, replace(HONEST, loss=BernoulliLoss(0.002)), HONEST, quick=False))


@pytest.mark.nightly
def test_the_full_verification_finds_a_wrong_queue(rigged: tuple[Rig, dict[Any, float]]) -> None:
    assert failures(verify(rigged, replace(HONEST, queue_bytes=350_000), HONEST, quick=False)) == {"queue"}


@pytest.mark.nightly
def test_asked_loss_is_inside_its_interval(rigged: tuple[Rig, dict[Any, float]]) -> None:
    lossy = replace(HONEST, loss=BernoulliLoss(0.01))
    assert failures(verify(rigged, lossy, lossy, quick=False)) == set()


@pytest.mark.parametrize(
    ("asked", "lie", "found"),
    [
        (replace(HONEST, jitter=Jitter(1_000_000)), {"delay_ns": 12_000_000}, {"delay"}),
        (replace(HONEST, jitter=Jitter(1_000_000)), {"jitter": Jitter(2_000_000)}, {"jitter"}),
        (replace(HONEST, jitter=Jitter(1_000_000, "pareto")), {"jitter": None}, {"jitter"}),
    ],
)
def test_with_jitter_mean_and_deviation_are_judged(
    rigged: tuple[Rig, dict[Any, float]], asked: Impairment, lie: dict[str, Any], found: set[str]
) -> None:
    assert not failures(verify(rigged, asked, asked, quick=True)) & {"delay", "jitter"}
    assert found <= failures(verify(rigged, replace(asked, **lie), asked, quick=True))


@pytest.mark.nightly
def test_whatever_is_asked_of_the_packets_is_judged_as_such(rigged: tuple[Rig, dict[Any, float]]) -> None:
    everything = replace(HONEST, loss=BernoulliLoss(0.01), duplication=0.02, corruption=0.02, reordering=0.03)
    result = verify(rigged, everything, everything, quick=False)
    assert failures(result) == set(), result
    judged = {figure["figure"] for figure in result["directions"]["forward"] if figure["judged"]}
    assert {"delay", "loss", "duplicates", "corruption", "reordering"} <= judged
    less = replace(everything, duplication=0.01, corruption=0.01, reordering=0.02)
    found = failures(verify(rigged, less, everything, quick=False))
    assert {"duplicates", "corruption", "reordering"} <= found


def test_a_slow_links_probe_takes_its_own_time(rigged: tuple[Rig, dict[Any, float]]) -> None:
    """48 bytes at 256 kbit/s are 1.5 ms, which nobody asked for as a delay."""
    slow = Impairment(rate_bps=256_000, delay_ns=10_000_000, queue_bytes=100_000)
    assert "delay" not in failures(verify(rigged, slow, slow, quick=True))


def test_without_a_floor_the_note_says_so(rigged: tuple[Rig, dict[Any, float]]) -> None:
    built, _ = rigged
    for direction in ("forward", "backward"):
        built.link.apply(direction, HONEST)
    bare = verify_link(target_of(built, HONEST, {"forward": None, "backward": None}), True, lambda _: None)
    (delay, *_) = bare["directions"]["forward"]
    assert delay["ok"]
    assert "floor not measured (up --no-verify)" in delay["note"]


@pytest.mark.usefixtures("leaves_nothing")
def test_up_says_what_it_measured_and_verify_passes_on_the_ready_topology(raise_lab: Any) -> None:
    lab = raise_lab("topologies/two-dc-tiny.yaml", "verified", "--no-workers")
    assert lab.status()["verified"]["ok"]
    result = run_pddbed("verify", "-l", "verified", "--quick")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "what was measured is what the links are asked to do" in result.stdout
    assert "wan0 forward: queue" in result.stdout, "the quick form fills no buffer, and does not say that it is right"
