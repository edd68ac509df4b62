"""`pddbed audit` against real workers: the capture and the counters agree to the byte, and a wrong counter is found."""

import itertools
import json
import shutil
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from testbed.lab.record import find_record
from tests.conftest import Lab, run_pddbed
from tests.testbed.capture.conftest import RunningCapture, audited, packets, raised
from workers.models import ModelSpec, load_model

pytestmark = pytest.mark.root
LAB = "audit-test"
THERE, BACK = "main > remote", "remote > main"
PROMPT, ANSWER = 300, 60
NUMBERS = itertools.count()  # of requests: no two prompts share a prefix, so that no cache saves KV
QUIET_S = 0.3  # so that even counters which never agree with each other are read while nothing crosses


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with raised(LAB) as lab:
        yield lab


@pytest.fixture(scope="module")
def bytes_per_token() -> int:
    """KV of one token of the lab's model: layers x 2 x kv_heads x head_dim x 4 bytes."""
    config = load_model(ModelSpec("tiny")).config
    layers, two, heads, dim = config.kv_shape
    return int(layers * two * heads * dim) * 4


def _ask(lab: Lab, number: int, prompt_tokens: int = PROMPT) -> dict[str, Any]:
    """One answer; returns its record once every worker has let go of the request."""
    prompt = [32 + (number * 7 + place * place) % 95 for place in range(prompt_tokens)]
    body = {"model": "tiny", "prompt": prompt, "max_tokens": ANSWER, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"{find_record(lab.name).state()['api']}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        name = json.load(answer)["id"]
    file = find_record(lab.name).results / "requests.jsonl"
    deadline = time.monotonic() + 30
    while True:
        for line in file.read_text().splitlines():
            record: dict[str, Any] = json.loads(line)
            if record["request_id"] == name:
                return record
        assert time.monotonic() < deadline, "the request was never settled"
        time.sleep(0.05)


@dataclass(frozen=True)
class Captured:
    """A finished capture of three requests, their records, and a copy of the lab's records at its end."""

    file: Path
    requests: list[dict[str, Any]]
    records: Path


def _captured(lab: Lab, directory: Path, *arguments: str, point: str = "wan0", requests: int = 3) -> Captured:
    file = directory / "x.pcapng"
    capture = RunningCapture(lab.name, point, "-w", str(file), *arguments)
    try:
        time.sleep(QUIET_S)
        done = [_ask(lab, next(NUMBERS)) for _ in range(requests)]
        time.sleep(QUIET_S)
        capture.interrupt()
        result = capture.result()
    finally:
        capture.stop()
    assert result.returncode == 0, result.stderr
    records = shutil.copytree(find_record(lab.name).results, directory / "records")
    return Captured(file, done, records)


@pytest.fixture(scope="module")
def captured(lab: Lab, tmp_path_factory: pytest.TempPathFactory) -> Captured:
    return _captured(lab, tmp_path_factory.mktemp("captured"))


def _rows(result: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["traffic"], row["direction"]): row for row in result["rows"]}


def test_capture_and_counters_agree_to_the_byte(captured: Captured) -> None:
    status, result = audited(captured.file)
    assert status == 0, result
    assert result["ok"]
    assert result["dropped"] == 0
    rows = _rows(result)
    for traffic in ("kv", "token-ids", "control"):
        for direction in (THERE, BACK):
            row = rows[traffic, direction]
            assert row["judged"]
            assert row["captured"] == row["counted"] == row["received"] == row["captured_for_receivers"]
    assert all(rows[traffic, THERE]["captured"] > 0 for traffic in ("kv", "token-ids", "control"))
    assert rows["control", BACK]["captured"] > 0


def test_only_token_ids_cross_for_generated_tokens(captured: Captured, bytes_per_token: int) -> None:
    _, result = audited(captured.file)
    rows = _rows(result)
    by_name = {row["request"]: row for row in result["requests"]}
    for record in captured.requests:
        row = by_name[record["request_id"]]
        # exactly the prompt's KV, although the sequence grew by the whole answer
        assert record["output_len"] == ANSWER
        assert row["kv_bytes"] == row["recorded_kv_bytes"] == PROMPT * bytes_per_token
        # what the relay made crosses as ids in one hand-over; what main decode made comes back as ids
        assert row["token_ids"].get(THERE, 0) == record["pdd_rld_tokens"] > 0
        assert row["token_ids"].get(BACK, 0) == record["pdd_md_tokens"]
        assert sum(row["bytes"]["token-ids"].values()) < ANSWER * bytes_per_token / 20, "not the answer's KV"
    blocks = sum(row["kv_bytes"] for row in result["requests"])
    assert 0 < rows["kv", THERE]["in_file"] - blocks < 0.01 * blocks, "frame headers and checksums"
    assert rows["kv", BACK]["in_file"] == 0


