"""Pacing: steps are due on an ideal clock, lateness is counted and not handed on, and answers stay what they are."""

import asyncio
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.workers.engine.drive import prompt
from workers.engine import BlockPool, Chunk, EngineRunner, Profile, Sampling, Sequence, generate
from workers.engine.batching import schedule_paced
from workers.engine.pacing import PROMPT_STEP_NS, TOLERANCE_NS, PaceCounts, Pacer, Work, work_of
from workers.linux import RealTimePriority
from workers.models import LoadedModel

MS = 1_000_000
CHIP = Profile("chip", prefill_token_ns=100_000, decode_step_ns=10 * MS, extend_token_ns=500_000)
DECODE = Work(decoding=1)


def sequence(prompt_len: int, answer: int = 0, computed: int = 0) -> Sequence:
    return Sequence("s", [0] * (prompt_len + answer), prompt_len, computed=computed)


def test_a_step_costs_its_prompt_tokens_and_one_pass_of_decode() -> None:
    assert CHIP.step_ns(Work(prompt_tokens=64)) == 6_400_000
    assert CHIP.step_ns(DECODE) == 10 * MS
    assert CHIP.step_ns(Work(decoding=8)) == 10 * MS
    assert CHIP.step_ns(Work(prompt_tokens=64, decoding=1)) == 16_400_000
    grows = replace(CHIP, decode_sequence_ns=1 * MS)
    assert grows.step_ns(Work(decoding=8)) == 17 * MS
    assert grows.step_ns(Work(decoding=7, extending=1, extend_tokens=4)) == 19 * MS


def test_an_extend_costs_a_pass_and_its_tokens() -> None:
    extend = work_of([Chunk(sequence(50, 100, computed=50), 100)])
    assert extend == Work(extending=1, extend_tokens=100)
    assert CHIP.step_ns(extend) == 10 * MS + 100 * 500_000
    decode = Chunk(sequence(50, 1, computed=50), 1)
    beside = work_of([Chunk(sequence(50, 100, computed=50), 100), decode])
    assert CHIP.step_ns(beside) == CHIP.step_ns(extend), "one pass for all"
    scaled = replace(CHIP, extend_pass_ns=2 * MS)
    assert scaled.step_ns(extend) == 52 * MS
    assert scaled.step_ns(beside) == 60 * MS


def test_a_tokens_position_says_whether_it_is_of_the_prompt() -> None:
    assert work_of([Chunk(sequence(50), 50)]) == Work(prompt_tokens=50)
    assert work_of([Chunk(sequence(50, 1, computed=50), 1)]) == DECODE
    assert work_of([Chunk(sequence(50, 1, computed=50), 1, draft=(3, 4))]) == Work(0, 1, 0, 2)
    # of a sequence that lost its memory in mid-answer
    assert work_of([Chunk(sequence(50, 7, computed=40), 17)]) == Work(10, 0, 1, 7)


def test_prompts_are_computed_one_after_the_other_and_decodes_go_along() -> None:
    first, second, decoding = sequence(500), sequence(1), sequence(20, 1, computed=20)
    chunks = schedule_paced([first, second, decoding], 256, 64)
    assert [(chunk.sequence, chunk.count) for chunk in chunks] == [(decoding, 1), (first, 64)]


def test_a_step_of_a_slow_chip_is_short_enough_to_leave() -> None:
    slow = replace(CHIP, prefill_token_ns=7_111_111)
    assert slow.prompt_step_tokens(256) == PROMPT_STEP_NS // 7_111_111
    assert replace(CHIP, prefill_token_ns=1e12).prompt_step_tokens(256) == 1
    assert CHIP.prompt_step_tokens(256) == 256


@given(st.lists(st.integers(0, 9 * MS), min_size=1, max_size=50))
def test_lateness_of_steps_does_not_add_up(late_by: list[int]) -> None:
    """Whenever steps that follow each other really end, the n-th is due n steps after the first began."""
    pacer = Pacer(CHIP)
    for count, late_ns in enumerate(late_by, 1):
        due_ns = pacer.begin(DECODE, since_ns=5 * MS)
        assert due_ns == 5 * MS + count * 10 * MS
        pacer.end(due_ns, due_ns + late_ns)


