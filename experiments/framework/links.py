"""Links of a lab while something is measured: a row of counters per link and second, and every change of settings.

A sample that fails is told and the next one is taken all the same: its row then covers more than a second (`span_s`).
Changes come from the lab itself, which notes each one: a change that lasts less than any sampling is not missed.
"""

import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from testbed.lab.control import ask_lab
from testbed.lab.messages import WanChanges, WanShow
from testbed.lab.record import LabError, Record
from testbed.model.impairment import Impairment
from testbed.topology.describe import describe_direction

SAMPLE_S = 1.0
MOST_S = 3.0  # between two samples; more is a gap
PATIENCE_S = 15.0  # with a lab that does not answer

Key = tuple[str, str]
Counters = dict[Key, Mapping[str, int]]


class LinkWatch:
    """Samples in a thread, from `start` to `stop`, into `out`."""

    def __init__(self, record: Record, out: Path, part: str) -> None:
        self._record = record
        self._out = out
        self._part = part
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="links", daemon=True)
        self._last: tuple[float, Counters] | None = None  # when, on the monotonic clock, and what was counted then
        self._ended_s = 0.0
        self.samples = 0
        self.gaps: list[float] = []
        """Length of each stretch without a sample, in seconds."""
        self.failures: list[str] = []
        """Reasons why samples failed."""

    def start(self) -> None:
        self._ended_s = time.monotonic()
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    def reasons(self) -> list[str]:
        """Reasons why links.jsonl is not whole; empty when it is. Call after `stop`."""
        reasons = []
        if self.gaps:
            gaps = f"{len(self.gaps)} gap" + ("s" if len(self.gaps) > 1 else "")
            reasons.append(f"links.jsonl has {gaps}, {sum(self.gaps):.0f} s in all, in which nobody counted")
        if self.failures:
            often = "once" if len(self.failures) == 1 else f"{len(self.failures)} times, the last time"
            reasons.append(f"the links could not be sampled {often}: {self.failures[-1]}")
        return reasons

    def _run(self) -> None:
        self._sample()
        while not self._over.wait(SAMPLE_S):
            self._sample()
        if not self._note_gap(time.monotonic()):
            return
        self._sample()  # what moved in the gap

    def _sample(self) -> None:
        """One sample, or the reason why there is none: never an exception."""
        try:
            now = self._counters()
            at_s = time.monotonic()
            self._note_gap(at_s)
            self._ended_s = at_s
            if self._last is not None:
                self._write(now, at_s - self._last[0], self._last[1])
            self._last = at_s, now
            self.samples += 1
        except Exception as error:
            self.failures.append(f"{type(error).__name__}: {error}")

    def _note_gap(self, at_s: float) -> bool:
        if at_s - self._ended_s <= MOST_S:
            return False
        self.gaps.append(at_s - self._ended_s)
        self._ended_s = at_s
        return True

    def _write(self, now: Counters, span_s: float, before: Counters) -> None:
        """Append rows of what moved since the sample before; a link that was not there then begins with the next."""
        rows = []
        for (link, direction), counters in now.items():
            if (counted := before.get((link, direction))) is None:
                continue
            moved = {name: value - counted.get(name, 0) for name, value in counters.items()}
            about = {"part": self._part, "time": time.time(), "span_s": round(span_s, 3)}
            rows.append(json.dumps({**about, "link": link, "direction": direction, **moved}) + "\n")
        text = "".join(rows).encode()
        with self._out.open("ab", buffering=0) as stream:
            size = stream.seek(0, 2)
            try:
                while text:
                    text = text[stream.write(text) :]
            except OSError:
                stream.truncate(size)  # rows are whole, or not there
                raise

    def _counters(self) -> Counters:
        """Raises LabError, and KeyError for a link that cannot be read."""
        links = ask_lab(self._record, WanShow(), PATIENCE_S).links
        return {
            (link["name"], way): cast(Mapping[str, int], counts)
            for link in links
            for way, counts in link["counters"].items()
        }


CHANGES_KEPT = 100  # in run.json, of a part; their number is always there


class SettingsWatch:
    """`begin`: what each link and direction is asked to do now, in words. Raises LabError."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._began = time.time()
        self._before = ask_lab(record, WanChanges(0)).counts
        links = ask_lab(record, WanShow()).links
        self.begin = {
            f"{link['name']} {direction}": in_words(asked)
            for link in links
            for direction, asked in link["asked"].items()
        }

    def changes(self) -> dict[str, Any]:
        """Changes since the beginning: how many by whom, and the first ones. `known` is false when the lab is gone."""
        try:
            since = sum(self._before.values())
            reply = ask_lab(self._record, WanChanges(since))
        except LabError:
            return {"known": False, "by": {}, "changes": []}
        by = {who: count - self._before[who] for who, count in reply.counts.items()}
        kept = [one for who in by for one in [c for c in reply.changes if c["by"] == who][:CHANGES_KEPT]]
        changes = [
            {
                "after_s": one["time"] - self._began,
                "by": one["by"],
                "link": one["link"],
                "direction": one["direction"],
                "asked": in_words(one["asked"]),
            }
            for one in sorted(kept, key=lambda change: int(change["number"]))
        ]
        return {"known": True, "by": {who: count for who, count in by.items() if count}, "changes": changes}


def in_words(asked: Mapping[str, Any]) -> str:
    """A direction's impairment as people write it."""
    return describe_direction(Impairment.from_dict(dict(asked))) or "nothing"


def settings_of(labs: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Settings of each link and direction when measuring began, of all labs of a run (several: with commas).

    Runs of older versions know only what was applied when the lab came up, and have nothing here.
    """
    found: dict[str, list[str]] = {}
    for lab in labs:
        for name, words in (lab.get("settings") or {}).items():
            found.setdefault(name, []).append(words)
    return {name: "; ".join(dict.fromkeys(words)) for name, words in found.items()}


def changes_of(labs: Sequence[Mapping[str, Any]]) -> str:
    """Changes while a run measured, in a few words; nothing where nothing was."""
    return "; ".join(words for lab in labs for part, words in _parts(lab))


def reasons_of(labs: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Reasons why a run is not of one setting: changes by hand meanwhile. A timeline's changes were asked for."""
    for lab in labs:
        for part, told in (lab.get("changes") or {}).items():
            if not told["known"]:
                yield f"{part}: whether the links were changed meanwhile is not known, the lab was gone"
        for part, words in _parts(lab, by="hand"):
            yield f"{part}: links were changed by hand while it ran: {words}"


def _parts(lab: Mapping[str, Any], by: str | None = None) -> Iterator[tuple[str, str]]:
    """Each part with changes, and these in words: the first three, and how many there are."""
    for part, told in (lab.get("changes") or {}).items():
        shown = [one for one in told["changes"] if by in (None, one["by"])]
        count = sum(number for who, number in told["by"].items() if by in (None, who))
        if not count:
            continue
        words = [
            f"{one['link']} {one['direction']} to {one['asked']} after {one['after_s']:.1f} s" for one in shown[:3]
        ]
        more = [f"{count - len(words)} more"] if count > len(words) else []
        yield part, ", ".join([*words, *more])
