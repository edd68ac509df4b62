"""Runs of `handoff`: KV streamed, or token ids sent and recomputed, on the calm and on the congested WAN."""

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from experiments.framework.base import ExperimentError, Options, Part, PartResult, Progress
from experiments.framework.checks import check_bytes
from experiments.framework.lab import ExperimentLab
from experiments.framework.process import Process
from experiments.handoff.endpoint import ONLY_IDS
from experiments.handoff.fit import (
    RECOMPUTE_MAX_MS,
    RECOMPUTE_MEAN_MS,
    RECOMPUTE_STD_MS,
    SPACING_S,
    TOKENS,
    Fit,
    as_csv,
)
from experiments.transport.memory import Shape
from experiments.transport.pair import note_quietly, start_pair
from testbed.lab.messages import WanReset
from testbed.machine.programs import environment, program

SMOLLM2 = "smollm2-135m"
SMOLLM2_SPACING_S = 1.2
_FULL = {"kv": (40, 160), "recompute": (48, 48)}  # calm, congested
_QUICK = {"kv": (6, 14), "recompute": (6, 6)}
_SMOLLM2_COUNT = 40
SETTLE_S = 3.0


def parts(options: Options, smollm2: bool) -> list[Part]:
    """Seed by seed; then, of a full run and where the model has been fetched, SmolLM2 as fast as it is."""
    counts = _QUICK if options.quick else _FULL
    made = [
        _part(kind, where, seed, count, "tiny", SPACING_S)
        for seed in range(1, options.seeds + 1)
        for kind, pair in counts.items()
        for where, count in zip(("calm", "congested"), pair, strict=True)
    ]
    if smollm2 and not options.quick:
        made += [
            _part("smollm2", where, 1, _SMOLLM2_COUNT, SMOLLM2, SMOLLM2_SPACING_S) for where in ("calm", "congested")
        ]
    return made


def _part(kind: str, where: str, seed: int, count: int, model: str, spacing_s: float) -> Part:
    detail = {"row": f"{kind}, {where}", "kind": kind, "congested": where == "congested", "count": count}
    detail |= {"model": model, "spacing_s": spacing_s}
    return Part(f"{kind}-{where}-seed{seed}", seed, count * spacing_s + SETTLE_S, detail)


_LEAD_NS = 1_500_000_000  # the congestion has begun by then
_IDS_BEHIND_NS = 30_000_000  # ids are sent so long after a KV transfer has begun: its bytes are ahead of them
_MARGIN_S = 20
LATE_STEP_MS = 3.0  # a percent of a step; a sleep's own lateness is below
MOST_LATE_STEPS, MOST_LATENESS = 0.01, 0.005


class HandoffSession:
    """Orders both ends and gathers times. All clocks are one."""

    def __init__(self, lab: ExperimentLab, fit: Fit, sender: Process, receiver: Process) -> None:
        self._lab = lab
        self._fit = fit
        self._sender = sender
        self._receiver = receiver
        self._model = ""
        receiver.order(op="copies")
        self.copies = receiver.wait_for("copied")

    def run(self, part: Part, directory: Path, progress: Progress) -> PartResult:
        detail = part.detail
        self._prepare(detail["model"])
        capture = directory / "wan0.pcapng"
        playing = self._congested(part, directory) if detail["congested"] else nullcontext()
        with self._lab.capturing("wan0", capture):
            note_quietly(self._sender, self._receiver)
            with playing:
                records = self._kv(part, progress) if detail["kind"] == "kv" else self._recompute(part, progress)
            note_quietly(self._sender, self._receiver)
        check = check_bytes(capture, self._lab.directory)
        reasons = [*check.reasons, *_late(records)]
        copies = {key: self.copies[key] for key in ("median_ms", "max_ms", "device")}
        return PartResult(records, {**check.facts(), "host_copies": copies}, reasons)

    def _prepare(self, model: str) -> None:
        if model != self._model:
            paced = {"mean_ms": RECOMPUTE_MEAN_MS, "std_ms": RECOMPUTE_STD_MS, "max_ms": RECOMPUTE_MAX_MS}
            self._receiver.order(op="prepare", model=model, pace=paced if model == "tiny" else None)
            self._receiver.wait_for("prepared")
            self._model = model

    def _kv(self, part: Part, progress: Progress) -> list[dict[str, Any]]:
        """KV transfers, and ids sent while each of them is on its way."""
        count, spacing_ns = part.detail["count"], round(part.detail["spacing_s"] * 1e9)
        starts_ns = [index * spacing_ns for index in range(count)]
        behind_ns = [start_ns + _IDS_BEHIND_NS for start_ns in starts_ns]
        transfers = {"name": part.name, "lead_ns": _LEAD_NS, "starts_ns": starts_ns, "first_blocks": [0] * count}
        ids = {"name": f"{ONLY_IDS}-{part.name}", "lead_ns": _LEAD_NS, "starts_ns": behind_ns}
        self._sender.order(op="both", transfers=transfers, ids=ids)
        found: dict[int, dict[str, Any]] = {}
        sent: dict[int, int] = {}
        for event in self._sender.events():
            if event["event"] == "over":
                break
            if event["event"] == "transfer":
                found[event["index"]] = event
                progress(len(found) / count)
            elif event["event"] == "sent":
                sent[event["index"]] = event["sent_ns"]
        arrived = self._gather("arrived", count)
        return [_kv_record(part, found[i], (arrived[i]["received_ns"] - sent[i]) / 1e6) for i in range(count)]

    def _recompute(self, part: Part, progress: Progress) -> list[dict[str, Any]]:
        count, spacing_ns = part.detail["count"], round(part.detail["spacing_s"] * 1e9)
        self._sender.order(
            op="ids", name=part.name, lead_ns=_LEAD_NS, starts_ns=[index * spacing_ns for index in range(count)]
        )
        sent: dict[int, int] = {}
        for event in self._sender.events():
            if event["event"] == "all-sent":
                break
            if event["event"] == "sent":
                sent[event["index"]] = event["sent_ns"]
                progress(len(sent) / count)
        done = self._gather("recomputed", count)
        first_ns = sent[0]
        return [_recompute_record(part, index, sent[index], done[index], first_ns) for index in range(count)]

    def _gather(self, name: str, count: int) -> dict[int, dict[str, Any]]:
        """So many events of md0, by index."""
        found: dict[int, dict[str, Any]] = {}
        for event in self._receiver.events():
            if event["event"] == name:
                found[event["index"]] = event
            if len(found) == count:
                break
        return found

    @contextmanager
    def _congested(self, part: Part, directory: Path) -> Iterator[None]:
        """The named congestion, forward, with this part's seed, for as long as it takes."""
        seconds = part.detail["count"] * part.detail["spacing_s"] + _MARGIN_S
        (directory / "available.csv").write_text(as_csv(self._fit.congestion.levels(seconds, part.seed)))
        timeline = directory / "congestion.yaml"
        timeline.write_text("- replay: {at: 0s, link: wan0, direction: forward, trace: available.csv}\n")
        self._play(str(timeline))
        try:
            yield
        finally:
            self._play("--stop")
            self._lab.ask(WanReset("wan0"))
            time.sleep(0.2)

    def _play(self, what: str) -> None:
        command = [*program("testbed"), "wan", "play", what, "--lab", self._lab.plan.name]
        done = subprocess.run(command, capture_output=True, text=True, env=environment())
        if done.returncode:
            raise ExperimentError(f"the congestion does not play: {done.stderr.strip()}")