def test_the_clock_of_an_idle_engine_begins_when_work_comes() -> None:
    pacer = Pacer(CHIP)
    pacer.end(0, pacer.begin(DECODE, since_ns=0))
    assert pacer.begin(DECODE, since_ns=300 * MS) == 310 * MS


def test_work_that_comes_during_a_step_begins_when_that_is_due() -> None:
    pacer = Pacer(CHIP)
    pacer.end(0, pacer.begin(DECODE, since_ns=0))
    assert pacer.begin(DECODE, since_ns=9 * MS) == 20 * MS


def test_time_without_room_for_anything_is_nobodys_lateness() -> None:
    pacer = Pacer(CHIP)
    pacer.end(0, pacer.begin(DECODE, since_ns=0))
    pacer.skip(500 * MS)
    due_ns = pacer.begin(DECODE, since_ns=0)
    assert due_ns == 510 * MS
    pacer.end(due_ns, due_ns)
    assert pacer.counts.late == 0


def paced(*steps: tuple[int, int]) -> PaceCounts:
    """Decode steps in a row, each computed and ended so many ns after it was due."""
    pacer = Pacer(CHIP)
    for computed, ended in steps:
        due_ns = pacer.begin(DECODE, since_ns=0)
        pacer.end(due_ns + computed, due_ns + ended)
    return pacer.counts


def test_late_steps_are_counted_and_told_by_cause() -> None:
    within = TOLERANCE_NS + CHIP.step_ns(DECODE) // 100
    counts = paced((-5 * MS, within), (-5 * MS, within + 1), (3 * MS, 3 * MS + 1000))
    assert (counts.steps, counts.late, counts.overran) == (3, 2, 1)
    assert counts.paced_ns == 30 * MS
    assert counts.worst_ns == 3 * MS + 1000


def test_lateness_that_is_handed_on_is_counted_once() -> None:
    counts = paced((0, 5 * MS), (0, 5 * MS), (0, 7 * MS), (0, 0))
    assert counts.lateness_ns == 7 * MS


@pytest.mark.parametrize("wrong", ["-1.0", "NaN", "Infinity", "1e999", '"fast"', "null"])
def test_impossible_speeds_are_refused(wrong: str) -> None:
    text = msgspec.json.encode(CHIP).replace(b"100000,", wrong.encode() + b",")
    with pytest.raises(msgspec.DecodeError):
        msgspec.json.decode(text, type=Profile)


async def serve(runner: EngineRunner, loaded: LoadedModel, length: int) -> list[int]:
    """A prompt's prefill, three known ids and the rest of its answer."""
    tokens = prompt(loaded, length)
    known = generate(loaded, tokens, Sampling(max_tokens=4, ignore_eos=True))
    sampling = Sampling(max_tokens=20, ignore_eos=True)
    made = runner.new_sequence(str(length), tokens, length, sampling)
    await runner.prefill(made)
    made.forget(length + 1)
    await runner.extend(made, known[1:])
    async for _ in runner.decode(made):
        pass
    answer = made.tokens[length:]
    runner.free(made)
    return answer


def test_answers_do_not_depend_on_pacing(tiny: LoadedModel) -> None:
    """Prefill, extend and decode of several at once, on a faster chip than this one and on a slower one."""

    async def scenario(profile: Profile | None) -> list[list[int]]:
        runner = EngineRunner(tiny, BlockPool(tiny.config, 100), threads=1, profile=profile)
        runner.start()
        try:
            return await asyncio.gather(*(serve(runner, tiny, length) for length in (1, 40, 300)))
        finally:
            await runner.close()
            runner.pool.check_integrity([])

    fast = Profile("fast", 1, 1000, 1)
    slow = Profile("slow", 200_000, 8 * MS, 100_000)
    native = asyncio.run(scenario(None))
    assert asyncio.run(scenario(fast)) == native
    assert asyncio.run(scenario(slow)) == native
    assert native[2] == generate(tiny, prompt(tiny, 300), Sampling(max_tokens=20, ignore_eos=True))


