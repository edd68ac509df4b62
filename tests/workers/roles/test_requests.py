"""A request's ways to end, and that each of them leaves nothing behind."""

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tests.workers.serving import SlowWan, eventually, prompt_of, run
from workers.engine import Sampling, generate
from workers.models import LoadedModel


def with_eos(loaded: LoadedModel, token: int) -> LoadedModel:
    """The same model, except that `token` ends an answer."""

    class Tokenizer(type(loaded.tokenizer)):  # type: ignore[misc]
        eos_ids = frozenset({token})

    tokenizer = object.__new__(Tokenizer)
    tokenizer.__dict__.update(getattr(loaded.tokenizer, "__dict__", {}))
    return dataclasses.replace(loaded, tokenizer=tokenizer)


def test_a_first_token_that_is_eos_ends_the_answer_on_the_relay(tiny: LoadedModel, tmp_path: Path) -> None:
    prompt = prompt_of(40)
    ends_at_once = with_eos(tiny, generate(tiny, prompt, Sampling(max_tokens=1))[0])

    async def test() -> None:
        async with SlowWan(ends_at_once, tmp_path, None) as lab:
            answer = await lab.complete(prompt, 50)
            assert answer["choices"][0]["finish_reason"] == "stop"
            assert answer["pdd"]["instances"] == ["rld0"]
            assert answer["usage"]["completion_tokens"] == 1
            await lab.check_released()

    run(test())


def test_ignore_eos_goes_on(tiny: LoadedModel, tmp_path: Path) -> None:
    prompt = prompt_of(40)
    expected = generate(tiny, prompt, Sampling(max_tokens=30))
    ends_at_once = with_eos(tiny, expected[0])

    async def test() -> None:
        async with SlowWan(ends_at_once, tmp_path, None) as lab:
            answer = await lab.complete(prompt, 30, ignore_eos=True)
            assert answer["pdd"]["token_ids"] == expected

    run(test())


@pytest.mark.parametrize("max_tokens", [1, 2, 5])
def test_an_answer_that_ends_on_the_relay_still_reaches_main_decode(
    tiny: LoadedModel, tmp_path: Path, max_tokens: int
) -> None:
    prompt = prompt_of(100)

    async def test() -> None:
        async with SlowWan(tiny, tmp_path, 500e3) as lab:  # 200 KB: about 0.4 s
            ids: list[Any] = []
            lab.md0.deliver = lambda active, message: (
                ids.append(message),
                type(lab.md0).deliver(lab.md0, active, message),
            )
            answer = await lab.complete(prompt, max_tokens)
            assert answer["pdd"]["instances"] == ["rld0"] * max_tokens
            assert answer["choices"][0]["finish_reason"] == "length"
            assert lab.p0.active, "the KV is still on its way"
            await lab.check_released(within_s=3)
            assert lab.md0.peers.local.counters.bytes("p0", "received", "kv") > 100 * lab.p0.pool.bytes_per_token
            assert [message.ids for message in ids] == [answer["pdd"]["token_ids"]]
            assert [message.finish_reason for message in ids] == ["length"]

    run(test())


def test_identical_prompts_at_the_same_moment_get_the_same_answer(tiny: LoadedModel, tmp_path: Path) -> None:
    prompt = prompt_of(64)
    expected = generate(tiny, prompt, Sampling(max_tokens=40))

    async def test() -> None:
        async with SlowWan(tiny, tmp_path, 3e6) as lab:
            answers = await asyncio.gather(*(lab.complete(prompt, 40) for _ in range(6)))
            assert [answer["pdd"]["token_ids"] for answer in answers] == [expected] * 6
            assert len({answer["id"] for answer in answers}) == 6
            await lab.check_released()

    run(test())


def test_many_different_requests_at_once_each_get_their_own_answer(tiny: LoadedModel, tmp_path: Path) -> None:
    prompts = [prompt_of(length, seed=length) for length in (1, 7, 16, 31, 32, 33, 90, 160, 250, 400)]
    expected = [generate(tiny, prompt, Sampling(max_tokens=25)) for prompt in prompts]

    async def test() -> None:
        async with SlowWan(tiny, tmp_path, 8e6) as lab:
            answers = await asyncio.gather(*(lab.complete(prompt, 25) for prompt in prompts))
            assert [answer["pdd"]["token_ids"] for answer in answers] == expected
            await lab.check_released()

    run(test())


def test_a_seeded_answer_does_not_depend_on_where_it_is_handed_over(tiny: LoadedModel, tmp_path: Path) -> None:
    prompt = prompt_of(64)
    expected = generate(tiny, prompt, Sampling(max_tokens=60, temperature=1.0, top_p=0.9, seed=11))

    async def test() -> None:
        switches = set()
        async with SlowWan(tiny, tmp_path, None, serving={"relay_threshold": 1}) as lab:
            for relayed in (1, 10, 30):
                answer = await lab.complete_after_relay(prompt, 60, relayed, temperature=1.0, top_p=0.9, seed=11)
                assert answer["pdd"]["token_ids"] == expected
                switches.add(answer["pdd"]["instances"].count("rld0"))
            other = await lab.complete(prompt, 60, temperature=1.0, top_p=0.9, seed=12)
            assert other["pdd"]["token_ids"] != expected
        assert len(switches) > 1, "handed over at different places"

    run(test())


