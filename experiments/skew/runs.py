"""Runs of `skew`: two published rows over seeds, and rows that only the fit predicts.

The workers' transport from p0 to md0, connections warm; packets are captured during each part.
"""

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.framework.base import ExperimentError, Options, Part, PartResult, Progress
from experiments.framework.checks import check_bytes
from experiments.framework.directory import edit_topology, write_whole
from experiments.framework.figures import percentile
from experiments.framework.lab import ExperimentLab
from experiments.framework.process import Process
from experiments.skew.fit import FIT_FILE, TOPOLOGY, TRANSFERS, Fit, as_json, refit
from experiments.traces.hit_rates import BIMODAL, DISTRIBUTIONS, MEAN_MATCHED, SKEWED, UNIFORM, MissRates, draw
from experiments.transport.memory import Shape
from experiments.transport.pair import note_quietly, start_pair

BLOCKS = 256  # of a whole prompt: miss rates come in steps of 0.4 %
FULL = Shape(tokens=4096, block_size=16, bytes_per_token=256)
QUICK = Shape(tokens=1024, block_size=4, bytes_per_token=256)  # a quarter of the bytes, in the same times
QUICK_TRANSFERS = 80
PREDICTED_TRANSFERS = 192
SETTLE_S = 6.0  # warm-up and ends of a part


@dataclass(frozen=True, slots=True)
class Row:
    """Transfers of one distribution at one spacing. `load`: of the arrivals, as a multiple of the published rows'."""

    name: str
    rates: MissRates
    transfers: int
    load: float = 1.0


PREDICTED = (
    Row("uniform, load +10 %", UNIFORM, PREDICTED_TRANSFERS, 1.10),
    Row("mean-matched", MEAN_MATCHED, PREDICTED_TRANSFERS),
    Row("bimodal", BIMODAL, PREDICTED_TRANSFERS),
)


def shape(options: Options) -> Shape:
    return QUICK if options.quick else FULL


def published(options: Options) -> tuple[Row, Row]:
    """The two rows; the same arrivals for both."""
    count = QUICK_TRANSFERS if options.quick else TRANSFERS
    return Row("skewed", SKEWED, count), Row("uniform", UNIFORM, count)


def parts(options: Options, fit: Fit) -> list[Part]:
    """Seed by seed, then, of a full run, the predictions with the first seed."""
    seeds = range(1, options.seeds + 1)
    made = [_part(row, seed, fit) for seed in seeds for row in published(options)]
    if not options.quick:
        made += [_part(row, 1, fit) for row in PREDICTED]
    return made


def _part(row: Row, seed: int, fit: Fit) -> Part:
    spacing_ms = fit.spacing_ms / row.load
    last_ms = fit.predict_waits_ms(row.rates, row.transfers, seed, spacing_ms)[-1]
    seconds = (row.transfers * spacing_ms + last_ms + fit.hold_ms(row.rates.mean)) / 1000 + SETTLE_S
    plain = row.name.replace(", ", "-").replace(" ", "-").replace("%", "percent").replace("+", "plus-")
    detail = {
        "row": row.name,
        "distribution": row.rates.name,
        "transfers": row.transfers,
        "spacing_ms": spacing_ms,
        "load": row.load,
    }
    return Part(f"{plain}-seed{seed}", seed, seconds, detail)


def first_blocks(part: Part) -> list[int]:
    """Number of blocks of each transfer that the receiver holds. At least one block misses: the last token's."""
    misses = draw(DISTRIBUTIONS[part.detail["distribution"]], part.detail["transfers"], part.seed)
    return [BLOCKS - min(BLOCKS, max(1, round(miss * BLOCKS))) for miss in misses]


LATEST_P99_MS = 20.0  # of starting a transfer: later, and the machine was too busy for the arrivals to be even
_LEAD_NS = 300_000_000
_WARM_UP = 24  # whole prompts, three a connection: TCP windows are open before anything is measured


class SkewSession:
    """Orders transfers and gathers their times."""

    def __init__(self, lab: ExperimentLab, sender: Process, receiver: Process) -> None:
        self._lab = lab
        self._sender = sender
        self._receiver = receiver

    def transfers(
        self, name: str, starts_ns: list[int], blocks: list[int], progress: Progress = lambda share: None
    ) -> list[dict[str, Any]]:
        """Their times, by index. Raises ExperimentError when one fails."""
        self._sender.order(op="transfers", name=name, lead_ns=_LEAD_NS, starts_ns=starts_ns, first_blocks=blocks)
        found: list[dict[str, Any]] = []
        for event in self._sender.events():
            if event["event"] == "done":
                break
            if event["event"] == "transfer":
                found.append(event)
                progress(len(found) / len(starts_ns))
        return sorted(found, key=lambda transfer: int(transfer["index"]))

    def run(self, part: Part, directory: Path, progress: Progress) -> PartResult:
        capture = directory / "wan0.pcapng"
        detail = part.detail
        starts_ns = [round(index * detail["spacing_ms"] * 1e6) for index in range(detail["transfers"])]
        blocks = first_blocks(part)
        with self._lab.capturing("wan0", capture):
            note_quietly(self._sender, self._receiver)
            found = self.transfers(part.name, starts_ns, blocks, progress)
            note_quietly(self._sender, self._receiver)
        check = check_bytes(capture, self._lab.directory)
        records = [_record(part, blocks[transfer["index"]], transfer) for transfer in found]
        late_ms = percentile([record["pdd_late_ms"] for record in records], 0.99)
        reasons = check.reasons
        if late_ms > LATEST_P99_MS:
            reasons.append(f"transfers started late, p99 {late_ms:.0f} ms (limit {LATEST_P99_MS:.0f} ms)")
        return PartResult(records, {**check.facts(), "late_p99_ms": late_ms}, reasons)


