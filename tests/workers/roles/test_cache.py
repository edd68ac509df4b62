"""With the caches on every answer is still the control's, and only what a receiver lacks crosses to it."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.workers.serving import SlowWan, eventually, prompt_of, run
from workers.engine import Sampling, Sequence, generate
from workers.models import LoadedModel
from workers.roles import prefill

BLOCK = 16 * 2048  # bytes of a block of `tiny`


class Turns:
    """Requests one after the other, each with what it cost in bytes of KV to each decode worker."""

    def __init__(self, lab: SlowWan, loaded: LoadedModel) -> None:
        self._lab = lab
        self._loaded = loaded

    async def ask(self, prompt: list[int], max_tokens: int = 30) -> dict[str, Any]:
        """The answer, which is the control's, as `pdd` has it; `kv`: bytes by receiver."""
        before = self._sent()
        lines = len(self._lab.records())
        answer: dict[str, Any] = (await self._lab.complete(prompt, max_tokens, ignore_eos=True))["pdd"]
        await self._lab.check_released(within_s=5)
        expected = generate(self._loaded, prompt, Sampling(max_tokens=max_tokens, ignore_eos=True))
        assert answer["token_ids"] == expected
        answer["kv"] = {name: count - before[name] for name, count in self._sent().items()}
        await eventually(lambda: len(self._lab.records()) > lines, 2, "the request's line is written")
        answer["record"] = self._lab.records()[-1]
        return answer

    def _sent(self) -> dict[str, int]:
        return {name: self._lab.p0.counters.bytes(name, "sent", "kv") for name in ("rld0", "md0")}


def test_a_second_turn_sends_only_what_is_new(tiny: LoadedModel, tmp_path: Path) -> None:
    async def test() -> None:
        async with SlowWan(tiny, tmp_path, None) as lab:
            turns = Turns(lab, tiny)
            question = prompt_of(200)
            first = await turns.ask(question, 60)
            assert 200 * 2048 < first["kv"]["md0"] < 200 * 2048 * 1.01
            more = [*question, *first["token_ids"], *prompt_of(40, seed=1)]
            second = await turns.ask(more, 60)
            # the answer's last token has no KV; the rest of the turn fills blocks up to a multiple of 16
            held = (200 + 60 - 1) // 16 * 16
            delta = (300 - held) * 2048
            assert delta < second["kv"]["md0"] < delta + 1000
            record = second["record"]
            assert record["pdd_delta_bytes"] == delta
            assert record["pdd_md_hit"] == held / 300
            assert record["pdd_p_hit"] == 200 / 300, "prefill never saw the answer; its part of the block is copied"
            assert record["pdd_kv_repairs"] == 0

    run(test())


@pytest.mark.parametrize("length", [1, 15, 16, 17, 64, 500])
def test_a_prompt_that_is_cached_everywhere_sends_its_unfilled_block_at_most(
    tiny: LoadedModel, tmp_path: Path, length: int
) -> None:
    async def test() -> None:
        async with SlowWan(tiny, tmp_path, None) as lab:
            turns = Turns(lab, tiny)
            await turns.ask(prompt_of(length))
            again = await turns.ask(prompt_of(length))
            rest = length % 16 * 2048
            assert again["record"]["pdd_delta_bytes"] == rest
            assert rest <= again["kv"]["md0"] < rest + 200
            assert again["record"]["pdd_p_hit"] == (length - 1) / length, "its last token is computed, for its logits"

    run(test())


def test_only_prefill_keeps_unfilled_blocks_as_only_prefill_can_use_them(tiny: LoadedModel, tmp_path: Path) -> None:
    async def test() -> None:
        async with SlowWan(tiny, tmp_path, None) as lab:
            await Turns(lab, tiny).ask(prompt_of(40), 21)
            assert len(lab.p0.cache) == 3
            assert len(lab.md0.cache) == len(lab.md0.cache.names) == 60 // 16

    run(test())


