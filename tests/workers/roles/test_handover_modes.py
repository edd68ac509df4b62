"""What makes each mode of hand-over what it is: who computes what, what crosses, who is stopped, what is recorded."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.workers.roles.steps import (
    PROMPT,
    assert_same_kv,
    both_decode,
    keep_kv,
    lab_of,
    only,
    slow,
    steps,
    until,
    without_room_once,
)
from tests.workers.serving import prompt_of, run
from workers.engine import BlockPool, EngineRunner, Sampling, Sequence, generate
from workers.engine.engine import Chunk, Engine
from workers.models import LoadedModel
from workers.roles.takeover import Following
from workers.wire import kv_tail
from workers.wire.kv_messages import KvBlocks, KvTail
from workers.wire.kv_send import TransferRefused

# -- kv ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 16, 17, 100])
def test_kv_takes_the_relays_kv_as_it_is_and_computes_one_token(tiny: LoadedModel, tmp_path: Path, length: int) -> None:
    prompt = prompt_of(length)
    expected = generate(tiny, prompt, Sampling(max_tokens=80, ignore_eos=True))

    async def test() -> None:
        async with lab_of(tiny, tmp_path, "kv") as lab:
            relayed, taken = keep_kv(lab.rld0), keep_kv(lab.md0)
            answer = await lab.complete_after_relay(prompt, 80, relayed=20, ignore_eos=True)
            assert answer["pdd"]["token_ids"] == expected
            await lab.check_released()
            made = answer["pdd"]["instances"].count("rld0")
            ours, theirs = relayed[0][1], taken[0][1]
            assert len(ours) == length + made - 1, "the relay's last token was not computed by anybody yet"
            assert np.array_equal(ours, theirs[: len(ours)]), "to the bit"
            record = (await lab.settled())[-1]
            assert (record["pdd_handoff_mode"], record["pdd_handoff_reason"]) == ("kv", "configured")
            assert record["pdd_handoff_recomputed"] == 1
            assert record["pdd_handoff_kv_bytes"] == (made - 1) * lab.md0.bytes_per_token
            assert lab.rld0.counters.bytes("md0", "sent", "kv") > record["pdd_handoff_kv_bytes"]

    run(test())


@pytest.mark.parametrize("mates", [0, 7])
def test_kv_of_a_relay_that_batches_differs_from_the_controls_by_rounding(
    tiny: LoadedModel, tmp_path: Path, mates: int
) -> None:
    """Of a prompt whose token 28 is a tie (1.2e-6): up to there tokens are the control's, and KV to within 1e-5."""
    prompt, clear = prompt_of(15, seed=7035), 28
    pool = BlockPool(tiny.config, 3, 16, tiny.spec.dtype)
    control = Sequence("control", list(prompt), len(prompt), Sampling(max_tokens=clear + 1, ignore_eos=True))
    engine = Engine(tiny, pool)
    engine.admit(control)
    while control.finish_reason is None:
        engine.step([Chunk(control, control.pending)])
    alone = pool.storage[control.blocks].flatten(0, 1)[: len(prompt) + clear].numpy()

    async def test() -> None:
        async with lab_of(tiny, tmp_path, "kv") as lab:
            kept = {"rld0": keep_kv(lab.rld0), "md0": keep_kv(lab.md0)}
            lab.wan.pause()
            asked = [(prompt, 120), *((prompt_of(40, seed=seed), 100) for seed in range(mates))]
            answers = [asyncio.create_task(lab.complete(*one, ignore_eos=True)) for one in asked]
            await until(
                lambda: any(a.spec.prompt == prompt and len(a.answer) >= 10 for a in lab.rld0.active.values()),
                "the relay has made ten tokens",
            )
            lab.wan.resume()
            answer, *_ = await asyncio.gather(*answers)
            await lab.check_released()
            assert answer["pdd"]["token_ids"][:clear] == control.tokens[len(prompt) :][:clear]
            assert set(answer["pdd"]["instances"]) == {"rld0", "md0"}
            for worker, sequences in kept.items():
                (kv,) = [kv for tokens, kv in sequences if tokens[: len(prompt)] == prompt]
                count = min(len(kv), len(alone))
                assert count >= len(prompt) + 9
                assert np.abs(kv[:count] - alone[:count]).max() <= 1e-5 * np.abs(alone).max(), worker

    run(test())


