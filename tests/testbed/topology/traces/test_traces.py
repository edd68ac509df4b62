"""Traces: what a recording comes to, the bytes conserved, the memory bounded."""

import gzip
import json
from array import array
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.model.impairment import BernoulliLoss
from testbed.model.trace import LEAST_RATE_BPS, MAX_CHANGES, Trace
from testbed.topology.traces import csv_trace, mahimahi, read
from testbed.topology.traces.mahimahi import OPPORTUNITY_BITS, Opportunities
from testbed.topology.traces.read import MAX_PROBLEMS, TraceErrors, read_trace
from tests.testbed.topology.timeline.timelines import FIXTURES, MBIT, MS, SECOND

TRACES = FIXTURES / "traces"
MAX = 10**11
times_ms = st.lists(st.integers(0, 5_000), min_size=1, max_size=300).map(sorted).filter(lambda times: times[-1] > 0)
granularities = st.integers(5, 400).map(lambda value: value * MS)


def counted(times: list[int], granularity: int) -> Opportunities:
    reader = Opportunities(granularity)
    for at in times:
        reader.add(b"%d" % at)
    return reader


def bits_by(starts: "array[int]", rates: "array[int]", period: int, moment: int) -> float:
    """Bits that the rates let through until a moment of the first period."""
    ends = [*starts[1:], period]
    spans = zip(starts, ends, rates, strict=True)
    return sum(max(0, min(end, moment) - start) * rate for start, end, rate in spans) / SECOND


@given(times_ms, granularities)
def test_a_mahimahi_trace_conserves_its_bytes(times: list[int], granularity: int) -> None:
    reader = counted(times, granularity)
    starts, rates = reader.rates()
    bits = bits_by(starts, rates, reader.period_ns, reader.period_ns)
    # A rate of nothing still lets 1 kbit/s through, which is taken off what follows, if anything does.
    assert bits == pytest.approx(len(times) * OPPORTUNITY_BITS, abs=LEAST_RATE_BPS * 5 + len(starts) + 1)


@given(times_ms, granularities)
def test_no_byte_is_early_by_more_than_a_bin_or_late_at_all(times: list[int], granularity: int) -> None:
    reader = counted(times, granularity)
    starts, rates = reader.rates()
    slack = LEAST_RATE_BPS * 5 + len(starts) + 1
    for boundary in range(0, reader.period_ns, granularity):
        recorded = sum(at * MS <= boundary for at in times if at > 0) + sum(at == 0 for at in times) * (boundary > 0)
        assert bits_by(starts, rates, reader.period_ns, boundary) == pytest.approx(
            recorded * OPPORTUNITY_BITS, abs=slack
        )


def test_a_steady_trace_is_a_single_rate() -> None:
    trace = read_trace(TRACES / "steady.mahi", "auto", None, MAX)
    assert (len(trace), trace.period_ns, trace.mean_rate_bps) == (1, 3 * SECOND, 6 * MBIT)
    assert trace.summary()["granularity_ns"] == 20 * MS


def test_a_csv_trace_holds_each_row_until_the_next_and_keeps_what_is_empty() -> None:
    trace = read_trace(TRACES / "three-rows.csv", "auto", None, MAX)
    assert list(trace.starts_ns) == [0, SECOND, 2 * SECOND]
    assert trace.period_ns == 3 * SECOND, "the last row holds as long as the one before it"
    assert trace.values(1) == (("rate_bps", 5 * MBIT), ("delay_ns", 30 * MS), ("loss", BernoulliLoss(0.01)))
    assert dict(trace.values(2))["loss"] == BernoulliLoss(0.01)
    assert dict(trace.values(0))["loss"] is None


