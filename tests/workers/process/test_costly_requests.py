"""Requests that would make a forked gateway hold or compute out of proportion to their bytes: eight of each at once."""

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

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


@pytest.mark.parametrize("name", COSTLY)
def test_eight_costly_requests_at_once_cost_their_bytes_and_hold_nobody_up(cluster: LocalCluster, name: str) -> None:
    path, body, status = COSTLY[name]
    pid = cluster.pids["gw0"]
    slowest, done = 0.0, asyncio.Event()

    async def poll(http: httpx.AsyncClient) -> None:
        nonlocal slowest
        while not done.is_set():
            start = time.monotonic()
            assert (await http.get("/health")).status_code == 200
            slowest = max(slowest, time.monotonic() - start)
            await asyncio.sleep(0.01)

    async def ask(headers: dict[str, str]) -> tuple[int, bytes]:
        """Sent by a program of its own, that our own time does not count."""
        command = ["curl", "-s", "-w", "%{http_code}", "-H", "Content-Type: application/json", "-H", "Expect:"]
        command += ["--data-binary", "@-", f"{cluster.base_url}/v1/{path}"]
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
        out, _ = await process.communicate(body)
        return int(out[-3:]), out[:-3]

    async def test() -> list[tuple[int, bytes]]:
        async with httpx.AsyncClient(base_url=cluster.base_url, timeout=30) as http:
            await http.get("/health")
            polling = asyncio.create_task(poll(http))
            answers = await asyncio.gather(*(ask({}) for _ in range(AT_ONCE)))
            done.set()
            await polling
            return answers

    Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak of memory begins anew
    before_kb = memory_kb(pid, "VmRSS")
    answers = asyncio.run(test())
    grown = (memory_kb(pid, "VmHWM") - before_kb) << 10
    print(f"{name}: {grown / AT_ONCE / len(body):.2f} x, health {slowest:.3f} s, {answers[0][1][:200]!r}")
    assert grown < 2 * AT_ONCE * len(body)
    assert slowest < HEALTH_S
    if status is not None:
        assert {one for one, _ in answers} == {status}
    for code, out in answers:
        if code != 200:
            error = json.loads(out)["error"]
            assert error["param"] or error["code"] in ("invalid_json", "unknown_parameter"), error
            assert len(out) < 2000
    held = (memory_kb(pid, "VmRSS") - before_kb) << 10
    assert held < AT_ONCE * len(body) // 2, "given back when it is over"