def _tampered(captured: Captured, directory: Path, host: str, peer: str, way: str, traffic: str, factor: float) -> Path:
    """A copy of the records in which one counter of one worker ran wrong all the time."""
    records = shutil.copytree(captured.records, directory / "records")
    file = records / f"bytes-{host}.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for line in lines:
        for entry in line["counts"]:
            if entry[:3] == [peer, way, traffic]:
                entry[3] = round(entry[3] * factor)
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return records


@pytest.mark.parametrize(
    ("host", "peer", "way", "traffic", "direction"),
    [
        ("p0", "md0", "sent", "kv", THERE),
        ("md0", "p0", "received", "kv", THERE),
        ("md0", "rld0", "received", "token-ids", THERE),
        ("md0", "gw0", "sent", "control", BACK),
    ],
)
def test_a_wrong_counter_is_found(
    captured: Captured, tmp_path: Path, host: str, peer: str, way: str, traffic: str, direction: str
) -> None:
    records = _tampered(captured, tmp_path, host, peer, way, traffic, 1.05)
    status, result = audited(captured.file, "--records", str(records))
    assert status == 1
    wrong = {key for key, row in _rows(result).items() if not row["ok"]}
    assert (traffic, direction) in wrong
    assert wrong <= {(traffic, direction), ("all frames", direction)}
    told = run_pddbed("audit", str(captured.file), "--records", str(records))
    assert told.returncode == 1
    if traffic == "kv":  # of the others, 5 % is less than a single frame that may have crossed during a reading
        assert "they do not agree" in told.stdout


def test_a_difference_below_one_percent_is_told_and_passes(captured: Captured, tmp_path: Path) -> None:
    records = _tampered(captured, tmp_path, "p0", "md0", "sent", "kv", 1.005)
    status, result = audited(captured.file, "--records", str(records))
    assert status == 0, result
    assert -0.01 < _rows(result)["kv", THERE]["difference"] < -0.003


def test_a_wrong_record_of_a_request_is_found(captured: Captured, tmp_path: Path) -> None:
    records = shutil.copytree(captured.records, tmp_path / "records")
    file = records / "requests.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    name = captured.requests[1]["request_id"]
    for line in lines:
        for span in line["pdd_spans"]:
            if line["request_id"] == name and span["name"] == "wan-transfer":
                span["bytes"] //= 2
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    status, result = audited(captured.file, "--records", str(records))
    assert status == 1
    assert [row["request"] for row in result["requests"] if not row["ok"]] == [name]


def test_counters_that_say_nothing_about_the_capture_fail_it(captured: Captured, tmp_path: Path) -> None:
    records = shutil.copytree(captured.records, tmp_path / "records")
    (records / "bytes-md0.jsonl").unlink()
    status, result = audited(captured.file, "--records", str(records))
    assert status == 1
    assert any("md0 noted its counters less than twice" in problem for problem in result["problems"])


def test_lost_packets_cross_again_and_are_counted_apart(lab: Lab, tmp_path: Path) -> None:
    assert run_pddbed("wan", "set", "wan0", "-l", LAB, "--loss", "2%").returncode == 0
    try:
        captured = _captured(lab, tmp_path, "--settle", "20s", requests=1)
    finally:
        assert run_pddbed("wan", "reset", "-l", LAB).returncode == 0
    status, result = audited(captured.file)
    assert status == 0, result
    assert result["directions"][THERE]["retransmitted_bytes"] > 1000
    assert result["directions"][THERE]["missed_bytes"] == 0
    row = _rows(result)["kv", THERE]
    assert row["captured"] == row["counted"], "what crossed twice counts once"


def _forwarded_bytes() -> int:
    shown = run_pddbed("wan", "show", "-l", LAB, "--json")
    return int(json.loads(shown.stdout)[0]["counters"]["forward"]["bytes"])