def test_an_answer_changes_when_any_frame_of_its_kv_is_zeroed_on_the_way(tiny: LoadedModel, tmp_path: Path) -> None:
    expected = generate(tiny, PROMPT, Sampling(max_tokens=120, ignore_eos=True))

    async def test() -> None:
        async with lab_of(tiny, tmp_path, "kv") as lab:
            take_tail = lab.md0.relay.take_tail
            lab.md0.relay.take_tail = lambda peer, tail, kv: take_tail(peer, tail, memoryview(bytes(len(kv))))
            answer = await lab.complete_after_relay(PROMPT, 120, relayed=40, ignore_eos=True)
            made = answer["pdd"]["instances"].count("rld0")
            assert answer["pdd"]["token_ids"][:made] == expected[:made]
            assert answer["pdd"]["token_ids"] != expected

    run(test())


def test_ids_are_a_hundred_times_fewer_bytes_than_the_kv_of_the_same_tokens(tiny: LoadedModel, tmp_path: Path) -> None:
    """Whole frames of ids against the bare KV, both as the workers count them on their connections."""

    async def test() -> None:
        sent: dict[str, tuple[int, int, int]] = {}
        for mode in ("one-shot", "kv"):
            directory = tmp_path / mode
            async with lab_of(tiny, directory, mode) as lab:
                await lab.complete_after_relay(PROMPT, 200, relayed=60, ignore_eos=True)
                await lab.check_released()
                record, counters = (await lab.settled())[-1], lab.rld0.counters
                ids, kv = (counters.bytes("md0", "sent", kind) for kind in ("token-ids", "kv"))
                assert ids == record["pdd_handoff_id_bytes"]
                sent[mode] = record["pdd_rld_tokens"], ids, kv
        tokens, ids, kv = sent["one-shot"]
        kv_tokens, _, kv_of_tokens = sent["kv"]
        assert kv == 0
        assert kv_of_tokens / (kv_tokens - 1) > 100 * ids / tokens

    run(test())


@pytest.mark.parametrize("fault", ["refused", "corrupt", "connection cut", "peer cut", "no room"])
def test_when_its_kv_does_not_come_main_decode_computes_it(
    tiny: LoadedModel, tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_tail, "FRAME_BODY_BYTES", 8 * 2048)
    expected = generate(tiny, PROMPT, Sampling(max_tokens=100, ignore_eos=True))
    serving = {"kv_pool": {"connections": 1, "warm": False}}

    async def test() -> None:
        lab = lab_of(tiny, tmp_path, "kv", serving=serving)
        if fault == "corrupt":
            lab.ids.spoil_at = 40_000  # of each connection; but for KV none carries so much
        async with lab:
            ((channel,), taken, take_tail) = (lab.rld0.peers.pools["md0"]._idle, [], lab.md0.relay.take_tail)
            port = channel.connection._stream._sock.getsockname()[1]

            def take(peer: str, tail: Any, kv: memoryview) -> str | None:
                taken.append(tail)
                if len(taken) == 3:
                    if fault == "refused":
                        return "a test has enough of it"
                    if fault == "no room":
                        without_room_once(lab.md0.pool)
                    if fault.endswith("cut"):
                        lab.ids.cut(port if fault == "connection cut" else None)
                return take_tail(peer, tail, kv)

            lab.md0.relay.take_tail = take
            answer = await lab.complete_after_relay(PROMPT, 100, relayed=50, ignore_eos=True)
            assert answer["pdd"]["token_ids"] == expected
            assert set(answer["pdd"]["instances"]) == {"rld0", "md0"}
            await lab.check_released(within_s=5)
            record = (await lab.settled())[-1]
            assert record["pdd_handoff_recomputed"] > 1
            assert record["pdd_handoff_kv_bytes"] == 0, "none that was acknowledged"

    run(test())


