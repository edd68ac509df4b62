"""The messages of requests and workers, by who speaks to whom. Data only; roles act on them. KV has kv_messages.py.

Encoded as msgpack maps tagged with `t`. Positions count tokens from the prompt's first; times are CLOCK_MONOTONIC
nanoseconds; a block is named by its index in the sequence, never by an address or a peer's block id.
"""

from typing import Annotated

from msgspec import Meta, Struct

Name = Annotated[str, Meta(min_length=1, max_length=256)]
Text = Annotated[str, Meta(max_length=4096)]
Count = Annotated[int, Meta(ge=0, lt=1 << 48)]
TokenId = Annotated[int, Meta(ge=0, lt=1 << 32)]
FinishReason = str | None  # "stop" | "length"; None while the sequence goes on


class Message(Struct, tag_field="t", frozen=True, kw_only=True, omit_defaults=True):
    """Base of all messages."""


# -- both sides, any time on a control connection --------------------------------------------------------------


class Ping(Message, tag="ping", frozen=True):
    """Are you there? The answer is a Pong and, to a gateway, a Status."""

    sent_ns: int


class Pong(Message, tag="pong", frozen=True):
    sent_ns: int


class Status(Message, tag="status", frozen=True):
    """A worker's state. The gateway chooses workers by it and shows it in /metrics; sent when it changes, too."""

    free_blocks: Count
    blocks: Count
    cached_blocks: Count  # not free, but given up when they are needed
    requests: Count
    connected: list[Name]  # peers to which this worker's warm connections are up
    counters: list[tuple[Name, Name, Name, Count, Count]]  # peer, direction, class, bytes, frames


# -- any worker to gateways, decode workers to prefill as well ---------------------------------------------------

BlockName = Annotated[bytes, Meta(min_length=16, max_length=16)]


class CacheNotice(Message, tag="cache", frozen=True):
    """Changes of the sender's cache: full blocks by the names of workers/cache/hashing.py. `evicted` comes first.

    With `reset` nothing that was said before holds: the first notice of a connection.
    """

    inserted: list[BlockName] = []
    evicted: list[BlockName] = []
    reset: bool = False


# -- gateway to worker -----------------------------------------------------------------------------------------


class SamplingSpec(Struct, frozen=True, kw_only=True):
    """The way tokens are chosen. A seed is always set when temperature > 0, so that a hand-over changes nothing.

    `logprobs`: each token comes with its log probability and so many likelier ones; None: without. `barred` ids are not
    chosen at positions before `barred_until`. `answer_from`: the position where the client's answer begins, which
    penalties count; a replay's prompt has some of it.
    """

    max_tokens: Count
    temperature: Annotated[float, Meta(ge=0, le=1e6)] = 0.0  # bounds also keep not-a-number out
    top_p: Annotated[float, Meta(ge=0, le=1)] = 1.0
    seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] | None = None
    ignore_eos: bool = False
    stop_token_ids: list[TokenId] = []
    top_k: Count = 0  # 0: all
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    barred: list[TokenId] = []
    barred_until: Count = 0
    logprobs: Annotated[int, Meta(ge=0, le=64)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=1e308)] = 1.0
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    logit_bias: Annotated[dict[TokenId, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=1024)] = {}
    answer_from: Count | None = None


class TokenLogprob(Struct, frozen=True, array_like=True):
    """The model's log probability of a token (natural, at temperature 1), and the likeliest tokens with theirs."""

    logprob: float
    top: list[tuple[TokenId, float]] = []


class RequestSpec(Struct, frozen=True, kw_only=True):
    """One request as every worker on its way sees it. `relay` or `main` is None where the pipeline has none."""

    id: Name
    gateway: Name
    prefill: Name
    relay: Name | None
    main: Name | None
    prompt: Annotated[list[TokenId], Meta(min_length=1)]
    sampling: SamplingSpec
    deadline_s: Annotated[float, Meta(gt=0, le=1e9)]  # from when a worker first hears of the request

    @property
    def first_decoder(self) -> str:
        """The worker that emits the first token: the relay, else the main decode, else prefill itself."""
        return self.relay or self.main or self.prefill

    @property
    def alone(self) -> bool:
        """The worker that is asked to prefill decodes as well. Any worker can, of whichever role."""
        return self.relay is None and self.main is None


