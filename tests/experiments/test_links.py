"""links.jsonl: a sample that fails is told, the next one is taken all the same, and a gap is told too."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from experiments.framework import links
from experiments.framework.links import LinkWatch
from testbed.lab.control import ControlServer
from testbed.lab.record import Record
from testbed.links.base import LinkCounters

COUNTED = {**dict.fromkeys(LinkCounters.__required_keys__, 0), "packets": 1, "bytes": 100}

LINK: dict[str, Any] = {"name": "wan0", "between": ["main", "remote"], "driver": "userspace", "mtu": 1500}
LINK |= {"file": {}, "asked": {}, "applied": {}, "punctuality": None, "problem": None}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "SAMPLE_S", 0.05)
    monkeypatch.setattr(links, "MOST_S", 0.3)
    monkeypatch.setattr(links, "PATIENCE_S", 0.2)


def watched(tmp_path: Path, answer: Callable[[int], dict[str, Any]], samples: int) -> tuple[LinkWatch, list[Any]]:
    """What a watch has written and told of a lab that answers its n-th question with `answer(n)`."""
    asked = 0

    def handle(_: dict[str, Any]) -> Any:
        nonlocal asked
        asked += 1
        return answer(asked), []

    record = Record(tmp_path)
    ControlServer(record.control_socket, handle)
    watch = LinkWatch(record, tmp_path / "links.jsonl", "bench")
    watch.start()
    end = time.monotonic() + 10
    while asked < samples:
        assert time.monotonic() < end, "the sampler does not ask any more"
        time.sleep(0.01)
    watch.stop()
    file = tmp_path / "links.jsonl"
    return watch, [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def one_link(number: int) -> dict[str, Any]:
    counters = {way: {name: number * value for name, value in COUNTED.items()} for way in ("forward", "backward")}
    return {"links": [{**LINK, "counters": counters}], "congestion": None}


def test_a_run_without_a_gap_says_nothing(tmp_path: Path, quick: None) -> None:
    watch, rows = watched(tmp_path, one_link, 8)
    assert watch.reasons() == []
    assert {row["bytes"] for row in rows} == {100}


def test_a_lab_that_stood_still_leaves_a_gap_that_is_told_and_counted_in_the_row_behind_it(
    tmp_path: Path, quick: None
) -> None:
    def stops(number: int) -> dict[str, Any]:
        if number == 4:
            time.sleep(0.5)  # longer than anybody waits for it
        return one_link(number)

    watch, rows = watched(tmp_path, stops, 12)
    gaps, failed = watch.reasons()
    assert "links.jsonl has 1 gap" in gaps
    assert "could not be sampled" in failed
    assert max(row["span_s"] for row in rows) > 0.3
    assert rows[-1]["span_s"] < 0.3, "and it goes on"


@pytest.mark.parametrize(
    "broken",
    [
        {"links": [], "congestion": None},
        {"links": [{**LINK, "counters": {}}], "congestion": None},
        {"error": "is broken"},
        {},
        {"links": 3},
    ],
    ids=["no links at first", "a broken link", "an error", "no answer", "rubbish"],
)
def test_whatever_the_lab_answers_the_next_sample_is_taken(tmp_path: Path, quick: None, broken: dict[str, Any]) -> None:
    watch, rows = watched(tmp_path, lambda number: broken if number in (1, 5) else one_link(number), 10)
    assert rows[-1]["bytes"] == 100
    assert watch.samples > 4


def test_a_file_that_cannot_be_written_is_told(tmp_path: Path, quick: None) -> None:
    (tmp_path / "links.jsonl").mkdir()
    record = Record(tmp_path)
    ControlServer(record.control_socket, lambda _: (one_link(1), []))
    watch = LinkWatch(record, tmp_path / "links.jsonl", "bench")
    watch.start()
    time.sleep(0.3)
    watch.stop()
    assert "Is a directory" in watch.reasons()[-1]
