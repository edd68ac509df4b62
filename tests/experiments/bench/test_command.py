"""`pddbed bench` as a user runs it, against real workers: loads, failures, Ctrl-C, a gateway that goes away."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from experiments.cli.bench import bench
from experiments.traces.generate import Recipe, generate
from experiments.traces.mooncake import write_trace
from tests.conftest import ROOT, run_pddbed
from workers.local import Layout, LocalCluster

COMMAND = [sys.executable, "-c", "from testbed.cli import main; main(prog_name='pddbed')", "bench"]
DEADLINE_S = 120.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    serving = {"max_running": 8, "max_waiting": 2}
    with LocalCluster(Layout(serving=serving), tmp_path_factory.mktemp("bench")) as running:
        yield running


def run_bench(cluster: LocalCluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_pddbed("bench", "--api", f"{cluster.base_url}/v1", *arguments)


def summary_of(result: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads(result.stdout)
    return summary


def test_a_closed_loop_prints_the_table_and_leaves_a_run_that_report_reads(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    load = ("--num", "9", "--concurrency", "3", "--input-len", "100", "--output-len", "12", "--seed", "11")
    result = run_bench(cluster, *load, "--goodput", "ttft:100000", "tpot:100000", "--out", str(out))
    assert result.returncode == 0, result.stderr + result.stdout
    for line in (
        "Successful requests:                     9",
        "Failed requests:                         0",
        "Total input tokens:                      900",
        "Total generated tokens:                  108",
        "Maximum request concurrency:             3",
        "Peak concurrent requests:                3",
        "Requests within the limits (%):          100.00",
        "Requests by pipeline:                    p-rld-md 9",
    ):
        assert line in result.stdout.splitlines()
    summary = json.loads((out / "summary.json").read_text())
    assert summary["faithful"]
    assert summary["complete"]
    assert summary["pdd_rld_tokens"] + summary["pdd_md_tokens"] == 108
    assert summary["p90_ttft_ms"] >= summary["median_ttft_ms"] > 0
    rows = [json.loads(line) for line in (out / "requests.jsonl").read_text().splitlines()]
    for row in rows:  # on a busy machine several tokens may come in one chunk
        assert len(row["itl"]) <= 11
        assert sum(row["itl"]) == pytest.approx(row["e2el"] - row["ttft"])
        assert row["tpot"] == pytest.approx(sum(row["itl"]) / 11)
    assert all(row["ttft"] >= row["pdd_gateway_ttft"] > 0 for row in rows), "a client sees no token before the gateway"
    (out / "summary.json").unlink()
    again = run_pddbed("report", str(out), "--json")
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout) == summary
    page = (out / "report.html").read_text()
    assert "--input-len 100" in page, "the command that makes this run again"
    assert "of the network and the server nothing is known" in page
    assert "<h2>Links</h2>" not in page
    refused = run_bench(cluster, *load, "--out", str(out))
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "holds a run already" in refused.stderr


def test_a_trace_hits_the_caches_as_its_ids_say_and_is_told_when_they_knew_it(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    trace = generate(Recipe("ninety", requests=16, sessions=2, prompt_tokens=4096, block_tokens=64, rate_per_s=50.0))
    file = tmp_path / "trace.jsonl.gz"
    write_trace(trace, file)
    refused = run_bench(cluster, "--trace", str(file))
    assert refused.returncode == 1
    assert "18 of 18 requests (trace.jsonl.gz) do not fit the model's context of 4096 tokens" in refused.stderr
    assert "--divide 2 makes prompts and blocks shorter by that, and all fit" in refused.stderr
    # one after the other, so that a session's next prompt finds its last one in the caches
    load = (
        "--trace",
        str(file),
        "--divide",
        "8",
        "--output-len",
        "4",
        "--speedup",
        "8",
        "--concurrency",
        "1",
        "--json",
    )
    first = summary_of(run_bench(cluster, *load, "--seed", "12"))
    assert (first["completed"], first["failed"]) == (18, 0)
    assert first["total_input_tokens"] == 18 * 512
    assert first["request_rate"] == "trace"
    assert first["pdd_p_hit"] == pytest.approx(first["pdd_expected_hit"], abs=0.02)
    assert 0.7 < first["pdd_expected_hit"] < 0.9
    again = summary_of(run_bench(cluster, *load, "--seed", "12"))
    assert again["pdd_p_hit"] > 0.95
    assert any("the caches knew prompts from an earlier run" in note for note in again["notes"])


def test_what_a_run_leaves_out_of_a_trace_is_in_table_summary_and_report(cluster: LocalCluster, tmp_path: Path) -> None:
    lengths = ((0, 40, 3), (9, 40, 0), (5, 4000, 200), (7, 60, 2), (8, 90, 2), (8, 90, 2))
    rows = [
        {
            "timestamp": at,
            "input_length": tokens,
            "output_length": answer,
            "hash_ids": list(range(tokens, tokens + -(-tokens // 16))),
        }
        for at, tokens, answer in lengths
    ]
    file = tmp_path / "t.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    refused = run_bench(cluster, "--trace", str(file))
    assert "1 of 6 requests (t.jsonl) do not fit" in refused.stderr
    assert "--max-input 90 keeps the 5 that fit" in refused.stderr
    out = tmp_path / "run"
    load = ("--trace", str(file), "--only-fitting", "--num", "4", "--speedup", "2", "--seed", "17", "--out", str(out))
    result = run_bench(cluster, *load)
    for words in (
        "Out of the order of time in the file, and sorted: 1 of 6 requests.",
        "The trace's times are divided by 2.",
        "1 of the trace's 6 requests are left out: with their answer they do not fit the model's context.",
        "1 of the trace's 6 requests are left out: --num takes the ones before them.",
        "Hit rate of the trace by itself: ",
        "Sent before, not measured:               1",
    ):
        assert words in result.stdout, result.stdout + result.stderr
    summary = json.loads((out / "summary.json").read_text())
    assert summary["pdd_changed"] == {"not_fitting": 1, "beyond_num": 1}
    page = (out / "report.html").read_text()
    assert "with their answer they do not fit the model" in page
    zero = summary_of(run_bench(cluster, *load[:3], "--seed", "18", "--json"))
    assert zero["pdd_changed"] == {"not_fitting": 1, "empty_answers": 1}
    assert "1 requests have an answer of no token in the trace, and ask for one." in zero["notes"]


def test_requests_that_the_gateway_refuses_are_counted_and_the_run_goes_on(cluster: LocalCluster) -> None:
    # 30 at once where 8 run and 2 wait; long answers, so that none ends before the last has come
    result = run_bench(cluster, "--num", "30", "--input-len", "16", "--output-len", "120", "--seed", "13", "--json")
    summary = summary_of(result)
    assert result.returncode == 0, "a refusal is a result"
    assert summary["completed"] >= 10
    assert summary["completed"] + summary["failed"] == 30
    assert set(summary["errors"]) == {"429 overloaded"}
    assert summary["num_prompts"] == 30


def test_ctrl_c_keeps_what_is_done(cluster: LocalCluster, tmp_path: Path) -> None:
    out = tmp_path / "run"
    load = ["--num", "2000", "--concurrency", "2", "--input-len", "32", "--output-len", "20", "--seed", "14"]
    records = cluster.records / "requests.jsonl"
    before = _lines(records)
    process = subprocess.Popen(
        [*COMMAND, "--api", cluster.base_url, *load, "--out", str(out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    deadline = time.monotonic() + DEADLINE_S
    while _lines(records) < before + 6 and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    printed, said = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130, said
    assert "Successful requests:" in printed
    assert "Traceback" not in said
    summary = json.loads((out / "summary.json").read_text())
    assert 1 <= summary["completed"] < 2000
    assert summary["failed"] == 0
    assert not summary["complete"]
    assert summary["pdd_under_way"] + summary["pdd_not_sent"] == 2000 - summary["completed"]
    assert f"interrupted after {summary['completed']} of 2000 requests" in summary["reasons"][0]


def test_a_gateway_that_goes_away_ends_the_run_with_what_was_done(cluster: LocalCluster) -> None:
    records = cluster.records / "requests.jsonl"
    before = _lines(records)
    load = ["--num", "2000", "--concurrency", "2", "--input-len", "32", "--output-len", "20", "--seed", "15"]
    process = subprocess.Popen(
        [*COMMAND, "--api", cluster.base_url, *load],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    deadline = time.monotonic() + DEADLINE_S
    while _lines(records) < before + 6 and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.02)
    cluster.kill("gw0")
    try:
        printed, said = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 1
        assert "not faithful: the server was gone after" in printed
        last = said.splitlines()[-1]  # a slow run has said before how far it was
        assert last == f"pddbed: nothing answers at {cluster.base_url} any more; look at pddbed ps, and at pddbed logs"
        gone = run_bench(cluster, "--num", "1")
        assert (gone.returncode, gone.stdout) == (1, "")
        assert f"nothing answers at {cluster.base_url}" in gone.stderr
        assert gone.stderr.count("\n") == 1
    finally:
        cluster.restart("gw0")


def _lines(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rate", "0"], "'0' is no rate"),
        (["--rate", "nan"], "'nan' is no rate"),
        (["--rate", "5/s"], "'5/s' is no rate"),
        (["--goodput", "ttft:10", "tbt:5"], "'tbt:5' is no limit; write one of ttft:MS"),
        (["--goodput=ttft:10", "ttft:5"], "ttft has two limits"),
        (["--percentiles", "50,101"], "write percentiles from 0 to 100"),
        (["--prefix-share", "0.5"], "has no percent sign"),
        (["--token-ids", "9-3"], "write the lowest and the highest id"),
        (["--speedup", "2"], "--speedup is for a trace: name its file with --trace"),
        (["--format", "azure"], "--format is for a trace"),
        (["--trace", "t.jsonl", "--input-len", "5"], "--input-len is for a synthetic load"),
        (["--trace", "t.jsonl", "--speedup", "2", "--rate", "1"], "--speedup and --rate exclude each other"),
        (["--distribution", "skewed", "--prefix-share", "5%"], "exclude each other"),
        (["--sessions", "3"], "--sessions is for --distribution"),
        (["--burstiness", "2"], "--burstiness shapes the gaps of --rate"),
        (["--distribution", "skewed", "--input-len", "100"], "100 is no multiple of 16"),
        (["--api", "http://x", "--lab", "y"], "leave --lab or --api out"),
        (["stray"], "unexpected extra argument"),
        (["--num", "0"], "--num"),
    ],
)
def test_a_contradiction_is_a_usage_error_before_anything_is_sent(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(bench, arguments)
    assert result.exit_code == 2
    assert said in result.output


def test_the_help_names_every_option_and_fits_80_columns() -> None:
    text = CliRunner(env={"COLUMNS": "80"}).invoke(bench, ["--help"]).output
    for parameter in bench.params:
        assert parameter.opts[0] in text
    assert max(map(len, text.splitlines())) <= 80


def test_the_command_starts_without_torch() -> None:
    code = "import sys, experiments.bench.measurement; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=DEADLINE_S).returncode == 0


def test_a_lab_that_is_not_up_is_told(tmp_path: Path) -> None:
    result = run_pddbed("bench", "-l", "no-such-lab", "--num", "1", "--out", str(tmp_path / "run"))
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith('pddbed: no lab "no-such-lab" is up; ')
    assert not (tmp_path / "run").exists()