@pytest.mark.parametrize("wrong", ["too short", "too long", "no tail"])
def test_a_frame_of_kv_that_breaks_a_rule_costs_its_connection_and_no_request(
    tiny: LoadedModel, tmp_path: Path, wrong: str
) -> None:
    async def test() -> None:
        async with lab_of(tiny, tmp_path, "kv", serving={"kv_pool": {"connections": 2, "warm": False}}) as lab:
            pool = lab.rld0.peers.pools["md0"]
            connection = pool._idle[-1].connection
            each = lab.md0.bytes_per_token
            tail = KvTail(transfer="t", request="r", position=5, tokens=2, checksum=0, last=True)
            body = {"too short": 2 * each - 1, "too long": 2 * each + 1, "no tail": 2 * each}[wrong]
            if wrong == "no tail":
                blocks = KvBlocks(transfer="t", first_block=0, tokens=[2], checksums=[0])
                await connection.send(blocks, [memoryview(bytes(body))])
            else:
                await connection.send(tail, [memoryview(bytes(body))])
            await until(lambda: connection.close_reason is not None, "main decode hangs up")
            await until(lambda: pool.up == 2, "the relay dials again")
            await lab.complete_after_relay(PROMPT, 60, relayed=10, ignore_eos=True)
            assert (await lab.settled())[-1]["pdd_handoff_recomputed"] == 1
            await lab.check_released()

    run(test())


def test_kv_that_nobody_waits_for_is_refused_and_its_connection_stays(tiny: LoadedModel, tmp_path: Path) -> None:
    async def test() -> None:
        async with lab_of(tiny, tmp_path, "kv") as lab:
            sequence = lab.rld0.runner.new_sequence("gone", PROMPT, len(PROMPT), Sampling())
            tail = kv_tail.OutgoingTail("gone", lab.rld0.pool, sequence.blocks, 10, 90)
            pool = lab.rld0.peers.pools["md0"]
            channel = pool._idle[-1]
            with pytest.raises(TransferRefused, match="request gone does not wait for KV on md0"):
                await tail.deliver(pool)
            assert channel.connection.close_reason is None
            assert pool._idle[-1] is channel
            lab.rld0.runner.free(sequence)

    run(test())


# -- catch-up ----------------------------------------------------------------------------------------------------


def test_catch_up_computes_round_after_round_while_the_relay_goes_on(tiny: LoadedModel, tmp_path: Path) -> None:
    expected = generate(tiny, PROMPT, Sampling(max_tokens=120, ignore_eos=True))

    async def test() -> None:
        async with lab_of(tiny, tmp_path, "catch-up") as lab:
            relayed, recomputed = keep_kv(lab.rld0), keep_kv(lab.md0)
            lab.wan.pause()
            with steps(lab.rld0, lab.md0) as (relay, main):
                asking = asyncio.create_task(lab.complete(PROMPT, 120, ignore_eos=True))
                relay.allow(30)
                await until(lambda: bool(lab.rld0.active) and len(only(lab.rld0).answer) == 31, "the relay decodes")
                lab.wan.resume()
                await until(lambda: bool(lab.md0.active) and only(lab.md0).following.rounds == [31], "a first round")
                relay.allow(10)
                await until(lambda: only(lab.md0).following.waiting == 10, "the relay went on and told each id")
                main.allow(1)
                await until(lambda: only(lab.md0).following.rounds == [31, 10], "a second round")
                assert not only(lab.rld0).stopping, "10 were too many to stop it"
                main.allow(1)
                await until(lambda: only(lab.rld0).stopping, "no gap: the relay is told to stop")
                relay.allow(1)
                main.free()
                answer = await asking
            assert answer["pdd"]["token_ids"] == expected
            assert answer["pdd"]["instances"] == ["rld0"] * 42 + ["md0"] * 78
            await lab.check_released()
            assert_same_kv(relayed[0][1], recomputed[0][1], len(PROMPT))
            record = (await lab.settled())[-1]
        assert (record["pdd_handoff_mode"], record["pdd_handoff_rounds"]) == ("catch-up", 3)
        assert record["pdd_handoff_recomputed"] <= 1, "in the pause"
        assert record["pdd_handoff_kv_bytes"] == 0
        assert record["pdd_rld_hold_ms"] > record["pdd_handoff_pause_ms"] > 0

    run(test())


