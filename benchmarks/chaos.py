"""Random faults under load: rude clients, and workers that are killed, stopped, cut off or cannot write.

Every right request's answer is compared with the control's, token for token, and asked for only as far as fp32 can
decide (`benchmarks/load.py`). None may fail, hang or be recorded twice; a record that is missing must be counted.
The gateway must be the same process at the end, with as much memory and as many descriptors as before, and `/health`
must answer within 0.5 s all the time.

    python -m benchmarks.chaos [--requests 2000] [--faults 500] [--lab-requests 200] [--out results/chaos.json]
"""

import argparse
import asyncio
import json
import random
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import torch

from benchmarks import harness
from benchmarks.chaos_checks import HealthWatch, books, verdict
from benchmarks.load import Case, clear_case
from benchmarks.rude_clients import KINDS, WEIGHTS, Wrong
from testbed.lab.troubles import Troubles
from tests.workers.failures.rig import Rig
from tests.workers.serving import TWO_OF_EACH, prompt_of
from workers.models import LoadedModel, ModelSpec, load_model

MODES = ("one-shot", "catch-up", "overlap", "kv")
PATIENCE = 0.3  # deadlines of 15 s become 4.5 s: more than a busy machine keeps a worker waiting
WORKER_FAULTS = ("kill", "stop", "cut", "half-open", "full disk")
WORKERS_SHARE = 0.12  # of all faults


def controls(loaded: LoadedModel, count: int, chance: random.Random) -> list[Case]:
    """Prompts of many lengths, and the answers of one process alone, as far as there is one right answer."""
    cases = []
    for number in range(count):
        prompt = prompt_of(chance.choice((1, 15, 16, 17, 40, 100, 250)), seed=7000 + number)
        cases.append(clear_case(loaded, tuple(prompt), chance.randint(5, 60)))
    return cases


