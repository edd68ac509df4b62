"""`modes`: a lab for each mode, the same prompts and loads in all of them, and auto judged by the better of the two."""

import itertools
import time
from pathlib import Path
from typing import Any

import pytest

from experiments.framework.base import Options, Part, PartResult
from experiments.framework.lab import ExperimentLab
from experiments.modes.experiment import LOADS, MODES, TOPOLOGY, Modes
from testbed.capture.counters import is_level, read_notes
from testbed.topology.load import plan_from_text
from testbed.topology.overlay import laid_over

QUICK = Options(quick=True, seeds=1)


def test_each_variant_is_a_topology_of_its_mode() -> None:
    for mode in MODES:
        text = laid_over(TOPOLOGY, Modes().variation(mode))
        assert plan_from_text(text, f"{mode}.yaml").serving["handoff"] == mode


def test_every_mode_gets_every_load_and_the_modes_take_turns() -> None:
    made = Modes().parts(Options(seeds=2))
    labs = [variant for variant, _ in itertools.groupby(made, key=lambda part: part.variant)]
    assert labs == [*MODES, *MODES], "a lab for each mode and seed"
    assert {(part.variant, part.detail["load"]) for part in made} == {(mode, load) for mode in MODES for load in LOADS}
    assert len({part.name for part in made}) == len(made)


def _results(answers_ms: dict[str, float], md_tokens: int = 9) -> dict[str, tuple[Part, PartResult]]:
    found = {}
    for part in Modes().parts(QUICK):
        record: dict[str, Any] = {
            "e2el_ms": answers_ms[part.variant],
            "pdd_handoff_pause_ms": 5.0,
            "pdd_md_tokens": md_tokens,
        }
        found[part.name] = (part, PartResult([record], {"bytes_difference": 0.0, "captured_bytes": {}, "pace": {}}))
    return found


def test_auto_is_held_against_the_better_of_the_two() -> None:
    parameters = Modes().parameters(Options(seeds=1))
    for auto_ms, verdict in ((108.0, "met"), (115.0, "missed")):
        evaluation = Modes().evaluate(parameters, _results({"catch-up": 100.0, "one-shot": 300.0, "auto": auto_ms}))
        figures = {figure.key: figure for figure in evaluation.figures}
        assert figures["auto_load4"].verdict == verdict
        assert figures["auto_load4"].value == auto_ms / 100


def test_answers_that_end_on_the_relay_do_not_pass_for_a_comparison() -> None:
    parameters = Modes().parameters(Options(seeds=1))
    for md_tokens, verdict in ((9, "met"), (0, "missed")):
        evaluation = Modes().evaluate(parameters, _results(dict.fromkeys(MODES, 100.0), md_tokens))
        assert {f.verdict for f in evaluation.figures if f.key.startswith("handed_over")} == {verdict}


@pytest.mark.root
def test_a_capture_begins_with_counters_that_were_read_while_nothing_crossed(tmp_path: Path) -> None:
    with ExperimentLab(TOPOLOGY, tmp_path / "lab", with_workers=True) as lab:
        began_ns = time.time_ns()
        with lab.capturing("wan0", tmp_path / "wan0.pcapng"):
            notes = read_notes(lab.record.results)  # before the first request
        last = {host: found[-1] for host, found in notes.items() if found[-1].time_ns > began_ns}
        assert set(last) == {"gw0", "p0", "rld0", "md0"}
        for sender in ("gw0", "p0", "rld0"):
            assert is_level(last[sender], last["md0"])
            assert is_level(last["md0"], last[sender])
