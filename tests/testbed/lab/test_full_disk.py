"""A full /run: answers come, no link is lost, and `status` says what could not be written. Logs are bounded."""

import json
import os
from pathlib import Path

import pytest

from testbed.congestion.control import ChangeLog
from testbed.lab.troubles import KINDS, ROW_WORDS, Troubles, trouble_words
from testbed.supervisor.log_limit import cut_logs
from tests.testbed.lab.apart import run_apart
from workers import linefile

FULL_RUN = """
import asyncio, json, os, subprocess, sys
import httpx
from pathlib import Path
from tests.conftest import run_pddbed

def pddbed(*arguments):
    result = run_pddbed(*arguments)
    assert result.returncode == 0, result.stderr
    return result.stdout

subprocess.run(["mount", "-o", "remount,size=8m", "/run"], check=True)
pddbed("up", "topologies/two-dc-tiny.yaml", "--name", "full", "--api", "auto", "--no-verify")
try:
    def status():
        return json.loads(pddbed("status", "-l", "full", "--json"))
    api, before = status()["api"], status()
    logs = Path("/run/pddbed/full/logs/hosts")
    filler = Path("/run/filler")
    with filler.open("wb", buffering=0) as stream:
        try:
            while True:
                stream.write(bytes(4096))
        except OSError as error:
            assert "No space" in str(error)
    async def ask(http, number):
        body = {"model": "tiny", "prompt": [number + 1] * 30, "max_tokens": 8, "temperature": 0}
        return (await http.post("/v1/completions", json=body)).status_code
    async def everything():
        async with httpx.AsyncClient(base_url=api, timeout=60) as http:
            single = [await ask(http, number) for number in range(25)]
            return single + await asyncio.gather(*(ask(http, 100 + number) for number in range(6)))
    codes = asyncio.run(everything())
    for _ in range(100):
        full = status()
        rows = [row for row in full["troubles"] if "request records" in row["what"]]
        if rows and rows[0]["times"] == 31:
            break
    text = pddbed("status", "-l", "full")
    filler.unlink()
    async def later():
        async with httpx.AsyncClient(base_url=api, timeout=60) as http:
            return [await ask(http, 200 + number) for number in range(2)]
    codes += asyncio.run(later())
    records = Path("/run/pddbed/full/records/requests.jsonl")
    for _ in range(200):
        lines = records.read_text().splitlines() if records.exists() else []
        if len(lines) == 2:
            break
        status()
    lost = [line for log in logs.glob("*.log") for line in log.read_text().splitlines() if " lost " in line]
    lines = [json.loads(line)["success"] for line in lines]
    print(json.dumps({"codes": codes, "rows": rows, "text": text, "lost": lost, "lines": lines}))
finally:
    pddbed("down", "full")
"""


@pytest.mark.root
def test_a_full_run_costs_records_that_status_counts_and_nothing_else() -> None:
    result = run_apart(FULL_RUN, timeout_s=240)
    assert result.returncode == 0, result.stderr
    told = json.loads(result.stdout.splitlines()[-1])
    assert told["codes"] == [200] * 33
    assert [(row["what"], row["times"], row["claim"]) for row in told["rows"]] == [
        ("gw0 could not write request records", 31, True)
    ]
    assert "gw0 could not write request records (31 times; the latest: No space left on device)" in told["text"]
    assert told["lost"] == []
    assert told["lines"] == [True, True], "later lines are whole"


def test_the_lab_reads_what_workers_count_and_a_failure_is_told_with_how_often(tmp_path: Path) -> None:
    assert (linefile.KINDS, linefile.ROW_WORDS) == (KINDS, ROW_WORDS)
    troubles = Troubles(tmp_path / "unwritten", ["gw0", "p0"])
    worker = linefile.Unwritten.in_lab(str(tmp_path / "unwritten"), 1)
    (tmp_path / "unwritten").unlink()  # both have it in memory
    assert troubles.rows() == []
    worker.note("pace", OSError(28, os.strerror(28)))
    worker.note("log", OSError(28, os.strerror(28)), lines=3)

    def broken() -> None:
        raise KeyError("x")

    assert not troubles.guard("watching", broken)
    assert not troubles.guard("watching", broken)
    assert [trouble_words(row) for row in troubles.rows()] == [
        "watching failed (2 times; the latest: KeyError: 'x')",
        "p0 could not write pace counts (once: No space left on device)",
        "p0 could not write lines of its log (3 times; the latest: No space left on device)",
    ]
    assert len(troubles.reasons()) == 2, "a line of a log is in no figure"
    with pytest.raises(ValueError, match="no row 2"):
        linefile.Unwritten.in_lab(_file(tmp_path, ["a", "b"]), 2)


def _file(tmp_path: Path, hosts: list[str]) -> str:
    Troubles(tmp_path / "other", hosts)
    return str(tmp_path / "other")


def test_a_long_log_is_cut_to_its_newest_part_and_its_writer_goes_on(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.mkdir()
    short, long = tmp_path / "guardian.log", hosts / "p0.log"
    short.write_text("short\n")
    told: list[str] = []
    with long.open("ab", buffering=0) as writer:
        for number in range(2000):
            writer.write(f"line {number} {'x' * 50}\n".encode())
        size = long.stat().st_size
        cut_logs(tmp_path, 20_000, told.append)
        writer.write(b"and on\n")
    first, *rest, last = long.read_text().splitlines()
    kept = sum(len(line) + 1 for line in rest)
    assert first == (
        f"pddbed: {size - kept} bytes are left out here: a log is at most 20000 bytes long (PDDBED_LOG_LIMIT)"
    )
    assert rest[-1].startswith("line 1999 ")
    assert all(line.startswith("line ") for line in rest), "no half line"
    assert 4000 < kept <= 5000
    assert last == "and on"
    assert told == ["hosts/p0.log"]
    assert short.read_text() == "short\n"


def test_a_timeline_goes_on_without_its_record_and_its_failures_are_troubles() -> None:
    told: list[tuple[str, object]] = []
    log = ChangeLog(Path("/dev/full"), lambda what, error: told.append((what, error)))
    log.write("set", event=0)
    log.write("error", error="tc refused it")
    log.write("end", state="failed", errors=["cross traffic is not ready"])
    log.close()
    assert told == [
        ("congestion.jsonl lacks a line", "No space left on device"),
        ("a change of a timeline failed", "tc refused it"),
        ("congestion.jsonl lacks a line", "No space left on device"),
        ("a timeline ended early", "cross traffic is not ready"),
        ("congestion.jsonl lacks a line", "No space left on device"),
    ]


def test_a_timelines_record_is_made_again_when_somebody_removed_it(tmp_path: Path) -> None:
    file = tmp_path / "records" / "congestion.jsonl"
    log = ChangeLog(file, lambda what, error: pytest.fail(f"{what}: {error}"))
    log.write("set", event=0)
    file.unlink()
    log.write("set", event=1)
    log.close()
    assert [json.loads(line)["event"] for line in file.read_text().splitlines()] == [1]
