"""Requests of clients: every field of OpenAI's and of vLLM's, typed; those of chats alone are in chat_requests.py.

A field that is in neither is unknown.

A field of type `Raw` is checked as JSON and not read: `bodies.py` has the values at which it is accepted, or the
methods below read it within limits.
"""

from typing import Annotated, Any

from msgspec import Meta, Raw, Struct

from workers.gateway.errors import ApiError
from workers.gateway.json_fields import NULL, decode, first_byte, items, shown, size

MAX_CHOICES = 128  # of one request: OpenAI's limit for n
MAX_LOGPROBS = 20  # OpenAI's limit for top_logprobs
MAX_PROMPT_IDS = 1 << 20  # of which the last ones are taken
MAX_STOPS, MAX_STOP_CHARACTERS, MAX_STOP_TOKENS = 16, 1000, 64
MAX_BIASES = 1024

TokenCount = Annotated[int, Meta(ge=1, le=1 << 31)]


class StreamOptions(Struct, forbid_unknown_fields=True):
    """`continuous_usage_stats` (vLLM's) has effect beside `include_usage` only."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # padding against eavesdroppers; changes no answer


class GenerationRequest(Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields that both endpoints share."""

    model: str | None = None
    max_tokens: TokenCount | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=1 << 31)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=1 << 31)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=1e308)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    logit_bias: Raw = NULL
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    stop: Raw = NULL
    stop_token_ids: Raw = NULL
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    truncate_prompt_tokens: TokenCount | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    request_id: Annotated[str, Meta(min_length=1, max_length=200)] | None = None

    # accepted at the values that change nothing
    add_special_tokens: Raw = NULL
    allowed_token_ids: Raw = NULL
    bad_words: Raw = NULL
    cache_salt: Raw = NULL
    ec_transfer_params: Raw = NULL
    guided_choice: Raw = NULL
    guided_decoding_backend: Raw = NULL
    guided_grammar: Raw = NULL
    guided_json: Raw = NULL
    guided_regex: Raw = NULL
    guided_whitespace_pattern: Raw = NULL
    kv_transfer_params: Raw = NULL
    length_penalty: Raw = NULL
    logits_processors: Raw = NULL
    logprob_token_ids: Raw = NULL
    priority: Raw = NULL
    prompt_logprobs: Raw = NULL
    repetition_detection: Raw = NULL
    response_format: Raw = NULL
    return_token_offsets: Raw = NULL
    routed_experts_prompt_start: Raw = NULL
    stream_interval: Raw = NULL
    structural_tag: Raw = NULL
    structured_outputs: Raw = NULL
    thinking_token_budget: Raw = NULL
    truncation_side: Raw = NULL
    use_beam_search: Raw = NULL
    vllm_xargs: Raw = NULL
    watermarking: Raw = NULL

    # never change an answer, whatever their value
    metadata: Raw = NULL
    prompt_cache_key: Raw = NULL
    prompt_cache_retention: Raw = NULL
    return_mm_kwargs: Raw = NULL
    safety_identifier: Raw = NULL
    service_tier: Raw = NULL
    session_id: Raw = NULL
    spaces_between_special_tokens: Raw = NULL  # no decoder here puts any between them
    store: Raw = NULL
    user: Raw = NULL

    @property
    def stops(self) -> list[str]:
        """The stop strings. Raises ApiError."""
        alone = first_byte(self.stop) != b"["
        given = [decode(self.stop, str | None, "stop")] if alone else _few(self.stop, "stop", str, MAX_STOPS)
        given = [stop for stop in given if stop is not None]
        for index, stop in enumerate(given):
            if not 1 <= len(stop) <= MAX_STOP_CHARACTERS:
                param = "stop" if alone else f"stop[{index}]"
                told = f"{param} has {len(stop)} characters; a stop string has 1 to {MAX_STOP_CHARACTERS}"
                raise ApiError(400, told, param=param)
        return given

    @property
    def stop_ids(self) -> list[int]:
        """The token ids that end an answer. Raises ApiError."""
        given: list[int] = _few(self.stop_token_ids, "stop_token_ids", int, MAX_STOP_TOKENS)
        for index, token in enumerate(given):
            if not 0 <= token < 1 << 32:
                param = f"stop_token_ids[{index}]"
                raise ApiError(400, f"{param} is no token id (got {shown(token)})", param=param)
        return given

    @property
    def biases(self) -> dict[int, float]:
        """Biases that are added to the logits of tokens, whose ids are decimal keys. Raises ApiError."""
        if size(self.logit_bias) > 64 * MAX_BIASES or bytes(self.logit_bias).count(b",") >= MAX_BIASES:
            raise ApiError(
                400, f"logit_bias has more than {MAX_BIASES} tokens, or is too long; give fewer", param="logit_bias"
            )
        given: dict[str, Any] = decode(self.logit_bias, dict[str, Any] | None, "logit_bias") or {}
        for key, bias in given.items():
            if not (key.isascii() and key.isdecimal() and len(key) <= 10 and int(key) < 1 << 32):
                raise ApiError(400, f"logit_bias has the key {shown(key)}, which is no token id", param="logit_bias")
            if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
                told = f"logit_bias of token {int(key)} must be a number from -100 to 100 (got {shown(bias)})"
                raise ApiError(400, told, param="logit_bias")
        return {int(key): float(bias) for key, bias in given.items()}

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return (
            self.include_usage and self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)
        )

    @property
    def top_logprobs_wanted(self) -> int | None:
        """Number of likeliest tokens wanted in each place; None: no log probabilities at all."""
        raise NotImplementedError

    def check_together(self) -> None:
        """Check fields against each other. Raises ApiError."""
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options goes with stream: true only", param="stream_options")
        _ = self.stops, self.stop_ids, self.biases