def _record(part: Part, first_block: int, transfer: dict[str, Any]) -> dict[str, Any]:
    """A line of requests.jsonl. Spans are nanoseconds since the part's first arrival."""
    start_ns = transfer["asked_ns"] + transfer["queue_ns"]
    spans = [
        {"name": "kv-queue", "start_ns": transfer["asked_ns"], "end_ns": start_ns},
        {
            "name": "wan-transfer",
            "start_ns": start_ns,
            "end_ns": transfer["received_ns"],
            "bytes": transfer["kv_bytes"],
        },
        {"name": "confirmation", "start_ns": transfer["received_ns"], "end_ns": transfer["done_ns"]},
    ]
    return {
        "request_id": f"{part.name}-{transfer['index']}",
        "part": part.name,
        "row": part.detail["row"],
        "seed": part.seed,
        "success": True,
        "arrival_s": transfer["asked_ns"] / 1e9,
        "pdd_md_hit": first_block / BLOCKS,
        "pdd_delta_bytes": transfer["kv_bytes"],
        "pdd_kv_queue_ms": transfer["queue_ns"] / 1e6,
        "pdd_kv_xfer_ms": (transfer["received_ns"] - start_ns) / 1e6,
        "pdd_kv_held_ms": (transfer["done_ns"] - start_ns) / 1e6,
        "pdd_late_ms": transfer["late_ns"] / 1e6,
        "pdd_spans": spans if transfer["queue_ns"] else spans[1:],
    }


@contextmanager
def open_session(lab: ExperimentLab, shape: Shape, connection_bps: int) -> Iterator[SkewSession]:
    """Start both ends, connect, open the windows."""
    sender, receiver = start_pair(lab, "experiments.transport.endpoint", shape, connection_bps)
    session = SkewSession(lab, sender, receiver)
    session.transfers("warm-up", [0] * _WARM_UP, [0] * _WARM_UP)
    yield session


_MISSED_BLOCKS = (1, 3, 6, 12, 26, 51, 102, 128, 154, 205, 256)
_TIMES = 5
_APART_NS = 350_000_000  # at most seven at once: nobody waits


def refit_live(say: Callable[[str], None]) -> Iterator[str]:
    """Measure, solve, write. Yields what was found, in words. Raises ExperimentError."""
    before = Fit.read()
    missed = list(_MISSED_BLOCKS) * _TIMES
    with tempfile.TemporaryDirectory(prefix="pddbed-fit-") as directory:
        with ExperimentLab(TOPOLOGY, Path(directory), with_workers=False, on_step=say) as lab:
            with open_session(lab, FULL, before.connection_bps(FULL.bytes)) as session:
                say(f"measuring {len(missed)} transfers")
                starts_ns = [index * _APART_NS for index in range(len(missed))]
                found = session.transfers("fit", starts_ns, [BLOCKS - count for count in missed])
            reasons = lab.verify()["reasons"]
    if reasons:
        raise ExperimentError(f"the lab was not faithful, so nothing is fitted: {'; '.join(reasons)}; try again")
    queued = sum(transfer["queue_ns"] > 0 for transfer in found)
    if queued:
        raise ExperimentError(f"{queued} transfers had to wait for a connection; is the machine busy? Try again")
    measured = [
        (missed[transfer["index"]] / BLOCKS, (transfer["done_ns"] - transfer["asked_ns"]) / 1e6) for transfer in found
    ]
    how = (
        f"base and whole: least squares over {len(found)} transfers without queueing, at a round trip of "
        f"{before.rtt_ms} ms and {before.whole_configured_ms} ms for a whole prompt, moved to the published medians; "
        "spacing: bisection of a simulated first-come queue over 16 draws that no run uses"
    )
    fit = refit(before, measured, how)
    write_whole(FIT_FILE, json.dumps(as_json(fit), indent=1) + "\n")
    edit_topology(TOPOLOGY, {"wan.wan0.rtt": f"{fit.rtt_ms}ms"})
    for name, value in as_json(fit).items():
        yield f"{name:<20} {getattr(before, name)} -> {value}" if name != "how" else f"{name:<20} {value}"
