"""What is due when: every move once, in order, whatever the steps of whoever asks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.congestion.schedule import (
    Assign,
    Cut,
    Heal,
    Move,
    PrepareTraffic,
    PutBack,
    Remember,
    Schedule,
    ServingEvent,
    moves,
)
from testbed.model.timeline import EACH, Change, Event, Outage, Ramp, Replay, Timeline, Trigger
from testbed.topology.traces.read import read_trace
from tests.testbed.topology.timeline.timelines import FIXTURES, MS, SECOND, events, timeline, timelines

END = 100 * SECOND


def all_moves(schedule: Schedule) -> list[Move]:
    return schedule.due(END)


@given(timelines())
def test_every_move_comes_once_and_in_order(plan: Timeline) -> None:
    taken = all_moves(Schedule(plan))
    assert taken == sorted(taken, key=lambda move: move.key)
    expected = [
        move
        for event in plan.events
        for number, start in enumerate(event.starts_ns())
        for move in moves(event, number, start)
    ]
    assert sorted(taken, key=repr) == sorted(expected, key=repr)


@given(timelines(), st.lists(st.integers(0, 30 * SECOND), max_size=10))
def test_looking_often_or_seldom_makes_no_difference(plan: Timeline, looks: list[int]) -> None:
    schedule, taken = Schedule(plan), []
    for now in sorted(looks):
        batch = schedule.due(now)
        assert all(move.at_ns <= now for move in batch)
        upcoming = schedule.next_ns()
        assert upcoming is None or upcoming > now
        taken += batch
    assert taken + all_moves(schedule) == all_moves(Schedule(plan))
    assert schedule.done


@given(timelines())
def test_a_timeline_is_the_same_after_a_trip_through_json(plan: Timeline) -> None:
    assert Timeline.from_dict(plan.to_dict()) == plan


@given(events())
def test_what_begins_ends(event: Event) -> None:
    cuts = 0
    for move in moves(event, 0, 0):
        cuts += isinstance(move.action, Cut) - isinstance(move.action, Heal)
        assert cuts in (0, 1)
    assert cuts == 0
    assert move.is_last
    assert move.at_ns == event.duration_ns


def test_an_ending_comes_before_a_beginning_of_the_same_moment() -> None:
    plan = timeline(
        "- outage: {at: 2s, duration: 1s, link: wan0, direction: forward}\n"
        "- outage: {at: 1s, duration: 1s, link: wan0, direction: forward}\n"
    )
    actions = [(move.event.number, type(move.action)) for move in all_moves(Schedule(plan))]
    assert actions == [(1, Cut), (1, Heal), (0, Cut), (0, Heal)]


@given(
    st.integers(1, 100 * SECOND),
    st.integers(0, 10**9),
    st.integers(0, 10**9),
    st.floats(0, 1),
    st.floats(0, 1),
)
def test_a_ramp_is_monotonic_and_ends_where_it_is_told(
    duration: int, start: int, end: int, loss_start: float, loss_end: float
) -> None:
    ramp = Ramp(duration, (("delay_ns", start, end), ("loss", loss_start, loss_end)))
    event = Event(0, ramp, (("wan0", "forward"),), at_ns=0)
    steps = list(moves(event, 0, 0))
    assert len(steps) <= 1001
    values = [dict(move.action.change.values) for move in steps if isinstance(move.action, Assign)]
    delays = [value["delay_ns"] for value in values]
    losses = [value["loss"].probability if value["loss"] else 0.0 for value in values]
    for series, first, last in ((delays, start, end), (losses, loss_start, loss_end)):
        assert (series[0], series[-1]) == (first, last)
        assert series == sorted(series, reverse=first > last)
    assert [move.at_ns for move in steps] == sorted({move.at_ns for move in steps}), "each step at a time of its own"


def test_a_replay_remembers_plays_again_and_again_and_puts_back() -> None:
    trace = read_trace(FIXTURES / "traces" / "three-rows.csv", "auto", None, 10**11)
    event = Event(0, Replay(int(4.5 * SECOND), trace), (("wan0", "forward"),), at_ns=SECOND)
    taken = list(moves(event, 0, SECOND))
    assert isinstance(taken[0].action, Remember)
    assert isinstance(taken[-1].action, PutBack)
    played = [(move.at_ns / SECOND, dict(move.action.change.values)["rate_bps"]) for move in taken[1:-1]]
    assert played == [(1, 10**7), (2, 5 * 10**6), (3, 8 * 10**6), (4, 10**7), (5, 5 * 10**6)]
    assert taken[-1].at_ns == int(5.5 * SECOND)


def test_cross_traffic_is_prepared_two_seconds_ahead() -> None:
    plan = timeline("- cross_traffic: {at: 1s, duration: 1s, link: wan0}\n")
    schedule = Schedule(plan)
    (prepare,) = schedule.due(-1)
    assert isinstance(prepare.action, PrepareTraffic)
    assert prepare.at_ns == -SECOND


def triggered(trigger: Trigger, times: int = 1) -> Schedule:
    event = Event(0, Outage(SECOND), (("wan0", "forward"),), trigger=trigger, every_ns=2 * SECOND, times=times)
    return Schedule(Timeline((event,), 0))


def test_a_trigger_waits_for_its_event_and_its_fraction() -> None:
    schedule = triggered(Trigger("kv-transfer", 0.6))
    assert schedule.next_ns() is None
    assert not schedule.done
    for told in (ServingEvent("handoff"), ServingEvent("kv-transfer", 0.59, "r1")):
        assert schedule.tell(told, 5 * MS) == []
    assert len(schedule.tell(ServingEvent("kv-transfer", 0.61, "r1"), 7 * MS)) == 1
    assert schedule.tell(ServingEvent("kv-transfer", 0.62, "r2"), 8 * MS) == [], "any means the first"
    assert [move.at_ns for move in all_moves(schedule)] == [7 * MS, 7 * MS + SECOND]
    assert schedule.done


def test_a_trigger_for_each_request_fires_once_for_each() -> None:
    schedule = triggered(Trigger("kv-transfer", 0.5, EACH))
    fired = [
        len(schedule.tell(ServingEvent("kv-transfer", share, name), 0))
        for name in ("r1", "r2")
        for share in (0.4, 0.6, 1.0)
    ]
    assert fired == [0, 1, 0, 0, 1, 0]
    assert {move.occurrence for move in all_moves(schedule)} == {0, 1}
    assert not schedule.done, "more requests may come"


def test_a_trigger_for_one_request_ignores_the_others() -> None:
    schedule = triggered(Trigger("kv-transfer", request="r2"))
    assert schedule.tell(ServingEvent("kv-transfer", 1.0, "r1"), 0) == []
    assert len(schedule.tell(ServingEvent("kv-transfer", 1.0, "r2"), 0)) == 1
    assert schedule.done is False
    all_moves(schedule)
    assert schedule.done


def test_what_is_triggered_may_repeat() -> None:
    schedule = triggered(Trigger("handoff"), times=3)
    schedule.tell(ServingEvent("handoff"), SECOND)
    starts = [move.at_ns for move in all_moves(schedule) if isinstance(move.action, Cut)]
    assert starts == [SECOND, 3 * SECOND, 5 * SECOND]


@given(
    timelines(triggered=True),
    st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from([0.2, 0.7]), st.sampled_from(["r1", "r2"])), max_size=8),
)
def test_the_same_events_give_the_same_moves(plan: Timeline, told: list[tuple[str, float, str]]) -> None:
    runs = []
    for _ in range(2):
        schedule = Schedule(plan)
        for number, message in enumerate(told):
            schedule.tell(ServingEvent(*message), number * MS)
        runs.append(all_moves(schedule))
    assert runs[0] == runs[1]


def test_a_change_survives_json_with_all_its_values() -> None:
    plan = timeline(
        "- step: {at: 0s, link: wan0, rate: none, delay: 10ms, jitter: {std: 1ms}, duplicate: 1%, corrupt: 0%,"
        " reorder: 2%, loss: {good_to_bad: 1%, bad_to_good: 10%}}\n"
        "- step: {at: 1s, link: wan0, rate: 1mbit, loss: 1%, queue: {bdp: 1.5, codel: true}}\n"
    )
    assert Timeline.from_dict(plan.to_dict()) == plan
    change = plan.events[0].what.change  # type: ignore[union-attr]
    assert isinstance(change, Change)
    assert dict(change.values)["rate_bps"] is None
    with pytest.raises(KeyError):
        Timeline.from_dict({"events": [], "seed": 0})
