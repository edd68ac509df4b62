"""Bodies are JSON, and are read within bounds of size, time and all of them together."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import pytest
from starlette.requests import Request

from workers.gateway.bodies import SMALL_BYTES, Bodies
from workers.gateway.errors import ApiError
from workers.gateway.limits import ApiLimits
from workers.gateway.responses import ClientGone

JSON = ((b"content-type", b"application/json"),)


def request_of(
    parts: Sequence[bytes | None],
    go_on: asyncio.Event | None = None,
    headers: Sequence[tuple[bytes, bytes]] = JSON,
) -> Request:
    """A request whose body comes in these parts; None: the client leaves. `go_on`: it waits before its last part."""
    left = iter(enumerate(parts, start=1))

    async def receive() -> dict[str, Any]:
        number, part = next(left)
        if number == len(parts) and go_on is not None:
            await go_on.wait()
        if part is None:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": part, "more_body": number < len(parts)}

    return Request({"type": "http", "method": "POST", "headers": list(headers)}, receive)


def bodies_of(**limits: int) -> Bodies:
    return Bodies(ApiLimits(**limits))


def test_a_body_in_parts_is_put_together() -> None:
    async def test() -> None:
        assert await bodies_of().read(request_of([b"ab", b"", b"c"])) == b"abc"

    asyncio.run(test())


def test_a_body_that_does_not_come_is_given_up() -> None:
    async def test() -> None:
        with pytest.raises(ApiError, match="was not complete within 0 s") as error:
            await bodies_of(body_ns=20_000_000).read(request_of([b"ab", b"c"], asyncio.Event()))
        assert error.value.status == 408

    asyncio.run(test())


def test_a_body_that_is_announced_as_too_large_is_refused_before_it_comes() -> None:
    async def test() -> None:
        for length in (b"101", b"9" * 30):
            with pytest.raises(ApiError, match="exceeds 100 bytes") as error:
                await bodies_of(body_bytes=100).read(request_of([], headers=[*JSON, (b"content-length", length)]))
            assert error.value.status == 413

    asyncio.run(test())


@pytest.mark.parametrize(
    "kind", [b"text/plain", b"json", b";", b"application/x-www-form-urlencoded", b"multipart/form-data; a=b"]
)
def test_a_body_that_is_not_called_json_is_refused_with_the_header_to_send(kind: bytes) -> None:
    async def test() -> None:
        with pytest.raises(ApiError, match="send the header Content-Type: application/json") as error:
            await bodies_of().read(request_of([b"{}"], headers=[(b"content-type", kind)]))
        assert error.value.status == 415

    asyncio.run(test())


@pytest.mark.parametrize("kind", [b"application/json", b"Application/JSON; charset=utf-8", b"application/problem+json"])
def test_a_body_that_is_called_json_is_read(kind: bytes) -> None:
    assert asyncio.run(bodies_of().read(request_of([b"{}"], headers=[(b"content-type", kind)]))) == b"{}"


LARGE = 10 * SMALL_BYTES


def test_large_bodies_together_have_a_limit_and_give_it_back_and_small_ones_pass() -> None:
    async def test() -> None:
        bodies, go_on = bodies_of(bodies_bytes=LARGE), asyncio.Event()
        first = asyncio.create_task(bodies.read(request_of([b"x" * (LARGE - 1), b"x"], go_on)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match="too many large bodies") as error:
            await bodies.read(request_of([b"y" * (LARGE // 2)]))
        assert (error.value.status, error.value.retry_after_s) == (429, 1)
        assert await bodies.read(request_of([b"y" * 300])) == b"y" * 300
        go_on.set()
        assert len(await first) == LARGE
        assert len(await bodies.read(request_of([b"y" * LARGE]))) == LARGE

    asyncio.run(test())


def test_a_large_body_that_is_not_sent_on_makes_room_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        bodies = bodies_of(bodies_bytes=LARGE)
        stalled = asyncio.create_task(bodies.read(request_of([b"x" * (LARGE - 1), b"x"], asyncio.Event())))
        await asyncio.sleep(0.01)
        early = time.monotonic
        monkeypatch.setattr(time, "monotonic", lambda: early() + 5)
        assert len(await bodies.read(request_of([b"y" * (LARGE // 2)]))) == LARGE // 2
        with pytest.raises(ApiError, match="came too slowly while others needed the memory") as error:
            await stalled
        assert error.value.status == 408

    asyncio.run(test())


def test_a_client_that_leaves_gives_its_room_back() -> None:
    async def test() -> None:
        bodies = bodies_of(bodies_bytes=LARGE)
        with pytest.raises(ClientGone):
            await bodies.read(request_of([b"x" * (LARGE - 1), None]))
        assert len(await bodies.read(request_of([b"y" * LARGE]))) == LARGE

    asyncio.run(test())