def test_partly_warm_prompts_share_their_beginning_and_no_more(tiny: LoadedModel, tmp_path: Path) -> None:
    async def test() -> None:
        async with SlowWan(tiny, tmp_path, None) as lab:
            turns = Turns(lab, tiny)
            await turns.ask(prompt_of(300))
            for shared in (299, 160, 159, 17, 16, 15, 1, 0):
                prompt = [*prompt_of(300)[:shared], *prompt_of(100, seed=shared + 7)]
                warm = await turns.ask(prompt, 20)
                blocks = shared // 16
                assert warm["record"]["pdd_md_hit"] == blocks * 16 / len(prompt)
                assert warm["record"]["pdd_delta_bytes"] == (len(prompt) - blocks * 16) * 2048

    run(test())


def test_an_answer_that_ends_on_the_relay_is_in_main_decodes_cache_too(tiny: LoadedModel, tmp_path: Path) -> None:
    async def test() -> None:
        async with SlowWan(tiny, tmp_path, 100e3) as lab:
            turns = Turns(lab, tiny)
            first = await turns.ask(prompt_of(100), 40)
            lab.wan.rate_bytes_per_s = None
            assert set(first["instances"]) == {"rld0"}
            chain = lab.md0.cache.hashes([*prompt_of(100), *first["token_ids"]])
            assert lab.md0.cache.policy.match(chain) == len(chain) == 8
            second = await turns.ask([*prompt_of(100), *first["token_ids"], 65, 66, 67], 40)
            assert second["record"]["pdd_md_hit"] == 128 / 143
            assert second["record"]["pdd_rld_hit"] in (None, 128 / 143)

    run(test())


def test_an_answer_that_a_stop_string_ends_on_the_relay_completes_main_decodes_cache(
    tiny: LoadedModel, tmp_path: Path
) -> None:
    prompt = prompt_of(100)
    expected = generate(tiny, prompt, Sampling(max_tokens=30, ignore_eos=True))
    stop = tiny.tokenizer.decode(expected[28:30])

    async def test() -> None:
        async with SlowWan(tiny, tmp_path, 100e3) as lab:
            fields = {"stop": [stop], "ignore_eos": True}
            answer = await lab.complete(prompt, 3000, **fields)
            assert answer["choices"][0]["finish_reason"] == "stop"
            assert set(answer["pdd"]["instances"]) == {"rld0"}
            assert lab.p0.active, "the KV is still on its way"
            await eventually(lambda: not lab.rld0.active, 1, "the relay decodes no further")
            lab.wan.rate_bytes_per_s = None
            await lab.check_released(within_s=5)
            chain = lab.md0.cache.hashes([*prompt, *answer["pdd"]["token_ids"]])
            assert lab.md0.cache.policy.match(chain) == len(chain) == (100 + len(answer["pdd"]["token_ids"])) // 16
            # with the cache warm main decode makes the answer, and stops there as well
            again = await lab.complete(prompt, 3000, **fields)
            assert again["pdd"]["token_ids"] == answer["pdd"]["token_ids"]
            assert "md0" in again["pdd"]["instances"]
            await lab.check_released(within_s=1)

    run(test())


def test_identical_prompts_at_the_same_moment(tiny: LoadedModel, tmp_path: Path) -> None:
    """Cold, then warm: all at once, with the same first block or the same everything."""
    base = prompt_of(80)
    prompts = [base, base, base[:64], base, [*base[:40], *prompt_of(40, seed=3)], base[:17], base]
    expected = [generate(tiny, prompt, Sampling(max_tokens=30, ignore_eos=True)) for prompt in prompts]

    async def test() -> None:
        async with SlowWan(tiny, tmp_path, 10e6) as lab:
            for _ in range(3):
                answers = await asyncio.gather(*(lab.complete(prompt, 30, ignore_eos=True) for prompt in prompts))
                assert [answer["pdd"]["token_ids"] for answer in answers] == expected
                await lab.check_released(within_s=3)

    run(test())


