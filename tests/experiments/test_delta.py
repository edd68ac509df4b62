"""`delta`: workloads hit as often as they say, and a short run's bytes fall as the hit rate says."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.delta.runs import CONTEXT, SCALE, SESSION_TURNS, excerpt, parts, trace_file, workload
from experiments.framework.base import Options
from experiments.traces import read_trace
from experiments.traces.trace import Request, Trace
from tests.conftest import ROOT


def test_the_control_is_as_long_and_shares_nothing() -> None:
    made = {part.name: part for part in parts(Options(quick=True, seeds=1), None)}
    delta, full = workload(made["delta-seed1"], None), workload(made["full-seed1"], None)
    assert [len(prompt) for prompt in delta.prompts[delta.warm_up :]] == [len(prompt) for prompt in full.prompts]
    assert len({tuple(prompt[:12]) for prompt in full.prompts}) == len(full.prompts)


@pytest.mark.parametrize("options", [Options(quick=True, seeds=1), Options(seeds=3)])
def test_prompts_repeat_nine_tenths_of_what_was_sent_before(options: Options) -> None:
    for part in parts(options, None):
        if part.detail["row"] != "delta":
            continue
        work = workload(part, None)
        seen: list[list[int]] = list(work.prompts[: work.warm_up])
        cached = total = 0
        for prompt in work.prompts[work.warm_up :]:
            cached += max(_common(prompt, other) for other in seen)
            total += len(prompt)
            seen.append(prompt)
        assert abs(cached / total - 0.90) < 0.01


def _common(one: list[int], other: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def test_an_excerpt_has_whole_sessions_that_fit() -> None:
    def session(name: int, turns: int, tokens: int) -> list[Request]:
        return [Request(i, tokens, 1, tuple(range(tokens // 64)), name, i) for i in range(turns)]

    short, fits, large = session(0, 3, 64), session(1, SESSION_TURNS.start, 640), session(2, 20, CONTEXT * SCALE)
    found = excerpt(Trace((*short, *fits, *large), 64, "test", "t"))
    assert found.requests == tuple(fits)


@pytest.mark.skipif(trace_file() is None, reason="the real agentic trace is not beside the project")
def test_the_real_excerpt_is_like_its_trace() -> None:
    file = trace_file()
    assert file is not None
    found = excerpt(read_trace(file))
    assert 80 <= len(found.requests) <= 160
    assert max(request.input_tokens for request in found.requests) < CONTEXT * SCALE


@pytest.mark.root
@pytest.mark.timeout(600)
def test_a_short_run_counts_a_tenth_of_the_bytes(tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = [sys.executable, "-m", "testbed", "experiment", "run", "delta", "--quick", "--out", str(out), "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=560)
    assert done.returncode in (0, 1), done.stderr
    summary = json.loads(done.stdout)
    figures = {figure["key"]: figure for figure in summary["figures"]}
    hit = figures["weighted_hit"]["measured"]
    assert figures["weighted_hit"]["verdict"] == "met", figures["weighted_hit"]
    assert figures["bytes_difference"]["verdict"] == "met", figures["bytes_difference"]
    # token ids, notices and control cross as well: never better than the hit rate allows
    assert 8 <= figures["ratio"]["measured"] <= 1.02 / (1 - hit)
    for line in (out / "requests.jsonl").read_text().splitlines():
        record = json.loads(line)
        assert record["success"]
        # a block is one token of 95: prompts that share nothing may begin alike by chance
        assert record["pdd_md_hit"] < 0.02 or record["row"] == "delta"
