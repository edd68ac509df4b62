"""One request on one worker while it lasts, and how it ends early. Data and small verbs: no wire, no pool."""

import asyncio
import time
from collections import OrderedDict
from typing import Any

from workers.engine import Generated, Job, Sampling, Sequence
from workers.wire.messages import RequestSpec, SamplingSpec, Span, TokenLogprob

REMEMBERED = 8192  # ended requests a worker can still tell from unknown ones


class RequestFailed(Exception):
    """A request cannot go on here; `name` is the error that clients and records see."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


class Bounded(OrderedDict[str, Any]):
    """A dictionary that forgets its oldest entries."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        while len(self) > REMEMBERED:
            self.popitem(last=False)


class Active:
    """One request on one worker, while it lasts."""

    def __init__(self, spec: RequestSpec, sequence: Sequence) -> None:
        self.spec = spec
        self.sequence = sequence
        self.spans: list[Span] = []
        self.failure: RequestFailed | None = None
        self.task: asyncio.Task[None] | None = None
        self.job: Job | None = None
        """What decodes here now."""
        self.first_logprob: TokenLogprob | None = None
        """Of the first token, when the request asks for log probabilities; prefill sampled it."""
        self.finished = False
        """The gateway wants no more tokens; the request goes on for the caches' sake."""
        self._decode: tuple[str, int, int] | None = None

    @property
    def decoding(self) -> bool:
        """Its tokens are being made here."""
        return self.job is not None

    @property
    def answer(self) -> list[int]:
        """Token ids generated so far."""
        return self.sequence.tokens[self.sequence.prompt_len :]

    def span(self, name: str, start_ns: int, end_ns: int, **details: Any) -> None:
        """Note a stretch of this request's life; the next report carries it."""
        self.spans.append(Span(name=name, start_ns=start_ns, end_ns=end_ns, **details))

    def note_copies(self, ns: int, tokens: int) -> None:
        """KV went from host to device memory, a piece at a time; `ns` is what the pieces took by the device's clock."""
        now_ns = time.monotonic_ns()
        self.span("host-copy", now_ns - ns, now_ns, tokens=tokens)

    def begin_decode(self, name: str, inherited: int = 0) -> None:
        """From now on tokens are this worker's, after `inherited` ones; `end_decode` notes the span."""
        self._decode = (name, time.monotonic_ns(), inherited)

    def end_decode(self) -> None:
        """Idempotent: by the last token, by a stop, or by neither."""
        if self._decode is not None:
            name, start_ns, inherited = self._decode
            self._decode = None
            sequence = self.sequence
            self.span(
                name,
                start_ns,
                time.monotonic_ns(),
                tokens=max(0, len(self.answer) - inherited),  # where both decode, the relay's may end the answer before
                drafted=sequence.drafted,
                accepted=sequence.accepted,
                preempted=sequence.preempted,
            )

    def end(self, failure: RequestFailed | None = None) -> None:
        """Stop now: cancelled, or failed with a name."""
        self.failure = self.failure or failure
        if self.task is not None:
            self.task.cancel()


def engine_sampling(spec: SamplingSpec) -> Sampling:
    """The engine's form of a request's sampling."""
    return Sampling(
        max_tokens=spec.max_tokens,
        temperature=spec.temperature,
        top_p=spec.top_p,
        seed=spec.seed,
        ignore_eos=spec.ignore_eos,
        stop_token_ids=tuple(spec.stop_token_ids),
        top_k=spec.top_k,
        min_p=spec.min_p,
        barred=tuple(spec.barred),
        barred_until=spec.barred_until,
        logprobs=spec.logprobs,
        repetition_penalty=spec.repetition_penalty,
        presence_penalty=spec.presence_penalty,
        frequency_penalty=spec.frequency_penalty,
        logit_bias=tuple(spec.logit_bias.items()),
        answer_from=spec.answer_from,
    )


def logprobs_of(active: Active, token: Generated) -> list[TokenLogprob]:
    """Of a token just sampled, as `emit` takes them; empty when the request does not ask for log probabilities."""
    if active.spec.sampling.logprobs is None or token.logprob is None:
        return []
    return [TokenLogprob(token.logprob, list(token.top_logprobs or ()))]
