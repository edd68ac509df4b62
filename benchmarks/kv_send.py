"""KV sent after prefill against KV sent while prefill computes: how much of the transfer the client waits for.

    python -m benchmarks.kv_send [--rounds 5] [--rate 200mbit] [--rtt 20ms] [--tokens 3000] [--out results/kv-send.json]

One lab for each way, of the built-in model, straight to main decode. Each round asks once with a prompt that no cache
knows, in both labs by turns; the records tell prefill's time, the transfer's, and what of it came after prefill. Two
labs share the CPUs, and only one of them works at a time. Run as root.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.harness import pddbed
from benchmarks.warm_start import TOPOLOGY, ask
from testbed.topology.overlay import laid_over

WAYS = ("after-prefill", "chunked")


@contextmanager
def lab(way: str, rate: str, rtt: str, folder: Path) -> Iterator[str]:
    """A running lab's API."""
    name, file = f"kv-send-{way}", folder / f"{way}.yaml"
    overlay = {"wan.wan0.rate": rate, "wan.wan0.rtt": rtt, "serving.kv_send": way}
    file.write_text(laid_over(file, overlay, TOPOLOGY))
    state = json.loads(pddbed("up", str(file), "--name", name, "--api", "auto", "--json"))
    try:
        yield state["api"]
    finally:
        pddbed("down", name)


def figures(record: dict[str, Any]) -> dict[str, float]:
    """Figures of one request, in ms."""
    prefill = next(span for span in record["pdd_spans"] if span["name"] == "prefill")
    return {
        "prefill_ms": (prefill["end_ns"] - prefill["start_ns"]) / 1e6,
        "transfer_ms": record["pdd_kv_xfer_ms"],
        "exposed_ms": record["pdd_kv_exposed_ms"],
        "ttft_ms": record["ttft"] * 1e3,
        "bytes": record["pdd_delta_bytes"],
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kv_send", description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rate", default="200mbit")
    parser.add_argument("--rtt", default="20ms")
    parser.add_argument("--tokens", type=int, default=3000)
    harness.add_option(parser)
    options = parser.parse_args()
    rounds: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        apis = {way: stack.enter_context(lab(way, options.rate, options.rtt, Path(folder))) for way in WAYS}
        for number in range(options.rounds + 1):
            for way, api in apis.items():
                record = ask(api, number, options.tokens)
                assert record["pdd_kv_send"] == way
                if number:  # the first one is for connections and caches of the CPU
                    rounds[way].append(figures(record))
    size = rounds["chunked"][0]["bytes"] / 1e6
    lines = [f"{options.tokens} tokens, {size:.1f} MB of KV over {options.rate} x {options.rtt}, medians"]
    lines.append(f"{'':<15}{'PREFILL':>12}{'TRANSFER':>12}{'AFTER PREFILL':>16}{'TTFT':>12}")
    for way, entries in rounds.items():
        prefill, transfer, exposed, ttft = (
            statistics.median(entry[key] for entry in entries)
            for key in ("prefill_ms", "transfer_ms", "exposed_ms", "ttft_ms")
        )
        lines.append(f"{way:<15}{prefill:>9.0f} ms{transfer:>9.0f} ms{exposed:>13.0f} ms{ttft:>9.0f} ms")
    print("\n".join(lines))
    harness.write(options.out, {**vars(options), "out": str(options.out), "rounds": rounds}, lines)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
