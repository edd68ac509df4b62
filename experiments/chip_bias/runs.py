"""Runs of `chip-bias`: on each chip prompts one after the other, and answers of one and of several requests at once."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from experiments.framework.base import ExperimentError, Options, Part, PartResult, Progress
from experiments.framework.checks import PaceSince, check_bytes
from experiments.framework.lab import ExperimentLab
from experiments.framework.requests import Client
from testbed.model.scale import Scale

CHIPS = ("gpu-a", "chip-e")
AT_ONCE = (1, 4)
SHORT_PROMPT = 8
_PROMPT_NS, _STEP_NS = 14_000_000, 150_000_000  # about; for the ETA


def parts(options: Options) -> list[Part]:
    """Parts, those of one chip together: they share a lab."""
    lengths = [40, 60, 80] if options.quick else [20, 50, 80, 100, 130, 160, 200, 250, 300, 400]
    tokens = 24 if options.quick else 100
    made = []
    for chip in CHIPS:
        for seed in range(1, options.seeds + 1):
            seconds = 3 + sum(lengths) * _PROMPT_NS / 1e9
            detail = {"row": f"{chip}, prefill", "chip": chip, "kind": "prefill", "lengths": lengths}
            made.append(Part(f"{chip}-prefill-seed{seed}", seed, seconds, detail, variant=chip))
            for at_once in AT_ONCE:
                row = f"{chip}, {at_once} at once"
                decode = {"row": row, "chip": chip, "kind": "decode", "at_once": at_once, "tokens": tokens}
                name, seconds = f"{chip}-decode{at_once}-seed{seed}", 3 + tokens * _STEP_NS / 1e9
                made.append(Part(name, seed, seconds, decode, variant=chip))
    return made


class ChipBiasSession:
    def __init__(self, lab: ExperimentLab, client: Client) -> None:
        self._lab = lab
        self._client = client
        if lab.plan.scale is None:
            raise ExperimentError("the topology of chip-bias has no scale")
        self._scale = lab.plan.scale.scale

    def run(self, part: Part, directory: Path, progress: Progress) -> PartResult:
        capture = directory / "wan0.pcapng"
        prefilling = part.detail["kind"] == "prefill"
        source = random.Random(f"chip-bias {part.seed}")  # the same prompts for both chips
        pace = PaceSince(self._lab.record.results)
        with self._lab.capturing("wan0", capture):
            found = self._prefill(part, source, progress) if prefilling else self._decode(part, source, progress)
        check = check_bytes(capture, self._lab.record.results)
        about = {"part": part.name, "row": part.detail["row"], "seed": part.seed}
        measured = prefilled if prefilling else decoded
        records = [{**record, **about, **measured(record, self._scale)} for record in found]
        return PartResult(records, {**check.facts(), "pace": pace.facts()}, check.reasons)

    def _prefill(self, part: Part, source: random.Random, progress: Progress) -> list[dict[str, Any]]:
        """One after the other, so that nobody waits for another's prompt."""
        lengths, found = part.detail["lengths"], []
        for length in lengths:
            found.append(self._client.complete(_prompt(source, length), 1))
            progress(len(found) / len(lengths))
        return found

    def _decode(self, part: Part, source: random.Random, progress: Progress) -> list[dict[str, Any]]:
        at_once = part.detail["at_once"]
        prompts = [_prompt(source, SHORT_PROMPT) for _ in range(at_once)]
        return self._client.complete_all(
            prompts, part.detail["tokens"], at_once, lambda done: progress(done / at_once), ignore_eos=True
        )


def _prompt(source: random.Random, length: int) -> list[int]:
    """Prompt that no cache has seen."""
    return source.choices(range(32, 127), k=length)


def prefilled(record: dict[str, Any], scale: Scale) -> dict[str, Any]:
    """Prompt tokens of a request that were computed and the time that took, as in the deployment."""
    (span,) = [span for span in record["pdd_spans"] if span["name"] == "prefill"]
    return {
        "prefill_tokens": (span["tokens"] - span.get("cached", 0)) * scale.prompt_scale,
        "prefill_s": (span["end_ns"] - span["start_ns"]) / 1e9 * scale.time_compression,
    }


def decoded(record: dict[str, Any], scale: Scale) -> dict[str, Any]:
    """Time of a request's decode step in the deployment. The first one is left out: it waits for one in flight."""
    gaps_s = record["itl"][1:]
    return {"decode_step_ms": sum(gaps_s) / len(gaps_s) * 1e3 * scale.time_compression / scale.output_scale}


@contextmanager
def open_session(lab: ExperimentLab) -> Iterator[ChipBiasSession]:
    client = Client(lab.state["api"], str(lab.plan.model["name"]), lab.record.results / "requests.jsonl")
    try:
        client.complete([40] * 4, 4)  # first steps are slow
        yield ChipBiasSession(lab, client)
    finally:
        client.close()
