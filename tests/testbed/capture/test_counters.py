"""Which readings of the workers' counters are compared, and which cannot be."""

import json
from pathlib import Path

import pytest

from testbed.capture.counters import BadCounters, Note, count_pair, read_notes

MS = 1_000_000


def _note(host: str, ms: int, peer: str, way: str, size: int, pid: int = 1) -> Note:
    return Note(host, pid, ms * MS, {(peer, way, "kv"): size})


def _sent(*points: tuple[int, int]) -> list[Note]:
    return [_note("p0", ms, "md0", "sent", size) for ms, size in points]


def _received(*points: tuple[int, int]) -> list[Note]:
    return [_note("md0", ms, "p0", "received", size) for ms, size in points]


def test_quiet_readings_next_to_the_ends_are_chosen() -> None:
    sent = _sent((100, 90), (300, 100), (900, 5000), (1100, 9000), (1300, 9000), (1500, 9040))
    received = _received((101, 80), (301, 100), (901, 4000), (1101, 8000), (1301, 9000), (1501, 9030))
    count = count_pair(sent, received, (0, 2000 * MS))
    assert count is not None
    assert (count.begins_level, count.ends_level) == (True, True)
    assert (count.sent, count.received) == ({"kv": 8900}, {"kv": 8900})
    assert (count.sent_within, count.received_within) == ((300 * MS, 1300 * MS), (301 * MS, 1301 * MS))


@pytest.mark.parametrize("factor", [1.05, 3])
def test_a_wrong_counter_cannot_hide_behind_a_quiet_beginning(factor: float) -> None:
    """Before anything was counted even a wrong counter is level: the capture must not be compared up to there only."""
    points = [(100, 0), (200, 0), (900, 5000), (1000, 5000)]
    sent = _sent(*((ms, int(size * factor)) for ms, size in points))
    count = count_pair(sent, _received(*points), (0, 2000 * MS))
    assert count is not None
    assert count.sent == {"kv": int(5000 * factor)}
    assert count.received == {"kv": 5000}
    assert not count.ends_level


def test_a_busy_link_is_compared_from_its_first_to_its_last_reading() -> None:
    count = count_pair(_sent((100, 50), (900, 200)), _received((101, 40), (901, 150)), (0, 2000 * MS))
    assert count is not None
    assert (count.begins_level, count.ends_level) == (False, False)
    assert (count.sent, count.received) == ({"kv": 150}, {"kv": 110})


def test_equal_counts_of_different_moments_are_not_a_quiet_reading() -> None:
    count = count_pair(_sent((100, 50), (900, 200)), _received((500, 50), (1500, 200)), (0, 2000 * MS))
    assert count is not None
    assert (count.begins_level, count.ends_level) == (False, False)


def test_readings_outside_the_capture_do_not_count() -> None:
    sent, received = _sent((100, 0), (500, 10), (900, 20)), _received((100, 0), (500, 10), (900, 20))
    assert count_pair(sent, received, (400 * MS, 800 * MS)) is None
    assert count_pair(sent, [], (0, 1000 * MS)) is None
    count = count_pair(sent, received, (400 * MS, 1000 * MS))
    assert count is not None
    assert count.sent == {"kv": 10}


def test_what_was_on_its_way_at_the_ends_of_the_capture_is_left_out() -> None:
    # never level; 100 ms from the sender to the point of capture, 200 ms from there to the receiver
    sent = _sent((100, 10), (400, 20), (900, 30), (980, 40))
    received = _received((101, 1), (401, 11), (901, 21), (981, 31))
    count = count_pair(sent, received, (50 * MS, 1000 * MS), 100 * MS, 200 * MS)
    assert count is not None
    # the receiver's note at 101 holds what had left before the capture began; what was sent by 980 passes too late
    assert count.sent_within == (100 * MS, 900 * MS)
    assert count.received_within == (401 * MS, 981 * MS)


def test_a_worker_that_started_anew_cannot_be_compared() -> None:
    sent = [_note("p0", 100, "md0", "sent", 50), _note("p0", 900, "md0", "sent", 60, pid=2)]
    with pytest.raises(BadCounters, match="p0 started anew"):
        count_pair(sent, _received((100, 50), (900, 60)), (0, 2000 * MS))


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    file = tmp_path / "bytes-p0.jsonl"
    line = {"host": "p0", "pid": 1, "time_ns": 1, "counts": [["md0", "sent", "kv", 7, 1]]}
    file.write_text(json.dumps(line) + "\n" + '{"host": "p0"')
    with pytest.raises(BadCounters, match=r"bytes-p0\.jsonl:2 "):
        read_notes(tmp_path)
    file.write_text(json.dumps(line) + "\n")
    assert read_notes(tmp_path) == {"p0": [Note("p0", 1, 1, {("md0", "sent", "kv"): 7})]}