def test_units_may_stand_in_the_header_and_times_may_begin_anywhere(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text("delay:ms, time:s ,rate:mbit\r\n20,1700000000.5,1.5\r\n,1700000001,0\r\n")
    trace = read_trace(file, "auto", None, MAX)
    assert list(trace.starts_ns) == [0, SECOND // 2]
    assert list(trace.columns["rate_bps"]) == [1_500_000, LEAST_RATE_BPS]
    assert list(trace.columns["delay_ns"]) == [20 * MS, 20 * MS]


@given(times_ms, granularities)
def test_a_trace_is_the_same_after_a_trip_through_json(times: list[int], granularity: int) -> None:
    reader = counted(times, granularity)
    starts, rates = reader.rates()
    trace = Trace("x", "mahimahi", "0", reader.period_ns, starts, {"rate_bps": rates}, granularity)
    assert Trace.from_dict(trace.to_dict()) == trace


@given(times_ms, st.integers(1, 20 * SECOND))
def test_a_trace_is_played_again_after_its_period(times: list[int], duration: int) -> None:
    reader = counted(times, 20 * MS)
    starts, rates = reader.rates()
    trace = Trace("x", "mahimahi", "0", reader.period_ns, starts, {"rate_bps": rates}, 20 * MS)
    played = list(trace.played(duration))
    assert [at for at, _ in played] == sorted({at for at, _ in played})
    assert played[0] == (0, 0)
    assert all(at < duration for at, _ in played)
    assert all(at % trace.period_ns == trace.starts_ns[index] for at, index in played)


@given(times_ms)
def test_a_floored_trace_conserves_bytes_where_it_can_be_repaid(times: list[int]) -> None:
    least = 600_000
    reader = counted([*times, *range(6000, 8000)], 20 * MS)  # ends with two seconds of 12 Mbit/s
    starts, rates = reader.rates()
    trace = Trace("x", "mahimahi", "0", reader.period_ns, starts, {"rate_bps": rates}, 20 * MS)
    floored = trace.floored(least)
    assert min(floored.columns["rate_bps"]) >= least
    assert floored.mean_rate_bps == pytest.approx(trace.mean_rate_bps, rel=0.001)


def test_a_file_of_another_kind_is_refused_in_a_few_words(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "x.mahi").write_bytes(gzip.compress(b"1\n2\n"))
    (tmp_path / "y.mahi").write_bytes(bytes(range(256)) * 1000)
    for file, words in [
        (tmp_path / "folder", "cannot be read: Is a directory"),
        (tmp_path / "none", "cannot be read: No such file or directory"),
        (Path("/dev/zero"), "is no regular file"),
        (tmp_path / "x.mahi", "x.mahi:1:1: is packed with gzip"),
        (tmp_path / "y.mahi", "y.mahi:1:1: is no plain text"),
    ]:
        with pytest.raises(TraceErrors, match=words):
            read_trace(file, "auto", None, MAX)


def test_a_long_list_of_mistakes_ends(tmp_path: Path) -> None:
    file = tmp_path / "x.mahi"
    file.write_text("10\n" + "x\n" * 1000)
    with pytest.raises(TraceErrors) as caught:
        read_trace(file, "auto", None, MAX)
    assert len(caught.value.problems) == MAX_PROBLEMS


def test_a_huge_file_is_refused_before_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read, "MAX_BYTES", 2**20)
    file = tmp_path / "x.mahi"
    file.write_text("12345\n" * 400_000)
    with pytest.raises(TraceErrors, match="is larger than 1 MiB"):
        read_trace(file, "auto", None, MAX)


def test_more_changes_than_a_replay_holds_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(csv_trace, "MAX_CHANGES", 1000)
    monkeypatch.setattr(mahimahi, "MAX_CHANGES", 1000)
    file = tmp_path / "x.csv"
    file.write_text("time:ms,rate:mbit\n" + "".join(f"{row * 10},1\n" for row in range(1001)))
    with pytest.raises(TraceErrors, match=r"x\.csv:1002:1: is one row more than the 1,000 that a replay holds"):
        read_trace(file, "auto", None, MAX)
    file = tmp_path / "x.mahi"
    file.write_text("".join(f"{at}\n" for at in range(0, 15_000, 15)))  # 0, 1 or 2 packets a bin, for 15 s
    assert len(read_trace(file, "auto", None, MAX)) <= 1000
    with pytest.raises(TraceErrors, match=r"comes to [0-9,]+ changes of the rate, more than the 1,000"):
        read_trace(file, "auto", 5 * MS, MAX)


def test_the_largest_trace_takes_little_memory() -> None:
    starts = array("q", range(MAX_CHANGES))
    trace = Trace(
        "x", "csv", "0", MAX_CHANGES, starts, {"rate_bps": starts, "delay_ns": starts, "loss": array("d", starts)}
    )
    columns = [trace.starts_ns, *trace.columns.values()]
    assert sum(len(column) * column.itemsize for column in columns) < 8 << 20
    assert len(json.dumps(trace.to_dict())) < 8 << 20, "fits into a message on the control socket"


def test_a_trace_faster_than_any_driver_is_refused_with_the_arithmetic(tmp_path: Path) -> None:
    file = tmp_path / "x.mahi"
    file.write_text("10\n" * 200_000 + "20\n")
    words = r"x.mahi:200001:1: asks for 120000\.6mbit \(200,001 packets within 20 ms\) at 0 s, more than the 100gbit"
    with pytest.raises(TraceErrors, match=words):
        read_trace(file, "auto", None, MAX)
