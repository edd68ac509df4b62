"""Requests to a lab's gateway, one after the other, and their records once every worker has let go of them."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import httpx

from experiments.framework.errors import ExperimentError
from experiments.framework.records import LabRecords


class Client:
    """Sends completions of token ids. `records` is the lab's requests.jsonl."""

    def __init__(self, api: str, model: str, records: Path) -> None:
        self._http = httpx.Client(base_url=api, timeout=300)
        self._model = model
        self._records = LabRecords(records)

    def close(self) -> None:
        self._http.close()

    def complete(self, prompt: list[int], max_tokens: int) -> dict[str, Any]:
        """Answer a prompt greedily; returns the request's record, its KV settled everywhere. Raises ExperimentError."""
        name = self._post(prompt, max_tokens, ignore_eos=False)
        return self._records.take([name])[name]

    def _post(self, prompt: list[int], max_tokens: int, ignore_eos: bool) -> str:
        """The request's id, once it is answered."""
        body: dict[str, Any] = {"model": self._model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        if ignore_eos:
            body["ignore_eos"] = True
        try:
            answer = self._http.post("/v1/completions", json=body)
        except httpx.HTTPError as error:
            raise ExperimentError(f"the gateway did not answer: {error}") from None
        if answer.status_code != 200:
            raise ExperimentError(f"the gateway answered {answer.status_code}: {answer.text[:300]}")
        name: str = answer.json()["pdd"]["record"]["request_id"]
        return name

    def complete_all(
        self,
        prompts: Sequence[list[int]],
        max_tokens: int,
        at_once: int,
        on_done: Callable[[int], None],
        *,
        ignore_eos: bool = False,
    ) -> list[dict[str, Any]]:
        """As `complete`, `at_once` clients that send their next prompt when they have their answer; in order."""

        def one(prompt: list[int]) -> str:
            return self._post(prompt, max_tokens, ignore_eos)

        with ThreadPoolExecutor(at_once) as clients:
            running = [clients.submit(one, prompt) for prompt in prompts]
            for done, _ in enumerate(as_completed(running), 1):
                on_done(done)
            names = [future.result() for future in running]
        found = self._records.take(names)
        return [found[name] for name in names]
