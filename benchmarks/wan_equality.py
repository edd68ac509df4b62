"""Every answer of a lab across a bad WAN equals the control's, token for token; and nothing is held afterwards.

    python -m benchmarks.wan_equality far    # 2 s one way, 1 % loss, an outage in the middle; little KV
    python -m benchmarks.wan_equality near   # 20 ms, long prompts, KV in full size
    python -m benchmarks.wan_equality real   # the same with SmolLM2, 40 requests
      [--requests 200] [--at-once N] [--model tiny] [--out FILE]

A real lab (`pddbed up`, userspace driver), `pdd`, streamed greedy answers in fp32. The client checks each token against
the control (`benchmarks/load.py`), and that positions follow one another: no gap, no duplicate. The outage begins when
half of the requests are answered. Afterwards: no request unsettled, no block in use on any worker, no engine that found
its pool's books wrong (each checks whenever it is idle), no traceback in any log. Run as root.
"""

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import harness
from benchmarks.load import Case, Tally, add_settled, make_cases, run_cases, wait_until_nothing_is_held
from workers.models import LoadedModel, ModelSpec, load_model

PDDBED = [sys.executable, "-c", "from testbed.cli import main; main()"]


@dataclass(frozen=True)
class Plan:
    """A run. `outage`: how long, in the middle; "" for none. Token counts are (least, most), drawn log-uniformly.

    `relay_cpu`: the relay gets so much of a CPU. `tiny` decodes a thousand tokens before the first byte of KV has
    crossed a link of 2 s; a relay as slow as that of a real model still answers when main decode is ready to take over.
    """

    name: str
    delay: str
    loss: str
    rate: str
    outage: str
    prompts: tuple[int, int]
    answers: tuple[int, int]
    at_once: int
    requests: int = 200
    model: str = "tiny"
    relay_cpu: str = "100%"
    max_kv_bytes: int | None = None

    def topology(self) -> str:
        """The lab's file."""
        return (
            f"name: {self.name}\nseed: 1\n"
            "datacenters:\n"
            "  main:\n    subnet: 10.1.0.0/24\n    hosts:\n      gw0: {role: gateway}\n      p0: {role: prefill}\n"
            f"      rld0: {{role: relay-decode, cpu: {{quota: {self.relay_cpu}}}}}\n"
            "  remote:\n    subnet: 10.2.0.0/24\n    hosts:\n      md0: {role: main-decode}\n"
            "wan:\n  - {name: wan0, between: [main, remote], driver: userspace, "
            f"rate: {self.rate}, delay: {self.delay}, loss: {self.loss}}}\n"
            f"model: {{name: {self.model}, seed: 0}}\n"
            "serving: {pipeline: pdd, kv_pool: {connections: 8}}\n"
        )

    def shapes(self, seed: int) -> list[tuple[int, int]]:
        """(prompt, answer) tokens of each request; the block size's neighbours are always among the prompts."""
        chance = random.Random(seed)

        def drawn(least: int, most: int) -> int:
            return round(least * (most / least) ** chance.random())

        edges = [length for length in (1, 15, 16, 17) if self.prompts[0] <= length <= self.prompts[1]]
        lengths = [*edges, *(drawn(*self.prompts) for _ in range(self.requests - len(edges)))]
        return [(length, drawn(*self.answers)) for length in lengths]


FAR = Plan("far", "2s", "1%", "20mbit", "6s", (1, 120), (60, 1500), 24, relay_cpu="20%", max_kv_bytes=20_000_000)
NEAR = Plan("near", "20ms", "0%", "400mbit", "", (16, 3500), (8, 300), 8)
REAL = Plan("real", "20ms", "0%", "400mbit", "", (15, 400), (8, 40), 4, requests=40, model="smollm2-135m")
PLANS = {plan.name: plan for plan in (FAR, NEAR, REAL)}