def test_following_replaces_what_it_had_sampled_by_what_the_relay_says(tiny: LoadedModel) -> None:
    """Another machine may round another way; what the client has seen is right."""

    async def test() -> None:
        pool = BlockPool(tiny.config, 40, 16)
        runner = EngineRunner(tiny, pool)
        runner.start()
        told = [65, 66, 67, 90, 91, 92, 33]
        following = Following(runner, runner.new_sequence("a", PROMPT, len(PROMPT), Sampling(max_tokens=50)))
        sequence = following._sequence
        for start, end in ((0, 2), (2, 3), (3, 7)):
            following.relayed.offer(len(PROMPT) + start, told[start:end])
            (token,) = await following.follow()
            assert token.position == len(PROMPT) + end
            assert sequence.tokens == [*PROMPT, *told[:end], token.token_id]
        fresh = runner.new_sequence("b", [*PROMPT, *told], len(PROMPT), Sampling(max_tokens=50))
        assert (await runner.prefill(fresh)).token_id == token.token_id
        ours, theirs = (pool.storage[s.blocks].flatten(0, 1)[: s.computed] for s in (sequence, fresh))
        assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()
        await runner.close()
        pool.check_integrity(holders=[])

    run(test())


def test_main_decode_guesses_what_the_relay_is_about_to_say(tiny: LoadedModel) -> None:
    """Ids that agree with the guesses cost no step; one that does not, costs the guesses behind it."""

    async def test() -> None:
        pool = BlockPool(tiny.config, 40, 16)
        runner = EngineRunner(tiny, pool)
        runner.start()
        expected = generate(tiny, PROMPT, Sampling(max_tokens=12, ignore_eos=True))
        following = Following(runner, runner.new_sequence("a", PROMPT, len(PROMPT), Sampling(max_tokens=12)))
        following.relayed.offer(len(PROMPT), expected[:3])
        await following.follow()
        for _ in range(4):
            assert following.may_guess
            await following.guess()
        assert [token.token_id for token in following.ahead] == expected[3:8]
        following.relayed.offer(len(PROMPT), expected[:6])
        computed = following._sequence.computed
        assert [token.token_id for token in await following.follow()] == expected[6:8]
        assert following._sequence.computed == computed, "nothing was computed"
        other = [*expected[:6], expected[6] ^ 1]
        following.relayed.offer(len(PROMPT), other)
        (token,) = await following.follow()
        assert (token.position, following._sequence.tokens) == (len(PROMPT) + 7, [*PROMPT, *other, token.token_id])
        fresh = runner.new_sequence("b", [*PROMPT, *other], len(PROMPT), Sampling(max_tokens=12))
        assert (await runner.prefill(fresh)).token_id == token.token_id
        while following.may_guess:
            await following.guess()
        assert not following.may_guess, "the answer is as long as it may be"
        await runner.close()

    run(test())


# -- overlap -----------------------------------------------------------------------------------------------------


@pytest.mark.quiet
def test_overlap_both_decode_until_the_gateway_stops_the_relay(tiny: LoadedModel, tmp_path: Path) -> None:
    expected = generate(tiny, PROMPT, Sampling(max_tokens=150, ignore_eos=True))

    async def test() -> None:
        async with lab_of(tiny, tmp_path, "overlap", wan_rtt_ns=10**9) as lab:
            slow(lab.rld0, 0.02)
            answer = await lab.complete_after_relay(PROMPT, 150, relayed=10, ignore_eos=True)
            assert answer["pdd"]["token_ids"] == expected
            await lab.check_released(within_s=5)
            made_by, record = answer["pdd"]["instances"], (await lab.settled())[-1]
            assert made_by[-1] == "md0"
            assert record["pdd_handoff_mode"] == "overlap"
            told = [span["name"] for span in record["pdd_spans"]]
            assert told.index("main-decode") > told.index("relay-stop"), "the relay had to be stopped"

    run(test())


