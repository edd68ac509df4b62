"""Client of one OpenAI-compatible server: the model that it serves, requests' bodies, and streamed answers.

Bodies are made before the clock starts: a prompt of 100,000 tokens takes long enough to make others late. They are kept
as text by block, so that a trace whose prompts share much takes little memory.
"""

import json
import random
import time
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import httpx

from experiments.bench.outcome import Outcome, named_error
from experiments.traces.prompts import PromptMaker
from experiments.traces.trace import Request, Trace

WARM_UP_TOKENS = 32


def _text(tokens: Sequence[int]) -> str:
    return ",".join(map(str, tokens))


class Bodies:
    """Bodies for /v1/completions of a trace's requests. `fields` stand in each of them."""

    def __init__(self, trace: Trace, token_ids: range, seed: int, fields: Mapping[str, Any]) -> None:
        maker = PromptMaker(trace, token_ids, seed=seed)
        self._block_tokens = trace.block_tokens
        self._fields = json.dumps(dict(fields))[1:-1]
        self._token_ids = token_ids
        self._blocks: dict[int, str] = {}
        self._tails: dict[int, str] = {}  # by identity: two requests may be equal, and their tails are not
        copies = Counter[tuple[int | None, ...]]()
        for request in trace.requests:
            full = self._full(request)
            for block in full:
                if block not in self._blocks:
                    self._blocks[block] = _text(maker.block(block))
            if len(full) * trace.block_tokens < request.input_tokens:
                moment = request.time_ns, request.session, request.turn
                prompt = maker.prompt(request, copies[moment])
                self._tails[id(request)] = _text(prompt[len(full) * trace.block_tokens :])
                copies[moment] += 1

    def _full(self, request: Request) -> Sequence[int]:
        return request.blocks[: request.input_tokens // self._block_tokens]

    def body(self, request: Request) -> bytes:
        """Body of a request of the trace."""
        parts = [self._blocks[block] for block in self._full(request)]
        if id(request) in self._tails:
            parts.append(self._tails[id(request)])
        return self._wrapped(",".join(parts), request.output_tokens)

    def warm_up(self, number: int, tokens: int = WARM_UP_TOKENS, output_tokens: int = 4) -> bytes:
        """Body of a short request that is no part of the load and shares nothing with it."""
        source = random.Random(f"warm-up {number}")
        return self._wrapped(_text(source.choices(self._token_ids, k=tokens)), output_tokens)

    def _wrapped(self, prompt: str, output_tokens: int) -> bytes:
        return f'{{{self._fields}, "max_tokens": {output_tokens}, "prompt": [{prompt}]}}'.encode()


CONNECT_S = 10.0
READ_S = 900.0  # between two chunks: as long as pddbed's gateway itself waits
MOST_LINE_BYTES = 64 << 20
DONE = b"[DONE]"
LOST = frozenset({"cannot connect", "connection lost"})  # failures after which the server may be gone


class ApiError(Exception):
    """The server cannot be used: what, and what to do next."""


@dataclass(frozen=True, slots=True)
class Served:
    """`context`: tokens of prompt and answer together, None where the server does not say."""

    model: str
    context: int | None


def base_of(url: str) -> str:
    """An API's address without the /v1 that `pddbed up` and other servers print behind it."""
    return url.rstrip("/").removesuffix("/v1")


class Api:
    """An async context manager. `key`: sent as a bearer token. `direct`: no proxy of the environment."""

    def __init__(self, url: str, key: str | None = None, direct: bool = False) -> None:
        self.url = base_of(url)
        try:
            if (port := httpx.URL(self.url).port) is not None and port > 65535:
                raise ValueError(f"there is no port {port}")
            self._http = httpx.AsyncClient(
                base_url=self.url,
                headers={"Authorization": f"Bearer {key}"} if key else {},
                timeout=httpx.Timeout(READ_S, connect=CONNECT_S, pool=None),
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
                trust_env=not direct,
            )
        except (httpx.InvalidURL, ValueError) as error:
            raise ApiError(f"{url!r} is not an address of an API: {error}") from None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def served(self, name: str | None) -> Served:
        """The model of that name, or the first one. Raises ApiError."""
        try:
            answer = await self._http.get("/v1/models", timeout=CONNECT_S)
        except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            raise ApiError(f"{self.url!r} is not an address of an API: {error}") from None
        except httpx.HTTPError as error:
            raise ApiError(
                f"nothing answers at {self.url} ({_words(error)}); is the lab up, the address right?"
            ) from None
        try:
            if answer.status_code != 200:
                raise ValueError
            models = {str(one["id"]): one.get("max_model_len") for one in answer.json()["data"]}
        except (ValueError, KeyError, TypeError, AttributeError):
            if name is not None and answer.status_code in (404, 405):
                return Served(name, None)  # a server that answers completions only
            raise ApiError(
                f"{self.url}/v1/models answered with status {answer.status_code} and no list of models; is it an "
                "OpenAI-compatible server?"
            ) from None
        if not models or (name is not None and name not in models):
            raise ApiError(f"{self.url} serves {', '.join(models) or 'no model'}" + (f", not {name}" if name else ""))
        found = name or next(iter(models))
        context = models[found]
        return Served(found, context if isinstance(context, int) else None)

    async def is_there(self) -> bool:
        """True if anything accepts a connection and speaks HTTP there."""
        try:
            await self._http.get("/v1/models", timeout=CONNECT_S)
        except httpx.HTTPError:
            return False
        return True

    async def answer(self, body: bytes, outcome: Outcome) -> None:
        """Send a request and note in `outcome` what comes back, failures included."""
        outcome.start_time, outcome.start_ns = time.time(), time.monotonic_ns()
        try:
            headers = {"Content-Type": "application/json"}
            async with self._http.stream("POST", "/v1/completions", content=body, headers=headers) as response:
                if response.status_code != 200:
                    outcome.fail(*_refusal(response.status_code, await response.aread()))
                else:
                    async with aclosing(_events(response)) as events:
                        async for data in events:
                            outcome.take(json.loads(data), time.monotonic_ns())
                            if outcome.reason:
                                break
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            outcome.fail("cannot connect", _words(error))
        except httpx.TimeoutException as error:
            outcome.fail("timed out", f"nothing came for {READ_S:.0f} s ({_words(error)})")
        except httpx.HTTPError as error:
            outcome.fail("connection lost", _words(error))
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            outcome.fail("not OpenAI's", f"an event that is none of OpenAI's ({error!r:.200})")
        outcome.finish(time.monotonic_ns())


async def _events(response: httpx.Response) -> AsyncGenerator[bytes, None]:
    """The data of each server-sent event, until [DONE]. Raises ValueError for an endless line."""
    rest = b""
    async for piece in response.aiter_bytes():
        *lines, rest = (rest + piece).split(b"\n")
        if len(rest) > MOST_LINE_BYTES:
            raise ValueError(f"an event longer than {MOST_LINE_BYTES >> 20} MiB")
        for line in lines:
            if data := _data(line):
                if data == DONE:
                    return
                yield data
    if (data := _data(rest)) and data != DONE:  # a last line that nothing ends
        yield data


def _data(line: bytes) -> bytes:
    """Data of a line of an event; nothing of comments, other fields and empty events, which keep a stream alive."""
    return line[5:].strip() if line.startswith(b"data:") else b""


def _refusal(status: int, body: bytes) -> tuple[str, str]:
    try:
        name, message = named_error(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {status}", body[:300].decode(errors="replace")
    return f"{status} {name}", message


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__


def asked(model: str, ignore_eos: bool) -> dict[str, Any]:
    """Fields of every request beside prompt and length. `ignore_eos` is not OpenAI's: said only where it is wanted."""
    fields: dict[str, Any] = {"model": model, "temperature": 0, "stream": True}
    fields["stream_options"] = {"include_usage": True}
    return {**fields, "ignore_eos": True} if ignore_eos else fields
