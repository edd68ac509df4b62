"""The decisions of a hand-over, without anything that runs."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.handover import (
    BUSY_SEQUENCES,
    MAX_ROUNDS,
    PACE_TOKENS,
    SMALL_GAP,
    IdConflict,
    Pace,
    RelayedIds,
    RelayLoad,
    choose_mode,
    close_enough,
    overtakes,
)

IDLE = RelayLoad(running=0, waiting=0, free_share=1.0)


@pytest.mark.parametrize("mode", ["one-shot", "catch-up", "overlap", "kv"])
def test_a_configured_mode_is_taken_whatever_the_load(mode: str) -> None:
    assert choose_mode(mode, RelayLoad(99, 99, 0.0)) == (mode, "configured")


@pytest.mark.parametrize(
    ("load", "mode", "why"),
    [
        (IDLE, "catch-up", "the relay has room: it decodes 0 others, none on their way"),
        (RelayLoad(BUSY_SEQUENCES - 1, 0, 0.5), "catch-up", "it decodes 3 others"),
        (RelayLoad(BUSY_SEQUENCES, 0, 0.5), "one-shot", "the relay decodes 4 others"),
        (RelayLoad(0, 2, 0.5), "one-shot", "2 more on their way to the relay"),
        (RelayLoad(0, 0, 0.05), "one-shot", "5% of the relay's KV memory is free"),
        (RelayLoad(0, 0, 1.0, begun=False), "one-shot", "main decode was ready before the relay"),
    ],
)
def test_auto_holds_an_idle_relay_and_frees_a_busy_one(load: RelayLoad, mode: str, why: str) -> None:
    chosen, reason = choose_mode("auto", load)
    assert chosen == mode
    assert why in reason


def test_main_decode_is_close_enough_after_a_round_that_left_a_small_gap() -> None:
    assert not close_enough([], 0), "nothing was heard yet"
    assert close_enough([40], SMALL_GAP)
    assert not close_enough([40], SMALL_GAP + 1)
    assert close_enough([40] * MAX_ROUNDS, 40), "a relay that is faster than main decode's rounds"


def test_main_decode_overtakes_when_it_is_faster_by_enough() -> None:
    """It starts a round trip behind, so it needs rtt / (relay - own) tokens."""
    ms = 1_000_000
    assert overtakes(60 * ms, 30 * ms, 400 * ms)
    assert not overtakes(30 * ms, 60 * ms, 400 * ms)
    assert not overtakes(30 * ms, 30 * ms, 0)
    assert overtakes(33.1 * ms, 30 * ms, 400 * ms), "within 10 round trips"
    assert not overtakes(32.9 * ms, 30 * ms, 400 * ms)


def test_a_pace_needs_enough_tokens_and_leaves_out_those_made_before() -> None:
    pace = Pace()
    pace.note(1000, 50)
    for index in range(1, PACE_TOKENS):
        pace.note(1000 + 20 * index)
        assert pace.itl_ns is None
    pace.note(1000 + 20 * PACE_TOKENS)
    assert pace.itl_ns == 20


@settings(max_examples=50)
@given(st.lists(st.integers(0, 99), max_size=30), st.data())
def test_however_ids_are_cut_up_and_repeated_they_become_the_same_list(ids: list[int], data: st.DataObject) -> None:
    relayed = RelayedIds(start=7)
    while len(relayed.ids) < len(ids):
        known = len(relayed.ids)
        first = data.draw(st.integers(0, known))
        last = data.draw(st.integers(first, len(ids)))
        relayed.offer(7 + first, ids[first:last])
        assert relayed.ids == ids[: max(known, last)]
    assert relayed.ids == ids


def test_ids_behind_a_gap_or_other_than_before_are_refused() -> None:
    relayed = RelayedIds(start=7)
    relayed.offer(7, [1, 2, 3])
    for position, ids in ((11, [5]), (8, [9]), (6, [0, 1]), (9, [4, 5])):
        with pytest.raises(IdConflict, match=f"position {position}"):
            relayed.offer(position, ids)
        assert relayed.ids == [1, 2, 3]
    relayed.offer(10, [])
    relayed.offer(8, [2, 3, 4])
    assert relayed.ids == [1, 2, 3, 4]


def test_what_the_relay_said_last_stands_when_it_is_said_again_with_less() -> None:
    relayed = RelayedIds(start=0, ids=[1])
    assert not relayed.over
    relayed.stop(5, None, tail=9)
    relayed.stop(8, "stop", tail=0)
    assert (relayed.over, relayed.stopped_ns, relayed.finish_reason, relayed.tail) == (True, 5, "stop", 0)
