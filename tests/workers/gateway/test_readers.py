"""Readers that take their answer slowly, or not at all: bounded memory, and nobody else waits."""

import json
import socket
from pathlib import Path

import pytest

from tests.workers.serving import SlowWan, connect_without_reading, eventually, prompt_of, run
from workers.models import LoadedModel


def test_a_reader_that_takes_nothing_is_let_go_and_everything_of_it_is_given_back(
    tiny: LoadedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The kernel's buffers are made small, so that it need not be an answer of megabytes."""
    extra = {"gw0": {"PDDBED_API": json.dumps({"unread_ns": 500_000_000})}}
    body = {"prompt": prompt_of(20), "max_tokens": 4000, "temperature": 0, "ignore_eos": True, "stream": True}
    body |= {"logprobs": 20}

    async def test() -> None:
        async with SlowWan(tiny, tmp_path, None, serving={"max_running": 1}, extra=extra) as lab:
            listener = lab.cluster._plan.sockets["gw0"]  # whose options the connection gets
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 10)
            sock = await connect_without_reading(lab.cluster.port("gw0"), body)
            admission = lab.cluster.gateway.admission
            await eventually(lambda: admission.running == 1, 5, "it runs")
            await eventually(lambda: admission.running == 0, 40, "it is let go")
            assert "a client took nothing of its answer" in caplog.text
            await lab.check_released(within_s=5)
            await eventually(lambda: not lab.cluster.gateway.dispatcher.live, 5, "the gateway forgets it")
            sock.close()
            assert (await lab.complete("x", 3, ignore_eos=True))["usage"]["completion_tokens"] == 3

    run(test())
