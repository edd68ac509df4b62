"""Clients that read slowly, or leave while their request is being recovered; and a gateway that dies."""

import asyncio
import json
import socket

import httpx
import pytest

from tests.workers.failures.rig import WORKERS, Answer, Rig
from tests.workers.serving import prompt_of
from workers.engine import Sampling, generate
from workers.models import LoadedModel


def test_a_slow_reader_holds_back_nobody_but_itself(tiny: LoadedModel, rig: Rig) -> None:
    prompt, other = prompt_of(50, seed=1), prompt_of(60, seed=2)
    expected = generate(tiny, prompt, Sampling(max_tokens=500, ignore_eos=True))
    expected_other = generate(tiny, other, Sampling(max_tokens=40, ignore_eos=True))
    body = {"prompt": prompt, "max_tokens": 500, "temperature": 0, "ignore_eos": True, "stream": True}

    async def test() -> list[int]:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 10)
        sock.connect(("127.0.0.1", rig.cluster.port("gw0")))
        reader, writer = await asyncio.open_connection(sock=sock, limit=1 << 10)
        data = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: gw0\r\nContent-Length: {len(data)}\r\nConnection: close\r\n\r\n"
        writer.write(head.encode() + data)
        for seed in range(3):
            answer = await rig.stream(Answer(), other, 40)
            assert answer.ids == expected_other, seed
        # all that its answer took of the workers is given back, although most of it was not read yet
        await rig.released()
        assert not writer.transport.is_closing()
        received = b""
        while part := await reader.read(1 << 10):
            received += part
        writer.close()
        chunks = [line for line in received.decode().splitlines() if line.startswith("data: {")]
        return [token for line in chunks for token in json.loads(line.removeprefix("data: "))["pdd"]["token_ids"]]

    assert rig.run(test()) == expected
    rig.run(rig.settled())


def test_a_client_that_leaves_during_a_replay_takes_it_along(rig: Rig) -> None:
    async def test() -> None:
        answer = Answer()
        asking = asyncio.create_task(rig.stream(answer, prompt_of(200), 2000))
        await rig.until(lambda: answer.from_("md0") > 3, "main decode answers")
        fabric = rig.ways["p0", "rld0"]
        fabric.hold("kv", "there")
        await rig.fault("kill", "md0")
        await rig.until(lambda: fabric.holds("kv", "there"), "the replay's KV is on its way")
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await rig.released()
        await rig.heal()
        await rig.settled()

    rig.run(test())


def test_a_client_that_leaves_while_nobody_is_there_is_forgotten(rig: Rig) -> None:
    async def test() -> None:
        answer = Answer()
        asking = asyncio.create_task(rig.stream(answer, prompt_of(200), 2000))
        await rig.until(lambda: len(answer.ids) > 3, "the answer has begun")
        for worker in WORKERS:
            await rig.fault("kill", worker)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await rig.released()
        await rig.heal()
        await rig.settled()

    rig.run(test())


def test_a_gateway_that_dies_takes_its_requests_along_and_can_come_back(tiny: LoadedModel, rig: Rig) -> None:
    prompt = prompt_of(80, seed=11)
    expected = generate(tiny, prompt, Sampling(max_tokens=20, ignore_eos=True))

    async def test() -> None:
        answer = Answer()
        asking = asyncio.create_task(rig.stream(answer, prompt_of(200, seed=12), 2000))
        await rig.until(lambda: len(answer.ids) > 3, "the answer has begun")
        await rig.fault("kill", "gw0")
        with pytest.raises(httpx.HTTPError):
            await asking
        await rig.heal()
        await rig.settled()
        assert (await rig.stream(Answer(), prompt, 20)).ids == expected

    rig.run(test())
