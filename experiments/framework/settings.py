"""What a lab's links were asked to do while something was measured: when it began, and every change until it ended.

From the lab itself, which notes each change: a change that lasts less than any sampling is not missed.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from testbed.impairment import Impairment
from testbed.lab.control import ask_lab
from testbed.lab.record import LabError, Record
from testbed.topology.describe import describe_direction

CHANGES_KEPT = 100  # in run.json, of a part; their number is always there


class SettingsWatch:
    """`begin`: what each link and direction is asked to do now, in words. Raises LabError."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._began = time.time()
        self._before: dict[str, int] = ask_lab(record, {"op": "wan-changes", "since": 0})[0]["counts"]
        links = ask_lab(record, {"op": "wan-show"})[0]["links"]
        self.begin = {
            f"{link['name']} {direction}": in_words(asked)
            for link in links
            for direction, asked in link["asked"].items()
        }

    def changes(self) -> dict[str, Any]:
        """Changes since the beginning: how many by whom, and the first ones. `known` is false when the lab is gone."""
        try:
            since = sum(self._before.values())
            reply = ask_lab(self._record, {"op": "wan-changes", "since": since})[0]
        except LabError:
            return {"known": False, "by": {}, "changes": []}
        by = {who: count - self._before[who] for who, count in reply["counts"].items()}
        kept = [one for who in by for one in [c for c in reply["changes"] if c["by"] == who][:CHANGES_KEPT]]
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
    """What each link and direction was asked to do when measuring began, of all labs of a run (several: with commas).

    Runs of older versions know only what was applied when the lab came up, and have nothing here.
    """
    found: dict[str, list[str]] = {}
    for lab in labs:
        for name, words in (lab.get("settings") or {}).items():
            found.setdefault(name, []).append(words)
    return {name: "; ".join(dict.fromkeys(words)) for name, words in found.items()}


def changes_of(labs: Sequence[Mapping[str, Any]]) -> str:
    """What was changed while a run measured, in a few words; nothing where nothing was."""
    return "; ".join(words for lab in labs for part, words in _parts(lab))


def reasons_of(labs: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Why a run is not of one setting: changes by hand meanwhile. What a timeline does is what was asked for."""
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
