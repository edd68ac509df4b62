"""The runner: concurrent requests get what they would get alone, and leaving at any moment leaves nothing
behind.
"""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from tests.workers.engine.drive import prompt
from workers.engine import (
    BlockPool,
    EngineRunner,
    Generated,
    OutOfBlocks,
    Sampling,
    Sequence,
    SequenceFailed,
    Stopped,
    generate,
)
from workers.models import LoadedModel
from workers.models.tokenizer import ByteTokenizer


@asynccontextmanager
async def running(loaded: LoadedModel, num_blocks: int = 200, **options: int) -> AsyncIterator[EngineRunner]:
    """A started runner; afterwards all of its blocks must be free again."""
    runner = EngineRunner(loaded, BlockPool(loaded.config, num_blocks), threads=1, **options)
    runner.start()
    try:
        yield runner
    finally:
        await runner.close()
        runner.pool.check_integrity([])


def greedy(max_tokens: int) -> Sampling:
    return Sampling(max_tokens=max_tokens, ignore_eos=True)


def ask(runner: EngineRunner, loaded: LoadedModel, id: str, length: int, max_tokens: int = 40) -> Sequence:
    return runner.new_sequence(id, prompt(loaded, length), length, greedy(max_tokens))


async def whole_answer(runner: EngineRunner, sequence: Sequence) -> list[Generated]:
    return [await runner.prefill(sequence), *[token async for token in runner.decode(sequence)]]


async def in_flight(runner: EngineRunner, sequence: Sequence) -> None:
    """Returns while the compute thread works on the sequence; that step can only land at the next await."""
    while not runner._jobs.is_flying(sequence):
        await asyncio.sleep(0)


def test_prefill_then_decode_is_the_control(tiny: LoadedModel) -> None:
    async def scenario() -> None:
        async with running(tiny) as runner:
            sequence = ask(runner, tiny, "a", 50)
            answer = await whole_answer(runner, sequence)
            expected = generate(tiny, prompt(tiny, 50), greedy(40))
            assert [token.token_id for token in answer] == expected
            assert [token.position for token in answer] == list(range(50, 90))
            assert [token.finish_reason for token in answer] == [None] * 39 + ["length"]
            assert all(token.logprob is not None and token.logprob <= 0 for token in answer)
            assert sequence.computed == len(sequence.tokens) - 1

    asyncio.run(scenario())


def test_sixteen_at_once_answer_as_alone_and_prefill_is_chunked_among_them(tiny: LoadedModel) -> None:
    async def scenario() -> None:
        async with running(tiny, 400, max_batch_tokens=64) as runner:
            lengths = [1, 15, 16, 17, 500, 33, 2, 300, 64, 5, 128, 7, 90, 31, 32, 200]
            sequences = [ask(runner, tiny, str(n), n) for n in lengths]
            answers = await asyncio.gather(*(whole_answer(runner, s) for s in sequences))
            for length, answer in zip(lengths, answers, strict=True):
                assert [t.token_id for t in answer] == generate(tiny, prompt(tiny, length), greedy(40))

    asyncio.run(scenario())


def test_an_answer_wanders_over_three_instances(tiny: LoadedModel) -> None:
    """Prefill, relay and main decode, each with its own pool; only KV bytes of the prompt and ids move."""

    async def scenario() -> None:
        async with running(tiny) as p, running(tiny) as rld, running(tiny) as md:
            at_p = ask(p, tiny, "a", 50)
            first = await p.prefill(at_p)
            received = []
            for runner in (rld, md):
                tokens = [*at_p.tokens[:50], first.token_id]
                sequence = runner.new_sequence("a", tokens, 50, greedy(40))
                for index, tokens_in_block in enumerate([16, 16, 16, 2]):
                    source = p.pool.view(at_p.blocks[index], tokens_in_block)
                    runner.pool.view(sequence.blocks[index], tokens_in_block)[:] = source
                sequence.computed = 50
                received.append(sequence)
            at_rld, at_md = received
            relayed = [first.token_id]
            relaying = rld.decode(at_rld)
            async for token in relaying:
                relayed.append(token.token_id)
                if len(relayed) == 11:
                    relaying.stop()
            assert relayed == at_rld.tokens[50:]
            next_token = await md.extend(at_md, relayed[1:])
            rest = [next_token.token_id, *[token.token_id async for token in md.decode(at_md)]]
            assert relayed + rest == generate(tiny, prompt(tiny, 50), greedy(40))

    asyncio.run(scenario())


def test_after_stop_no_token_appears_and_decoding_can_go_on(tiny: LoadedModel) -> None:
    async def scenario() -> None:
        async with running(tiny) as runner:
            expected = generate(tiny, prompt(tiny, 20), greedy(400))
            sequence = ask(runner, tiny, "a", 20, max_tokens=400)
            seen = [(await runner.prefill(sequence)).token_id]
            noise = ask(runner, tiny, "noise", 100, max_tokens=3000)
            await runner.prefill(noise)
            background = runner.decode(noise)
            chance = random.Random(1)
            while sequence.finish_reason is None:
                stream = runner.decode(sequence)
                await asyncio.sleep(chance.random() * 0.02)
                stream.stop()
                await runner.landed(sequence)
                length = len(sequence.tokens)
                await asyncio.sleep(0.005)
                assert len(sequence.tokens) == length
                seen += [token.token_id async for token in stream]
                assert seen == sequence.tokens[20:]  # every token of the step in flight was delivered
            assert seen == expected
            background.stop()
            assert [t.token_id async for t in background] == noise.tokens[101:]

    asyncio.run(scenario())


