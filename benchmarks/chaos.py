"""Random faults under load: two workers of each role, several clients, one worker at a time killed, stopped or cut off.

Every answer is compared with the control's, token for token; no request may fail, hang or leave anything behind.

    python -m benchmarks.chaos [--requests 200] [--seed 1] [--out results/chaos.json]
"""

import argparse
import asyncio
import itertools
import json
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from benchmarks import out
from tests.workers.failures.rig import Answer, Rig
from tests.workers.serving import TWO_OF_EACH, prompt_of
from workers.engine import Sampling, generate
from workers.models import LoadedModel, ModelSpec, load_model

MODES = ("one-shot", "catch-up", "overlap", "kv")
PATIENCE = 0.3  # deadlines of 15 s become 4.5 s: more than a busy machine keeps a worker waiting
FAULTS = ("kill", "stop", "cut", "half-open")


def controls(loaded: LoadedModel, count: int, chance: random.Random) -> list[tuple[list[int], list[int]]]:
    """Prompts of many lengths, and the answers of one process alone."""
    cases = []
    for number in range(count):
        prompt = prompt_of(chance.choice((1, 15, 16, 17, 40, 100, 250)), seed=7000 + number)
        tokens = chance.randint(20, 120)
        cases.append((prompt, generate(loaded, prompt, Sampling(max_tokens=tokens, ignore_eos=True))))
    return cases


async def client(rig: Rig, work: "itertools.chain[Any]", seen: list[dict[str, Any]]) -> None:
    """One request after the other, until there are no more."""
    for prompt, expected in work:
        started = time.monotonic()
        answer = await rig.stream(Answer(), prompt, len(expected))
        seen.append(
            {
                "id": answer.request_id,
                "error": answer.error,
                "equal": answer.ids == expected,
                "took_s": time.monotonic() - started,
            }
        )


async def trouble(rig: Rig, chance: random.Random, faults: Counter[str]) -> None:
    """Fault after fault, each healed before the next."""
    while True:
        await asyncio.sleep(chance.uniform(0.1, 0.6))
        kind, victim = (
            chance.choice(FAULTS),
            chance.choice([name for name, role, _ in TWO_OF_EACH if role != "gateway"]),
        )
        await rig.fault(kind, victim)
        faults[f"{kind} {victim[:-1]}"] += 1
        # sometimes long enough to be noticed, sometimes not
        await asyncio.sleep(chance.choice((0.1, 1.0, 6.0)))
        await rig.heal()
        await rig.whole()


def run(requests: int, clients: int, seed: int, mode: str, directory: Path) -> dict[str, Any]:
    """The figures of one run."""
    chance = random.Random(seed)
    loaded = load_model(ModelSpec("tiny"))
    cases = controls(loaded, min(requests, 60), chance)
    work = itertools.islice(itertools.cycle(cases), requests)
    seen: list[dict[str, Any]] = []
    faults: Counter[str] = Counter()

    async def everything(rig: Rig) -> None:
        troubling = asyncio.create_task(trouble(rig, chance, faults))
        try:
            await asyncio.gather(*(client(rig, work, seen) for _ in range(clients)))  # type: ignore[arg-type]
            if troubling.done():
                troubling.result()
        finally:
            troubling.cancel()
            await asyncio.gather(troubling, return_exceptions=True)
            await rig.heal()
            await rig.settled()

    with Rig(directory, {"handoff": mode}, TWO_OF_EACH, patience=PATIENCE) as rig:
        rig.run(everything(rig), within_s=3600)
        rig.check_books()
        records = [rig.record(one["id"]) for one in seen if one["id"]]
    took = sorted(one["took_s"] for one in seen)
    return {
        "mode": mode,
        "seed": seed,
        "requests": len(seen),
        "equal": sum(one["equal"] for one in seen),
        "errors": [one["error"] for one in seen if one["error"]],
        "faults": dict(sorted(faults.items())),
        "replays": sum(record["pdd_replays"] for record in records),
        "recoveries": dict(Counter(loss["how"] for record in records for loss in record["pdd_recovery"])),
        "unsettled": [record["pdd_unsettled"] for record in records if record["pdd_unsettled"]],
        "took_s": {"p50": took[len(took) // 2], "max": took[-1]},
    }


def main() -> int:
    """Run every mode; exit status 1 when an answer differs, a request fails or something is left."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos", description=main.__doc__)
    parser.add_argument("--requests", type=int, default=100, help="of each mode of hand-over")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--mode", choices=MODES, action="append")
    out.add_option(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for mode in options.mode or MODES:
        with tempfile.TemporaryDirectory(prefix="pddbed-chaos-") as directory:
            row = run(options.requests, options.clients, options.seed, mode, Path(directory))
        print(json.dumps(row, indent=2), flush=True)
        rows.append(row)
    out.write(options.out, rows)
    bad = [row for row in rows if row["equal"] != options.requests or row["errors"] or row["unsettled"]]
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
