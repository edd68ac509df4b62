"""Every mode of hand-over answers as one process alone, whenever the answer ends, and gives everything back."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.workers.roles.steps import PROMPT, both_decode, lab_of, only, steps, until
from tests.workers.serving import eventually, prompt_of, run
from workers.engine import Sampling, generate
from workers.models import LoadedModel

MODES = ["one-shot", "catch-up", "overlap", "kv"]
LENGTHS = [1, 15, 16, 17, 200]


def held(worker: Any, tokens: list[int]) -> int:
    """How many of these tokens a worker's cache has in full blocks."""
    return worker.cache.policy.match(worker.cache.hashes(tokens)) * worker.pool.block_size


def first_of_its_kind(tokens: list[int], start: int) -> int:
    """The first index from `start` on of a token that is not among those before it."""
    return next(i for i in range(start, len(tokens)) if tokens[i] not in tokens[:i])


# -- the same answer ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [*MODES, "auto"])
def test_every_prompt_is_answered_as_alone(tiny: LoadedModel, tmp_path: Path, mode: str) -> None:
    async def test() -> None:
        async with lab_of(tiny, tmp_path, mode) as lab:
            for length in LENGTHS:
                prompt = prompt_of(length, seed=length)
                with steps(lab.rld0) as (relay,):
                    if mode == "overlap":  # the relay is to be overtaken, whatever either's pace is here
                        relay.allow(60)
                    else:
                        relay.free()
                    answer = await lab.complete_after_relay(prompt, 120, relayed=5, ignore_eos=True)
                assert answer["pdd"]["token_ids"] == generate(tiny, prompt, Sampling(max_tokens=120, ignore_eos=True))
                made_by = answer["pdd"]["instances"]
                assert made_by[:5] == ["rld0"] * 5
                assert made_by[-1] == "md0", f"main decode took over the answer to {length} tokens"
                await lab.check_released()

    run(test())


@pytest.mark.parametrize("mode", MODES)
def test_seeded_sampling_goes_on_as_it_would_have(tiny: LoadedModel, tmp_path: Path, mode: str) -> None:
    sampling = Sampling(max_tokens=120, temperature=1.3, top_p=0.9, seed=7, ignore_eos=True)
    expected = generate(tiny, PROMPT, sampling)
    assert expected != generate(tiny, PROMPT, Sampling(max_tokens=120, ignore_eos=True))

    async def test() -> None:
        async with lab_of(tiny, tmp_path, mode) as lab:
            options = {"temperature": 1.3, "top_p": 0.9, "seed": 7, "ignore_eos": True}
            answer = await lab.complete_after_relay(PROMPT, 120, relayed=5, **options)
            assert answer["pdd"]["token_ids"] == expected
            assert answer["pdd"]["instances"][-1] == "md0"

    run(test())


# -- an answer that ends at each moment of a hand-over -------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_the_first_token_ends_the_answer(tiny: LoadedModel, tmp_path: Path, mode: str) -> None:
    async def test() -> None:
        async with lab_of(tiny, tmp_path, mode) as lab:
            first = generate(tiny, PROMPT, Sampling(max_tokens=1))
            answer = await lab.complete(PROMPT, 50, stop_token_ids=first)
            assert (answer["pdd"]["token_ids"], answer["pdd"]["instances"]) == (first, ["rld0"])
            assert answer["choices"][0]["finish_reason"] == "stop"
            await lab.check_released()

    run(test())


@pytest.mark.parametrize("how", ["stop", "length"])
@pytest.mark.parametrize("mode", MODES)
def test_the_answer_ends_on_the_relay_before_main_decode_asks(
    tiny: LoadedModel, tmp_path: Path, mode: str, how: str
) -> None:
    whole = generate(tiny, PROMPT, Sampling(max_tokens=60, ignore_eos=True))
    end = first_of_its_kind(whole, 5)
    limit = {"stop_token_ids": [whole[end]]} if how == "stop" else {}

    async def test() -> None:
        async with lab_of(tiny, tmp_path, mode) as lab:
            lab.wan.pause()
            answer = await lab.complete(PROMPT, 60 if how == "stop" else end + 1, ignore_eos=True, **limit)
            assert answer["pdd"]["token_ids"] == whole[: end + 1]
            assert set(answer["pdd"]["instances"]) == {"rld0"}
            assert answer["choices"][0]["finish_reason"] == how
            lab.wan.resume()
            await lab.check_released(within_s=5)
            turn = [*PROMPT, *whole[: end + 1]]
            assert held(lab.md0, turn) == len(turn) // 16 * 16, "main decode keeps the turn for the next one"

    run(test())


