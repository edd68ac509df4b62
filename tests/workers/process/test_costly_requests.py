"""Requests that would make a forked gateway hold or compute out of proportion to their bytes: eight of each at once."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from benchmarks.chaos_checks import HealthWatch
from workers.local import Layout, LocalCluster

AT_ONCE = 8
BYTES = 15 << 20
HEALTH_S = 0.2


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(Layout(), tmp_path_factory.mktemp("cluster")) as running:
        yield running


def filled(before: str, item: str, after: str, size: int = BYTES) -> bytes:
    """As many items as fit."""
    return (before + item * ((size - len(before) - len(after)) // len(item)) + after).encode()


PART = '{"type":"text","text":""},'
COSTLY = {
    "metadata of lists": ("completions", filled('{"prompt":"x","max_tokens":1,"metadata":[', "[],", "[]]}"), 200),
    "metadata of keys": ("completions", filled('{"prompt":"x","max_tokens":1,"metadata":{', '"a":1,', '"b":1}}'), 200),
    "bias of keys": ("completions", filled('{"prompt":"x","logit_bias":{', '"1":1,', '"2":1}}'), 400),
    "tools of nothing": ("chat/completions", filled('{"messages":[],"tools":[', "{},", "{}]}"), 400),
    "empty text parts": (
        "chat/completions",
        filled('{"messages":[{"role":"user","content":[', PART, PART[:-1] + "]}]}"),
        400,
    ),
    "messages of nothing": (
        "chat/completions",
        filled('{"messages":[', '{"role":"user","content":""},', '{"role":"user","content":""}]}'),
        400,
    ),
    "stop strings": ("completions", filled('{"prompt":"x","stop":[', '"a",', '"b"]}'), 400),
    "stop ids": ("completions", filled('{"prompt":"x","stop_token_ids":[', "1,", "1]}"), 400),
    "prompts of nothing": ("completions", filled('{"prompt":[', "[],", "[]]}"), 400),
    "prompts of text": ("completions", filled('{"prompt":[', '"ab",', '"ab"]}'), 400),
    "a prompt of ids": ("completions", filled('{"prompt":[', "1000,", "1]}"), 400),
    "a prompt of text": ("completions", filled('{"prompt":"', "word ", '"}'), 400),
    "a message of text": ("chat/completions", filled('{"messages":[{"role":"user","content":"', "word ", '"}]}'), 400),
    "a seed of digits": ("completions", filled('{"prompt":"x","seed":', "9", "}"), 400),
    "a temperature of digits": ("completions", filled('{"prompt":"x","temperature":0.', "1", "}"), None),
    "unknown keys": ("completions", filled('{"prompt":"x"', ',"a":1', "}"), 400),
    "a deep list": ("completions", filled('{"prompt":"x","metadata":', "[", ""), 400),
    "escapes": ("completions", filled('{"prompt":"', "\\u00e4", '"}'), 400),
}


def memory_kb(pid: int, name: str) -> int:
    return int(Path(f"/proc/{pid}/status").read_text().partition(f"{name}:")[2].split()[0])


@pytest.mark.quiet
@pytest.mark.parametrize("name", COSTLY)
def test_eight_costly_requests_at_once_cost_their_bytes_and_hold_nobody_up(cluster: LocalCluster, name: str) -> None:
    path, body, status = COSTLY[name]
    pid = cluster.pids["gw0"]

    async def ask() -> tuple[int, bytes]:
        """Sent by a program of its own, that our own time does not count."""
        command = ["curl", "-s", "-w", "%{http_code}", "-H", "Content-Type: application/json", "-H", "Expect:"]
        command += ["--data-binary", "@-", f"{cluster.base_url}/v1/{path}"]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
        out, _ = await process.communicate(body)
        return int(out[-3:]), out[:-3]

    async def test() -> list[tuple[int, bytes]]:
        return await asyncio.gather(*(ask() for _ in range(AT_ONCE)))

    Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak of memory begins anew
    before_kb = memory_kb(pid, "VmRSS")
    watch = HealthWatch(cluster.port("gw0"))
    answers = asyncio.run(test())
    health = watch.end()
    grown = (memory_kb(pid, "VmHWM") - before_kb) << 10
    print(f"{name}: {grown / AT_ONCE / len(body):.2f} x, health {health}, {answers[0][1][:200]!r}")
    assert grown < 2 * AT_ONCE * len(body)
    assert not health["failed"]
    assert health["max"] < HEALTH_S + health["late"], "beyond what the machine keeps everybody waiting"
    if status is not None:
        assert {one for one, _ in answers} == {status}
    for code, out in answers:
        if code != 200:
            error = json.loads(out)["error"]
            assert error["param"] or error["code"] in ("invalid_json", "unknown_parameter"), error
            assert len(out) < 2000
    held = (memory_kb(pid, "VmRSS") - before_kb) << 10
    assert held < AT_ONCE * len(body) // 2, "given back when it is over"


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_many_choices_with_log_probabilities_are_held_as_their_json(cluster: LocalCluster, path: str) -> None:
    """4,096 tokens with twenty likeliest ones each: 2.4 or 5 MB of JSON, ten times that as objects of Python's.

    Beside its JSON a choice that is under way takes about 64 KiB, whatever it is asked for.
    """
    pid = cluster.pids["gw0"]
    body = {"n": 128, "max_tokens": 32, "temperature": 0, "ignore_eos": True}
    body |= (
        {"prompt": "x", "logprobs": 20} if path == "completions" else {"messages": [{"role": "user", "content": "x"}]}
    )
    if path != "completions":
        body |= {"logprobs": True, "top_logprobs": 20}
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    before_kb = memory_kb(pid, "VmRSS")
    answer = httpx.post(f"{cluster.base_url}/v1/{path}", json=body, timeout=120)
    grown = (memory_kb(pid, "VmHWM") - before_kb) << 10
    assert answer.status_code == 200
    choices = answer.json()["choices"]
    assert [len(choice["logprobs"].get("tokens") or choice["logprobs"]["content"]) for choice in choices] == [32] * 128
    print(f"{path}: {len(answer.content) >> 10} kB of JSON, grown by {grown >> 10} kB")
    assert grown < 4 * len(answer.content) + 128 * (64 << 10)


def test_an_answer_that_grows_too_large_is_ended_with_what_to_do(tmp_path: Path) -> None:
    extra = {"gw0": {"PDDBED_API": json.dumps({"answer_bytes": 100_000})}}
    body = {"prompt": "x", "n": 4, "max_tokens": 400, "temperature": 0, "ignore_eos": True, "logprobs": 5}
    with LocalCluster(Layout(extra=extra), tmp_path) as small:
        answer = httpx.post(f"{small.base_url}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "answer_too_large"
        assert "stream: true" in answer.json()["error"]["message"]
        streamed = httpx.post(f"{small.base_url}/v1/completions", json={**body, "stream": True}, timeout=60)
        assert streamed.text.endswith("data: [DONE]\n\n")


@pytest.mark.quiet
@pytest.mark.parametrize(
    "body",
    [{"prompt": [65] * 3900, "n": 128}, {"prompt": ["a" * 3000] * 128, "echo": True}],
    ids=["a prompt of many choices", "many prompts"],
)
def test_many_choices_of_long_prompts_hold_nobody_up(cluster: LocalCluster, body: dict[str, object]) -> None:
    """15 kB of a request; there may be no room for all of it. The gateway was deaf for 3.4 and 3.8 s."""

    async def test() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=cluster.base_url, timeout=60) as http:
            asked = {**body, "max_tokens": 1}
            return await asyncio.gather(*(http.post("/v1/completions", json=asked) for _ in range(2)))

    watch = HealthWatch(cluster.port("gw0"))
    answers = asyncio.run(test())
    health = watch.end()
    print(health)
    assert {answer.status_code for answer in answers} <= {200, 503}
    assert health["max"] < 0.5 + health["late"]