def _late(records: list[dict[str, Any]]) -> Iterator[str]:
    """Reasons why this machine was too slow for the profile it is paced to."""
    steps = [record for record in records if "pdd_late_ms" in record]
    late = sum(record["pdd_late_ms"] > LATE_STEP_MS for record in steps)
    if late > MOST_LATE_STEPS * len(steps):
        yield f"{late} of {len(steps)} paced steps were late"
    total_ms = sum(record["pdd_extend_ms"] for record in steps)
    lateness_ms = sum(record["pdd_late_ms"] for record in steps)
    if lateness_ms > MOST_LATENESS * total_ms:
        yield f"paced steps were late by {lateness_ms / total_ms:.1%} of their time (limit {MOST_LATENESS:.1%})"


def _kv_record(part: Part, transfer: dict[str, Any], ids_ms: float) -> dict[str, Any]:
    start_ns = transfer["asked_ns"] + transfer["queue_ns"]
    spans = [{"name": "kv-stream", "start_ns": start_ns, "end_ns": transfer["received_ns"]}]
    return {
        "request_id": f"{part.name}-{transfer['index']}",
        "part": part.name,
        "row": part.detail["row"],
        "seed": part.seed,
        "success": True,
        "arrival_s": transfer["asked_ns"] / 1e9,
        "pdd_kv_xfer_ms": (transfer["received_ns"] - start_ns) / 1e6,
        "pdd_kv_queue_ms": transfer["queue_ns"] / 1e6,
        "pdd_token_ids_ms": ids_ms,
        "pdd_delta_bytes": transfer["kv_bytes"],
        "pdd_spans": spans,
    }


def _recompute_record(part: Part, index: int, sent_ns: int, done: dict[str, Any], first_ns: int) -> dict[str, Any]:
    spans = [
        {"name": "token-ids", "start_ns": sent_ns - first_ns, "end_ns": done["received_ns"] - first_ns},
        {"name": "extend", "start_ns": done["start_ns"] - first_ns, "end_ns": done["done_ns"] - first_ns},
    ]
    return {
        "request_id": f"{part.name}-{index}",
        "part": part.name,
        "row": part.detail["row"],
        "seed": part.seed,
        "success": True,
        "arrival_s": (sent_ns - first_ns) / 1e9,
        "pdd_token_ids_ms": (done["received_ns"] - sent_ns) / 1e6,
        "pdd_extend_ms": (done["done_ns"] - done["start_ns"]) / 1e6,
        "pdd_computed_ms": (done["computed_ns"] - done["start_ns"]) / 1e6,
        "pdd_late_ms": done["late_ns"] / 1e6,
        "pdd_handoff_ms": (done["done_ns"] - sent_ns) / 1e6,
        "pdd_spans": spans,
    }


@contextmanager
def open_session(lab: ExperimentLab, fit: Fit) -> Iterator[HandoffSession]:
    """Start both ends, connect, open the windows."""
    shape = Shape(TOKENS, 4, fit.bytes_per_token)
    sender, receiver = start_pair(lab, "experiments.handoff.endpoint", shape, None)
    sender.order(op="transfers", name="warm-up", starts_ns=[0] * 12, first_blocks=[0] * 12)
    sender.wait_for("done")
    yield HandoffSession(lab, fit, sender, receiver)
