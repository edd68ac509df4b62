"""Clients of a forked gateway that leave at every moment: it and everybody else's answers live on."""

import json
import shlex
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from tests.workers.serving import prompt_of
from workers.engine import Sampling, generate
from workers.local import Layout, LocalCluster
from workers.models import LoadedModel

TIMES = 200
ASK = b"GET %s HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """A cluster whose API was polled by impatient clients from before its start."""
    running = LocalCluster(Layout(), tmp_path_factory.mktemp("cluster"))
    port, started = running.port("gw0"), threading.Event()

    def poll() -> None:
        while not started.is_set():
            send_and_leave(port, ASK % b"/health")
            started.wait(0.05)

    poller = threading.Thread(target=poll)
    poller.start()
    try:
        with running:
            started.set()
            poller.join()
            yield running
    finally:
        started.set()


def send_and_leave(port: int, data: bytes, *, reset: bool = False, after_s: float = 0.0) -> None:
    """Send, read nothing, and close, with a FIN or a RST."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as sock:
        if reset:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        with suppress(BrokenPipeError, ConnectionResetError):  # refused before all was sent
            sock.sendall(data)
        time.sleep(after_s)


def post(body: bytes, length: int | None = None) -> bytes:
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body) if length is None else length}\r\n\r\n"
    )
    return head.encode() + body


def completion(**fields: object) -> bytes:
    body = {"prompt": "x", "max_tokens": 200, "temperature": 0, "ignore_eos": True, **fields}
    return post(json.dumps(body).encode())


WAYS = {
    "health": ASK % b"/health",
    "eight pipelined": ASK % b"/health" * 8,
    "metrics": ASK % b"/metrics",
    "refused body": post(b'{"prompt": 1}'),
    "body too large": post(b" " * 200_000, 17 << 20),
    "half a head": b"GET /health HT",
    "half a body": post(b"{", 100),
    "stream": completion(stream=True),
    "whole answer": completion(),
}


@pytest.mark.parametrize("reset", [False, True], ids=["fin", "rst"])
@pytest.mark.parametrize("way", WAYS)
def test_a_client_that_asks_and_leaves_ends_nothing(cluster: LocalCluster, way: str, reset: bool) -> None:
    pid = cluster.pids["gw0"]
    for number in range(TIMES // 2):
        send_and_leave(cluster.port("gw0"), WAYS[way], reset=reset, after_s=0.001 * (number % 4))
    assert httpx.get(f"{cluster.base_url}/health", timeout=10).status_code == 200
    assert Path(f"/proc/{pid}/cmdline").exists()
    assert cluster.exits() == []


def test_a_stream_cut_by_head_ends_nothing(tiny: LoadedModel, cluster: LocalCluster) -> None:
    """`curl -N ... | head -c 300`, beside an answer that goes on."""
    expected = generate(tiny, prompt_of(40), Sampling(max_tokens=300, ignore_eos=True))
    answered: list[list[int]] = []

    def innocent() -> None:
        body = {"prompt": prompt_of(40), "max_tokens": 300, "temperature": 0, "ignore_eos": True}
        answer = httpx.post(f"{cluster.base_url}/v1/completions", json=body, timeout=60).json()
        answered.append(answer["pdd"]["token_ids"])

    beside = threading.Thread(target=innocent)
    beside.start()
    body = {"prompt": "x", "max_tokens": 4000, "temperature": 0, "ignore_eos": True, "stream": True}
    url = f"{cluster.base_url}/v1/completions"
    ask = f"curl -sN {url} -H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body))}"
    for size in (1, 300, 5000, 300, 1, 300):
        subprocess.run(f"{ask} | head -c {size} > /dev/null", shell=True, check=True, timeout=60)
    beside.join()
    assert answered == [expected]
    assert cluster.exits() == []
    assert httpx.get(f"{cluster.base_url}/health", timeout=10).status_code == 200


def test_a_process_that_dies_is_told_and_started_anew(cluster: LocalCluster) -> None:
    pid = cluster.pids["gw0"]
    cluster.kill("gw0")
    (ended,) = cluster.exits(within_s=10)
    assert str(ended) == f"gw0 (pid {pid}) was ended by signal 9"
    cluster.restart("gw0")
    answer = httpx.post(f"{cluster.base_url}/v1/completions", json={"prompt": "x", "max_tokens": 3}, timeout=30)
    assert answer.status_code == 200
