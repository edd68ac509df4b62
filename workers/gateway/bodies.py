"""Reading request bodies: each of bounded size and time, and all of them together of bounded memory."""

import asyncio
import ctypes
import time
from typing import TypeVar

from fastapi import Request
from starlette.requests import ClientDisconnect

from workers.gateway.disconnect import ClientGone
from workers.gateway.errors import ApiError
from workers.gateway.limits import ApiLimits, S
from workers.gateway.parsing import parse_body
from workers.gateway.requests import GenerationRequest

M_MMAP_THRESHOLD = -3  # malloc.h

R = TypeVar("R", bound=GenerationRequest)

SMALL_BYTES = 64 << 10  # a body up to here needs no room of the common one: connections are limited, too
YOUNG_S = 2.0  # a body that has been sent for less is not given up in favour of another one


def give_memory_back() -> None:
    """Let large blocks be the kernel's again once they are freed. Of this process, and for good.

    Left alone, the C library learns from the first large body that such blocks are common, and keeps those that follow.
    """
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):  # not with every C library
        mallopt(M_MMAP_THRESHOLD, 1 << 20)


class _Body:
    """One body that is being read."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.began = time.monotonic()
        self.reading: asyncio.Task[bytearray] | None = None
        self.displaced = False

    @property
    def pace(self) -> float:
        """Bytes a second."""
        return len(self.data) / max(time.monotonic() - self.began, 1e-3)


class Bodies:
    """The bodies that are being read now."""

    def __init__(self, limits: ApiLimits) -> None:
        self._limits = limits
        self._one_at_a_time = asyncio.Lock()
        self._large: dict[_Body, None] = {}

    async def parsed(self, kind: type[R], request: Request) -> R:
        """The request in a body. Raises as `read` and `parse_body` do.

        A large one is parsed beside the loop, so that other answers go on, and one at a time: while it is looked at it
        may take some times its bytes.
        """
        body = await self.read(request)
        if len(body) <= SMALL_BYTES:
            return parse_body(kind, body)
        async with self._one_at_a_time:
            return await asyncio.to_thread(parse_body, kind, body)

    async def read(self, request: Request) -> bytearray:
        """The whole body. Raises ApiError (408, 413, 415, 429) or ClientGone."""
        _check_type(request)
        announced = request.headers.get("content-length", "")
        if announced.isascii() and announced.isdigit() and (len(announced) > 18 or int(announced) > self._most):
            raise self._too_large()
        body = _Body()
        body.reading = asyncio.create_task(self._read(request, body))
        try:
            async with asyncio.timeout(self._limits.body_ns / S):
                return await body.reading
        except ClientDisconnect:
            raise ClientGone from None
        except TimeoutError:
            limit_s = self._limits.body_ns / S
            raise ApiError(408, f"the body was not complete within {limit_s:.0f} s; send it again") from None
        except asyncio.CancelledError:
            if not body.displaced:
                raise
            raise ApiError(
                408, "the body came too slowly while others needed the memory; send it again", code="body_too_slow"
            ) from None
        finally:
            body.reading.cancel()
            self._large.pop(body, None)

    @property
    def _most(self) -> int:
        return self._limits.body_bytes

    async def _read(self, request: Request, body: _Body) -> bytearray:
        async for part in request.stream():
            if len(body.data) + len(part) > self._most:
                raise self._too_large()
            if len(body.data) + len(part) > SMALL_BYTES:
                self._take_room(body, len(part))
            body.data += part
        return body.data

    def _take_room(self, body: _Body, more: int) -> None:
        """Room for a part of a large body; the slowest one gives up its own. Raises ApiError (429)."""
        self._large[body] = None
        while sum(len(one.data) for one in self._large) + more > self._limits.bodies_bytes:
            now = time.monotonic()
            old = [one for one in self._large if now - one.began > YOUNG_S and not one.displaced and one is not body]
            if not old:
                raise ApiError(
                    429,
                    "too many large bodies are being sent at once; try again later",
                    kind="rate_limit_error",
                    code="overloaded",
                    retry_after_s=1,
                )
            slowest = min(old, key=lambda one: one.pace)
            slowest.displaced = True
            self._large.pop(slowest)
            slowest.data = bytearray()
            assert slowest.reading is not None
            slowest.reading.cancel()

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body exceeds {self._most} bytes; send a shorter prompt")


def _check_type(request: Request) -> None:
    """Nothing that is called anything but JSON: a page of any site may post text or a form to this machine.

    A page can leave the type out as well, but a browser then names the page (`origins.py`); a program need not send it.
    """
    given = request.headers.get("content-type", "")
    kind = given.split(";", 1)[0].strip().lower()
    if given and kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise ApiError(
            415,
            f"Content-Type is {given[:100]!r}; send the header Content-Type: application/json",
            code="unsupported_media_type",
        )
