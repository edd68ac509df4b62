"""One generation from a checked request to its answer: tokenise, find a place, choices, SSE or a whole answer."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import msgspec
from fastapi import Request, Response

from workers.gateway.admission import Admission, Overloaded
from workers.gateway.answers import Answer, ChatAnswer, CompletionAnswer, Counts, Piece, Wanted
from workers.gateway.attempts import LiveRequest
from workers.gateway.chat_requests import ChatRequest
from workers.gateway.choices import Choice, side_by_side
from workers.gateway.dispatcher import Dispatcher
from workers.gateway.errors import ApiError, refused
from workers.gateway.limits import ApiLimits
from workers.gateway.prompts import Conversations, Prompts
from workers.gateway.requests import MAX_CHOICES, CompletionRequest, GenerationRequest
from workers.gateway.responses import EventStream, Gathering, events, unless_gone
from workers.gateway.text import AnswerText, ChatLogprobs, CompletionLogprobs, Logprobs, NoLogprobs
from workers.wire.messages import SamplingSpec

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions


class Generation:
    """Answers requests of both endpoints through one dispatcher."""

    def __init__(self, dispatcher: Dispatcher, admission: Admission, model_id: str, limits: ApiLimits) -> None:
        self._dispatcher = dispatcher
        self._admission = admission
        self._loaded = dispatcher.loaded
        self._conversations = Conversations(dispatcher.loaded.tokenizer)
        self._prompts = Prompts(dispatcher.loaded, model_id)
        self._gathering = Gathering(limits)
        self.model_id = model_id

    async def completion(self, request: Request, asked: CompletionRequest) -> Response:
        """Answer /v1/completions. Raises ApiError."""
        self._check_model(asked.model)
        tokenizer = self._loaded.tokenizer
        prompts, echoes = [], []
        for given in asked.prompts(self._loaded.config.context_length):
            prompt = await self._prompts.of_text(given) if isinstance(given, str) else given
            prompts.append(self._fitting(asked, prompt, "prompt"))
            if asked.echo:
                echoes.append(given if isinstance(given, str) else tokenizer.decode(given))
        top, as_ids = asked.top_logprobs_wanted, bool(asked.return_tokens_as_token_ids)
        special = asked.skip_special_tokens is False

        def logprobs() -> Logprobs:
            return NoLogprobs() if top is None else CompletionLogprobs(tokenizer, top, special=special, as_ids=as_ids)

        max_tokens = asked.max_tokens or DEFAULT_COMPLETION_TOKENS
        choices = self._choices(asked, prompts, max_tokens, logprobs, echoes)
        return await self._answer(request, asked, choices, CompletionAnswer)

    async def chat(self, request: Request, asked: ChatRequest) -> Response:
        """Answer /v1/chat/completions. Raises ApiError."""
        self._check_model(asked.model)
        if asked.is_large:
            messages, variables = await asyncio.to_thread(asked.told)
        else:
            messages, variables = asked.told()
        template = await self._prompts.of_messages(messages, variables)
        prompt = self._conversations.prompt(messages, template, variables)
        ids = self._fitting(asked, prompt.ids, "messages")
        top, as_ids = asked.top_logprobs_wanted, bool(asked.return_tokens_as_token_ids)

        def logprobs() -> Logprobs:
            return NoLogprobs() if top is None else ChatLogprobs(self._loaded.tokenizer, top, as_ids=as_ids)

        def annotate(live: LiveRequest) -> None:
            live.log.spliced, live.log.retokenised = prompt.spliced, prompt.retokenised

        def answered(text: str, ids: list[int]) -> None:
            self._conversations.note(messages, prompt, text, ids, variables)

        max_tokens = asked.max_completion_tokens or asked.max_tokens
        choices = self._choices(asked, [ids], max_tokens, logprobs, annotate=annotate, answered=answered)
        return await self._answer(request, asked, choices, ChatAnswer)

    # -- the request -------------------------------------------------------------------------------------------

    def _check_model(self, name: str | None) -> None:
        if name is not None and name not in (self.model_id, self._loaded.config.name):
            shown = name if len(name) <= 200 else name[:200] + "..."
            raise ApiError(
                404,
                f"the model {shown!r} does not exist here; this lab serves {self.model_id!r}",
                param="model",
                code="model_not_found",
            )

    def _fitting(self, asked: GenerationRequest, prompt: list[int], param: str) -> list[int]:
        """The prompt, or its last tokens where the client wants no more. Raises ApiError."""
        self._prompts.check(prompt, param, asked.truncate_prompt_tokens)
        return prompt if asked.truncate_prompt_tokens is None else prompt[-asked.truncate_prompt_tokens :]

    def _choices(
        self,
        asked: GenerationRequest,
        prompts: Sequence[list[int]],
        max_tokens: int | None,
        logprobs: Callable[[], Logprobs],
        echoes: Sequence[str] = (),
        **hooks: Any,
    ) -> list[Choice]:
        """`n` choices for each prompt, prompt by prompt, each with a place. Raises ApiError."""
        each, stops, tokenizer = asked.n or 1, asked.stops, self._loaded.tokenizer
        with_stop, special = bool(asked.include_stop_str_in_output), asked.skip_special_tokens is False
        if each * len(prompts) > MAX_CHOICES:
            raise ApiError(400, f"{len(prompts)} prompts x n = {each}: at most {MAX_CHOICES} choices", param="n")
        samplings = [
            self._sampling(asked, prompt, self._prompts.answer_tokens(prompt, max_tokens)) for prompt in prompts
        ]
        try:
            tickets = self._admission.enter(each * len(prompts))
        except Overloaded as error:
            raise refused(error) from None
        return [
            Choice(
                index,
                prompts[index // each],
                _of_choice(samplings[index // each], index % each),
                ticket,
                AnswerText(tokenizer, stops, with_stop=with_stop, special=special, at_least=asked.min_tokens or 0),
                logprobs(),
                echoes[index // each] if echoes else "",
                hide_stop=not with_stop,
                **hooks,
            )
            for index, ticket in enumerate(tickets)
        ]

    def _sampling(self, asked: GenerationRequest, prompt: list[int], max_tokens: int) -> SamplingSpec:
        model = self._loaded.defaults
        temperature: float = _first_given(asked.temperature, model.temperature, 1.0)
        seed = secrets.randbits(63) if asked.seed is None else asked.seed % (1 << 63)
        at_least, stop_ids = asked.min_tokens or 0, asked.stop_ids
        if at_least > max_tokens:
            raise ApiError(
                400, f"min_tokens is {at_least}, more than the {max_tokens} of max_tokens", param="min_tokens"
            )
        biases, vocab = asked.biases, self._loaded.config.vocab
        if (unknown := max(biases, default=0)) >= vocab:
            told = f"logit_bias has token {unknown}, outside the model's vocabulary ({vocab})"
            raise ApiError(400, told, param="logit_bias")
        return SamplingSpec(
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=_first_given(asked.top_p, model.top_p, 1.0),
            top_k=max(0, _first_given(asked.top_k, model.top_k, 0)),
            min_p=_first_given(asked.min_p, model.min_p, 0.0),
            seed=seed if temperature > 0 else None,
            ignore_eos=bool(asked.ignore_eos),
            stop_token_ids=stop_ids,
            barred=sorted({*self._loaded.tokenizer.eos_ids, *stop_ids}) if at_least else [],
            barred_until=len(prompt) + at_least if at_least else 0,
            logprobs=asked.top_logprobs_wanted,
            repetition_penalty=_first_given(asked.repetition_penalty, model.repetition_penalty, 1.0),
            presence_penalty=asked.presence_penalty or 0.0,
            frequency_penalty=asked.frequency_penalty or 0.0,
            logit_bias=biases,
            answer_from=len(prompt),
        )

    # -- the answer --------------------------------------------------------------------------------------------

    async def _answer(
        self, request: Request, asked: GenerationRequest, choices: list[Choice], kind: type[Answer]
    ) -> Response:
        pieces = side_by_side([choice.pieces(self._dispatcher, kind.prefix) for choice in choices])

        async def close() -> None:
            # a generator that was never begun has no `finally` to run
            await pieces.aclose()
            for choice in choices:
                choice.close(self._dispatcher)

        def counts_now() -> Counts:
            return _counts(choices, asked.n or 1)

        def answer() -> Answer:
            only = choices[0].live if len(choices) == 1 else None
            request_id = only.spec.id if only else f"{kind.prefix}-{secrets.token_hex(12)}"
            if asked.request_id is not None:
                request_id = f"{kind.prefix}-{asked.request_id}"
            wanted = Wanted(asked.include_usage, asked.continuous_usage, bool(asked.return_token_ids))
            return kind(request_id, self.model_id, int(time.time()), wanted)

        try:
            if asked.stream:
                # the status line waits for the first token: a request that fails before it gets the status it deserves
                first = await unless_gone(request, _first(pieces))
                counts = counts_now if asked.include_usage else None
                return EventStream(events(first, pieces, answer(), counts), close)
            gathered = await unless_gone(request, self._gathering.gather(pieces, len(choices)))
        except BaseException:
            await close()
            raise
        body = answer().whole(gathered, counts_now())
        return Response(msgspec.json.encode(body), media_type="application/json")


def _first_given(*values: Any) -> Any:
    """The first that is there: what the request says, what the model brings, what the API has."""
    return next(value for value in values if value is not None)


def _of_choice(sampling: SamplingSpec, number: int) -> SamplingSpec:
    """Sampling of one of a prompt's choices: the first has the request's seed, and each other one the next."""
    if sampling.seed is None or number == 0:
        return sampling
    return msgspec.structs.replace(sampling, seed=(sampling.seed + number) % (1 << 63))


def _counts(choices: Sequence[Choice], each: int) -> Counts:
    """Each prompt counts once, however many choices it has."""
    counts = [choice.counts for choice in choices]
    return Counts(
        sum(one.prompt for one in counts[::each]),
        sum(one.completion for one in counts),
        sum(one.cached for one in counts[::each]),
    )


async def _first(pieces: AsyncIterator[Piece]) -> Piece:
    """`anext` as a coroutine."""
    return await anext(pieces)
