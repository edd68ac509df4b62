"""Bursts follow from the seed alone, are apart and in order; a paced source sends what its on-time is worth."""

from hypothesis import given
from hypothesis import strategies as st

from testbed.congestion.traffic.pacing import FOREVER, Pacer, burst_seed, bursts

MS = 1_000_000
SECOND = 1_000_000_000
lengths = st.integers(1, SECOND)


@given(st.text(max_size=5), st.integers(1, 5 * SECOND), st.integers(10 * MS, SECOND), st.integers(10 * MS, SECOND))
def test_bursts_ascend_never_touch_and_stay_within_the_duration(seed: str, duration: int, on: int, off: int) -> None:
    found = list(bursts(seed, duration, on, off))
    assert found == list(bursts(seed, duration, on, off)), "the same seed, the same bursts"
    edges = [edge for burst in found for edge in burst]
    assert edges == sorted(set(edges))
    assert all(0 <= edge <= duration for edge in edges)


def test_bursts_are_the_same_on_every_machine() -> None:
    first = list(bursts(burst_seed(1, 0, 0, 0, 0), SECOND, 100 * MS, 100 * MS))
    assert first[:2] == [(32681479, 37437606), (117793072, 192038775)]
    assert first != list(bursts(burst_seed(1, 0, 0, 0, 1), SECOND, 100 * MS, 100 * MS)), "each flow has its own"
    assert first != list(bursts(burst_seed(2, 0, 0, 0, 0), SECOND, 100 * MS, 100 * MS)), "each seed, too"


def test_a_source_is_on_for_its_share_of_the_time_and_its_bursts_are_exponential() -> None:
    found = [list(bursts(str(seed), 100 * SECOND, 200 * MS, 800 * MS)) for seed in range(50)]
    on = sum(end - start for run in found for start, end in run) / (50 * 100 * SECOND)
    assert abs(on - 0.2) < 0.01  # 5,000 bursts: a standard error of 0.003
    inner = [end - start for run in found for start, end in run if start > 0 and end < 100 * SECOND]
    mean = sum(inner) / len(inner)
    longer = sum(length > mean for length in inner) / len(inner)
    assert abs(mean / (200 * MS) - 1) < 0.06
    assert abs(longer - 0.368) < 0.03  # 1/e


def test_without_mean_lengths_a_source_is_always_on() -> None:
    assert list(bursts("x", SECOND, None, None)) == [(0, SECOND)]


@given(
    st.lists(st.tuples(lengths, lengths), min_size=1, max_size=5),
    st.integers(10_000, 10**9),
    st.integers(28, 9000),
    st.lists(st.integers(0, 10 * SECOND), max_size=20),
)
def test_a_paced_source_sends_what_its_on_time_is_worth(
    pairs: list[tuple[int, int]], rate_bps: int, size: int, looks: list[int]
) -> None:
    at, on = 0, []
    for pause, length in pairs:
        on.append((at + pause, at + pause + length))
        at += pause + length
    pacer = Pacer(iter(on), rate_bps, size)
    sent = 0
    for now in [*sorted(looks), 11 * SECOND]:
        sent += pacer.take(now)
        so_far = sum(max(0, min(now, end) - start) for start, end in on)
        assert sent == so_far * rate_bps // (size * 8 * SECOND)
        assert pacer.next_ns > now
    assert pacer.next_ns == FOREVER


@given(st.integers(10_000, 10**8), st.integers(28, 9000))
def test_a_source_that_wakes_when_it_is_told_to_sends_one_packet_at_a_time(rate_bps: int, size: int) -> None:
    pacer = Pacer(iter([(0, SECOND)]), rate_bps, size)
    for _ in range(20):
        upcoming = pacer.next_ns
        if upcoming >= SECOND:
            break
        assert pacer.take(upcoming - 1) == 0
        assert pacer.take(upcoming) == 1