@pytest.mark.parametrize("worker", ["p0", "rld0", "md0"])
@pytest.mark.parametrize("block", [0, 2, 5])
def test_a_cached_block_that_is_wrong_makes_a_wrong_answer(
    tiny: LoadedModel, tmp_path: Path, worker: str, block: int
) -> None:
    """So the equalities above do depend on what the caches hold."""

    async def test() -> None:
        serving = {"relay_threshold": 1}
        async with SlowWan(tiny, tmp_path, None, serving=serving) as lab:
            turns = Turns(lab, tiny)
            prompt = prompt_of(103)
            await turns.ask(prompt, 40)
            expected = generate(tiny, prompt, Sampling(max_tokens=40, ignore_eos=True))
            cache = lab.cluster.worker(worker).cache
            name = cache.hashes(prompt)[block]
            cache.pool.storage[cache._cached[name].block] = 0
            if worker == "rld0":
                answer = await lab.complete_after_relay(prompt, 40, relayed=20, ignore_eos=True)
            else:
                answer = await lab.complete(prompt, 40, ignore_eos=True)
            assert answer["pdd"]["token_ids"] != expected

    run(test())


def test_under_a_tiny_budget_blocks_are_evicted_and_answers_stay_right(tiny: LoadedModel, tmp_path: Path) -> None:
    async def test() -> None:
        async with SlowWan(tiny, tmp_path, None, kv_bytes=12 * BLOCK) as lab:
            turns = Turns(lab, tiny)
            for turn in range(24):
                await turns.ask([*prompt_of(32), *prompt_of(70, seed=turn % 5)], 20)
            for worker in lab.workers:
                assert len(worker.cache) <= 12
                assert len(lab.p0.mirrors["md0"]) == len(lab.md0.cache.names)

    run(test())


def lie(mirror: Any, chain: list[bytes]) -> None:
    mirror.apply(chain, [])


def forget(mirror: Any, chain: list[bytes]) -> None:
    mirror.apply([], chain)


@pytest.mark.parametrize(
    ("spoil", "repairs"), [(lie, 1), (forget, 0)], ids=["it holds less than the mirror says", "it holds more"]
)
@pytest.mark.parametrize("warm", [0, 100])
def test_a_wrong_mirror_is_found_out_and_mended(
    tiny: LoadedModel, tmp_path: Path, spoil: Callable[[Any, list[bytes]], None], repairs: int, warm: int
) -> None:
    async def test() -> None:
        async with SlowWan(tiny, tmp_path, None, serving={"pipeline": "cdc-pd"}) as lab:
            turns = Turns(lab, tiny)
            prompt = prompt_of(200)
            await lab.complete(prompt_of(5, seed=9), 2)  # main decode has introduced its cache by then
            if warm:
                await turns.ask(prompt[:warm])
            spoil(lab.p0.mirrors["md0"], lab.p0.cache.hashes(prompt))
            record = (await turns.ask(prompt))["record"]
            assert record["pdd_kv_repairs"] == repairs
            held = warm // 16 if repairs else 0
            assert record["pdd_delta_bytes"] == (200 - held * 16) * 2048
            if repairs:  # too little in a mirror costs bytes and never comes to light
                await eventually(lambda: len(lab.p0.mirrors["md0"]) == len(lab.md0.cache.names), 1, "mended")

    run(test())


def test_blocks_evicted_between_the_offer_and_its_arrival_are_sent_after_all(tiny: LoadedModel, tmp_path: Path) -> None:
    async def test() -> None:
        async with SlowWan(tiny, tmp_path, None, serving={"pipeline": "cdc-pd"}) as lab:
            turns = Turns(lab, tiny)
            await turns.ask(prompt_of(200))
            begin = lab.md0.begin

            def evict_then_begin(message: Any) -> Any:
                lab.md0.begin = begin
                lab.md0.cache.evict_all()
                return begin(message)

            lab.md0.begin = evict_then_begin
            record = (await turns.ask(prompt_of(200)))["record"]
            assert record["pdd_kv_repairs"] == 1
            assert record["pdd_delta_bytes"] == 200 * 2048
            assert record["pdd_md_hit"] == 0

    run(test())