@pytest.mark.quiet
def test_overlap_with_a_slower_main_decode_stops_the_relay_all_the_same(tiny: LoadedModel, tmp_path: Path) -> None:
    expected = generate(tiny, PROMPT, Sampling(max_tokens=240, ignore_eos=True))

    async def test() -> None:
        async with lab_of(tiny, tmp_path, "overlap") as lab:
            slow(lab.rld0, 0.004)
            slow(lab.md0, 0.016)
            asking = asyncio.create_task(lab.complete_after_relay(PROMPT, 240, relayed=10, ignore_eos=True))
            await until(lambda: bool(lab.md0.active) and only(lab.md0).overlapping, "both decode")
            await until(lambda: not lab.rld0.active, "the relay has been stopped")
            answer = await asking
            assert answer["pdd"]["token_ids"] == expected
            assert answer["pdd"]["instances"].count("rld0") < 230
            assert answer["pdd"]["instances"][-1] == "md0"
            await lab.check_released()

    run(test())


def test_overlap_a_main_decode_that_falls_behind_extends_what_the_relay_made(tiny: LoadedModel, tmp_path: Path) -> None:
    expected = generate(tiny, PROMPT, Sampling(max_tokens=120, ignore_eos=True))

    async def test() -> None:
        async with lab_of(tiny, tmp_path, "overlap", wan_rtt_ns=10**10) as lab:
            lab.wan.pause()
            with steps(lab.rld0, lab.md0) as (relay, main):
                asking = asyncio.create_task(lab.complete(PROMPT, 120, ignore_eos=True))
                await both_decode(lab, relay, main)
                relay.allow(1)
                await until(lambda: only(lab.md0).behind, "it hears how far behind it is")
                done = main.done
                main.allow(2)
                await until(lambda: len(only(lab.md0).answer) == 65, "one step in flight, and one for the rest")
                assert main.done - done == 2
                main.free()
                await until(lambda: only(lab.rld0).stopping, "the gateway stops the relay")
                relay.free()
                answer = await asking
            assert answer["pdd"]["token_ids"] == expected
            assert answer["pdd"]["instances"] == ["rld0"] * 64 + ["md0"] * 56
            await lab.check_released()

    run(test())


def differs_at(worker: Any, position: int) -> list[int]:
    """Once, at a position, a worker's engine chooses another token, as a machine may that rounds another way."""
    engine, changed = worker.runner._engine, []
    compute = engine.compute

    def other(batch: Any) -> Any:
        sampled = compute(batch)
        for row, asked in enumerate(batch.requests):
            if asked.position == position and not changed:
                changed.append(position)
                sampled[row] = sampled[row]._replace(token=sampled[row].token ^ 1)
        return sampled

    engine.compute = other
    return changed


def test_overlap_a_main_decode_that_rounds_another_way_leaves_the_answer_to_the_relay(
    tiny: LoadedModel, tmp_path: Path
) -> None:
    expected = generate(tiny, PROMPT, Sampling(max_tokens=120, ignore_eos=True))

    async def test() -> None:
        async with lab_of(tiny, tmp_path, "overlap", wan_rtt_ns=10**10) as lab:
            lab.wan.pause()
            with steps(lab.rld0, lab.md0) as (relay, main):
                asking = asyncio.create_task(lab.complete(PROMPT, 120, ignore_eos=True))
                relay.allow(20)
                await until(lambda: bool(lab.rld0.active) and len(only(lab.rld0).answer) == 21, "the relay decodes")
                lab.wan.resume()
                await until(lambda: bool(lab.md0.active) and only(lab.md0).following.rounds == [21], "a round begins")
                relay.allow(2)
                await until(lambda: only(lab.md0).following.waiting == 2, "a small gap")
                main.allow(1)
                await until(lambda: only(lab.md0).following.rounds == [21, 2], "the last round")
                changed = differs_at(lab.md0, len(PROMPT) + 30)
                relay.allow(20)
                await until(lambda: len(only(lab.md0).following.relayed.ids) == 43, "main decode is behind")
                main.free()
                await until(lambda: not lab.md0.active, "main decode was told to give up")
                relay.free()
                answer = await asking
            assert changed
            assert answer["pdd"]["token_ids"] == expected
            assert set(answer["pdd"]["instances"]) == {"rld0"}
            (loss,) = answer["pdd"]["record"]["pdd_recovery"]
            assert (loss["lost"], loss["error"]) == ("md0", "merge_conflict")
            await lab.check_released()

    run(test())