class Prefill(Message, tag="prefill", frozen=True):
    """Compute the prompt's KV, sample the first token, send both to `relay` and `main`; without either, decode."""

    spec: RequestSpec


class Cancel(Message, tag="cancel", frozen=True):
    """Stop and release everything of a request, known or not yet known."""

    request: Name
    reason: Text


class Finish(Message, tag="finish", frozen=True):
    """The answer is complete for a reason that only the gateway sees (a stop string): decode no further.

    What is on its way to main decode still goes there, for its cache.
    """

    request: Name


class Without(Message, tag="without", frozen=True):
    """A request goes on without one of its workers: `lost` is gone, has failed, or cannot be heard.

    To prefill: send it nothing more. To a decode worker that has lost its prefill: give up unless all KV is here. To
    a relay that has lost its main decode: finish the answer. To main decode that has lost its relay: take over from
    `ids`, all that the gateway has of the answer, and say again what follows; with `finish_reason` nothing does.
    """

    request: Name
    lost: Name
    ids: list[TokenId] = []
    finish_reason: FinishReason = None


# -- main decode to relay decode, and back ---------------------------------------------------------------------


class HandOver(Message, tag="hand-over", frozen=True):
    """Main decode holds the whole prompt's KV and asks for the answer: in which mode is in workers/handover.py."""

    request: Name
    mode: Name = "one-shot"  # "auto": the relay chooses


class StopRelay(Message, tag="stop-relay", frozen=True):
    """Main decode has caught up, or (from the gateway) its tokens have overtaken: decode no further, send the rest."""

    request: Name


class TokenIds(Message, tag="token-ids", frozen=True):
    """Generated ids at consecutive positions from `position`, in order, first token included.

    With `stopped_ns` they are the last; before that, in the modes that go on decoding, each is sent as it is made.
    `tail`: of all ids, so many whose KV comes over a KV connection.
    """

    request: Name
    position: Count
    ids: list[TokenId]
    stopped_ns: int | None = None
    finish_reason: FinishReason = None
    tail: Count = 0


# -- worker to gateway -----------------------------------------------------------------------------------------


class Tokens(Message, tag="tokens", frozen=True):
    """Generated tokens at consecutive positions from `position`; `logprobs`: of each, if the request asks for them."""

    request: Name
    position: Count
    ids: Annotated[list[TokenId], Meta(min_length=1)]
    finish_reason: FinishReason = None
    logprobs: list[TokenLogprob] = []


class Span(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A stretch of a request's life on one worker. An instant has end_ns == start_ns."""

    name: Name
    start_ns: int
    end_ns: int
    peer: str = ""
    bytes: int = 0
    tokens: int = 0
    cached: int = 0  # of `tokens`, those a cache had
    queue_ns: int = 0
    chunks: int = 0  # of KV that left while prefill still computed; 0: everything left after it
    encoding: str = ""  # of KV that was sent in fewer bytes than it has
    waited_ns: int = 0  # of a transfer that followed prefill: how long there was nothing to send
    rounds: int = 0  # of catching up
    drafted: int = 0  # tokens guessed ahead while decoding
    accepted: int = 0  # of those, the ones that the model chose itself
    preempted: int = 0  # how often decoding had to wait for memory
    mode: str = ""  # of a hand-over, and why it was chosen
    reason: str = ""


class Report(Message, tag="report", frozen=True):
    """The work of a worker on a request. `done`: it holds nothing of the request any more."""

    request: Name
    spans: list[Span]
    done: bool = False


class Failed(Message, tag="failed", frozen=True):
    """A worker cannot go on with a request; it has released what it held."""

    request: Name
    error: Name
    message: Text


class Undelivered(Message, tag="undelivered", frozen=True):
    """Prefill cannot give one decode worker the prompt's KV; what it does for the others goes on."""

    request: Name
    peer: Name
    error: Name
    message: Text


class Unheard(Message, tag="unheard", frozen=True):
    """Main decode does not get the token ids from its relay; the gateway has them, too, and answers with `Without`."""

    request: Name
    peer: Name
    reason: Text