@pytest.mark.quiet  # frames of a starved process are late by more than the audit allows for
def test_a_capture_amid_a_transfer_says_that_it_cannot_tell(lab: Lab, tmp_path: Path) -> None:
    file = tmp_path / "x.pcapng"
    assert run_pddbed("wan", "set", "wan0", "-l", LAB, "--rate", "3mbit").returncode == 0
    before = _forwarded_bytes()
    asking = threading.Thread(target=_ask, args=(lab, next(NUMBERS), 1800))  # 3.7 MB of KV: ten seconds
    try:
        asking.start()
        deadline = time.monotonic() + 30
        while _forwarded_bytes() < before + 200_000:
            assert time.monotonic() < deadline, "no KV on its way"
        # longer than a frame of 512 KB, so that one begins in it
        captured = run_pddbed("capture", "-l", LAB, "wan0", "-w", str(file), "--duration", "3s", "--settle", "0s")
        assert captured.returncode == 0, captured.stderr
    finally:
        assert run_pddbed("wan", "reset", "-l", LAB).returncode == 0
        asking.join()
    status, result = audited(file)
    assert status == 1, "what cannot be confirmed is not confirmed"
    row = _rows(result)["kv", THERE]
    assert not row["ok"], result["rows"]
    assert row["undecided"], result["rows"]
    assert _rows(result)["unknown", THERE]["in_file"] > 0, "the rest of a frame that had begun before"
    told = run_pddbed("audit", str(file))
    assert "it cannot be told" in told.stdout, told.stdout
    assert "they do not agree" not in told.stdout


def test_without_payload_the_sum_of_all_frames_is_compared(lab: Lab, tmp_path: Path) -> None:
    captured = _captured(lab, tmp_path, "--headers-only")
    status, result = audited(captured.file)
    assert status == 0, result
    rows = _rows(result)
    assert not rows["kv", THERE]["judged"], "no class is guessed"
    assert rows["kv", THERE]["in_file"] == 0
    everything = rows["all frames", THERE]
    assert everything["judged"]
    assert everything["captured"] == everything["counted"] > 0
    assert any("frames have no class" in note for note in result["notes"])
    told = run_pddbed("audit", str(captured.file)).stdout
    assert "not told" in told
    # a wrong counter is found all the same
    records = _tampered(captured, tmp_path / "wrong", "p0", "md0", "sent", "kv", 1.05)
    assert audited(captured.file, "--records", str(records))[0] == 1
    # and connections can still be told apart
    towards_md0 = [c for c in result["connections"] if "md0:7000" in (c["source"], c["target"])]
    assert all(c["between_workers"] for c in towards_md0)
    carried = sorted(max(c["source_bytes"], c["target_bytes"]) for c in towards_md0)
    assert sum(carried[-3:]) > 0.9 * sum(carried), "three transfers, each on a connection of the pool"


def test_a_hosts_interface_shows_fabric_and_wan(lab: Lab, tmp_path: Path, bytes_per_token: int) -> None:
    captured = _captured(lab, tmp_path, point="p0", requests=2)
    status, result = audited(captured.file)
    assert status == 0, result
    rows = _rows(result)
    assert rows["kv", "from p0"]["captured"] == rows["kv", "from p0"]["counted"]
    # to the relay over the fabric and to main decode over the WAN
    assert [row["kv_bytes"] for row in result["requests"]] == [2 * PROMPT * bytes_per_token] * 2
    assert rows["control", "to p0"]["captured"] > 0


def test_a_file_of_another_tool_needs_the_labs_name(lab: Lab, captured: Captured, tmp_path: Path) -> None:
    file = tmp_path / "x.pcap"
    lab.exec("router.main", "timeout", "-s", "INT", "2", "tcpdump", "-i", "wan0", "-w", str(file))
    assert packets(file)
    refused = run_pddbed("audit", str(file))
    assert refused.returncode == 1
    assert "name it with --lab" in refused.stderr
    result = run_pddbed("audit", str(file), "-l", LAB, "--captured-only")
    assert result.returncode == 0, result.stderr
    assert "control" in result.stdout
    other = captured.file.with_name("text")
    other.write_text("no capture at all")
    refused = run_pddbed("audit", str(other), "-l", LAB)
    assert refused.returncode == 1
    assert "is no capture file" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_when_the_lab_is_down_its_records_are_asked_for(captured: Captured) -> None:
    # last in this file: it takes the lab down
    assert run_pddbed("down", LAB).returncode == 0
    refused = run_pddbed("audit", str(captured.file))
    assert refused.returncode == 1
    assert "--records" in refused.stderr
    status, result = audited(captured.file, "--records", str(captured.records))
    assert status == 0, result
    assert len(result["requests"]) == 3
    status, result = audited(captured.file, "--captured-only")
    assert status == 0
    assert _rows(result)["kv", THERE]["counted"] is None
