"""Connections that a forked gateway must bound: half open, idle, stalled, half closed, too many, and no HTTP at all."""

import json
import resource
import select
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import httpx
import pytest

from tests.workers.serving import prompt_of
from workers.engine import Sampling, generate
from workers.local import Layout, LocalCluster
from workers.models import LoadedModel

S = 10**9
LIMITS = {"head_ns": 2 * S, "keep_alive_ns": 2 * S, "body_ns": 4 * S, "bodies_bytes": 64 << 20}
MANY = 1100
ASK = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    layout = Layout(extra={"gw0": {"PDDBED_API": json.dumps(LIMITS)}})
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    with LocalCluster(layout, tmp_path_factory.mktemp("cluster")) as running:
        yield running


def head(length: int, path: str = "/v1/completions") -> bytes:
    start = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
    )
    return start.encode()


def completion(**fields: object) -> bytes:
    body = json.dumps({"prompt": "x", "max_tokens": 3, "temperature": 0, "ignore_eos": True, **fields}).encode()
    return head(len(body)) + body


def dial(cluster: LocalCluster) -> socket.socket:
    return socket.create_connection(("127.0.0.1", cluster.port("gw0")), timeout=30)


def read_all(sock: socket.socket) -> bytes:
    data = b""
    with suppress(ConnectionResetError):
        while part := sock.recv(1 << 16):
            data += part
    return data


@contextmanager
def many(cluster: LocalCluster, data: bytes, count: int = MANY) -> Iterator[list[socket.socket]]:
    with ExitStack() as stack:
        clients = []
        for _ in range(count):
            clients.append(stack.enter_context(dial(cluster)))
            with suppress(ConnectionResetError, BrokenPipeError):
                clients[-1].sendall(data)
        yield clients


def health_s(cluster: LocalCluster) -> float:
    start = time.monotonic()
    assert httpx.get(f"{cluster.base_url}/health", timeout=20).status_code == 200
    return time.monotonic() - start


def wait_until_closed(clients: list[socket.socket], within_s: float) -> None:
    """Each is closed by the gateway, whatever it sent before."""
    end, left = time.monotonic() + within_s, set(clients)
    while left:
        assert time.monotonic() < end, f"{len(left)} are open after {within_s} s"
        poll = select.poll()
        by_fd = {client.fileno(): client for client in left}
        for fd in by_fd:
            poll.register(fd, select.POLLIN)
        for fd, _ in poll.poll(200):
            try:
                gone = not by_fd[fd].recv(1 << 16)
            except ConnectionError:
                gone = True
            if gone:
                left.discard(by_fd[fd])


def log_bytes(cluster: LocalCluster) -> int:
    return cluster.log("gw0").stat().st_size


HALF_OPEN = {
    "nothing": b"",
    "half a head": b"GET /health HTTP/1.1\r\nHost: loc",
    "no body": head(100),
    "half a body": head(100) + b"{",
    "an endless chunk": head(0).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked") + b"ffff\r\n{",
    "idle after an answer": ASK,
    "a TLS hello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(30),
}


@pytest.mark.parametrize("kind", HALF_OPEN)
def test_clients_that_do_not_go_on_starve_nobody_and_are_let_go(cluster: LocalCluster, kind: str) -> None:
    before = log_bytes(cluster)
    with many(cluster, HALF_OPEN[kind]) as clients:
        assert max(health_s(cluster) for _ in range(5)) < 1
        wait_until_closed(clients, 12)
    assert log_bytes(cluster) - before < 10_000


def test_headers_byte_by_byte_have_to_be_complete_in_time(cluster: LocalCluster) -> None:
    with dial(cluster) as client:
        start = time.monotonic()
        data = b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Padding: " + b"x" * 1000
        with suppress(ConnectionError):
            for byte in data:
                client.sendall(bytes([byte]))
                time.sleep(0.02)
        assert 1.5 < time.monotonic() - start < 10


def test_a_gateway_without_descriptors_lets_idle_clients_go_and_logs_little(cluster: LocalCluster) -> None:
    before, pid = log_bytes(cluster), cluster.pids["gw0"]
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (100, hard))
    try:
        with many(cluster, b"", count=400):
            assert max(health_s(cluster) for _ in range(5)) < 1
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
    assert log_bytes(cluster) - before < 10_000
    assert health_s(cluster) < 1


def test_stalled_large_bodies_keep_neither_small_nor_large_ones_out(cluster: LocalCluster) -> None:
    size = 16 << 20
    with many(cluster, head(size) + b'{"prompt": "' + b"x" * (size - 1000), count=4):  # all the room there is
        for _ in range(5):
            answer = httpx.post(f"{cluster.base_url}/v1/completions", json={"prompt": "y" * 300, "max_tokens": 2})
            assert answer.status_code == 200
        time.sleep(2)
        large = httpx.post(f"{cluster.base_url}/v1/completions", json={"prompt": "y" * (8 << 20)}, timeout=30)
        assert large.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("request_", [head(17 << 20), head(10**19)], ids=["too large", "far too large"])