def _few(raw: Raw, name: str, kind: type[Any], most: int) -> list[Any]:
    """A list of at most so many, or none. Raises ApiError."""
    found = items(raw, most)
    if found is not None and len(found) > most:
        raise ApiError(400, f"{name} has more than {most} items; give fewer", param=name)
    return decode(raw, list[kind] | None, name) or []  # type: ignore[valid-type]


class CompletionRequest(GenerationRequest, kw_only=True):
    """POST /v1/completions. A prompt is text or token ids; there may be a list of them."""

    prompt: Raw
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None

    # accepted at the values that change nothing
    prompt_embeds: Raw = NULL
    suffix: Raw = NULL

    def prompts(self, context: int) -> list[str | list[int]]:
        """The prompts, at least one, of at most so many ids each. Raises ApiError."""
        most = MAX_PROMPT_IDS if self.truncate_prompt_tokens is not None else context
        found = items(self.prompt, MAX_CHOICES)
        if found is None or (found and found[0][:1] not in b'"['):
            return [_prompt(self.prompt, "prompt", most)]
        if not found:
            raise ApiError(400, "the prompt is empty; give at least one token", param="prompt")
        if len(found) > MAX_CHOICES:
            raise ApiError(
                400, f"more than {MAX_CHOICES} prompts in one request; send several requests", param="prompt"
            )
        return [_prompt(Raw(one), f"prompt[{index}]", most) for index, one in enumerate(found)]

    @property
    def top_logprobs_wanted(self) -> int | None:
        return self.logprobs

    def check_together(self) -> None:
        super().check_together()
        if self.echo and self.logprobs is not None:
            raise ApiError(
                400, "log probabilities of the prompt are not built: leave out echo or logprobs", param="echo"
            )
        if self.best_of not in (None, self.n or 1):
            raise ApiError(
                400,
                f"best_of is {self.best_of}: choosing among more answers than n is not built; leave it out",
                param="best_of",
                code="unsupported_parameter",
            )


def _prompt(raw: Raw, param: str, most: int) -> str | list[int]:
    """Text, or token ids, which are counted before they take memory. Raises ApiError."""
    if first_byte(raw) == b'"':
        return decode(raw, str, param)
    if first_byte(raw) != b"[":
        raise ApiError(400, f"{param} is neither text nor a list of token ids; give one of them", param=param)
    if size(raw) > 2 * most and (count := bytes(raw).count(b",") + 1) > most:
        told = f"{param} has {count} token ids; this model's maximum context length is {most}; send fewer"
        raise ApiError(400, told, param=param, code="context_length_exceeded")
    return decode(raw, list[int], param)
