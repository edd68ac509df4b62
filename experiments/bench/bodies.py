"""The requests' JSON, made before the clock starts: a prompt of 100,000 tokens takes long enough to make others late.

Kept as text by block, so that a trace whose prompts share much takes little memory. The tokens are those of
`traces.prompts`: equal block ids are equal tokens.
"""

import json
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

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
        """Of a request of the trace."""
        parts = [self._blocks[block] for block in self._full(request)]
        if id(request) in self._tails:
            parts.append(self._tails[id(request)])
        return self._wrapped(",".join(parts), request.output_tokens)

    def warm_up(self, number: int, tokens: int = WARM_UP_TOKENS, output_tokens: int = 4) -> bytes:
        """Of a short request that is no part of the load and shares nothing with it."""
        source = random.Random(f"warm-up {number}")
        return self._wrapped(_text(source.choices(self._token_ids, k=tokens)), output_tokens)

    def _wrapped(self, prompt: str, output_tokens: int) -> bytes:
        return f'{{{self._fields}, "max_tokens": {output_tokens}, "prompt": [{prompt}]}}'.encode()
