"""Many requests through real worker processes over loopback: no wrong answer, and nothing grows.

    python -m benchmarks.serving_soak [--requests 2000] [--at-once 8] [--out FILE]

`tiny`, `pdd`, small pools, so that caches are full and evict from early on. Prompts of 1 to 400 tokens, a part of them
continues an earlier conversation, one client in ten hangs up in the middle of its answer. Every answer is compared with
the control's token by token. Resident memory, descriptors and threads of every process, and blocks in use, are read
while nothing runs: after the warm-up (a fifth of the requests), again at the end, and in between.
"""

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks import harness
from benchmarks.load import Case, make_cases, run_cases, wait_until_nothing_is_held
from workers.local import Layout, LocalCluster
from workers.models import LoadedModel, ModelSpec, load_model

KV_BYTES = 16 << 20  # 512 blocks of 16 tokens
WINDOWS = 10  # readings, the first after the warm-up
GROWTH_BYTES = 4 << 20  # of a process behind the warm-up: a leaked block a request would be ten times as much
SPARE = 2  # descriptors and threads: the last reading's own HTTP connection may still be closing


def shapes(count: int, seed: int) -> list[tuple[int, int]]:
    chance = random.Random(seed)
    lengths = (1, 15, 16, 17, 31, 33, 64, 100, 200, 400)
    return [(chance.choice(lengths), chance.randint(1, 60)) for _ in range(count)]


def reading(cluster: LocalCluster) -> dict[str, dict[str, int]]:
    """Resident bytes, descriptors and threads of each process."""
    found = {}
    for name, pid in cluster.pids.items():
        process = psutil.Process(pid)
        with process.oneshot():
            found[name] = {
                "rss_bytes": process.memory_info().rss,
                "descriptors": process.num_fds(),
                "threads": process.num_threads(),
            }
    return found


async def soak(cluster: LocalCluster, cases: Sequence[Case], at_once: int, windows: int) -> dict[str, Any]:
    """Run all cases in windows, with a reading behind each once nothing runs."""
    began = time.monotonic()
    warm = len(cases) // 5
    size = -(-(len(cases) - warm) // max(1, windows - 1))
    parts = [cases[:warm], *(cases[start : start + size] for start in range(warm, len(cases), size))]
    readings: list[dict[str, dict[str, int]]] = []
    answered = left = tokens = handed_over = 0
    wrong: list[str] = []
    unreturned: list[dict[str, int]] = []
    pipelines: dict[str, int] = {}
    for part in parts:
        tally = await run_cases(cluster.base_url, part, at_once)
        after = await wait_until_nothing_is_held(cluster.base_url, 20)
        if not after.nothing:
            unreturned.append(after.used_blocks)
        readings.append(reading(cluster))
        answered += tally.asked - tally.left
        left += tally.left
        tokens += tally.tokens
        handed_over += tally.handed_over
        wrong += tally.wrong
        for name, count in tally.pipelines.items():
            pipelines[name] = pipelines.get(name, 0) + count
        print(f"\r{answered + left} of {len(cases)} requests, {len(wrong)} wrong", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    first, last = readings[0], readings[-1]
    return {
        "requests": len(cases),
        "shortened": sum(case.shortened for case in cases),
        "answered": answered,
        "clients_that_left": left,
        "tokens": tokens,
        "pipelines": pipelines,
        "handed_over": handed_over,
        "wrong": wrong[:20],
        "wrong_count": len(wrong),
        "blocks_not_returned": unreturned,
        "cached_blocks": after.cached_blocks,
        "seconds": round(time.monotonic() - began, 1),
        "growth": {name: {key: last[name][key] - first[name][key] for key in first[name]} for name in first},
        "readings": readings,
    }


def bugs_in_logs(cluster: LocalCluster) -> list[str]:
    """Tails of logs with a traceback: a failed integrity check (engines look whenever they are idle), or a bug."""
    found = []
    for name in cluster.pids:
        text = cluster.log(name).read_text(errors="replace")
        if "Traceback" in text:
            found.append(f"{name}: ...{text[text.index('Traceback') :][:2000]}")
    return found


def run(loaded: LoadedModel, requests: int, at_once: int, windows: int = WINDOWS, seed: int = 1) -> dict[str, Any]:
    """The whole soak on a cluster of its own."""

    def progress(count: int) -> None:
        if count % 50 == 0:
            print(f"\rcontrol: {count} of {requests}", end="", file=sys.stderr, flush=True)

    cases = make_cases(loaded, shapes(requests, seed), seed, leaving=0.1, grow_from=0.3, progress=progress)
    print(file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="pddbed-soak-") as directory:
        with LocalCluster(Layout(kv_bytes=KV_BYTES), Path(directory)) as cluster:
            try:
                found = asyncio.run(soak(cluster, cases, at_once, windows))
            except BaseException:
                for name in cluster.pids:
                    print(f"--- {name}:\n{cluster.log(name).read_text(errors='replace')[-2000:]}", file=sys.stderr)
                raise
            found["bugs"] = bugs_in_logs(cluster)
            lines = (cluster.records / "requests.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        found["records"] = len(records)
        found["unsettled_records"] = sum(bool(record["pdd_unsettled"]) for record in records)
        found["kv_bytes"] = sum(record["pdd_delta_bytes"] or 0 for record in records)
    return found


def verdict(found: dict[str, Any], growth_bytes: int = GROWTH_BYTES) -> list[str]:
    """Sentences on what is not as it must be; none when all is."""
    problems = [f"wrong answer: {text}" for text in found["wrong"]]
    problems += [f"blocks not returned: {blocks}" for blocks in found["blocks_not_returned"]]
    problems += found["bugs"]
    if found["records"] != found["requests"]:
        problems.append(f"{found['records']} records of {found['requests']} requests")
    if found["unsettled_records"]:
        problems.append(f"{found['unsettled_records']} requests that some worker did not let go")
    for name, growth in found["growth"].items():
        if growth["rss_bytes"] > growth_bytes:
            problems.append(f"{name} grew by {growth['rss_bytes'] / 1e6:.1f} MB")
        for what in ("descriptors", "threads"):
            if growth[what] > SPARE:
                problems.append(f"{name} has {growth[what]} more {what}")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving_soak", description=__doc__)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--at-once", type=int, default=8)
    harness.add_option(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = run(load_model(ModelSpec("tiny")), options.requests, options.at_once)
    for key in (
        "requests",
        "answered",
        "clients_that_left",
        "tokens",
        "pipelines",
        "handed_over",
        "wrong_count",
        "seconds",
    ):
        print(f"{key.replace('_', ' '):20} {found[key]}")
    print(f"{'process':12}{'RSS warm':>12}{'RSS end':>12}{'growth':>12}")
    for name, growth in found["growth"].items():
        first, last = (found["readings"][index][name]["rss_bytes"] / 1e6 for index in (0, -1))
        print(f"{name:12}{first:9.1f} MB{last:9.1f} MB{growth['rss_bytes'] / 1e6:9.2f} MB")
    problems = verdict(found)
    print("\n".join(problems) or "no wrong answer, nothing grew, everything was given back")
    harness.write(options.out, found)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
