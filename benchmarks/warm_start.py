"""The first KV transfer of a fresh lab, with its connections warmed and cold: 2 MB over 400 Mbit/s and 40 ms.

    python -m benchmarks.warm_start [--rounds 5] [--out results/warm-start.json]

Each round raises a lab of the built-in model, gives it a second, asks twice with prompts of 1,000 tokens that share
nothing (2 MB of KV each, straight to main decode), and reads both transfers from the records. Cold and warm alternate.
Run as root.
"""

import argparse
import json
import statistics
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.harness import pddbed
from testbed.topology.overlay import laid_over

TOKENS = 1000
TOPOLOGY = """
name: warm-start
datacenters:
  main:
    subnet: 10.1.0.0/24
    hosts: {gw0: {role: gateway}, p0: {role: prefill}}
  remote:
    subnet: 10.2.0.0/24
    hosts: {md0: {role: main-decode}}
wan: [{name: wan0, between: [main, remote], rate: 400mbit, rtt: 40ms}]
serving: {pipeline: cdc-pd}
"""


def one_round(warm: bool, rate: str, rtt: str, settle_s: float) -> dict[str, float]:
    """Transfer times (ms) of the first two requests, how long `up` took (s), and the padding sent (bytes)."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "warm-start.yaml"
        overlay = {"wan.wan0.rate": rate, "wan.wan0.rtt": rtt, "serving.kv_pool": {"warm": warm}}
        file.write_text(laid_over(file, overlay, TOPOLOGY))
        began = time.monotonic()
        state = json.loads(pddbed("up", str(file), "--api", "auto", "--json"))
        up_s = time.monotonic() - began
        try:
            time.sleep(settle_s)
            transfers = [ask(state["api"], seed)["pdd_kv_xfer_ms"] for seed in range(2)]
            padding = padding_bytes(state["api"])
        finally:
            pddbed("down", "warm-start")
    return {"first_ms": transfers[0], "second_ms": transfers[1], "up_s": up_s, "padding": padding}


def ask(api: str, seed: int, tokens: int = TOKENS) -> dict[str, Any]:
    """The record of one request with a prompt of its own."""
    prompt = [32 + (seed * 7 + 31 * index + index * index * (1 + seed)) % 95 for index in range(tokens)]
    body = json.dumps({"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0}).encode()
    request = urllib.request.Request(f"{api}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as response:
        record: dict[str, Any] = json.load(response)["pdd"]["record"]
    return record


def padding_bytes(api: str) -> int:
    """So far, by the gateway's metrics."""
    metrics = urllib.request.urlopen(f"{api}/metrics", timeout=30).read().decode()
    lines = [line for line in metrics.splitlines() if 'class="padding"' in line and "sent" in line and "bytes" in line]
    return int(sum(float(line.rpartition(" ")[2]) for line in lines))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.warm_start", description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rate", default="400mbit")
    parser.add_argument("--rtt", default="40ms")
    parser.add_argument("--settle", type=float, default=1.0, help="seconds between `up` and the first request")
    harness.add_option(parser)
    options = parser.parse_args()
    rounds: dict[str, list[dict[str, float]]] = {"cold": [], "warm": []}
    for _ in range(options.rounds):
        for name in rounds:
            rounds[name].append(one_round(name == "warm", options.rate, options.rtt, options.settle))
    lines = [f"2 MB over {options.rate} x {options.rtt}, {options.rounds} labs each, medians"]
    lines.append(f"{'':<6}{'FIRST':>12}{'SECOND':>12}{'PADDING':>12}{'UP':>9}")
    for name, entries in rounds.items():
        first, second, padding, up_s = (
            statistics.median(entry[key] for entry in entries) for key in ("first_ms", "second_ms", "padding", "up_s")
        )
        lines.append(f"{name:<6}{first:>9.1f} ms{second:>9.1f} ms{padding:>10.0f} B{up_s:>7.2f} s")
    print("\n".join(lines))
    harness.write(options.out, {**vars(options), "out": str(options.out), "rounds": rounds}, lines)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
