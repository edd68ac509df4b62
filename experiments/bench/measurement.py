"""Measurement of a load: read or made, sent to the server that is found, and written to its directory.

The directory is in the format of every experiment (experiments.framework.directory), so that `pddbed report` reads it.
"""

import asyncio
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from experiments.bench.client import Api, Bodies, Served, asked
from experiments.bench.load import Load, planned
from experiments.bench.options import Asked
from experiments.bench.progress import BenchProgress
from experiments.bench.report import PART, Bench, notes, reasons_of, summary_of
from experiments.bench.run import Plan, Result, claim_resources, run
from experiments.framework import machine
from experiments.framework.base import Evaluation, ExperimentError, Part, PartResult
from experiments.framework.directory import RunDirectory
from experiments.framework.links import LinkWatch, SettingsWatch
from experiments.framework.links import reasons_of as changed_by_hand
from experiments.framework.requests import LabRecords
from experiments.framework.runner import report
from experiments.traces.stats import Hit, hits
from experiments.traces.trace import Trace
from testbed.lab.control import ask_lab
from testbed.lab.messages import VerificationResult, Verify
from testbed.lab.record import LabError, Record, find_record


def refuse_used(path: Path) -> None:
    """Raises ExperimentError when the directory cannot take a new run: before anything is sent."""
    if RunDirectory(path).run_file.exists():
        raise ExperimentError(f"{path} holds a run already; choose another --out, or remove it")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ExperimentError(f"cannot keep a run in {path}: {error.strerror}") from None


def write_run(
    path: Path,
    words: str,
    command: str,
    parameters: Mapping[str, Any],
    result: PartResult,
    labs: list[dict[str, Any]],
    topology: str,
    started: float,
) -> Evaluation:
    """Write everything, report included. Raises ExperimentError."""
    directory = RunDirectory(path)
    directory.keep(Part(PART, parameters["seed"], result.facts["duration_s"], {"row": PART}), result)
    directory.write_run(
        {
            "experiment": Bench.name,
            "title": f"bench: {words}",
            "claim": "Measured at the client, as vllm bench serve does; there is no published figure to meet.",
            "command": command,
            "quick": False,
            "seeds": 1,
            "parameters": dict(parameters),
            "parts": [PART],
            "topology": topology,
            "versions": machine.versions(),
            "machine": machine.machine(),
            "started": started,
            "finished": time.time(),
            "labs": labs,
        }
    )
    return report(path)


def reasons_in(path: Path) -> list[str]:
    """Reasons why the run in a directory is not faithful, as its report has it."""
    found: list[str] = RunDirectory(path).run()["reasons"]
    return found


VERIFY_PATIENCE_S = 900.0


@dataclass(frozen=True)
class Done:
    """`reasons`: why the run is not faithful. `why`: what stopped it, if anything did."""

    summary: dict[str, Any]
    reasons: list[str]
    notes: list[str]
    why: str
    url: str