def test_what_an_offer_relies_on_is_not_evicted_once_it_has_arrived(tiny: LoadedModel, tmp_path: Path) -> None:
    async def test() -> None:
        async with SlowWan(tiny, tmp_path, None, serving={"pipeline": "cdc-pd"}) as lab:
            turns = Turns(lab, tiny)
            await turns.ask(prompt_of(100))
            lab.wan.rate_bytes_per_s = 500e3
            longer = prompt_of(300)
            asking = asyncio.create_task(turns.ask(longer))
            await eventually(lambda: bool(lab.md0.active), 5, "the delta is on its way")
            lab.md0.cache.evict_all()
            assert lab.md0.cache.policy.match(lab.md0.cache.hashes(longer)) == 6
            record = (await asking)["record"]
            assert record["pdd_kv_repairs"] == 0
            assert record["pdd_md_hit"] == 96 / 300

    run(test())


def test_a_broken_connection_costs_only_what_had_not_arrived(tiny: LoadedModel, tmp_path: Path) -> None:
    async def test() -> None:
        serving = {"pipeline": "cdc-pd", "kv_pool": {"connections": 1}}
        async with SlowWan(tiny, tmp_path, 3e6, serving=serving) as lab:
            prompt = prompt_of(1500)  # 3 MB in three frames
            channel = lab.p0.peers.pools["md0"]._idle[0]
            asking = asyncio.create_task(Turns(lab, tiny).ask(prompt, 10))
            await eventually(lambda: any(a.held_blocks >= 64 for a in lab.md0.active.values()), 10, "two arrived")
            lab.wan.cut(channel.connection._stream._sock.getsockname()[1])
            record = (await asking)["record"]
            assert record["pdd_kv_repairs"] == 1
            assert record["pdd_delta_bytes"] == (1500 - 64 * 16) * 2048

    run(test())


def test_when_only_the_acknowledgement_was_lost_the_request_goes_on(
    tiny: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill, "WANTED_S", 0.02)

    async def test() -> None:
        serving = {"pipeline": "cdc-pd", "kv_pool": {"connections": 1}}
        async with SlowWan(tiny, tmp_path, None, serving=serving) as lab:
            prompt = prompt_of(100)
            channel = lab.p0.peers.pools["md0"]._idle[0]
            begin = lab.md0.begin

            def lose_the_answer(message: Any) -> Any:
                lab.md0.begin = begin
                incoming = begin(message)
                complete = incoming.complete

                def complete_then_cut(*arguments: Any) -> None:
                    complete(*arguments)
                    lab.wan.cut(channel.connection._stream._sock.getsockname()[1])

                incoming.complete = complete_then_cut
                return incoming

            lab.md0.begin = lose_the_answer
            answer = await Turns(lab, tiny).ask(prompt, 200)  # longer than prefill waits before it tries again
            assert answer["record"]["pdd_kv_repairs"] == 1
            assert answer["record"]["success"]

    run(test())


def test_a_cut_of_every_connection_to_main_decode_is_mended(tiny: LoadedModel, tmp_path: Path) -> None:
    async def test() -> None:
        async with SlowWan(tiny, tmp_path, 3e6, serving={"pipeline": "cdc-pd"}) as lab:
            asking = asyncio.create_task(Turns(lab, tiny).ask(prompt_of(1000), 10))
            await eventually(lambda: any(a.held_blocks >= 32 for a in lab.md0.active.values()), 10, "half arrived")
            lab.wan.cut()
            record = (await asking)["record"]
            assert record["pdd_kv_repairs"] == 1
            await eventually(lambda: len(lab.p0.mirrors["md0"]) == len(lab.md0.cache.names), 1, "the mirror is new")

    run(test())


