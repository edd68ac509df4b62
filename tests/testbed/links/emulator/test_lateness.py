"""Lateness by windows: a stall is told and stays told, a moment is not, and a long honest life hides nothing."""

from collections.abc import Iterable
from typing import Any

from testbed.links.emulator.lateness import Lateness

MS, SECOND = 1_000_000, 1_000_000_000


def lived(seconds: Iterable[list[int]]) -> tuple[Lateness, dict[str, Any] | None]:
    """A life of seconds, each with the lateness of its packets."""
    lateness = Lateness(0, 1000.0)
    number = 0
    for number, packets in enumerate(seconds, 1):
        for late_ns in packets:
            lateness.add(late_ns)
        lateness.judge(number * SECOND, 1000.0 + number)
    return lateness, lateness.summary()["unfaithful"]


PUNCTUAL = [40_000] * 500


def test_a_second_in_which_many_were_late_stays_after_a_hundred_thousand_punctual_packets() -> None:
    _, told = lived([PUNCTUAL, [40_000] * 400 + [5 * MS] * 100, *[PUNCTUAL] * 200])
    assert told is not None
    assert told["windows"] == 1
    assert told["worst"] == {
        "from": 1001.0, "to": 1002.0, "packets": 500, "late": 100, "worst_ns": 5 * MS, "limit": 0.05,
    }  # fmt: skip


def test_one_packet_that_waited_for_long_is_told() -> None:
    assert lived([[*PUNCTUAL, 60 * MS]])[1] is not None
    assert lived([[60 * MS]])[1] is not None


def test_a_moment_of_this_machine_is_not() -> None:
    assert lived([[*PUNCTUAL, 12 * MS, 9 * MS, 7 * MS, 3 * MS]])[1] is None
    assert lived([[3 * MS, 2 * MS]])[1] is None
    assert lived([[]] * 100)[1] is None


def test_a_few_late_packets_in_every_second_are_told_after_half_a_minute() -> None:
    """3 % of each second: a punctual p50 and a p99 of 5 ms."""
    assert lived([[*PUNCTUAL, *[5 * MS] * 15]] * 29)[1] is None
    assert lived([[*PUNCTUAL, *[5 * MS] * 15]] * 31)[1] is not None


def test_a_trickle_of_late_packets_is_told() -> None:
    _, told = lived([[5 * MS] * 8] * 11)
    assert told is not None


def test_what_is_forgotten_is_gone() -> None:
    lateness, told = lived([[60 * MS]])
    assert told is not None
    lateness.forget(2 * SECOND, 1002.0)
    assert lateness.summary()["unfaithful"] is None
    assert lateness.summary()["count"] == 0


def test_asking_often_changes_no_verdict() -> None:
    lateness = Lateness(0, 0.0)
    for number in range(100):
        lateness.add(3 * MS if number % 50 == 0 else 40_000)  # 2 %
        lateness.judge(number * SECOND // 100, number / 100)
    assert lateness.summary()["unfaithful"] is None
