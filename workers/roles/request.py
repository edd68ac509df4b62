"""A request on one worker while it lasts, how it ends early, and the stream of its answer to the gateway."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from workers.engine import (
    EngineFailed,
    EngineRunner,
    Generated,
    Job,
    OutOfBlocks,
    Sampling,
    Sequence,
    SequenceFailed,
    Stopped,
)
from workers.wire.frames import WireError
from workers.wire.messages import Report, RequestSpec, SamplingSpec, Span, TokenLogprob, Tokens
from workers.wire.peers import Peers

REMEMBERED = 8192  # ended requests a worker can still tell from unknown ones


class RequestFailed(Exception):
    """A request cannot go on here; `name` is the error that clients and records see."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


def failure_of(error: Exception, host: str) -> RequestFailed:
    """The failure of a request on `host` that an error makes."""
    if isinstance(error, RequestFailed | WireError):
        return RequestFailed(error.name, str(error))
    if isinstance(error, OutOfBlocks):
        return RequestFailed("out_of_kv_blocks", f"{host}: {error}")
    if isinstance(error, SequenceFailed):
        return RequestFailed("computation_failed", f"{host}: {error}")
    if isinstance(error, EngineFailed | Stopped):
        return RequestFailed("engine_failed", f"{host}: {error}")
    return RequestFailed("internal_error", f"{host}: {type(error).__name__}: {error}")


class Bounded(OrderedDict[str, Any]):
    """A dictionary that forgets its oldest entries."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        while len(self) > REMEMBERED:
            self.popitem(last=False)


class ActiveRequest:
    """A request on one worker, while it lasts."""

    def __init__(self, spec: RequestSpec, sequence: Sequence) -> None:
        self.spec = spec
        self.sequence = sequence
        self.spans: list[Span] = []
        self.failure: RequestFailed | None = None
        self.task: asyncio.Task[None] | None = None
        self.job: Job | None = None
        """The computation that decodes it here now."""
        self.first_logprob: TokenLogprob | None = None
        """Log probability of the first token, which prefill sampled, when the request asks for some."""
        self.finished = False
        """The gateway wants no more tokens; the request goes on for the caches' sake."""
        self._decode: tuple[str, int, int] | None = None

    @property
    def decoding(self) -> bool:
        """Whether its tokens are being made here."""
        return self.job is not None

    @property
    def answer(self) -> list[int]:
        """Token ids generated so far."""
        return self.sequence.tokens[self.sequence.prompt_len :]

    def span(self, name: str, start_ns: int, end_ns: int, **details: Any) -> None:
        """Note a stretch of this request's life; the next report carries it."""
        self.spans.append(Span(name=name, start_ns=start_ns, end_ns=end_ns, **details))

    def note_copies(self, ns: int, tokens: int) -> None:
        """Note that KV went to device memory, a piece at a time; `ns` is what the pieces took by the device's clock."""
        now_ns = time.monotonic_ns()
        self.span("host-copy", now_ns - ns, now_ns, tokens=tokens)

    def begin_decode(self, name: str, inherited: int = 0) -> None:
        """Begin the span of tokens that this worker makes, after `inherited` ones; `end_decode` notes it."""
        self._decode = (name, time.monotonic_ns(), inherited)

    def end_decode(self) -> None:
        """Note the span of tokens made here: after the last one, or after a stop. Idempotent."""
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


def logprobs_of(active: ActiveRequest, token: Generated) -> list[TokenLogprob]:
    """Log probabilities of a token just sampled, as `emit` takes them; empty when the request does not ask for any."""
    if active.spec.sampling.logprobs is None or token.logprob is None:
        return []
    return [TokenLogprob(token.logprob, list(token.top_logprobs or ()))]


class AnswerStream:
    """Tokens, spans and failures of a worker's requests, streamed to the gateways that asked for them."""

    def __init__(self, peers: Peers, runner: EngineRunner) -> None:
        self._peers = peers
        self._runner = runner
        self.on_emit: Callable[[ActiveRequest, int], None] = lambda _request, _count: None
        """Told of the number of tokens that a request's gateway has been sent."""

    def report(self, active: ActiveRequest, *, done: bool = False) -> None:
        """Tell the gateway what has been noted since the last report."""
        spans, active.spans = active.spans, []
        self._peers.post_if_up(active.spec.gateway, Report(request=active.spec.id, spans=spans, done=done))

    def emit(
        self,
        active: ActiveRequest,
        position: int,
        ids: list[int],
        finish_reason: str | None,
        logprobs: list[TokenLogprob],
    ) -> None:
        """Stream tokens to the gateway, all spans before the last one. Raises WireError when it is not there."""
        if finish_reason is not None:
            active.end_decode()
            self.report(active)
        self._peers.post(
            active.spec.gateway,
            Tokens(request=active.spec.id, position=position, ids=ids, finish_reason=finish_reason, logprobs=logprobs),
        )
        self.on_emit(active, len(ids))

    def emit_first(self, active: ActiveRequest, first: int, finish_reason: str | None) -> None:
        """Stream the token that prefill sampled."""
        logprobs = [active.first_logprob] if active.first_logprob is not None else []
        self.emit(active, active.sequence.prompt_len, [first], finish_reason, logprobs)

    async def decode(self, active: ActiveRequest) -> None:
        """Decode to the end, or until the sequence is stopped, streaming each token."""
        if not active.finished:
            active.job = job = self._runner.decode(active.sequence)
            try:
                async for token in job:
                    self.emit(active, token.position, [token.token_id], token.finish_reason, logprobs_of(active, token))
            finally:
                active.job = None
                job.stop()
        active.end_decode()

    def stop(self, active: ActiveRequest) -> None:
        """Make no further token after the step in flight; `decode` returns. What is begun after that goes on."""
        if active.job is not None:
            active.job.stop()

    async def decode_from_first(self, active: ActiveRequest, name: str, first: int, finish_reason: str | None) -> None:
        """Emit the token that prefill sampled, then decode unless it ended the answer."""
        sequence = active.sequence
        active.begin_decode(name)
        sequence.tokens.append(first)
        sequence.finish_reason = finish_reason  # type: ignore[assignment]
        self.emit_first(active, first, finish_reason)
        if finish_reason is None:
            await self.decode(active)
