"""The pause of each hand-over mode against its bound, and what crosses for it, over an emulated WAN.

    python -m benchmarks.handover [--rtt 40ms 400ms] [--modes one-shot catch-up overlap kv] [--requests 6]
                                  [--model smollm2-135m] [--out FILE]

A lab for each mode and round trip (`pddbed up`, userspace driver), one greedy request at a time, each with a prompt of
its own over a WAN so slow that the relay makes a few dozen tokens first. The pause is what the gateway sees between the
relay's last and main decode's first token; ITLs are medians of the same request, the larger one of both sides. Bounds:

    one-shot   about RTT + extend, the extend as main decode reports it
    catch-up   RTT + 2 ITL
    overlap    2 ITL, where main decode is faster: in this mode the relay's CPU is shared with a busy loop
    kv         about RTT + bytes / rate

A request counts as within when its pause is at most the bound; the verdict is on the median. Run as root.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks import harness

PDDBED = [sys.executable, "-c", "from testbed.cli import main; main()"]
MODES = ("one-shot", "catch-up", "overlap", "kv")
RATE_BPS = 20e6
FEW_TOKENS = 5
ABOUT = 1.15  # "about RTT + extend": queueing of the ids and of main decode's token is not counted in it


@dataclass(frozen=True)
class Plan:
    """One lab. `busy`: another program wants the relay's CPU."""

    mode: str
    rtt_ms: float
    model: str
    busy: bool

    def topology(self) -> str:
        """The lab's file."""
        loop = "      other0: {command: 'while :; do :; done', cpu: {affinity: [0]}}\n" if self.busy else ""
        return (
            "name: handover\nseed: 1\n"
            "datacenters:\n"
            "  main:\n    subnet: 10.1.0.0/24\n    hosts:\n"
            "      gw0: {role: gateway}\n      p0: {role: prefill}\n"
            "      rld0: {role: relay-decode, cpu: {affinity: [0]}}\n"
            f"{loop}"
            "  remote:\n    subnet: 10.2.0.0/24\n    hosts:\n      md0: {role: main-decode, cpu: {affinity: [1]}}\n"
            "wan:\n  - {name: wan0, between: [main, remote], driver: userspace, "
            f"rate: {RATE_BPS / 1e6:.0f}mbit, rtt: {self.rtt_ms:.0f}ms}}\n"
            f"model: {{name: {self.model}}}\n"
            f"serving: {{handoff: {self.mode}}}\n"
        )


@dataclass(frozen=True)
class Pause:
    """One hand-over, times in ms."""

    pause: float
    bound: float
    relay_itl: float
    main_itl: float
    extend: float
    relay_hold: float
    rounds: int
    recomputed: int
    relay_tokens: int
    id_bytes: int
    kv_bytes: int


