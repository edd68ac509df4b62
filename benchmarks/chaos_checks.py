"""Checks of a run of `benchmarks.chaos`: answers, records, and the times of `/health` meanwhile.

`/health` is asked every 50 ms from a process of its own: whoever makes a load has enough to do. How late that process's
own sleeps end says how long the machine keeps anybody waiting.
"""

import http.client
import json
import select
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

HEALTH_S = 0.5
GROWTH_KB = 48 << 10
WAY = ("pdd_handoff_mode", "pdd_rld_tokens", "pdd_md_tokens", "pdd_replays", "pdd_recovery")


def books(seen: Sequence[dict[str, Any]], lines: Iterable[str], metrics: Iterable[str], told: int) -> dict[str, Any]:
    """Findings of a run: a gateway's `requests.jsonl`, its `/metrics`, the lab, and answers that are not the control's.

    `seen`: the right requests, as their clients saw them. `lines` and `metrics` are those of the idle gateway, and so
    of all requests ever, rude clients' too. `told`: records that the gateway counted as unwritten where a lab reads it
    (`PDDBED_UNWRITTEN`).
    """
    counts = Counter[str]()
    for line in metrics:
        name, _, value = line.rpartition(" ")
        if name.startswith(("pddbed_request_success_total{", "pddbed_request_failure_total{")):
            counts["settled"] += int(float(value))
        elif name == 'pddbed_unwritten_lines_total{kind="requests"}':
            counts["unwritten"] += int(float(value))
    recorded = [record for record in map(json.loads, lines) if record["request_id"]]  # "": the file's own last word
    records = {record["request_id"]: record for record in recorded}
    written = Counter(record["request_id"] for record in recorded)
    ids = [one["id"] for one in seen if one["id"]]
    return {
        "records": {
            "settled": counts["settled"],
            "lines": len(recorded),
            "unwritten": counts["unwritten"],
            "told": told,
        },
        "records_twice": sum(written[name] > 1 for name in ids),
        "records_missing": sum(written[name] == 0 for name in ids),
        "different": [_difference(one, records.get(one["id"], {})) for one in seen if "got" in one],
    }


def _difference(one: dict[str, Any], record: dict[str, Any]) -> dict[str, Any]:
    """Position at which an answer leaves the control's, and its record's account of its way."""
    case = one["case"]
    pairs = zip(one["got"], case.expected, strict=False)
    at = next((index for index, (left, right) in enumerate(pairs) if left != right), len(one["got"]))
    way = {name: record.get(name) for name in WAY}
    seen = {"prompt": len(case.prompt), "of": case.max_tokens, "got": len(one["got"]), "from": at}
    return {"id": one["id"], **seen, **way}


def verdict(row: dict[str, Any]) -> list[str]:
    """List what is wrong with a run: nothing, if all is well."""
    found = [f"error: {error}" for error in row["errors"]] + [f"wrong: {wrong}" for wrong in row["wrong"]]
    if row["equal"] != row["requests"]:
        found.append(f"{row['requests'] - row['equal']} answers are not the control's")
    found += _wrong_with_records(row)
    if not row["same_gateway"]:
        found.append("the gateway died")
    health = row["health_s"]
    found += [f"/health: {failed}" for failed in health["failed"]]
    if health["max"] > HEALTH_S + health["late"]:
        found.append(f"/health took {health['max']} s, on a machine that kept a sleeper waiting for {health['late']} s")
    before, after = row["gateway"]["before"], row["gateway"]["after"]
    if after["descriptors"] > before["descriptors"]:
        found.append(f"descriptors grew from {before['descriptors']} to {after['descriptors']}")
    if after["rss_kb"] > before["rss_kb"] + GROWTH_KB:
        found.append(f"memory grew from {before['rss_kb']} to {after['rss_kb']} kB")
    return found


def _wrong_with_records(row: dict[str, Any]) -> list[str]:
    """Every settled request has its line or is counted as unwritten, the latter only where the disk was full."""
    found = []
    settled, lines, unwritten, told = (row["records"][name] for name in ("settled", "lines", "unwritten", "told"))
    if row["records_twice"]:
        found.append(f"{row['records_twice']} requests were recorded twice")
    if lines + unwritten != settled:
        found.append(f"{settled} requests were settled, {lines} recorded and {unwritten} counted as unwritten")
    if row["records_missing"] > unwritten:
        found.append(f"{row['records_missing']} requests were not recorded, {unwritten} counted as unwritten")
    if unwritten != told:
        found.append(f"/metrics counts {unwritten} unwritten records, the lab is told of {told}")
    if unwritten and not row["faults"].get("full disk"):
        found.append(f"{unwritten} records were not written, though the disk was never full")
    return found


EVERY_S = 0.05


class HealthWatch:
    """Asks from now on. `end` returns seconds: `p50`, `p99`, `max`, and `late`; `asked`, and what `failed`."""

    def __init__(self, port: int) -> None:
        command = [sys.executable, "-m", "benchmarks.chaos_checks", str(port)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def end(self) -> dict[str, Any]:
        said, _ = self._process.communicate(timeout=60)
        figures: dict[str, Any] = json.loads(said)
        return figures


def watch(port: int) -> dict[str, Any]:
    """Ask until standard input ends."""
    took, late, failed = [0.0], [0.0], []
    while not select.select([sys.stdin], [], [], 0)[0]:
        start = time.monotonic()
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        try:
            connection.request("GET", "/health")
            connection.getresponse().read()
        except OSError as error:
            failed.append(f"{type(error).__name__}: {error}")
        connection.close()
        took.append(time.monotonic() - start)
        start = time.monotonic()
        time.sleep(EVERY_S)
        late.append(time.monotonic() - start - EVERY_S)
    took.sort()
    seconds = {"p50": took[len(took) // 2], "p99": took[len(took) * 99 // 100], "max": took[-1], "late": max(late)}
    return {"asked": len(took) - 1, "failed": failed, **{name: round(value, 4) for name, value in seconds.items()}}


if __name__ == "__main__":
    print(json.dumps(watch(int(sys.argv[1]))))
