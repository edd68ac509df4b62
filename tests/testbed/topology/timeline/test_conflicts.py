"""A timeline that is accepted never has two that write the same value at once; one that does is refused."""

from itertools import combinations, pairwise

from hypothesis import given

from testbed.congestion.schedule import Assign, Cut, Schedule
from testbed.model.timeline import Event, Outage, Timeline
from testbed.topology.timeline.conflicts import conflicts
from tests.testbed.topology.timeline.timelines import SECOND, timelines


def names(event: Event) -> set[str]:
    """What an event writes, found out by letting it happen."""
    found: set[str] = set()
    for move in Schedule(Timeline((event,), 0)).due(1000 * SECOND):
        if isinstance(move.action, Assign):
            found |= set(move.action.change.names)
        elif isinstance(move.action, Cut):
            found.add("outage")
    return found


def overlap(one: Event, other: Event) -> bool:
    """Whether any occurrence of one touches the inside of one of the other's (or both are steps of one moment)."""
    for start in one.starts_ns():
        for begin in other.starts_ns():
            end, finish = start + one.duration_ns, begin + other.duration_ns
            if start == end and begin == finish:
                if start == begin:
                    return True
            elif start == end:
                if begin < start < finish:
                    return True
            elif begin == finish:
                if start < begin < end:
                    return True
            elif start < finish and begin < end:
                return True
    return False


@given(timelines())
def test_a_conflict_is_found_exactly_where_two_events_overlap(plan: Timeline) -> None:
    found = list(conflicts(plan.events))
    clashing = [
        (one, other)
        for one, other in combinations(plan.events, 2)
        if set(one.targets) & set(other.targets) and names(one) & names(other) and overlap(one, other)
    ]
    # Every clash is reported unless the later event of a pair is reported for another clash with the same partner.
    assert bool(found) == bool(clashing)
    assert {conflict.event.number for conflict in found} <= {other.number for _, other in clashing}


@given(timelines())
def test_what_is_accepted_has_at_most_one_outage_at_a_time(plan: Timeline) -> None:
    outages = tuple(event for event in plan.events if isinstance(event.what, Outage))
    if list(conflicts(outages)):
        return
    for target in {target for event in outages for target in event.targets}:
        spans = sorted(
            (start, start + event.duration_ns)
            for event in outages
            if target in event.targets
            for start in event.starts_ns()
        )
        assert all(first[1] <= second[0] for first, second in pairwise(spans))