def test_freeing_in_flight_keeps_the_blocks_until_the_step_has_landed(tiny: LoadedModel) -> None:
    async def scenario() -> None:
        async with running(tiny, 40) as runner:
            sequence = ask(runner, tiny, "a", 400)
            waiting = asyncio.ensure_future(runner.prefill(sequence))
            await in_flight(runner, sequence)
            runner.free(sequence)
            assert runner.pool.free_count == 15  # the compute thread still writes into its 25 blocks
            with pytest.raises(Stopped):
                await waiting
            await runner.landed(sequence)
            assert runner.pool.free_count == 40
            runner.free(sequence)  # once more is harmless
            assert runner.pool.free_count == 40

    asyncio.run(scenario())


def test_leaving_a_prefill_keeps_what_was_computed(tiny: LoadedModel) -> None:
    async def scenario() -> None:
        async with running(tiny, max_batch_tokens=16) as runner:
            sequence = ask(runner, tiny, "a", 500)
            waiting = asyncio.ensure_future(runner.prefill(sequence))
            while sequence.computed == 0:
                await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            await runner.landed(sequence)
            assert 0 < sequence.computed < 500
            assert len(sequence.tokens) == 500
            answer = await whole_answer(runner, sequence)
            assert [t.token_id for t in answer] == generate(tiny, prompt(tiny, 500), greedy(40))

    asyncio.run(scenario())


def test_a_cancelled_prefill_and_an_abandoned_stream_end_the_work(tiny: LoadedModel) -> None:
    async def scenario() -> None:
        async with running(tiny) as runner:
            cancelled = ask(runner, tiny, "a", 500)
            waiting = asyncio.ensure_future(runner.prefill(cancelled))
            await in_flight(runner, cancelled)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert runner.running == 0

            sequence = ask(runner, tiny, "b", 20, max_tokens=1000)
            await runner.prefill(sequence)
            stream = runner.decode(sequence)
            await anext(stream)
            stream.stop()
            assert runner.running == 0
            await runner.landed(sequence)
            length = len(sequence.tokens)
            await asyncio.sleep(0.01)
            assert len(sequence.tokens) == length < 100

    asyncio.run(scenario())


def test_an_end_of_text_as_the_first_token_ends_at_once(tiny: LoadedModel) -> None:
    ids = prompt(tiny, 33)
    (first,) = generate(tiny, ids, greedy(1))
    tokenizer = ByteTokenizer()
    tokenizer.eos_ids = frozenset({first})  # type: ignore[misc]
    loaded = replace(tiny, tokenizer=tokenizer)

    async def scenario() -> None:
        async with running(loaded) as runner:
            sequence = runner.new_sequence("a", ids, 33, Sampling(max_tokens=40))
            generated = await runner.prefill(sequence)
            assert (generated.token_id, generated.finish_reason) == (first, "stop")
            assert [token async for token in runner.decode(sequence)] == []
            elsewhere = runner.new_sequence("b", [*ids, first], 33, Sampling(max_tokens=40))
            elsewhere.computed = 33
            assert [token async for token in runner.decode(elsewhere)] == []
            assert elsewhere.tokens == [*ids, first]

    asyncio.run(scenario())


def test_running_out_of_blocks_ends_one_stream_and_no_other(tiny: LoadedModel) -> None:
    async def scenario() -> None:
        async with running(tiny, 5) as runner:
            long = ask(runner, tiny, "long", 32, max_tokens=100)
            short = ask(runner, tiny, "short", 16, max_tokens=16)
            with pytest.raises(OutOfBlocks):
                ask(runner, tiny, "third", 33)
            await asyncio.gather(runner.prefill(long), runner.prefill(short))
            tokens: list[Generated] = []

            async def drain_long() -> None:
                async for token in runner.decode(long):
                    tokens.append(token)

            drained = asyncio.create_task(drain_long())
            assert await whole(runner, short) == generate(tiny, prompt(tiny, 16), greedy(16))[1:]
            await asyncio.sleep(0.1)
            waited_at = len(long.tokens)
            assert not drained.done(), "it waits for the blocks of one that has ended and was not freed yet"
            runner.free(short)
            with pytest.raises(OutOfBlocks):
                await drained
            assert waited_at < len(long.tokens) == 32 + 1 + len(tokens) == 5 * 16 + 1
            expected = generate(tiny, prompt(tiny, 32), greedy(100))[1 : 1 + len(tokens)]
            assert [token.token_id for token in tokens] == expected

    async def whole(runner: EngineRunner, sequence: Sequence) -> list[int]:
        return [token.token_id async for token in runner.decode(sequence)]

    asyncio.run(scenario())