def test_a_body_that_is_too_large_is_refused_before_it_is_sent(cluster: LocalCluster, request_: bytes) -> None:
    with dial(cluster) as client:
        client.sendall(request_)
        assert read_all(client).startswith(b"HTTP/1.1 413 ")


def test_an_endless_body_is_refused_at_its_limit_and_the_answer_arrives(cluster: LocalCluster) -> None:
    with dial(cluster) as client:
        client.sendall(head(0).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked"))
        sent = 0
        chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
        while not select.select([client], [], [], 0)[0]:
            client.sendall(chunk)
            sent += 65536
        assert read_all(client).startswith(b"HTTP/1.1 413 ")
    assert sent < 32 << 20


@pytest.mark.parametrize("length", [32 << 10, 1 << 20])
def test_headers_that_are_too_large_are_refused(cluster: LocalCluster, length: int) -> None:
    with dial(cluster) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Padding: " + b"x" * length + b"\r\n\r\n")
        assert read_all(client).startswith(b"HTTP/1.1 431 ")


def test_a_request_whose_end_is_ambiguous_is_refused(cluster: LocalCluster) -> None:
    for also in (b"Transfer-Encoding: chunked\r\n", b"Content-Length: 7\r\n"):
        with dial(cluster) as client:
            client.sendall(head(6).replace(b"Content-Type", also + b"Content-Type") + b"0\r\n\r\n" + ASK)
            answer = read_all(client)
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert answer.count(b"HTTP/1.1 4") == 1
        assert b"HTTP/1.1 2" not in answer


# -- clients that close their own direction ------------------------------------------------------------------------


def test_a_client_that_half_closes_gets_its_answer(tiny: LoadedModel, cluster: LocalCluster) -> None:
    expected = generate(tiny, prompt_of(9), Sampling(max_tokens=8, ignore_eos=True))
    for stream in (False, True):
        with dial(cluster) as client:
            client.sendall(completion(prompt=prompt_of(9), max_tokens=8, stream=stream))
            client.shutdown(socket.SHUT_WR)
            start, _, rest = read_all(client).partition(b"\r\n\r\n")
        assert start.startswith(b"HTTP/1.1 200 ")
        if stream:
            assert b"data: [DONE]" in rest
        else:
            assert json.loads(rest)["pdd"]["token_ids"] == expected


def test_a_client_that_half_closes_gets_an_answer_that_takes_long(tiny: LoadedModel, cluster: LocalCluster) -> None:
    """It is asked whether it is still there with interim answers, which HTTP/1.0 does not have."""
    expected = generate(tiny, prompt_of(9), Sampling(max_tokens=200, ignore_eos=True))
    for version in (b"1.1", b"1.0"):
        with dial(cluster) as client:
            client.sendall(completion(prompt=prompt_of(9), max_tokens=200).replace(b"HTTP/1.1", b"HTTP/" + version, 1))
            client.shutdown(socket.SHUT_WR)
            answer = read_all(client)
        *interim, start, body = answer.split(b"\r\n\r\n")
        assert set(interim) <= ({b"HTTP/1.1 100 Continue"} if version == b"1.1" else set())
        assert start.startswith(b"HTTP/1.1 200 ")
        assert json.loads(body)["pdd"]["token_ids"] == expected


def test_a_client_that_half_closes_gets_the_answers_to_all_that_it_asked(cluster: LocalCluster) -> None:
    with dial(cluster) as client:
        client.sendall(ASK * 20 + completion() + ASK)
        client.shutdown(socket.SHUT_WR)
        assert read_all(client).count(b"HTTP/1.1 200 ") == 22


@pytest.mark.parametrize("data", [completion(max_tokens=4000), completion(max_tokens=4000) + ASK], ids=["one", "two"])
def test_a_client_that_closes_is_noticed_and_its_work_ends(cluster: LocalCluster, data: bytes) -> None:
    with dial(cluster) as client:
        client.sendall(data)
        time.sleep(0.3)
        metrics = httpx.get(f"{cluster.base_url}/metrics").text
        assert "pddbed_num_requests_running 1" in metrics
    end = time.monotonic() + 3
    while "pddbed_num_requests_running 0" not in httpx.get(f"{cluster.base_url}/metrics").text:
        assert time.monotonic() < end
        time.sleep(0.02)


# -- answers that are not read -------------------------------------------------------------------------------------


def test_answers_that_are_not_read_hold_further_requests_back(cluster: LocalCluster) -> None:
    """A million pipelined requests of a client that reads nothing, then everything."""
    with dial(cluster) as client:
        client.setblocking(False)
        sent = 0
        data = ASK.replace(b"health", b"metrics") * 1_000_000
        end = time.monotonic() + 2
        while time.monotonic() < end:
            try:
                sent += client.send(data[sent:])
            except BlockingIOError:
                time.sleep(0.01)
        assert sent < len(data), "it is not taken"
        assert health_s(cluster) < 1
        client.setblocking(True)
        client.settimeout(20)
        answered = 0
        while answered < 50:
            answered += client.recv(1 << 16).count(b"HTTP/1.1 200 ")
    assert health_s(cluster) < 1