def test_closing_does_not_wait_for_a_step_that_is_held(tiny: LoadedModel) -> None:
    async def scenario() -> float:
        runner = EngineRunner(tiny, BlockPool(tiny.config, 10), threads=1, profile=replace(CHIP, prefill_token_ns=1e13))
        runner.start()
        made = runner.new_sequence("a", [1, 2, 3], 3, Sampling(max_tokens=4))
        waiting = asyncio.create_task(runner.prefill(made))
        while not runner._jobs.is_flying(made):
            await asyncio.sleep(0)
        began = time.monotonic()
        await runner.close()
        await asyncio.gather(waiting, return_exceptions=True)
        return time.monotonic() - began

    assert asyncio.run(scenario()) < 3600  # the step's own time is hours


@pytest.mark.quiet
def test_a_paced_answer_takes_its_profiles_time_within_a_percent(tiny: LoadedModel) -> None:
    async def scenario() -> tuple[float, float, PaceCounts]:
        runner = EngineRunner(
            tiny, BlockPool(tiny.config, 40), threads=1, profile=Profile("chip", 4 * MS, 30 * MS, 0.5 * MS)
        )
        runner.start()
        made = runner.new_sequence("a", prompt(tiny, 300), 300, Sampling(max_tokens=51, ignore_eos=True))
        began_ns = time.monotonic_ns()
        await runner.prefill(made)
        first_ns = time.monotonic_ns()
        async for _ in runner.decode(made):
            pass
        last_ns = time.monotonic_ns()
        counts = runner.pace
        await runner.close()
        assert counts is not None
        return (first_ns - began_ns) / 1200e6, (last_ns - first_ns) / (50 * 30e6), counts

    prefill, decode, counts = asyncio.run(scenario())
    assert prefill == pytest.approx(1, rel=0.01)
    assert decode == pytest.approx(1, rel=0.01)
    assert counts.steps == 50 + 5  # 300 tokens of prefill in steps of up to 62: 250 ms


@pytest.mark.parametrize(("prompt_step", "steps"), [(None, 2), (64, 5), (8, 38)])
def test_blocks_of_a_prompt_are_done_step_by_step_of_the_asked_size(
    tiny: LoadedModel, prompt_step: int | None, steps: int
) -> None:
    async def scenario() -> PaceCounts | None:
        profile = Profile("chip", 1000, MS, 1000)
        runner = EngineRunner(tiny, BlockPool(tiny.config, 40), threads=1, profile=profile, prompt_step=prompt_step)
        runner.start()
        made = runner.new_sequence("a", prompt(tiny, 300), 300, Sampling(max_tokens=1))
        await runner.prefill(made)
        counts = runner.pace
        await runner.close()
        return counts

    counts = asyncio.run(scenario())
    assert counts is not None
    assert counts.steps == steps


@pytest.mark.root
def test_who_waits_for_a_due_step_goes_first_and_who_computes_does_not() -> None:
    def policies() -> tuple[int, int, int]:
        priority, born = RealTimePriority(), []
        priority.begin()
        waiting = os.sched_getscheduler(0)
        child = threading.Thread(target=lambda: born.append(os.sched_getscheduler(0)))
        child.start()
        child.join()
        priority.end()
        return tuple(policy & ~os.SCHED_RESET_ON_FORK for policy in (waiting, *born, os.sched_getscheduler(0)))

    with ThreadPoolExecutor(1) as thread:  # its priority is its own
        assert thread.submit(policies).result() == (os.SCHED_FIFO, os.SCHED_OTHER, os.SCHED_OTHER)


def test_without_permission_a_worker_waits_as_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", refused)
    priority = RealTimePriority()
    priority.begin()
    priority.end()
    assert not priority.permitted
