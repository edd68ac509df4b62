"""No request breaks the gateway: random and mutilated bodies, raw bytes on its socket, and bodies made to cost memory.

Everything goes to a real gateway in front of real workers; afterwards it still answers, and nothing is held.
"""

import asyncio
import importlib.util
import json
import random
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.conftest import ROOT
from tests.workers.fuzz.apart import run_apart
from tests.workers.fuzz.gateway_targets import MOST_ERROR_BYTES, SEEDS, bodies
from tests.workers.serving import Served
from workers.models import LoadedModel

HANG_S = 20.0  # an answer takes milliseconds
RIGHT = {200, 400, 404, 408, 413}


class Sender(Served):
    """A cluster that is sent anything, and answers in time."""

    release_within_s = 10.0

    def send(self, path: str, body: bytes) -> httpx.Response:
        return self.run(asyncio.wait_for(self.wan.http.post(path, content=body), HANG_S))

    def raw(self, data: bytes) -> bytes:
        """Whatever a gateway answers to raw bytes, or does not, until one end closes."""

        async def exchange() -> bytes:
            url = self.wan.http.base_url
            reader, writer = await asyncio.open_connection(url.host, url.port)
            try:
                writer.write(data)
                writer.write_eof()
                async with asyncio.timeout(HANG_S):
                    return await reader.read(1 << 20)
            except ConnectionError:
                return b""
            finally:
                writer.close()

        return self.run(exchange())

    def alive(self) -> None:
        response = self.run(self.wan.http.get("/health"))
        assert response.status_code == 200, response.text
        answer = self.run(self.wan.complete("x", 2, ignore_eos=True))
        assert answer["usage"]["completion_tokens"] == 2


@pytest.fixture(scope="module")
def served(tiny: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sender]:
    with Sender(tiny, tmp_path_factory.mktemp("fuzz")) as served:
        yield served
        served.alive()
        admission = served.wan.cluster.gateway.admission
        assert admission.running == admission.waiting == 0


def check(response: httpx.Response) -> None:
    """An answer, or an error of the right kind and shape: short, and about the request."""
    assert response.status_code in RIGHT, response.text[:500]
    if response.status_code != 200:
        assert len(response.content) <= MOST_ERROR_BYTES
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["type"] == "invalid_request_error"
        assert error["message"]


numbers = st.sampled_from(
    [
        "NaN",
        "Infinity",
        "-Infinity",
        "1e308",
        "-1e308",
        "1e999",
        "9" * 400,
        "-1",
        "0",
        "0.5",
        "2.0",
        "1e-320",
        "00",
        "+1",
    ]
)
strings = st.sampled_from(['"\\ud800"', '"\\udfff\\ud800"', '"\\u0000"', '"' + "é" * 300 + '"', '""', '"\x7f"', '"x"'])
texts = st.text(max_size=8).map(json.dumps)
scalars = st.one_of(numbers, strings, texts, st.sampled_from(["true", "false", "null"]))