def pddbed(*arguments: str, given: str | None = None) -> str:
    """Run the command; its output. Raises RuntimeError with its error."""
    done = subprocess.run([*PDDBED, *arguments], input=given, capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise RuntimeError(f"pddbed {' '.join(arguments)} failed: {done.stderr.strip()[-2000:]}")
    return done.stdout


async def play_cases(plan: Plan, api: str, cases: Sequence[Case], lab: str) -> tuple[Tally, float | None]:
    """All cases, with the outage in their middle; how far the outage came into the run (s), if there was one."""
    began = time.monotonic()
    outage_s: list[float] = []
    playing: set[asyncio.Task[str]] = set()
    timeline = f"congestion:\n  - outage: {{at: 0s, link: wan0, duration: {plan.outage}}}\n"

    def done(tally: Tally) -> None:
        print(f"\r{tally.asked} of {len(cases)}, {len(tally.wrong)} wrong", end="", file=sys.stderr, flush=True)
        if plan.outage and not outage_s and tally.asked >= len(cases) // 2:
            outage_s.append(time.monotonic() - began)
            playing.add(asyncio.create_task(asyncio.to_thread(pddbed, "wan", "play", "-l", lab, "-", given=timeline)))

    tally = await run_cases(api, cases, plan.at_once, done)
    await asyncio.gather(*playing)
    print(file=sys.stderr)
    return tally, outage_s[0] if outage_s else None


def run(plan: Plan, loaded: LoadedModel, lab: str, seed: int = 1) -> dict[str, Any]:
    """The whole run in a lab of its own, which is gone afterwards."""

    def progress(count: int) -> None:
        print(f"\rcontrol: {count} of {plan.requests}", end="", file=sys.stderr, flush=True)

    cases = make_cases(loaded, plan.shapes(seed), seed, grow_from=0.1, progress=progress)
    print(file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="pddbed-equality-") as directory:
        file = Path(directory) / "lab.yaml"
        file.write_text(plan.topology())
        pddbed("up", str(file), "--name", lab, "--api", "auto")
        try:
            status = json.loads(pddbed("status", "-l", lab, "--json"))
            began = time.monotonic()
            tally, outage_s = asyncio.run(play_cases(plan, status["api"], cases, lab))
            seconds = time.monotonic() - began
            # an answer that ended on the relay still goes to main decode: link deadlines bound how long that may take
            after = asyncio.run(wait_until_nothing_is_held(status["api"], 120))
            folder = Path("/run/pddbed") / lab
            records = [json.loads(line) for line in (folder / "records" / "requests.jsonl").read_text().splitlines()]
            congestion = folder / "records" / "congestion.jsonl"
            outages = congestion.read_text().count('"outage"') if congestion.exists() else 0
            bugs = [
                f"{log.name}: {text[text.index('Traceback') :][:2000]}"
                for log in (folder / "logs" / "hosts").glob("*.log")
                if "Traceback" in (text := log.read_text(errors="replace"))
            ]
            dropped = json.loads(pddbed("status", "-l", lab, "--json"))["links"][0]["counters"]
        finally:
            pddbed("down", lab)
    add_settled(tally, records)
    return {
        "plan": asdict(plan),
        "seed": seed,
        "seconds": round(seconds, 1),
        "requests": tally.asked,
        "shortened": sum(case.shortened for case in cases),
        "tokens": tally.tokens,
        "wrong_count": len(tally.wrong),
        "wrong": tally.wrong[:20],
        "records": len(records),
        "unsettled_records": sum(bool(record["pdd_unsettled"]) for record in records),
        "pipelines": dict(tally.pipelines),
        "tokens_by": dict(tally.instances),
        "handed_over": tally.handed_over,
        "kv_bytes": tally.kv_bytes,
        "kv_repairs": tally.kv_repairs,
        "replays": tally.replays,
        "ttft_p50_s": statistics.median(tally.ttft_s),
        "outage_after_s": outage_s,
        "outages_recorded": outages,
        "blocks_used_after": after.used_blocks,
        "requests_after": after.requests,
        "bugs": bugs,
        "link_counters": dropped,
        "verified": status.get("verified", {}).get("ok", None),
    }


def verdict(plan: Plan, found: dict[str, Any]) -> list[str]:
    """Sentences on what is not as it must be; none when all is."""
    problems = [f"wrong answer: {text}" for text in found["wrong"]] + found["bugs"]
    if found["requests"] != plan.requests or found["records"] != plan.requests:
        problems.append(f"{plan.requests} requests, {found['requests']} answers, {found['records']} records")
    if found["unsettled_records"] or found["requests_after"]:
        problems.append(f"{found['unsettled_records']} requests were not let go, {found['requests_after']} still live")
    if any(found["blocks_used_after"].values()) or not found["blocks_used_after"]:
        problems.append(f"blocks in use afterwards: {found['blocks_used_after']}")
    if not found["handed_over"]:
        problems.append("no answer was handed over: the run shows nothing")
    if plan.outage and not found["outages_recorded"]:
        problems.append("the outage did not happen")
    if plan.max_kv_bytes is not None and found["kv_bytes"] > plan.max_kv_bytes:
        problems.append(f"{found['kv_bytes']} bytes of KV, more than the {plan.max_kv_bytes} of the plan")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.wan_equality", description=__doc__)
    parser.add_argument("plan", choices=PLANS)
    parser.add_argument("--requests", type=int)
    parser.add_argument("--at-once", type=int)
    parser.add_argument("--model")
    harness.add_option(parser)
    options = parser.parse_args()
    changes = {key: value for key in ("requests", "at_once", "model") if (value := getattr(options, key)) is not None}
    plan = replace(PLANS[options.plan], **changes)
    torch.set_num_threads(1)
    found = run(plan, load_model(ModelSpec(plan.model)), f"equality-{plan.name}")
    for key, value in found.items():
        if key not in ("plan", "wrong", "bugs", "link_counters"):
            print(f"{key.replace('_', ' '):20} {value}")
    problems = verdict(plan, found)
    print("\n".join(problems) or "every answer is the control's; nothing is held")
    harness.write(options.out, found)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
