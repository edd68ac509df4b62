"""`skew` in its lab: the workers' transport between p0 and md0, connections warm, packets captured during each part."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from experiments.framework.bytes_check import check_bytes
from experiments.framework.experiment import Part, PartResult, Progress
from experiments.framework.figures import percentile
from experiments.framework.lab import ExperimentLab, Process
from experiments.skew.rows import BLOCKS, first_blocks
from experiments.transport.counting import note_quietly
from experiments.transport.memory import Shape

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
        directory.mkdir(parents=True, exist_ok=True)
        capture = directory / "wan0.pcapng"
        detail = part.detail
        starts_ns = [round(index * detail["spacing_ms"] * 1e6) for index in range(detail["transfers"])]
        blocks = first_blocks(part)
        with self._lab.capturing("wan0", capture):
            note_quietly(self._sender, self._receiver)
            found = self.transfers(part.name, starts_ns, blocks, progress)
            note_quietly(self._sender, self._receiver)
        check = check_bytes(capture, self._lab.directory)
        capture.unlink()
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
    module = "experiments.transport.endpoint"
    ends = []
    for host in ("md0", "p0"):  # one after the other: the sender's deadline to connect runs from its own start
        ends.append(lab.start_program(host, module))
        ends[-1].order(shape=asdict(shape), connection_bps=connection_bps)
        ends[-1].wait_for("ready")
    receiver, sender = ends
    session = SkewSession(lab, sender, receiver)
    session.transfers("warm-up", [0] * _WARM_UP, [0] * _WARM_UP)
    yield session