@pytest.mark.parametrize(
    ("pipeline", "maker"), [("cdc-pd", "md0"), ("idc-pd", "rld0"), ("single", "p0")], ids=lambda v: str(v)
)
def test_the_other_pipelines_answer_the_same(tiny: LoadedModel, tmp_path: Path, pipeline: str, maker: str) -> None:
    prompt = prompt_of(50)
    expected = generate(tiny, prompt, Sampling(max_tokens=20))

    async def test() -> None:
        async with SlowWan(tiny, tmp_path, None, serving={"pipeline": pipeline}) as lab:
            answer = await lab.complete(prompt, 20)
            assert answer["pdd"]["token_ids"] == expected
            assert answer["pdd"]["instances"] == [maker] * 20
            await lab.check_released()

    run(test())


def test_a_prompt_that_no_worker_has_blocks_for_is_refused_by_name(tiny: LoadedModel, tmp_path: Path) -> None:
    async def test() -> None:
        async with SlowWan(tiny, tmp_path, None, kv_bytes=8 * 16 * 2048) as lab:
            response = await lab.http.post("/v1/completions", json={"prompt": prompt_of(500), "temperature": 0})
            assert response.status_code == 503
            error = response.json()["error"]
            assert error["code"] == "out_of_kv_blocks"
            for name in ("p0", "rld0", "md0"):
                assert f"{name}: 32 KV blocks of 16 tokens needed, and there are 8 in all" in error["message"]
            await lab.check_released()
            await lab.complete(prompt_of(50), 8)

    run(test())


@pytest.mark.parametrize("small", ["rld0", "md0"])
def test_a_decode_worker_without_room_leaves_the_answer_to_the_other(
    tiny: LoadedModel, tmp_path: Path, small: str
) -> None:
    prompt = prompt_of(500)
    expected = generate(tiny, prompt, Sampling(max_tokens=40))

    async def test() -> None:
        extra = {small: {"PDDBED_KV_BYTES": str(8 * 16 * 2048)}}
        async with SlowWan(tiny, tmp_path, None, extra=extra) as lab:
            answer = await lab.complete(prompt, 40)
            assert answer["pdd"]["token_ids"] == expected
            assert set(answer["pdd"]["instances"]) == {"rld0", "md0"} - {small}
            (loss,) = answer["pdd"]["record"]["pdd_recovery"]
            assert (loss["lost"], loss["error"], loss["how"]) == (small, "out_of_kv_blocks", "goes-on")
            await lab.check_released()

    run(test())


@pytest.mark.parametrize("way", ["wan", "fabric"])
def test_corrupted_kv_is_never_an_answer(tiny: LoadedModel, tmp_path: Path, way: str) -> None:
    prompt = prompt_of(500)
    expected = generate(tiny, prompt, Sampling(max_tokens=100))
    spoilt, other = ("md0", "rld0") if way == "wan" else ("rld0", "md0")

    async def test() -> None:
        async with SlowWan(tiny, tmp_path, None, serving={"kv_pool": {"connections": 1}}) as lab:
            getattr(lab, way).spoil_at = 300_000
            answer = await lab.complete(prompt, 100)
            assert answer["pdd"]["token_ids"] == expected
            assert set(answer["pdd"]["instances"]) == {other}
            losses = answer["pdd"]["record"]["pdd_recovery"]
            assert [(loss["lost"], loss["error"]) for loss in losses] == [(spoilt, "kv_corrupt")]
            getattr(lab, way).spoil_at = None
            await lab.check_released()

    run(test())


def test_the_record_tells_the_whole_life(tiny: LoadedModel, tmp_path: Path) -> None:
    import json

    async def test() -> None:
        async with SlowWan(tiny, tmp_path, 2e6) as lab:
            answer = await lab.complete(prompt_of(100), 120)
            await lab.check_released()
            path = tmp_path / "requests.jsonl"
            await eventually(lambda: path.read_text() != "", 1, "the line is written")
        record = json.loads(path.read_text())
        assert record["request_id"] == answer["id"]
        assert record["success"] is True
        assert (record["input_len"], record["output_len"]) == (100, 120)
        assert len(record["itl"]) == 119
        assert record["ttft"] + sum(record["itl"]) == pytest.approx(record["e2el"], abs=5e-3)
        assert record["pdd_pipeline"] == "p-rld-md"
        assert record["pdd_rld_tokens"] + record["pdd_md_tokens"] == 120
        assert record["pdd_handoff_mode"] == "catch-up"
        assert record["pdd_delta_bytes"] == 100 * 2048
        assert 80 < record["pdd_kv_xfer_ms"] < 1000, "200 KB at 2 MB/s"
        assert record["pdd_kv_queue_ms"] == 0
        spans = {row["name"]: row for row in record["pdd_spans"]}
        order = [
            record["pdd_start_ns"],
            spans["prefill"]["start_ns"],
            spans["prefill"]["end_ns"],
            spans["fabric-transfer"]["start_ns"],
            spans["fabric-transfer"]["end_ns"],
            spans["relay-decode"]["start_ns"],
            spans["hand-over"]["start_ns"],
            spans["relay-stopped"]["start_ns"],
            spans["hand-over"]["end_ns"],
            spans["extend"]["end_ns"],
            spans["main-decode"]["start_ns"],
            record["pdd_end_ns"],
        ]
        assert order == sorted(order)
        assert spans["wan-transfer"]["end_ns"] <= spans["hand-over"]["start_ns"]
        assert record["pdd_spans"] == sorted(record["pdd_spans"], key=record["pdd_spans"].index)

    run(test())
