"""`delta` in its lab: real workers, requests one after the other, every packet of the WAN captured while they run."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from experiments.delta.workloads import ANSWER_TOKENS, workload
from experiments.framework.bytes_check import check_bytes
from experiments.framework.errors import ExperimentError
from experiments.framework.experiment import Part, PartResult, Progress
from experiments.framework.lab import ExperimentLab
from experiments.framework.serving import Client
from experiments.traces.trace import Trace


class DeltaSession:
    """One request at a time: the next turn of a conversation comes after the answer to the last one."""

    def __init__(self, lab: ExperimentLab, client: Client, trace: Trace | None) -> None:
        self._lab = lab
        self._client = client
        self._trace = trace
        # what main decode has cached is known in the other datacenter half a round trip later
        self._pause_s = 2 * max(wan.rtt_ns for wan in lab.plan.wans) / 1e9

    def run(self, part: Part, directory: Path, progress: Progress) -> PartResult:
        directory.mkdir(parents=True, exist_ok=True)
        capture = directory / "wan0.pcapng"
        work = workload(part, self._trace)
        for prompt in work.prompts[: work.warm_up]:
            self._send(prompt)
        measured = work.prompts[work.warm_up :]
        records = []
        with self._lab.capturing("wan0", capture, headers_only=False):
            for index, prompt in enumerate(measured):
                record = self._send(prompt)
                records.append({**record, "part": part.name, "row": part.detail["row"], "seed": part.seed})
                progress((index + 1) / len(measured))
        check = check_bytes(capture, self._lab.record.results)
        capture.unlink()
        return PartResult(records, {**check.facts(), "trace_sha256": work.trace_sha256}, check.reasons)

    def _send(self, prompt: list[int]) -> dict[str, object]:
        record = self._client.complete(prompt, ANSWER_TOKENS)
        if not record["success"]:
            raise ExperimentError(f"request {record['request_id']} failed: {record['error']}")
        time.sleep(self._pause_s)
        return record


@contextmanager
def open_session(lab: ExperimentLab, trace: Trace | None) -> Iterator[DeltaSession]:
    client = Client(lab.state["api"], str(lab.plan.model["name"]), lab.record.results / "requests.jsonl")
    try:
        yield DeltaSession(lab, client, trace)
    finally:
        client.close()
