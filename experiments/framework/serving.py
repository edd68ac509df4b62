"""Requests to a lab's gateway, one after the other, and their records once every worker has let go of them."""

import json
import time
from pathlib import Path
from typing import Any

import httpx

from experiments.framework.errors import ExperimentError

SETTLED_S = 120.0


class Client:
    """Sends completions of token ids. `records` is the lab's requests.jsonl."""

    def __init__(self, api: str, model: str, records: Path) -> None:
        self._http = httpx.Client(base_url=api, timeout=300)
        self._model = model
        self._records = records
        self._read = 0
        self._found: dict[str, dict[str, Any]] = {}

    def close(self) -> None:
        self._http.close()

    def complete(self, prompt: list[int], max_tokens: int) -> dict[str, Any]:
        """Answer a prompt greedily; returns the request's record, its KV settled everywhere. Raises ExperimentError."""
        body = {"model": self._model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        try:
            answer = self._http.post("/v1/completions", json=body)
        except httpx.HTTPError as error:
            raise ExperimentError(f"the gateway did not answer: {error}") from None
        if answer.status_code != 200:
            raise ExperimentError(f"the gateway answered {answer.status_code}: {answer.text[:300]}")
        return self._settled(answer.json()["pdd"]["record"]["request_id"])

    def _settled(self, request: str) -> dict[str, Any]:
        deadline = time.monotonic() + SETTLED_S
        while request not in self._found:
            self._read_on()
            if request in self._found:
                break
            if time.monotonic() > deadline:
                raise ExperimentError(f"request {request} left no record within {SETTLED_S:.0f} s")
            time.sleep(0.01)
        return self._found.pop(request)

    def _read_on(self) -> None:
        if not self._records.exists():
            return
        with self._records.open("rb") as stream:
            stream.seek(self._read)
            *lines, _ = stream.read().split(b"\n")
        for line in lines:
            self._read += len(line) + 1
            record = json.loads(line)
            self._found[record["request_id"]] = record
