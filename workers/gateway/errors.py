"""Errors as OpenAI's clients expect them, the status of each named error of a worker, and JSON responses."""

from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import Response

from workers.gateway.admission import Draining, Overloaded

BAD_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"

# A request that a worker refused or lost. What is not here is this project's own fault: 500.
STATUS_OF_FAILURE = {
    "bad_request": 400,
    "no_worker": 503,
    "draining": 503,
    "out_of_kv_blocks": 503,
    "peer_unreachable": 503,
    "worker_lost": 502,
    "prefill_lost": 502,
    "relay_lost": 502,
    "connection_lost": 502,
    "kv_corrupt": 502,
    "transfer_aborted": 502,
    "deadline_exceeded": 504,
    "handover_deadline": 504,
    "request_deadline": 504,
}


class ApiError(Exception):
    """An answer with an error in it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = BAD_REQUEST,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.retry_after_s is None else {"Retry-After": str(self.retry_after_s)}

    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}


def from_failure(name: str, message: str) -> ApiError:
    """The API error of a request that failed on its way through the workers."""
    status = STATUS_OF_FAILURE.get(name, 500)
    kind = BAD_REQUEST if status == 400 else SERVER_ERROR
    return ApiError(status, message, kind=kind, code=name)


def refused(error: Overloaded) -> ApiError:
    """The API error of a request that there is no room for: 429, or 503 when there never will be."""
    if isinstance(error, Draining):
        return ApiError(503, str(error), kind=SERVER_ERROR, code=error.name, retry_after_s=error.retry_after_s)
    return ApiError(429, str(error), kind="rate_limit_error", code=error.name, retry_after_s=error.retry_after_s)


def broken(error: Exception) -> ApiError:
    """The API error of a fault of the gateway's own."""
    message = f"the gateway failed: {type(error).__name__}: {error}"
    return ApiError(500, message[:2000], kind=SERVER_ERROR, code="internal_error")


def json_response(status: int, body: object, headers: Mapping[str, str] | None = None) -> Response:
    """A body as JSON."""
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")
