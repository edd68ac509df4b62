"""An answer as it streams from a gateway: text with its maker, and the record at the end. No terminal here."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx

from testbed.cli import CommandError

CONNECT_S = 5.0
READ_S = 900.0  # as long as the gateway itself waits


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that arrived together. `record` comes with the last piece."""

    text: str
    instance: str
    tokens: int
    record: dict[str, Any] | None = None
    finish_reason: str | None = None


def stream_answer(base_url: str, path: str, body: dict[str, Any]) -> Iterator[Piece]:
    """Pieces of the answer to a POST of `body`. Raises CommandError in one sentence."""
    timeout = httpx.Timeout(READ_S, connect=CONNECT_S)
    try:
        with httpx.stream(
            "POST", base_url.rstrip("/") + path, json={**body, "stream": True}, timeout=timeout
        ) as answer:
            if answer.status_code != 200:
                answer.read()
                raise CommandError(_refusal(base_url, answer))
            yield from _pieces(answer.iter_lines())
    except httpx.InvalidURL as error:
        raise CommandError(f"{base_url!r} is not an address of an API: {error}") from None
    except httpx.ConnectError:
        raise CommandError(
            f"nothing answers at {base_url}; start a lab (sudo pddbed up FILE) or name its API with --api"
        ) from None
    except httpx.HTTPError as error:
        raise CommandError(
            f"the connection to {base_url} failed: {str(error) or type(error).__name__}; look at the lab with "
            "pddbed status"
        ) from None


def _pieces(lines: Iterator[str]) -> Iterator[Piece]:
    ended = False
    for line in lines:
        data = line.removeprefix("data:").strip()
        if not line.startswith("data:") or data == "[DONE]":
            ended = ended or data == "[DONE]"
            continue
        try:
            chunk = json.loads(data)
            if "error" in chunk:
                raise CommandError(f"the answer broke off: {chunk['error']['message']}")
            if not chunk["choices"]:
                continue
            choice, pdd = chunk["choices"][0], chunk.get("pdd", {})
            text = choice["delta"].get("content") or "" if "delta" in choice else choice["text"]
        except (json.JSONDecodeError, KeyError, TypeError, IndexError) as error:
            raise CommandError(f"the API sent an event that is none of OpenAI's ({error!r}); is it a pddbed?") from None
        yield Piece(
            text,
            pdd.get("instance", ""),
            len(pdd.get("token_ids", ())),
            pdd.get("record"),
            choice.get("finish_reason"),
        )
    if not ended:
        raise CommandError("the answer broke off: the gateway closed the connection; look at pddbed logs")


def _refusal(base_url: str, answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"]["message"])
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError):
        return f"{base_url} answered with status {answer.status_code} and no OpenAI error; is it a pddbed lab's API?"