@pytest.mark.parametrize("how", ["stop", "length"])
@pytest.mark.parametrize("mode", ["catch-up", "overlap"])
def test_the_answer_ends_on_the_relay_while_main_decode_catches_up(
    tiny: LoadedModel, tmp_path: Path, mode: str, how: str
) -> None:
    """Main decode stands in its first round until the relay has finished."""
    whole = generate(tiny, PROMPT, Sampling(max_tokens=80, ignore_eos=True))
    end = first_of_its_kind(whole, 12) if how == "stop" else 40
    limit = {"stop_token_ids": [whole[end]]} if how == "stop" else {}

    async def test() -> None:
        async with lab_of(tiny, tmp_path, mode) as lab:
            with steps(lab.rld0, lab.md0) as (relay, main):
                max_tokens = 80 if how == "stop" else end + 1
                asking = asyncio.create_task(lab.complete(PROMPT, max_tokens, ignore_eos=True, **limit))
                relay.allow(5)
                await until(lambda: bool(lab.md0.active) and only(lab.md0).following.rounds != [], "a round begins")
                relay.free()
                answer = await asking
                assert lab.md0.active, "main decode has not finished its round"
                main.free()
            assert answer["pdd"]["token_ids"] == whole[: end + 1]
            assert set(answer["pdd"]["instances"]) == {"rld0"}
            assert answer["choices"][0]["finish_reason"] == how
            await lab.check_released(within_s=5)
            turn = [*PROMPT, *whole[: end + 1]]
            assert held(lab.md0, turn) == len(turn) // 16 * 16

    run(test())


@pytest.mark.parametrize("how", ["stop", "length"])
@pytest.mark.parametrize("mode", MODES)
def test_the_token_after_the_last_extend_ends_the_answer(
    tiny: LoadedModel, tmp_path: Path, mode: str, how: str
) -> None:
    """The relay's tokens are counted out, so that main decode's first one is the last of the answer."""
    whole = generate(tiny, PROMPT, Sampling(max_tokens=80, ignore_eos=True))
    end = first_of_its_kind(whole, 9)
    limit = {"stop_token_ids": [whole[end]]} if how == "stop" else {}

    async def test() -> None:
        async with lab_of(tiny, tmp_path, mode) as lab:
            with steps(lab.rld0) as (relay,):
                max_tokens = 80 if how == "stop" else end + 1
                lab.wan.pause()
                asking = asyncio.create_task(lab.complete(PROMPT, max_tokens, ignore_eos=True, **limit))
                # prefill's token, these, and the one of the step in flight when the relay is told to stop
                relay.allow(end - 2)
                await until(lambda: bool(lab.rld0.active) and len(only(lab.rld0).answer) == end - 1, "its share")
                lab.wan.resume()
                await until(lambda: only(lab.rld0).stopping or mode == "overlap", "the relay is told to stop")
                if mode != "overlap":
                    relay.allow(1)
                answer = await asking
            assert answer["pdd"]["token_ids"] == whole[: end + 1]
            made_by = answer["pdd"]["instances"]
            assert made_by[-1] == "md0"
            if mode != "overlap":
                assert made_by == ["rld0"] * end + ["md0"]
            assert answer["choices"][0]["finish_reason"] == how
            await lab.check_released(within_s=5)

    run(test())


@pytest.mark.parametrize("mode", MODES)
def test_a_stop_string_is_found_during_the_hand_over(tiny: LoadedModel, tmp_path: Path, mode: str) -> None:
    """Only the gateway sees it: the relay is told to finish while main decode stands in its first step."""
    whole = generate(tiny, PROMPT, Sampling(max_tokens=80, ignore_eos=True))
    text = tiny.tokenizer.decode(whole)
    stop = text[11:14]
    at = text.index(stop)

    async def test() -> None:
        async with lab_of(tiny, tmp_path, mode) as lab:
            with steps(lab.rld0, lab.md0) as (relay, main):
                asking = asyncio.create_task(lab.complete(PROMPT, 80, ignore_eos=True, stop=stop))
                relay.allow(5)
                await until(lambda: bool(lab.md0.active) and only(lab.md0).asked_ns is not None, "main decode asks")
                relay.free()
                if mode in ("one-shot", "kv"):
                    main.free()
                answer = await asking
                main.free()
            assert answer["choices"][0]["text"] == text[:at]
            assert answer["choices"][0]["finish_reason"] == "stop"
            await lab.check_released(within_s=5)
            again = await lab.complete(PROMPT, 80, ignore_eos=True)
            assert again["pdd"]["token_ids"] == whole

    run(test())