def test_overlap_a_relay_that_rounds_another_way_behind_main_decode_is_not_heard(
    tiny: LoadedModel, tmp_path: Path
) -> None:
    expected = generate(tiny, PROMPT, Sampling(max_tokens=120, ignore_eos=True))

    async def test() -> None:
        async with lab_of(tiny, tmp_path, "overlap", wan_rtt_ns=10**10) as lab:
            lab.rld0._stop = lambda active: None  # else it has stopped before it is wrong
            lab.wan.pause()
            with steps(lab.rld0, lab.md0) as (relay, main):
                asking = asyncio.create_task(lab.complete(PROMPT, 120, ignore_eos=True))
                relay.allow(20)
                await until(lambda: bool(lab.rld0.active) and len(only(lab.rld0).answer) == 21, "the relay decodes")
                lab.wan.resume()
                main.allow(20)
                await until(lambda: bool(lab.md0.active) and len(only(lab.md0).answer) == 41, "main decode is ahead")
                changed = differs_at(lab.rld0, len(PROMPT) + 25)
                relay.allow(10)
                await until(lambda: not lab.rld0.active, "the relay was told to give up")
                main.free()
                answer = await asking
            assert changed
            assert answer["pdd"]["token_ids"] == expected
            assert answer["pdd"]["instances"] == ["rld0"] * 21 + ["md0"] * 99
            (loss,) = answer["pdd"]["record"]["pdd_recovery"]
            assert (loss["lost"], loss["error"]) == ("rld0", "merge_conflict")
            await lab.check_released()

    run(test())


# -- auto --------------------------------------------------------------------------------------------------------


def test_auto_holds_an_idle_relay_and_frees_a_crowded_one_and_says_why(tiny: LoadedModel, tmp_path: Path) -> None:
    prompts = [prompt_of(60, seed=seed) for seed in range(6)]
    expected = [generate(tiny, prompt, Sampling(max_tokens=60, ignore_eos=True)) for prompt in prompts]

    async def test() -> None:
        async with lab_of(tiny, tmp_path, "auto") as lab:
            await lab.complete_after_relay(PROMPT, 60, relayed=5, ignore_eos=True)
            await lab.check_released()
            alone = (await lab.settled())[-1]
            assert (alone["pdd_handoff_mode"], alone["pdd_handoff_reason"]) == (
                "catch-up",
                "the relay has room: it decodes 0 others, none on their way",
            )
            lab.wan.pause()
            with steps(lab.rld0) as (relay,):
                asking = [asyncio.create_task(lab.complete(prompt, 60, ignore_eos=True)) for prompt in prompts]
                relay.allow(3)
                await until(lambda: sum(a.decoding for a in lab.rld0.active.values()) == 6, "all are on the relay")
                lab.wan.resume()
                await until(lambda: any(a.asked_ns for a in lab.rld0.active.values()), "main decode asks for one")
                crowded = next(a for a in lab.rld0.active.values() if a.asked_ns)
                assert (crowded.mode, crowded.reason) == ("one-shot", "the relay decodes 5 others")
                relay.free()
                answers = await asyncio.gather(*asking)
            assert [answer["pdd"]["token_ids"] for answer in answers] == expected
            await lab.check_released()

    run(test())


