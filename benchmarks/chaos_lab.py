"""The lab's part of `benchmarks.chaos`: the same clients over a raised lab whose workers stall and whose WAN drops out.

Needs what raising a lab needs. A worker that is killed in a lab stays away, so each role has a second one.
"""

import asyncio
import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import torch

from benchmarks.chaos import Load, controls, held
from benchmarks.chaos_checks import books
from testbed.lab.troubles import WORDS
from workers.models import ModelSpec, load_model

TOPOLOGY = """
name: chaos
seed: 1
datacenters:
  main:
    subnet: 10.1.0.0/24
    hosts:
      gw0:  {role: gateway}
      p0:   {role: prefill}
      p1:   {role: prefill}
      rld0: {role: relay-decode}
      rld1: {role: relay-decode}
  remote:
    subnet: 10.2.0.0/24
    hosts:
      md0:  {role: main-decode}
      md1:  {role: main-decode}
wan:
  - {name: wan0, between: [main, remote], rate: 400mbit, delay: 5ms}
model: {name: tiny, seed: 0}
"""
NAME = "chaos"
FAULTS = ("stop", "delay", "loss", "kill")


def pddbed(*arguments: str) -> str:
    """Output of the command of this checkout. Raises CalledProcessError."""
    command = [sys.executable, "-c", "from testbed.cli import main; main(prog_name='pddbed')", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout


def hosts(name: str) -> dict[str, dict[str, Any]]:
    return {host["name"]: host for host in json.loads(pddbed("status", "-l", name, "--json"))["hosts"]}


def signal(name: str, host: str, pid: int, number: str) -> None:
    pddbed("exec", "-l", name, host, "--", "kill", f"-{number}", str(pid))


async def trouble(name: str, load: Load, chance: random.Random) -> None:
    """Workers that stall for a while, a WAN that is slow or loses packets, and in the end one death of each role."""
    pids = {host: state["pid"] for host, state in hosts(name).items()}
    doomed = ["p1", "rld1", "md1"]
    while True:
        await asyncio.sleep(chance.uniform(0.1, 0.6))
        kind = chance.choice(FAULTS)
        if kind == "kill" and doomed:
            victim = doomed.pop()
            await asyncio.to_thread(signal, name, victim, pids[victim], "KILL")
        elif kind in ("stop", "kill"):
            victim = chance.choice(("p0", "rld0", "md0"))
            await asyncio.to_thread(signal, name, victim, pids[victim], "STOP")
            await asyncio.sleep(chance.choice((0.1, 0.5)))
            await asyncio.to_thread(signal, name, victim, pids[victim], "CONT")
        else:
            setting = ("--delay", "80ms") if kind == "delay" else ("--loss", "5%")
            await asyncio.to_thread(pddbed, "wan", "set", "-l", name, "wan0", *setting)
            await asyncio.sleep(chance.choice((0.5, 2)))
            await asyncio.to_thread(pddbed, "wan", "reset", "-l", name, "wan0")
        load.faults[f"{kind} in the lab"] += 1


def _settle(name: str, load: Load) -> None:
    """Wait until no worker holds a request. Raises TimeoutError."""
    end = time.monotonic() + 60
    while "pddbed_requests_running 0" not in httpx.get(f"{load.base_url}/metrics", timeout=30).text:
        if time.monotonic() > end:
            raise TimeoutError("requests are not let go")
        time.sleep(0.2)


def over_a_lab(requests: int, clients: int, seed: int, directory: Path, name: str = NAME) -> dict[str, Any]:
    """The figures of one run over a lab with two workers of each role."""
    chance = random.Random(seed)
    cases = controls(load_model(ModelSpec("tiny")), min(requests, 40), chance)
    torch.set_num_threads(1)
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / "chaos.yaml"
    file.write_text(TOPOLOGY)
    pddbed("up", str(file), "--name", name, "--api", "auto", "--no-verify")
    try:
        state = json.loads(pddbed("status", "-l", name, "--json"))
        outside = _outside(hosts(name)["gw0"]["pid"], name)
        warm = Load(state["api"], cases, chance, 20, 10)
        asyncio.run(warm.run(4, 1, asyncio.sleep(0)))
        _settle(name, warm)
        before = held(outside)
        load = Load(state["api"], cases, chance, requests, requests // 4)
        asyncio.run(load.run(clients, 2, trouble(name, load, chance)))
        _settle(name, load)
        time.sleep(1)
        status = json.loads(pddbed("status", "-l", name, "--json"))
        gateway = next(host for host in status["hosts"] if host["name"] == "gw0")
        unwritten = f"gw0 could not write {WORDS['requests']}"
        told = sum(row["times"] for row in status["troubles"] if row["what"] == unwritten)
        metrics = httpx.get(f"{load.base_url}/metrics", timeout=30).text.splitlines()
        records = Path("/run/pddbed") / name / "records" / "requests.jsonl"
        return {
            "over": "lab",
            "seed": seed,
            **load.figures(),
            **books(load.seen, records.read_text().splitlines(), metrics, told),
            "same_gateway": gateway["state"] == "ready" and not gateway["restarts"],
            "gateway": {"before": before, "after": held(outside)},
        }
    finally:
        pddbed("down", name)


def _outside(inside: int, name: str) -> int:
    """The pid, on this machine, of a lab's process: it holds the lab's name in its environment."""
    for place in Path("/proc").glob("[0-9]*"):
        try:
            variables = (place / "environ").read_bytes()
            pids = [line for line in (place / "status").read_text().splitlines() if line.startswith("NSpid")]
        except OSError:
            continue
        found = pids[0].split()[1:] if pids else []
        if len(found) > 1 and found[-1] == str(inside) and b"PDDBED_FORKSERVER_FD" in variables:
            return int(found[0])
    raise LookupError(f"no process of lab {name} has pid {inside} inside")