def test_leaving_while_blocks_are_shared_leaves_the_others_alone(tiny: LoadedModel, tmp_path: Path) -> None:
    async def test() -> None:
        async with SlowWan(tiny, tmp_path, 2e6) as lab:
            shared = prompt_of(160)
            await Turns(lab, tiny).ask(shared)
            prompts = [[*shared, *prompt_of(50, seed=seed)] for seed in range(4)]
            expected = [generate(tiny, prompt, Sampling(max_tokens=60, ignore_eos=True)) for prompt in prompts]
            asking = [asyncio.create_task(lab.complete(prompt, 60, ignore_eos=True)) for prompt in prompts]
            await eventually(lambda: len(lab.rld0.active) == 4, 10, "all are on the relay")
            leavers = asking[::2]
            for task in leavers:
                task.cancel()
            await asyncio.gather(*leavers, return_exceptions=True)
            answers = await asyncio.gather(*asking[1::2])
            assert [answer["pdd"]["token_ids"] for answer in answers] == expected[1::2]
            await lab.check_released(within_s=3)
            again = await asyncio.gather(*(lab.complete(prompt, 60, ignore_eos=True) for prompt in prompts))
            assert [answer["pdd"]["token_ids"] for answer in again] == expected
            await lab.check_released(within_s=3)

    run(test())


def test_a_load_that_fails_spoils_nothing_for_its_twin(tiny: LoadedModel, tmp_path: Path) -> None:
    async def test() -> None:
        async with SlowWan(tiny, tmp_path, 1e6, serving={"pipeline": "cdc-pd"}) as lab:
            prompt = prompt_of(300)
            expected = generate(tiny, prompt, Sampling(max_tokens=20))
            twins = [asyncio.create_task(lab.complete(prompt, 20)) for _ in range(2)]
            await eventually(lambda: len(lab.md0.active) == 2, 10, "both arrive")
            twins[0].cancel()
            await asyncio.gather(twins[0], return_exceptions=True)
            assert (await twins[1])["pdd"]["token_ids"] == expected
            await lab.check_released(within_s=3)
            assert (await lab.complete(prompt, 20))["pdd"]["token_ids"] == expected

    run(test())


def test_three_hundred_requests_under_a_small_budget_leave_no_growth(tiny: LoadedModel, tmp_path: Path) -> None:
    prompts = [[*prompt_of(20), *prompt_of(5 + seed, seed=seed)] for seed in range(30)]
    expected = [generate(tiny, prompt, Sampling(max_tokens=6)) for prompt in prompts]

    async def test() -> None:
        async with SlowWan(tiny, tmp_path, None, kv_bytes=40 * BLOCK) as lab:
            sizes = []
            at_once = asyncio.Semaphore(4)

            async def one(number: int) -> None:
                async with at_once:
                    answer = await lab.complete(prompts[number % 30], 6)
                    assert answer["pdd"]["token_ids"] == expected[number % 30]

            for _ in range(5):
                await asyncio.gather(*(one(number) for number in range(60)))
                await lab.check_released(within_s=3)
                sizes.append([books(worker) for worker in lab.workers])
            assert all(count <= 40 for row in sizes for count, *_ in row)
            for now, then in zip(sizes[-1], sizes[1], strict=True):
                assert all(b <= a + 10 for b, a in zip(now, then, strict=True)), (sizes[1], sizes[-1])

    def books(worker: Any) -> tuple[int, ...]:
        policy = worker.cache.policy
        mirrored = sum(len(mirror) for mirror in getattr(worker, "mirrors", {}).values())
        return len(worker.cache), policy._extents, mirrored, len(worker.runner._leases), len(worker._tasks)

    run(test())


def test_zeroing_is_noticed_because_the_cache_really_is_used(tiny: LoadedModel, tmp_path: Path) -> None:
    """Prefill computes the missing suffix only."""

    async def test() -> None:
        async with SlowWan(tiny, tmp_path, None) as lab:
            computed: list[int] = []
            compute = lab.p0.runner.prefill

            async def counting(sequence: Sequence, *more: Any) -> Any:
                first = await compute(sequence, *more)
                computed.append(sequence.prompt_len - sequence.cached)
                return first

            lab.p0.runner.prefill = counting
            turns = Turns(lab, tiny)
            await turns.ask(prompt_of(200))
            await turns.ask([*prompt_of(200), *prompt_of(30, seed=1)])
            assert computed == [200, 30]

    run(test())
