"""Bodies are read within bounds of size, time and all of them together."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from starlette.requests import Request

from workers.gateway.bodies import Bodies
from workers.gateway.disconnect import ClientGone
from workers.gateway.errors import ApiError


def request_of(parts: Sequence[bytes | None], go_on: asyncio.Event | None = None) -> Request:
    """A request whose body comes in these parts; None: the client leaves. `go_on`: it waits before its last part."""
    left = iter(enumerate(parts, start=1))

    async def receive() -> dict[str, Any]:
        number, part = next(left)
        if number == len(parts) and go_on is not None:
            await go_on.wait()
        if part is None:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": part, "more_body": number < len(parts)}

    return Request({"type": "http", "method": "POST", "headers": []}, receive)


def test_a_body_in_parts_is_put_together() -> None:
    async def test() -> None:
        assert await Bodies().read(request_of([b"ab", b"", b"c"])) == b"abc"

    asyncio.run(test())


def test_a_body_that_does_not_come_is_given_up() -> None:
    async def test() -> None:
        with pytest.raises(ApiError, match="was not complete within 0 s") as error:
            await Bodies(deadline_s=0.02).read(request_of([b"ab", b"c"], asyncio.Event()))
        assert error.value.status == 408

    asyncio.run(test())


def test_bodies_together_have_a_limit_and_give_it_back() -> None:
    async def test() -> None:
        bodies, go_on = Bodies(room_bytes=100), asyncio.Event()
        first = asyncio.create_task(bodies.read(request_of([b"x" * 80, b"x"], go_on)))
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match="too many large bodies") as error:
            await bodies.read(request_of([b"y" * 30]))
        assert (error.value.status, error.value.retry_after_s) == (429, 1)
        assert await bodies.read(request_of([b"y" * 15])) == b"y" * 15
        go_on.set()
        assert len(await first) == 81
        assert len(await bodies.read(request_of([b"y" * 100]))) == 100

    asyncio.run(test())


def test_a_client_that_leaves_gives_its_room_back() -> None:
    async def test() -> None:
        bodies = Bodies(room_bytes=100)
        with pytest.raises(ClientGone):
            await bodies.read(request_of([b"x" * 90, None]))
        assert len(await bodies.read(request_of([b"y" * 100]))) == 100

    asyncio.run(test())
