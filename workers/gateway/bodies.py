"""Reading request bodies: each of bounded size and time, and all of them together of bounded memory."""

import asyncio

from fastapi import Request
from starlette.requests import ClientDisconnect

from workers.gateway.disconnect import ClientGone
from workers.gateway.errors import ApiError
from workers.gateway.parsing import MAX_BODY_BYTES

MAX_BODIES_BYTES = 256 << 20  # being read at the same time
BODY_S = 60.0  # from the headers to the last byte


class Bodies:
    """The bodies that are being read now."""

    def __init__(self, room_bytes: int = MAX_BODIES_BYTES, deadline_s: float = BODY_S) -> None:
        self._room = room_bytes
        self._deadline_s = deadline_s

    async def read(self, request: Request) -> bytes:
        """The whole body. Raises ApiError (408, 413, 429) or ClientGone."""
        body = bytearray()
        try:
            async with asyncio.timeout(self._deadline_s):
                async for part in request.stream():
                    body += part
                    self._room -= len(part)
                    if len(body) > MAX_BODY_BYTES:
                        raise ApiError(413, f"the body exceeds {MAX_BODY_BYTES} bytes; send a shorter prompt")
                    if self._room < 0:
                        raise ApiError(
                            429,
                            "too many large bodies are being sent at once; try again later",
                            kind="rate_limit_error",
                            code="overloaded",
                            retry_after_s=1,
                        )
        except ClientDisconnect:
            raise ClientGone from None
        except TimeoutError:
            raise ApiError(408, f"the body was not complete within {self._deadline_s:.0f} s; send it again") from None
        finally:
            self._room += len(body)
        return bytes(body)