# -- together with guessing ahead --------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [{}, {"repetition_penalty": 1.1, "frequency_penalty": 0.3}], ids=["", "penalised"])
@pytest.mark.parametrize("mode", ["one-shot", "catch-up", "overlap", "kv"])
def test_main_decode_that_guesses_ahead_takes_over_in_every_mode(
    tiny: LoadedModel, tmp_path: Path, mode: str, fields: dict[str, float]
) -> None:
    prompt = (PROMPT[:7] * 20)[:100]
    expected = generate(tiny, prompt, Sampling(max_tokens=90, ignore_eos=True, **fields))  # type: ignore[arg-type]

    async def test() -> None:
        async with lab_of(tiny, tmp_path, mode, serving={"speculative": {"ngram": 1, "draft": 4}}) as lab:
            answer = await lab.complete_after_relay(prompt, 90, relayed=10, ignore_eos=True, **fields)
            assert answer["pdd"]["token_ids"] == expected
            assert answer["pdd"]["instances"][-1] == "md0"
            await lab.check_released()
            assert (await lab.settled())[-1]["pdd_handoff_mode"] == mode

    run(test())


# -- a crowd -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["catch-up", "overlap", "kv"])
def test_in_a_crowd_everybody_is_answered_rightly(tiny: LoadedModel, tmp_path: Path, mode: str) -> None:
    cases = [(prompt_of(length, seed=length), 25 + length % 7) for length in (1, 15, 16, 17, 40, 100)]
    expected = [generate(tiny, prompt, Sampling(max_tokens=tokens)) for prompt, tokens in cases]

    async def test() -> None:
        async with lab_of(tiny, tmp_path, mode) as lab:
            at_once = asyncio.Semaphore(8)

            async def one(index: int) -> None:
                async with at_once:
                    prompt, tokens = cases[index % len(cases)]
                    answer = await lab.complete(prompt, tokens)
                    assert answer["pdd"]["token_ids"] == expected[index % len(cases)]

            await asyncio.gather(*(one(index) for index in range(30)))
            await lab.check_released(within_s=5)

    run(test())


def test_overlap_a_stop_that_comes_late_leaves_what_was_begun_meanwhile_alone(
    tiny: LoadedModel, tmp_path: Path
) -> None:
    """Main decode hears twice that it is behind; the second stop is dealt with when the extend has begun already."""
    expected = generate(tiny, PROMPT, Sampling(max_tokens=120, ignore_eos=True))

    async def test() -> None:
        async with lab_of(tiny, tmp_path, "overlap", wan_rtt_ns=10**10) as lab:
            lab.wan.pause()
            with steps(lab.rld0, lab.md0) as (relay, main):
                asking = asyncio.create_task(lab.complete(PROMPT, 120, ignore_eos=True))
                await both_decode(lab, relay, main)
                runner = lab.md0.runner
                other = runner.new_sequence("other", PROMPT[:40], 40, Sampling(max_tokens=500, ignore_eos=True))
                beside = asyncio.create_task(runner.prefill(other))
                relay.allow(1)
                await until(lambda: only(lab.md0).behind, "it hears how far behind it is")
                spawn, late = lab.md0.spawn, []
                lab.md0.spawn = late.append  # a task may begin as late as it likes
                relay.allow(1)
                await until(lambda: len(only(lab.md0).following.relayed.ids) == 65, "it hears it again")
                lab.md0.spawn = spawn
                main.allow(1)
                await until(
                    lambda: runner._jobs.is_flying(other) and runner.running == 2, "the extend waits for its step"
                )
                for work in late:
                    spawn(work)
                await asyncio.sleep(0.05)
                main.free()
                await beside
                relay.free()
                answer = await asking
                runner.free(other)
            assert answer["pdd"]["token_ids"] == expected
            assert answer["pdd"]["record"]["pdd_recovery"] == []
            assert answer["pdd"]["instances"][-1] == "md0"
            await lab.check_released()

    run(test())