class Load:
    """Right requests, rude clients and a watch on `/health`, until there were enough of each."""

    def __init__(self, base_url: str, cases: Sequence[Case], chance: random.Random, requests: int, faults: int) -> None:
        self.base_url = base_url
        self.port = int(base_url.rpartition(":")[2])
        self._cases = cases
        self._chance = chance
        self.requests, self.faults_wanted = requests, faults
        self.begun = 0
        self.seen: list[dict[str, Any]] = []
        self.faults: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.health: dict[str, Any] = {}

    @property
    def enough(self) -> bool:
        return self.begun >= self.requests and self.faults.total() >= self.faults_wanted

    async def client(self, http: httpx.AsyncClient) -> None:
        """One right request after the other."""
        while not self.enough:
            case = self._chance.choice(self._cases)
            self.begun += 1
            started = time.monotonic()
            asked = {"prompt": case.prompt, "max_tokens": case.max_tokens, "temperature": 0, "ignore_eos": True}
            one: dict[str, Any] = {"error": None, "equal": False, "id": "", "case": case}
            try:
                ask = self._stream if self._chance.random() < 0.6 else self._whole
                one["id"], ids = await ask(http, asked, len(case.prompt))
                one["equal"] = tuple(ids) == case.expected
                if not one["equal"]:
                    one["got"] = ids
            except (httpx.HTTPError, Wrong) as error:
                one["error"] = f"{type(error).__name__}: {error}"
            self.seen.append({**one, "took_s": time.monotonic() - started})

    async def _stream(self, http: httpx.AsyncClient, asked: dict[str, Any], prompt: int) -> tuple[str, list[int]]:
        ids, name, done = list[int](), "", False
        async with http.stream("POST", "/v1/completions", json={**asked, "stream": True}) as response:
            if response.status_code != 200:
                raise Wrong(f"{response.status_code}: {(await response.aread())[:300]!r}")
            async for line in response.aiter_lines():
                if not line:
                    continue
                done = line == "data: [DONE]"
                if not done:
                    chunk = json.loads(line.removeprefix("data: "))
                    if "error" in chunk:
                        raise Wrong(str(chunk["error"]))
                    name, pdd = chunk["id"], chunk["pdd"]
                    if pdd["position"] != prompt + len(ids):
                        raise Wrong("a gap or a repetition")
                    ids += pdd["token_ids"]
        if not done:
            raise Wrong("the stream has no end")
        return name, ids

    async def _whole(self, http: httpx.AsyncClient, asked: dict[str, Any], _: int) -> tuple[str, list[int]]:
        response = await http.post("/v1/completions", json=asked)
        if response.status_code != 200:
            raise Wrong(f"{response.status_code}: {response.text[:300]}")
        answer = response.json()
        return answer["id"], answer["pdd"]["token_ids"]

    async def rude_client(self) -> None:
        """One after the other."""
        while not self.enough:
            (kind,) = self._chance.choices(tuple(KINDS), WEIGHTS)
            try:
                await KINDS[kind](self.port, random.Random(self._chance.random()))
            except (Wrong, OSError, TimeoutError) as error:
                if not isinstance(error, ConnectionError) or isinstance(error, ConnectionRefusedError):
                    self.wrong.append(f"{kind}: {type(error).__name__}: {error}")
            self.faults[kind] += 1
            if self.faults.total() >= self.faults_wanted:
                return

    async def run(self, clients: int, rude: int, trouble: Coroutine[Any, Any, None]) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=20, keepalive_expiry=30)
        async with httpx.AsyncClient(base_url=self.base_url, timeout=120, limits=limits) as http:
            aside = asyncio.create_task(trouble)
            watch = HealthWatch(self.port)
            try:
                await asyncio.gather(
                    *(self.client(http) for _ in range(clients)), *(self.rude_client() for _ in range(rude))
                )
                if aside.done():
                    aside.result()
            finally:
                aside.cancel()
                await asyncio.gather(aside, return_exceptions=True)
                self.health = await asyncio.to_thread(watch.end)

    def figures(self) -> dict[str, Any]:
        took = sorted(one["took_s"] for one in self.seen)
        return {
            "requests": len(self.seen),
            "equal": sum(one["equal"] for one in self.seen),
            "compared": self._compared(),
            "errors": [one["error"] for one in self.seen if one["error"]],
            "faults": dict(sorted(self.faults.items())),
            "wrong": self.wrong,
            "took_s": {"p50": round(took[len(took) // 2], 3), "max": round(took[-1], 3)},
            "health_s": self.health,
        }

    def _compared(self) -> dict[str, Any]:
        """Answers and their tokens; of those that the control's next token, a tie, has shortened, how many to which
        length.
        """
        cases = [one["case"] for one in self.seen if not one["error"]]
        shortened = Counter(case.max_tokens for case in cases if case.shortened)
        tokens = sum(case.max_tokens for case in cases)
        return {"answers": len(cases), "tokens": tokens, "shortened_to": dict(sorted(shortened.items()))}


async def trouble(rig: Rig, load: Load, chance: random.Random) -> None:
    """Fault after fault of workers, each healed before the next."""
    while True:
        await asyncio.sleep(chance.uniform(0.1, 0.6))
        ours = sum(load.faults[kind] for kind in load.faults if kind not in KINDS)
        if ours > WORKERS_SHARE * load.faults_wanted:
            continue
        kind = chance.choice(WORKER_FAULTS)
        victim = chance.choice([name for name, role, _ in TWO_OF_EACH if role != "gateway"])
        load.faults[f"{kind} {victim[:-1]}" if kind != "full disk" else kind] += 1
        if kind == "full disk":
            async with full_disk(rig.cluster.pids["gw0"]):
                await asyncio.sleep(chance.choice((0.2, 1.0)))
            continue
        await rig.fault(kind, victim)
        # sometimes long enough to be noticed, sometimes not
        await asyncio.sleep(chance.choice((0.1, 0.1, 1.0, 6.0)))
        await rig.heal()
        await rig.whole()


@asynccontextmanager
async def full_disk(pid: int) -> AsyncIterator[None]:
    """No file of a process can grow: records and log lines are lost, as on a disk without room."""
    _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard, hard))


def held(pid: int) -> dict[str, int]:
    """Resident memory (kB) and descriptors of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    fds = sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
    return {"rss_kb": int(status.partition("VmRSS:")[2].split()[0]), "descriptors": fds}


def over_a_cluster(requests: int, faults: int, clients: int, seed: int, mode: str, directory: Path) -> dict[str, Any]:
    """The figures of one run over a forked cluster with two workers of each role."""
    chance = random.Random(seed)
    cases = controls(load_model(ModelSpec("tiny")), min(requests, 60), chance)
    before: dict[str, int] = {}

    async def everything(rig: Rig) -> Load:
        warm = Load(rig.cluster.base_url, cases, chance, 40, 20)
        await warm.run(4, 2, asyncio.sleep(0))
        await rig.settled()
        await asyncio.sleep(0.5)
        before.update(held(rig.cluster.pids["gw0"]))
        load = Load(rig.cluster.base_url, cases, chance, requests, faults)
        try:
            await load.run(clients, 3, trouble(rig, load, chance))
        finally:
            await rig.heal()
            await rig.settled()
        return load

    directory.mkdir(parents=True, exist_ok=True)
    troubles = Troubles(file := directory / "unwritten.now", ["gw0"])
    told = {"gw0": {"PDDBED_UNWRITTEN": f"0:{file}"}}
    with Rig(directory, {"handoff": mode}, TWO_OF_EACH, patience=PATIENCE, extra=told) as rig:
        pid = rig.cluster.pids["gw0"]
        load = rig.run(everything(rig), within_s=3600)
        time.sleep(1)
        after = held(pid)
        same = rig.cluster.pids["gw0"] == pid and Path(f"/proc/{pid}").exists()
        rig.check_books()
        metrics = rig.run(rig.metrics())
        lines = (rig.cluster.records / "requests.jsonl").read_text().splitlines()
    return {
        "over": "cluster",
        "mode": mode,
        "seed": seed,
        **load.figures(),
        **books(load.seen, lines, metrics, troubles.unwritten().get("gw0", {}).get("requests", 0)),
        "same_gateway": same,
        "gateway": {"before": before, "after": after},
    }


def main() -> int:
    """Run over a cluster, with each mode of hand-over in turn, and over a lab; exit status 1 when anything is wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos", description=main.__doc__)
    parser.add_argument("--requests", type=int, default=2000, help="right requests over the cluster, of all modes")
    parser.add_argument("--faults", type=int, default=500, help="over the cluster, of all modes")
    parser.add_argument("--lab-requests", type=int, default=200, help="0: no lab")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--mode", choices=MODES, action="append")
    harness.add_option(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows, modes = [], options.mode or MODES
    with tempfile.TemporaryDirectory(prefix="pddbed-chaos-") as directory:
        for number, mode in enumerate(modes):
            requests, faults = options.requests // len(modes), options.faults // len(modes)
            place = Path(directory) / mode
            rows.append(over_a_cluster(requests, faults, options.clients, options.seed + number, mode, place))
            print(json.dumps(rows[-1], indent=2), flush=True)
        if options.lab_requests:
            from benchmarks.chaos_lab import over_a_lab

            rows.append(over_a_lab(options.lab_requests, options.clients, options.seed, Path(directory)))
            print(json.dumps(rows[-1], indent=2), flush=True)
    harness.write(options.out, rows)
    bad = [problem for row in rows for problem in verdict(row)]
    for problem in bad:
        print(problem, file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
