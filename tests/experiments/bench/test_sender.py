"""The schedule: order, the cap, what is stopped. Sending is a coroutine here; sockets are the client's tests."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from experiments.bench.load import LoadError, Planned, planned
from experiments.bench.outcome import Outcome
from experiments.bench.sender import Sender, SendResult
from experiments.framework.base import ExperimentError
from experiments.framework.requests import LabRecords
from experiments.traces.trace import Request

Send = Callable[[Planned, Outcome], Awaitable[None]]


class Counter:
    """An observer that knows how many were under way at most."""

    def __init__(self) -> None:
        self.now = self.most = self.done = 0

    def started(self) -> None:
        self.now += 1
        self.most = max(self.most, self.now)

    def finished(self, outcome: Outcome) -> None:
        self.now -= 1
        self.done += 1


def load_of(count: int, due_ns: int | None = None) -> list[Planned]:
    return [Planned(i, Request(i, 8, 1), None if due_ns is None else i * due_ns) for i in range(count)]


def answered(outcome: Outcome) -> None:
    outcome.start_ns = time.monotonic_ns()
    outcome.chunk_ns.append(outcome.start_ns)
    outcome.finish_reason = "length"
    outcome.finish(time.monotonic_ns())


async def at_once(planned: Planned, outcome: Outcome) -> None:
    answered(outcome)


async def always(outcome: Outcome) -> bool:
    return True


def drive(load: list[Planned], send: Send, cap: int | None = None) -> tuple[SendResult, Counter]:
    counter = Counter()

    async def run() -> SendResult:
        return await asyncio.wait_for(Sender(load, send, always, counter, cap).run(), 60)

    return asyncio.run(run()), counter


def test_every_request_is_sent_once_and_in_order() -> None:
    sent: list[int] = []

    async def send(planned: Planned, outcome: Outcome) -> None:
        sent.append(planned.index)
        answered(outcome)

    driven, counter = drive(load_of(50, due_ns=100_000), send)
    assert sent == list(range(50)) == [outcome.index for outcome in driven.outcomes]
    assert (counter.done, driven.under_way, driven.not_sent, driven.why) == (50, 0, 0, "")


def test_no_request_is_sent_before_it_is_due() -> None:
    driven, _ = drive(load_of(20, due_ns=2_000_000), at_once)
    for outcome in driven.outcomes:
        assert outcome.due_ns is not None
        assert outcome.late_ns is not None
        assert outcome.start_ns - driven.begin_ns - outcome.due_ns == outcome.late_ns >= 0


def test_what_is_due_at_once_is_never_late() -> None:
    driven, _ = drive(load_of(10), at_once)
    assert {outcome.late_ns for outcome in driven.outcomes} == {None}


def test_the_cap_holds_and_is_used() -> None:
    async def send(planned: Planned, outcome: Outcome) -> None:
        for _ in range(5):
            await asyncio.sleep(0)
        answered(outcome)

    driven, counter = drive(load_of(40), send, cap=3)
    assert (counter.most, len(driven.outcomes)) == (3, 40)
    assert driven.outcomes[39].held_ns > 0


def test_waiting_for_the_cap_is_not_the_clients_lateness() -> None:
    async def send(planned: Planned, outcome: Outcome) -> None:
        outcome.start_ns = time.monotonic_ns()
        await asyncio.sleep(0.03)
        outcome.chunk_ns.append(time.monotonic_ns())
        outcome.finish_reason = "length"
        outcome.finish(time.monotonic_ns())

    driven, _ = drive(load_of(4, due_ns=0), send, cap=1)
    last = driven.outcomes[-1]
    assert last.late_ns is not None
    assert last.held_ns >= 90_000_000
    assert last.late_ns + last.held_ns == last.start_ns - driven.begin_ns


@pytest.mark.parametrize("cap", [None, 1, 2])
def test_a_turn_waits_for_its_last_answer_and_for_no_other_conversations(cap: int | None) -> None:
    turns = [Request(at, 8, 1, session=at % 2, turn=at // 2) for at in range(6)]
    under_way: set[int | None] = set()
    sent: list[tuple[int | None, int | None]] = []

    async def send(planned: Planned, outcome: Outcome) -> None:
        assert planned.request.session not in under_way, "one turn at a time"
        under_way.add(planned.request.session)
        sent.append((planned.request.session, planned.request.turn))
        for _ in range(3 if planned.request.session else 1):
            await asyncio.sleep(0)
        under_way.remove(planned.request.session)
        answered(outcome)

    driven, counter = drive(planned(turns, [0] * 6, in_turn=True), send, cap)
    assert sorted(sent) == [(session, turn) for session in range(2) for turn in range(3)]
    assert all([turn for one, turn in sent if one == session] == [0, 1, 2] for session in range(2))
    assert counter.most == (cap or 2)
    late = [outcome.late_ns for outcome in driven.outcomes]
    assert all(one is not None and one < 50_000_000 for one in late), "what is held back is not late"


def test_a_turn_goes_on_behind_one_that_failed() -> None:
    async def send(planned: Planned, outcome: Outcome) -> None:
        if planned.index == 0:
            outcome.start_ns = time.monotonic_ns()
            outcome.fail("HTTP 500", "")
            outcome.finish(time.monotonic_ns())
        else:
            answered(outcome)

    turns = [Request(at, 8, 1, session=0, turn=at) for at in range(2)]
    driven, _ = drive(planned(turns, [None, None], in_turn=True), send)
    assert [outcome.success for outcome in driven.outcomes] == [False, True]


def test_a_load_without_conversations_has_no_turns() -> None:
    with pytest.raises(LoadError, match="this load has none"):
        planned([Request(0, 8, 1)], [None], in_turn=True)


def test_stopping_keeps_what_is_done_and_counts_the_rest() -> None:
    async def run() -> SendResult:
        third = asyncio.Event()

        async def send(planned: Planned, outcome: Outcome) -> None:
            if planned.index >= 3:
                third.set()
                await asyncio.Event().wait()
            answered(outcome)

        driver = Sender(load_of(10), send, always, Counter(), 2)
        running = asyncio.create_task(driver.run())
        await third.wait()
        driver.stop("interrupted")
        driver.stop("gone")
        return await asyncio.wait_for(running, 60)

    driven = asyncio.run(run())
    assert [outcome.index for outcome in driven.outcomes] == [0, 1, 2]
    assert driven.why == "interrupted"
    assert driven.under_way + driven.not_sent == 7
    assert 1 <= driven.under_way <= 2


def test_a_run_that_is_stopped_while_it_waits_ends_at_once() -> None:
    async def run() -> SendResult:
        driver = Sender(load_of(2, due_ns=3_600_000_000_000), at_once, always, Counter())
        running = asyncio.create_task(driver.run())
        await asyncio.sleep(0)
        driver.stop("interrupted")
        return await asyncio.wait_for(running, 60)

    driven = asyncio.run(run())
    assert len(driven.outcomes) + driven.not_sent == 2


def test_a_failure_does_not_stop_the_run_unless_nobody_is_there_any_more() -> None:
    async def run(there: bool) -> SendResult:
        async def send(planned: Planned, outcome: Outcome) -> None:
            outcome.start_ns = time.monotonic_ns()
            if planned.index == 2:
                outcome.fail("connection lost", "reset")
            else:
                if planned.index > 2 and not there:
                    await asyncio.Event().wait()
                outcome.chunk_ns.append(time.monotonic_ns())
                outcome.finish_reason = "length"
            outcome.finish(time.monotonic_ns())

        async def still_there(outcome: Outcome) -> bool:
            assert outcome.index == 2
            return there

        return await asyncio.wait_for(Sender(load_of(9), send, still_there, Counter(), 1).run(), 60)

    driven = asyncio.run(run(there=True))
    assert ([o.index for o in driven.outcomes if not o.success], driven.why) == ([2], "")
    assert len(driven.outcomes) == 9
    driven = asyncio.run(run(there=False))
    assert (driven.why, len(driven.outcomes)) == ("gone", 3)


def test_a_bug_is_raised_and_not_counted_as_a_failure() -> None:
    async def send(planned: Planned, outcome: Outcome) -> None:
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        drive(load_of(3), send)


def test_records_are_read_from_where_they_ended_before_and_whole_lines_only(tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    file.write_text('{"request_id": "old"}\n')
    records = LabRecords(file)
    with file.open("a") as stream:
        stream.write('{"request_id": "a"}\n{"request_id": "b", "x')
        stream.flush()
        missing: list[int] = []

        def waiting(count: int) -> None:
            missing.append(count)
            stream.write('": 1}\n')
            stream.flush()

        found = records.gather(["a", "b"], waiting)
    assert found == {"a": {"request_id": "a"}, "b": {"request_id": "b", "x": 1}}
    assert missing == [1]


def test_records_that_never_come_are_given_up(tmp_path: Path) -> None:
    assert LabRecords(tmp_path / "requests.jsonl").gather(["a"], lambda count: None, patience_s=0.01) == {}


def test_records_that_are_needed_are_taken_once_or_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("experiments.framework.requests.SETTLED_S", 0.05)
    file = tmp_path / "requests.jsonl"
    records = LabRecords(file)
    file.write_text('{"request_id": "a", "value": 1}\n{"request_id": "b", "value": 2}\n')
    assert [record["value"] for record in records.take(["a"]).values()] == [1]
    with pytest.raises(ExperimentError, match="1 requests, the first a, left no record"):
        records.take(["a", "b"])
    assert records.take(["b"])["b"]["value"] == 2


def test_a_line_that_is_no_record_is_counted_and_hides_no_other(tmp_path: Path) -> None:
    file = tmp_path / "requests.jsonl"
    records = LabRecords(file)
    file.write_text('{"request_id": "a", "val{"request_id": "b"}\n[]\n{}\n\n{"request_id": "c"}\n')
    assert records.gather(["c"], lambda count: None, patience_s=0.01) == {"c": {"request_id": "c"}}
    assert records.damaged == 4
