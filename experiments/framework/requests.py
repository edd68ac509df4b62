"""Requests to a lab's gateway, and the lab's own records of them: its requests.jsonl, read from where it ended before.

A streamed answer ends with the record so far; KV that still crosses the WAN then, and what the workers do afterwards,
is only in the line that is written when every worker has let the request go.
"""

import json
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import httpx

from experiments.framework.base import ExperimentError
from testbed.lab.record import Record
from workers.wire.link_table import LinkTable

PATIENCE_S = 60.0  # without a new line; what links take comes on top
EVERY_S = 0.05
SETTLED_S = 120.0  # without a new line, until every worker has let all requests go


class LabRecords:
    """`file`: a lab's requests.jsonl, which need not exist yet."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._read = file.stat().st_size if file.exists() else 0
        self._found: dict[str, dict[str, Any]] = {}
        self.damaged = 0
        """Lines that are no record, such as one that a full disk cut."""

    def gather(
        self, requests: Collection[str], waiting: Callable[[int], None], patience_s: float = PATIENCE_S
    ) -> dict[str, dict[str, Any]]:
        """Records by request id, of as many of `requests` as are written in time. `waiting` is told how many lack."""
        wanted = set(requests)
        deadline = time.monotonic() + patience_s
        while True:
            if self._read_on():
                deadline = time.monotonic() + patience_s
            missing = wanted - self._found.keys()
            if not missing or self._is_over(deadline):
                return {name: self._found[name] for name in wanted - missing}
            waiting(len(missing))
            time.sleep(EVERY_S)

    def take(self, requests: Collection[str]) -> dict[str, dict[str, Any]]:
        """Records by request id, of all of `requests`; kept no longer. Raises ExperimentError if one is missing."""
        deadline = time.monotonic() + SETTLED_S
        while missing := [name for name in requests if name not in self._found]:
            if self._read_on():
                deadline = time.monotonic() + SETTLED_S
            elif self._is_over(deadline):
                words = f"{len(missing)} requests, the first {missing[0]}"
                raise ExperimentError(f"{words}, left no record within {SETTLED_S:.0f} s")
            else:
                time.sleep(0.01)
        return {name: self._found.pop(name) for name in requests}

    def _is_over(self, deadline: float) -> bool:
        return time.monotonic() > deadline and time.monotonic() > deadline + self._link_s()

    def _link_s(self) -> float:
        """Time that bytes on their way may take over the longest of the lab's links, beyond what anybody computes."""
        try:
            table = LinkTable(str(Record(self._file.parent.parent).links_file))
        except (OSError, ValueError):  # no lab, or it is gone
            return 0.0
        waits = [table.link(row).longest() for row in range(table.rows)]
        return max((link.rtt_ns + link.queue_ns for link in waits), default=0) / 1e9

    def _read_on(self) -> int:
        """Number of new lines."""
        try:
            with self._file.open("rb") as stream:
                if stream.seek(0, 2) < self._read:  # removed, and made again
                    self._read = 0
                stream.seek(self._read)
                *lines, _ = stream.read().split(b"\n")
        except FileNotFoundError:  # nobody was let go yet, or the lab went away
            return 0
        for line in lines:
            self._read += len(line) + 1
            try:
                record = json.loads(line)
                self._found[record["request_id"]] = record
            except (ValueError, LookupError, TypeError):
                self.damaged += 1
        return len(lines)


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
        """Answers in order, by `at_once` clients that send a prompt when they have their answer (`complete`)."""

        def one(prompt: list[int]) -> str:
            return self._post(prompt, max_tokens, ignore_eos)

        with ThreadPoolExecutor(at_once) as clients:
            running = [clients.submit(one, prompt) for prompt in prompts]
            for done, _ in enumerate(as_completed(running), 1):
                on_done(done)
            names = [future.result() for future in running]
        found = self._records.take(names)
        return [found[name] for name in names]
