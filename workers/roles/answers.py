"""How a worker answers: tokens, spans and failures of a request, streamed to the gateway that asked for it."""

from workers.engine import EngineRunner
from workers.roles.active import Active, logprobs_of
from workers.wire.messages import Report, TokenLogprob, Tokens
from workers.wire.peers import Peers


class Answers:
    """The part of every worker that decodes and tells the gateway. `Worker` makes what it uses."""

    peers: Peers
    runner: EngineRunner

    def report(self, active: Active, *, done: bool = False) -> None:
        """Tell the gateway what has been noted since the last report."""
        spans, active.spans = active.spans, []
        self.peers.post_if_up(active.spec.gateway, Report(request=active.spec.id, spans=spans, done=done))

    def emit(
        self,
        active: Active,
        position: int,
        ids: list[int],
        finish_reason: str | None,
        logprobs: list[TokenLogprob],
    ) -> None:
        """Stream tokens to the gateway, all spans before the last one. Raises WireError when it is not there."""
        if finish_reason is not None:
            active.end_decode()
            self.report(active)
        self.peers.post(
            active.spec.gateway,
            Tokens(request=active.spec.id, position=position, ids=ids, finish_reason=finish_reason, logprobs=logprobs),
        )

    def emit_first(self, active: Active, first: int, finish_reason: str | None) -> None:
        """Stream the token that prefill sampled."""
        logprobs = [active.first_logprob] if active.first_logprob is not None else []
        self.emit(active, active.sequence.prompt_len, [first], finish_reason, logprobs)

    async def decode(self, active: Active) -> None:
        """Decode to the end, or until the sequence is stopped, streaming each token."""
        if not active.finished:
            active.job = job = self.runner.decode(active.sequence)
            try:
                async for token in job:
                    self.emit(active, token.position, [token.token_id], token.finish_reason, logprobs_of(active, token))
            finally:
                active.job = None
                job.stop()
        active.end_decode()

    def stop_decoding(self, active: Active) -> None:
        """No further token after the step in flight; `decode` returns. What is begun after that goes on."""
        if active.job is not None:
            active.job.stop()

    async def decode_from_first(self, active: Active, name: str, first: int, finish_reason: str | None) -> None:
        """Emit the token that prefill sampled, then decode unless it ended the answer."""
        sequence = active.sequence
        active.begin_decode(name)
        sequence.tokens.append(first)
        sequence.finish_reason = finish_reason  # type: ignore[assignment]
        self.emit_first(active, first, finish_reason)
        if finish_reason is None:
            await self.decode(active)