def nested(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    lists = st.lists(inner, max_size=4).map(lambda items: "[" + ",".join(items) + "]")
    objects = st.lists(st.tuples(texts, inner), max_size=3).map(
        lambda items: "{" + ",".join(f"{key}:{value}" for key, value in items) + "}"
    )
    deep = st.tuples(inner, st.integers(1, 2000)).map(lambda deep: "[" * deep[1] + deep[0] + "]" * deep[1])
    return st.one_of(lists, objects, deep)


values = st.recursive(scalars, nested, max_leaves=5)
FIELDS = [
    "model",
    "prompt",
    "max_tokens",
    "max_completion_tokens",
    "temperature",
    "top_p",
    "n",
    "seed",
    "stop",
    "stop_token_ids",
    "stream",
    "stream_options",
    "logprobs",
    "top_logprobs",
    "echo",
    "best_of",
    "ignore_eos",
    "messages",
    "logit_bias",
    "response_format",
    "tools",
    "user",
    "extra_body",
]
VALID = {
    "/v1/completions": {"prompt": '"x"', "max_tokens": "2"},
    "/v1/chat/completions": {"messages": '[{"role":"user","content":"x"}]', "max_tokens": "2"},
}


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(st.sampled_from(sorted(VALID)), st.lists(st.tuples(st.sampled_from(FIELDS), values), min_size=1, max_size=3))
def test_no_value_of_any_field_breaks_the_gateway(served: Sender, path: str, changes: list[tuple[str, str]]) -> None:
    fields = VALID[path] | dict(changes)
    if fields.get("n", "1").isdigit():
        fields["n"] = str(min(int(fields.get("n", "1")), 3))
    body = "{" + ",".join(f'"{name}":{value}' for name, value in fields.items()) + "}"
    check(served.send(path, body.encode("utf-8", "surrogatepass")))


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(st.sampled_from(SEEDS), st.integers(0, 1 << 30))
def test_mutilated_bodies_are_refused_or_still_valid(seed: bytes, chance: int) -> None:
    random_ = random.Random(chance)
    data = bytearray(seed)
    for _ in range(random_.randint(1, 6)):
        at = random_.randrange(len(data) + 1)
        action = random_.randrange(4)
        if action == 0:
            data[at : at + random_.randint(1, 8)] = b""
        elif action == 1:
            data[at:at] = random_.randbytes(random_.randint(1, 4))
        elif action == 2:
            data[at:at] = random_.choice([b'"', b"{", b"]", b",", b"-", b"1e9", b"\\u", b"null", b"\xff", b"\x00"])
        else:
            other = random_.choice(SEEDS)
            data[at:at] = other[: random_.randrange(len(other))]
        data = data or bytearray(b"{")
    bodies(bytes(data))


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
RAW = {
    "not-http": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
    "nothing": b"",
    "only-newlines": b"\r\n" * 500,
    "endless-line": b"GET /" + b"a" * 200_000,
    "endless-headers": b"GET /health HTTP/1.1\r\n" + b"X-Y: " + b"z" * 200_000,
    "many-headers": b"GET /health HTTP/1.1\r\n" + b"".join(b"X-%d: y\r\n" % n for n in range(20_000)) + b"\r\n",
    "negative-length": HEAD + b"Content-Length: -5\r\n\r\n",
    "huge-length": HEAD + b"Content-Length: 99999999999999999999\r\n\r\n{}",
    "two-lengths": HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    "bad-chunk": HEAD + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n{}",
    "bad-escape": b"GET /v1/models/%ff%00%zz HTTP/1.1\r\nHost: x\r\n\r\n",
    "bad-target": b"GET http://[::1 HTTP/1.1\r\nHost: x\r\n\r\n",
    "old-http": b"POST /v1/completions HTTP/0.9\r\n\r\n",
    "wrong-method": b"BREW /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}",
    "upgrade": b"GET /v1/completions HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\n",
    "expect": HEAD + b'Expect: 100-continue\r\nContent-Length: 13\r\n\r\n{"prompt":""}',
    "pipelined": (HEAD + b"Content-Length: 2\r\n\r\n{}") * 50,
}


@pytest.mark.parametrize("data", RAW.values(), ids=RAW)
def test_no_bytes_on_its_socket_break_the_gateway(served: Sender, data: bytes) -> None:
    answer = served.raw(data)
    statuses = {line.split(b" ")[1] for line in answer.splitlines() if line.startswith(b"HTTP/1.1 ")}
    assert not {status for status in statuses if status.startswith(b"5")}, answer[:500]
    served.alive()


MEASURED = """
    import sys, time
    from workers.gateway.errors import ApiError
    from workers.gateway.bodies import parse_body
    from workers.gateway.chat_requests import ChatRequest
    from workers.gateway.requests import CompletionRequest
    body = eval(sys.argv[2])
    def peak_kb():
        return int(open("/proc/self/status").read().partition("VmHWM:")[2].split()[0])
    before = peak_kb()
    start = time.process_time()
    try:
        request = parse_body({"chat": ChatRequest, "completion": CompletionRequest}[sys.argv[1]], body)
        request.prompts(4096) if sys.argv[1] == "completion" else request.plain_messages
        print("taken")
    except ApiError as error:
        print("refused", len(str(error)))
    print(time.process_time() - start, (peak_kb() - before) / 1024)
"""
COSTLY = {
    "prompts-of-nothing": ("completion", "b'{\"prompt\":[' + b'[],' * 1_000_000 + b'[]]}'"),
    "empty-messages": ("chat", "b'{\"messages\":[' + b'{},' * 1_000_000 + b'{}]}'"),
    "stops-of-nothing": ("completion", 'b\'{"prompt":"x","stop":[\' + b\'"",\' * 1_000_000 + b\'""]}\''),
    "one-long-word": ("completion", 'b\'{"prompt":"x","model":5,"seed":"\' + b\'x\' * 3_000_000 + b\'"}\''),
    "many-fields": ("completion", "b'{\"prompt\":\"x\"' + b''.join(b',\"a%d\":1' % n for n in range(200_000)) + b'}'"),
    "deep": ("completion", "b'{\"prompt\":' + b'[' * 3_000_000"),
}


@pytest.mark.parametrize(("kind", "body"), COSTLY.values(), ids=COSTLY)
def test_megabytes_made_to_be_costly_are_refused_at_bounded_cost(kind: str, body: str) -> None:
    """Collecting an error for each wrong item took gigabytes and minutes."""
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(MEASURED), kind, body],
        capture_output=True,
        text=True,
        timeout=120,
        env={"PYTHONPATH": str(ROOT)},
    )
    assert run.returncode == 0, run.stderr[-2000:]
    verdict, figures = run.stdout.splitlines()
    assert verdict.split()[0] == "refused"
    assert int(verdict.split()[1]) < 1000
    seconds, megabytes = map(float, figures.split())
    assert megabytes < 250
    assert seconds < 10


@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="atheris has no wheel for this machine")
def test_a_coverage_guided_run_finds_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.workers.fuzz.guided_gateway", "-runs=20000", "-max_total_time=4"]
    run = run_apart(command, tmp_path, {"PYTHONPATH": str(ROOT)}, 120)
    found = [path.read_bytes()[:300] for path in tmp_path.iterdir()]
    assert run.returncode == 0, f"{found}\n{run.stderr[-3000:]}"
    assert "Done " in run.stderr
    assert int(run.stderr.rpartition("cov: ")[2].split()[0]) > 20, "the fuzzer sees no branches: it guides nothing"


def test_a_long_text_is_refused_without_being_tokenised(served: Sender) -> None:
    body: dict[str, Any] = {"prompt": "x" * (10 << 20)}
    response = served.send("/v1/completions", json.dumps(body).encode())
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert "at least 40960 tokens" in response.json()["error"]["message"]