def test_misuse_is_refused_with_the_name_of_the_sequence(tiny: LoadedModel) -> None:
    async def scenario() -> None:
        async with running(tiny) as runner:
            sequence = ask(runner, tiny, "a", 20, max_tokens=1000)
            with pytest.raises(ValueError, match='"a" exists already'):
                ask(runner, tiny, "a", 20)
            await runner.prefill(sequence)
            stream = runner.decode(sequence)
            with pytest.raises(ValueError, match='"a" is being computed'):
                runner.decode(sequence)
            with pytest.raises(ValueError, match='"a" is being computed'):
                await runner.extend(sequence, [65])
            stream.stop()
            assert [token.token_id async for token in stream] == sequence.tokens[21:]
            with pytest.raises(ValueError, match="outside the vocabulary"):
                await runner.extend(sequence, [65, 300])
            runner.free(sequence)
            with pytest.raises(ValueError, match='"a" is not known'):
                await runner.prefill(sequence)

            filled = ask(runner, tiny, "full hit", 16)
            filled.computed = 16
            with pytest.raises(ValueError, match="no pending token"):
                await runner.prefill(filled)

    asyncio.run(scenario())


def test_a_step_that_fails_reaches_its_waiters_and_the_runner_lives_on(tiny: LoadedModel) -> None:
    async def scenario() -> None:
        async with running(tiny) as runner:
            broken = ask(runner, tiny, "broken", 20)
            released, broken.blocks = broken.blocks, [9999, 9999]
            with pytest.raises(SequenceFailed, match="IndexError"):
                await runner.prefill(broken)
            broken.blocks = released
            answer = await whole_answer(runner, ask(runner, tiny, "fine", 20))
            assert [t.token_id for t in answer] == generate(tiny, prompt(tiny, 20), greedy(40))

    asyncio.run(scenario())


def test_a_pool_whose_books_are_wrong_stops_the_engine_and_nobody_waits(tiny: LoadedModel) -> None:
    async def scenario() -> None:
        runner = EngineRunner(tiny, BlockPool(tiny.config, 20), threads=1)
        runner.start()
        await whole_answer(runner, ask(runner, tiny, "a", 20))
        runner.pool._free.append(runner.pool._free[0])
        await asyncio.sleep(0.3)  # the books are checked when the engine has nothing to do
        with pytest.raises(Stopped, match="a block is free twice"):
            await runner.prefill(ask(runner, tiny, "c", 5))
        await runner.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("given", ["0", "-1", "two", ""])
def test_a_senseless_number_of_threads_is_refused(
    tiny: LoadedModel, given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PDDBED_THREADS", given)
    with pytest.raises(ValueError, match=f'PDDBED_THREADS is "{given}"'):
        EngineRunner(tiny, BlockPool(tiny.config, 1))


def test_closing_ends_every_wait(tiny: LoadedModel) -> None:
    async def scenario() -> None:
        async with running(tiny) as runner:
            waiting = asyncio.ensure_future(runner.prefill(ask(runner, tiny, "a", 3000)))
            sequence = ask(runner, tiny, "b", 20, max_tokens=3000)
            await runner.prefill(sequence)
            stream = runner.decode(sequence)
            await runner.close()
            tokens = [token async for token in stream]
            assert len(tokens) < 3000
            with pytest.raises(Stopped):
                await asyncio.wait_for(waiting, 5)
            with pytest.raises(Stopped, match="closed"):
                await runner.prefill(ask(runner, tiny, "c", 5))
            await runner.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("seed", range(4))
def test_requests_that_come_and_go_at_random_leave_right_answers_and_no_blocks(tiny: LoadedModel, seed: int) -> None:
    chance = random.Random(seed)

    async def request(runner: EngineRunner, number: int) -> str:
        length = chance.choice([1, 15, 16, 17, 40, 150])
        sequence = ask(runner, tiny, f"{number}", length, max_tokens=30)
        fate = chance.choice(["finish", "free", "cancel", "stop and go on"])
        expected = generate(tiny, prompt(tiny, length), greedy(30))
        work = asyncio.ensure_future(whole_answer(runner, sequence))
        try:
            if fate == "finish":
                assert [t.token_id for t in await work] == expected
            elif fate == "stop and go on":
                await asyncio.sleep(chance.random() * 0.03)
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)
                await runner.landed(sequence)
                if sequence.pending > 1 or sequence.finish_reason is None:
                    await whole_answer(runner, sequence)
                assert sequence.tokens[length:] == expected
            else:
                await asyncio.sleep(chance.random() * 0.03)
                if fate == "cancel":
                    work.cancel()
                else:
                    runner.free(sequence)
                await asyncio.gather(work, return_exceptions=True)
                assert expected[: len(sequence.tokens) - length] == sequence.tokens[length:]
        finally:
            runner.free(sequence)
        return fate

    async def scenario() -> None:
        async with running(tiny, 300, max_batch_tokens=64) as runner:
            await asyncio.gather(*(request(runner, number) for number in range(24)))

    asyncio.run(scenario())