# -- a client that leaves ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["catch-up", "overlap"])
def test_the_client_leaves_while_main_decode_catches_up(tiny: LoadedModel, tmp_path: Path, mode: str) -> None:
    async def test() -> None:
        async with lab_of(tiny, tmp_path, mode) as lab:
            with steps(lab.md0) as (main,):
                asking = asyncio.create_task(lab.complete(PROMPT, 3000, ignore_eos=True))
                await until(lambda: bool(lab.md0.active) and only(lab.md0).following.rounds != [], "a round begins")
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
                await eventually(lambda: not lab.rld0.active and not lab.md0.active, 1, "all workers let go")
                main.free()
            await lab.check_released()
            assert (await lab.complete(PROMPT, 5))["usage"]["completion_tokens"] == 5

    run(test())


def test_the_client_leaves_while_both_decode(tiny: LoadedModel, tmp_path: Path) -> None:
    async def test() -> None:
        async with lab_of(tiny, tmp_path, "overlap", wan_rtt_ns=10**12) as lab:
            lab.wan.pause()
            with steps(lab.rld0, lab.md0) as (relay, main):
                asking = asyncio.create_task(lab.complete(PROMPT, 3000, ignore_eos=True))
                await both_decode(lab, relay, main)
                assert lab.rld0.active
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
                await eventually(lambda: not lab.rld0.active and not lab.md0.active, 1, "all workers let go")
            await lab.check_released()

    run(test())


def test_the_client_leaves_while_generated_kv_crosses(tiny: LoadedModel, tmp_path: Path) -> None:
    async def test() -> None:
        async with lab_of(tiny, tmp_path, "kv") as lab:
            lab.wan.pause()
            asking = asyncio.create_task(lab.complete(PROMPT, 3000, ignore_eos=True))
            await until(lambda: bool(lab.rld0.active) and len(only(lab.rld0).answer) > 300, "the relay decodes")
            lab.ids.rate_bytes_per_s = 200e3  # 600 KB of KV, behind which the ids do not wait
            lab.wan.resume()
            await until(lambda: bool(lab.md0.active) and bool(only(lab.md0).tail), "some of its KV has come")
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            await lab.check_released(within_s=1)
            lab.ids.rate_bytes_per_s = None
            assert (await lab.complete(PROMPT, 5))["usage"]["completion_tokens"] == 5

    run(test())


# -- end_on_rld --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end_on_rld", [False, True])
@pytest.mark.parametrize("how", ["length", "stop string"])
def test_main_decode_keeps_a_turn_that_ended_on_the_relay_unless_told_not_to(
    tiny: LoadedModel, tmp_path: Path, end_on_rld: bool, how: str
) -> None:
    whole = generate(tiny, PROMPT, Sampling(max_tokens=60, ignore_eos=True))
    text = tiny.tokenizer.decode(whole)
    stop = {"stop": text[20:23]} if how == "stop string" else {}

    async def test() -> None:
        async with lab_of(tiny, tmp_path, "auto", serving={"end_on_rld": end_on_rld}) as lab:
            lab.wan.pause()
            answer = await lab.complete(PROMPT, 30 if how == "length" else 60, ignore_eos=True, **stop)
            assert set(answer["pdd"]["instances"]) == {"rld0"}
            await until(lambda: not lab.rld0.active or not end_on_rld, "the relay lets go")
            lab.wan.resume()
            await lab.check_released(within_s=5)
            turn = [*PROMPT, *whole[:16]]
            assert held(lab.rld0, turn) == 112
            assert held(lab.md0, turn) == (0 if end_on_rld else 112)
            await until(lambda: not lab.cluster.gateway.dispatcher.live, "the gateway forgets it, too")

    run(test())