def pddbed(*arguments: str) -> str:
    """Run the command; its output. Raises RuntimeError with its error."""
    done = subprocess.run([*PDDBED, *arguments], capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise RuntimeError(f"pddbed {' '.join(arguments)} failed: {done.stderr.strip()[-2000:]}")
    return done.stdout


def bound_of(mode: str, rtt_ms: float, itl_ms: float, extend_ms: float, kv_bytes: int) -> float:
    """Pause that the mode promises (ms)."""
    if mode == "catch-up":
        return rtt_ms + 2 * itl_ms
    if mode == "overlap":
        return 2 * itl_ms
    return ABOUT * (rtt_ms + extend_ms + kv_bytes * 8 / RATE_BPS * 1e3)


def pause_of(plan: Plan, answer: dict[str, Any]) -> Pause:
    """Pause of an answer, from its record. Raises ValueError when main decode did not take over."""
    record, made_by = answer["record"], answer["instances"]
    if record["pdd_handoff_pause_ms"] is None:
        raise ValueError(
            f"no hand-over: {record['pdd_rld_tokens']} tokens of the relay, {record['pdd_md_tokens']} after"
        )
    gaps: dict[str, list[float]] = {"rld0": [], "md0": []}
    for before, after, gap in zip(made_by, made_by[1:], record["itl"], strict=False):
        if before == after:
            gaps[after].append(gap * 1e3)
    relay_itl, main_itl = (statistics.median(gaps[name][1:]) for name in ("rld0", "md0"))
    spans = {span["name"]: span for span in record["pdd_spans"]}
    extend = (spans["extend"]["end_ns"] - spans["extend"]["start_ns"]) / 1e6
    bound = bound_of(plan.mode, plan.rtt_ms, max(relay_itl, main_itl), extend, record["pdd_handoff_kv_bytes"] or 0)
    return Pause(
        pause=record["pdd_handoff_pause_ms"],
        bound=bound,
        relay_itl=relay_itl,
        main_itl=main_itl,
        extend=extend,
        relay_hold=record["pdd_rld_hold_ms"],
        rounds=record["pdd_handoff_rounds"],
        recomputed=record["pdd_handoff_recomputed"],
        relay_tokens=record["pdd_rld_tokens"],
        id_bytes=record["pdd_handoff_id_bytes"] or 0,
        kv_bytes=record["pdd_handoff_kv_bytes"] or 0,
    )


def ask(api: str, prompt: list[int], max_tokens: int) -> dict[str, Any]:
    """One greedy answer: token ids, instances, record."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    response = httpx.post(f"{api}/v1/completions", json=body, timeout=300)
    if response.status_code != 200:
        raise RuntimeError(f"the lab answered {response.status_code}: {response.text[:500]}")
    answer: dict[str, Any] = response.json()["pdd"]
    return answer


def run(plan: Plan, lab: str, requests: int, shape: tuple[int, int], seed: int = 1) -> dict[str, Any]:
    """The pauses of one lab, which is gone afterwards. `shape`: prompt and answer tokens."""
    chance = random.Random(f"{plan.mode} {plan.rtt_ms} {seed}")
    with tempfile.TemporaryDirectory(prefix="pddbed-handover-") as directory:
        file = Path(directory) / "lab.yaml"
        file.write_text(plan.topology())
        pddbed("up", str(file), "--name", lab, "--api", "auto")
        try:
            status = json.loads(pddbed("status", "-l", lab, "--json"))
            pauses: list[Pause] = []
            asked = 0
            while len(pauses) < requests and asked < 2 * requests + 1:
                prompt = [chance.randrange(100, 250) for _ in range(shape[0])]
                pause = pause_of(plan, ask(status["api"], prompt, shape[1]))
                if asked and pause is not None:  # the first one warms the connections and the model up
                    pauses.append(pause)
                asked += 1
                print(f"\r{plan.mode} at {plan.rtt_ms:.0f} ms: {len(pauses)} of {requests}", end="", file=sys.stderr)
        finally:
            pddbed("down", lab)
    print(file=sys.stderr)
    if not pauses:
        raise RuntimeError(f"{asked} answers, and no hand-over after {FEW_TOKENS} tokens: ask for longer ones")
    return summary(plan, pauses, (status.get("verified") or {}).get("ok"))


def summary(plan: Plan, pauses: Sequence[Pause], verified: bool | None) -> dict[str, Any]:
    """Medians, and how many pauses were within their own bound."""

    def median(name: str) -> float:
        return round(statistics.median(getattr(pause, name) for pause in pauses), 1)

    found: dict[str, Any] = {
        "mode": plan.mode,
        "rtt_ms": plan.rtt_ms,
        "relay_cpu_shared": plan.busy,
        "requests": len(pauses),
        "link_verified": verified,
    }
    for name in Pause.__dataclass_fields__:
        found[name if name in ("rounds", "recomputed", "relay_tokens") or "bytes" in name else f"{name}_ms"] = median(
            name
        )
    found["id_bytes_per_token"] = round(sum(p.id_bytes for p in pauses) / sum(p.relay_tokens for p in pauses), 1)
    found["kv_bytes_per_token"] = round(
        sum(p.kv_bytes for p in pauses) / sum(max(1, p.relay_tokens - 1) for p in pauses)
    )
    found["within"] = sum(pause.pause <= pause.bound for pause in pauses)
    found["holds"] = found["pause_ms"] <= found["bound_ms"]
    found["pauses_ms"] = [round(pause.pause, 1) for pause in pauses]
    return found


COLUMNS = (
    ("mode", "mode"),
    ("rtt_ms", "RTT ms"),
    ("pause_ms", "pause ms"),
    ("bound_ms", "bound ms"),
    ("within", "within"),
    ("relay_itl_ms", "ITL RLD"),
    ("main_itl_ms", "ITL MD"),
    ("extend_ms", "extend ms"),
    ("rounds", "rounds"),
    ("recomputed", "recomputed"),
    ("relay_tokens", "RLD tokens"),
    ("relay_hold_ms", "RLD hold ms"),
    ("id_bytes_per_token", "id B/token"),
    ("kv_bytes_per_token", "KV B/token"),
)


def table(found: Sequence[dict[str, Any]]) -> str:
    """For people."""
    rows = [[title for _, title in COLUMNS]]
    rows += [[f"{row[key]:g}" if isinstance(row[key], float) else str(row[key]) for key, _ in COLUMNS] for row in found]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.handover", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rtt", nargs="+", default=["40ms", "400ms"])
    parser.add_argument("--modes", nargs="+", default=MODES, choices=MODES)
    parser.add_argument("--requests", type=int, default=6)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--prompt", type=int, default=200, help="tokens")
    parser.add_argument("--answer", type=int, default=140, help="tokens")
    harness.add_option(parser)
    options = parser.parse_args()
    found = []
    for rtt in options.rtt:
        for mode in options.modes:
            plan = Plan(mode, float(rtt.removesuffix("ms")), options.model, busy=mode == "overlap")
            found.append(run(plan, "bench-handover", options.requests, (options.prompt, options.answer)))
    lines = [table(found)]
    ids, kv = (max((row[key] for row in found), default=0) for key in ("id_bytes_per_token", "kv_bytes_per_token"))
    if kv and ids:
        lines.append(f"token ids: at most {ids:g} bytes a token in frames, its KV {kv:g}: {kv / ids:.0f} times as many")
    lines += [f"{row['mode']} at {row['rtt_ms']:g} ms RTT: pause above its bound" for row in found if not row["holds"]]
    print("\n".join(lines))
    harness.write(options.out, {"model": options.model, "rate_bps": RATE_BPS, "rows": found}, lines)
    return 0 if all(row["holds"] for row in found) else 1


if __name__ == "__main__":
    sys.exit(main())