class Measurement:
    """One server and what is asked of it. `record`: of the lab that the server belongs to."""

    def __init__(self, url: str, options: Asked, record: Record | None = None, key: str | None = None) -> None:
        self.url = url
        self._options = options
        self._record = record
        self._key = key

    @classmethod
    def of_lab(cls, name: str | None, options: Asked) -> Self:
        """A running lab's gateway. Raises LabError."""
        record = find_record(name)
        url: str | None = record.state().get("api")
        if url is None:
            raise LabError(f'lab "{record.name}" has no API: it runs without workers, or without a gateway')
        return cls(url, options, record)

    @classmethod
    def of_server(cls, url: str, options: Asked) -> Self:
        """Any server; OPENAI_API_KEY is sent where it is set, as clients of OpenAI's do."""
        return cls(url, options, key=os.environ.get("OPENAI_API_KEY"))

    def run(self, out: Path | None, *, verify: bool, command: str, quiet: bool) -> Done:
        """Raises TraceError, LoadError, ApiError, ExperimentError, LabError: before anything is sent, in most cases."""
        if out is not None:
            refuse_used(out)
        claim_resources()
        with BenchProgress(quiet) as progress:
            synthetic = self._options.source is None
            progress.step("making the load" if synthetic else "reading the trace", brief=synthetic)
            read = self._options.read()
            labs = [self._lab(verify, progress)] if out is not None and self._record is not None else []
            topology = self._topology() if labs else ""
            started = time.time()
            watch = LinkWatch(self._record, out / "links.jsonl", "bench") if labs and out and self._record else None
            settings = SettingsWatch(self._record) if self._record is not None else None
            load, served, result = asyncio.run(self._send(read, progress, watch))
            links = {} if settings is None else {"settings": settings.begin, "changes": {PART: settings.changes()}}
            for lab in labs:
                lab.update(links)
            parameters = self._parameters(read, load, served)
            found = hits(load.trace)[load.first :]
            for row in result.rows:
                row["pdd_expected_hit"] = found[row["pdd_index"]].rate
            facts = {
                "duration_s": result.duration_s,
                "expected_hit": _by_tokens(found),
                "under_way": result.under_way,
                "not_sent": result.not_sent,
                "why": result.why,
                "unrecorded": result.unrecorded,
                "lost": [] if self._record is None else self._record.losses(),
                "damaged": result.damaged,
                "links": links,
            }
            part = PartResult(result.rows, facts)
            reasons = reasons_of(parameters, part) + (watch.reasons() if watch is not None else [])
            part = PartResult(result.rows, facts, reasons)
            summary = summary_of(parameters, part)
            reasons = [*changed_by_hand([links]), *reasons]
            if out is not None:
                if labs and verify:
                    progress.step("verifying the links")
                    with suppress(LabError):  # a lab that went away meanwhile: the report says that nobody verified it
                        labs[0]["verified_after"] = self._verified()
                progress.step("writing the report")
                write_run(out, self._options.words(load.trace), command, parameters, part, labs, topology, started)
                reasons = reasons_in(out)
        return Done(summary, reasons, notes(summary), result.why, self.url)

    async def _send(self, read: Trace, progress: BenchProgress, watch: LinkWatch | None) -> tuple[Load, Served, Result]:
        options = self._options
        async with Api(self.url, self._key, direct=self._record is not None) as api:
            served = await api.served(options.model)
            load = options.load(read, served.context)
            trace, first = load.trace, load.first
            fields = asked(served.model, options.ignore_eos)
            bodies = Bodies(trace, options.token_ids, options.seed, fields)
            due = options.due_ns(trace, first)
            sent = planned(trace.requests[first:], due, options.in_turn)
            progress.expect(len(sent), (due[-1] or 0) / 1e9)
            records = None if self._record is None else LabRecords(self._record.results / "requests.jsonl")
            plan = Plan(sent, trace.requests[:first], bodies, options.concurrency, options.warm_up)
            if watch is not None:
                watch.start()
            try:
                return load, served, await run(api, plan, progress, records)
            finally:
                if watch is not None:
                    watch.stop()

    def _parameters(self, read: Trace, load: Load, served: Served) -> dict[str, Any]:
        options, trace, first = self._options, load.trace, load.first
        return {
            "server": "lab" if self._record is not None else self.url,
            "model": served.model,
            "context": served.context,
            "synthetic": options.source is None,
            "trace": trace.origin,
            "trace_sha256": trace.sha256,
            "block_tokens": trace.block_tokens,
            "num_prompts": len(trace.requests) - first,
            "sent_first": first,
            "request_rate": options.request_rate,
            "burstiness": options.burstiness or 1.0,
            "speedup": options.speedup or 1.0,
            "max_concurrency": options.concurrency,
            "in_turn": options.in_turn,
            "divide": options.divide or 1,
            "max_input": options.max_input,
            "only_fitting": options.only_fitting,
            "output_len": options.output_len,
            "trace_requests": len(read.requests),
            "changed": dict(load.changed),
            "trace_notes": [*read.notes, *options.rounding],
            "warm_up": options.warm_up,
            "seed": options.seed,
            "ignore_eos": options.ignore_eos,
            "token_ids": [options.token_ids.start, options.token_ids.stop - 1],
            "goodput": dict(options.limits or {}),
            "percentiles": list(options.percentiles),
        }

    # -- the lab -------------------------------------------------------------------------------------------------

    def _lab(self, verify: bool, progress: BenchProgress) -> dict[str, Any]:
        """As run.json has it."""
        assert self._record is not None
        state = self._record.state()
        if verify:
            progress.step("verifying the links")
        return {
            "variant": "",
            "driver": state["driver"],
            "applied": state["applied"],
            "verified_before": self._verified() if verify else None,
            "verified_after": None,
            "versions": machine.versions(),
            "machine": machine.machine(),
            "parts": ["bench"],
        }

    def _verified(self) -> VerificationResult:
        assert self._record is not None
        return ask_lab(self._record, Verify(quick=True), VERIFY_PATIENCE_S)

    def _topology(self) -> str:
        """The lab's file as it is now."""
        assert self._record is not None
        file = self._record.state().get("file")
        try:
            return Path(file).read_text() if file else ""
        except OSError as error:
            return f"# {file} could not be read any more: {error.strerror}\n"


def _by_tokens(found: Sequence[Hit]) -> float:
    """The hit rate, by tokens, of a cache that begins empty and forgets nothing."""
    return sum(hit.cached_tokens for hit in found) / sum(hit.request.input_tokens for hit in found)
