"""Every file in wrong-traces and wrong-timelines is refused with all of its mistakes, each on its line.

As in wrong-topologies: a fixture is named after its mistake, and its sibling `.expected` has one line for each error.
"""

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from testbed.topology.problems import Problem, TopologyErrors
from testbed.topology.traces.read import TraceErrors, read_trace
from tests.testbed.topology.timeline.timelines import FIXTURES, timeline

TRACES = sorted(file for file in (FIXTURES / "wrong-traces").iterdir() if file.suffix != ".expected")
TIMELINES = sorted((FIXTURES / "wrong-timelines").glob("*.yaml"))


def problems_of_trace(file: Path) -> Iterable[Problem]:
    with pytest.raises(TraceErrors) as caught:
        read_trace(file, "auto", None, 100_000_000_000)
    return caught.value.problems


def problems_of_timeline(file: Path) -> Iterable[Problem]:
    with pytest.raises(TopologyErrors) as caught:
        timeline(file.read_text(), folder=file.parent)
    return caught.value.problems


def test_there_are_enough_mistakes_and_each_says_what_is_expected() -> None:
    assert len(TRACES) >= 25
    assert len(TIMELINES) >= 15
    assert all(file.with_suffix(".expected").read_text().strip() for file in [*TRACES, *TIMELINES])


@pytest.mark.parametrize("file", [*TRACES, *TIMELINES], ids=lambda file: f"{file.parent.name}/{file.stem}")
def test_a_wrong_file_gives_all_its_mistakes_at_once_with_their_lines(file: Path) -> None:
    read: Callable[[Path], Iterable[Problem]] = problems_of_timeline if file.suffix == ".yaml" else problems_of_trace
    problems = list(read(file))
    unmatched = list(problems)
    for line, words in (row.split(": ", 1) for row in file.with_suffix(".expected").read_text().splitlines()):
        found = [p for p in unmatched if str(p.line or "-") == line and words in f"{p.path}: {p.message}"]
        assert found, f"no error on line {line} says {words!r}; there are:\n" + "\n".join(map(str, problems))
        unmatched.remove(found[0])
    assert not unmatched, "errors that nobody expects:\n" + "\n".join(map(str, unmatched))
    for problem in problems:
        assert str(problem).isprintable()
        assert not problem.message.endswith((".", ";"))
