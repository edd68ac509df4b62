"""From text and messages to token ids that fit the model: tokenised off the loop when long, refused when too long."""

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import Any

from workers.gateway.errors import SERVER_ERROR, ApiError
from workers.models import ChatRefusal, LoadedModel, TemplateFault

LONG_TEXT = 20_000  # characters: tokenised on another thread, so that other answers keep streaming
MESSAGE_COST = 100  # characters of text that take a template and a tokenizer as long as a message does
MAX_TOKEN_BYTES = 256  # no vocabulary has longer ones; so much longer than the context, a text need not be tokenised


class Prompts:
    """Token ids of one model. Every method raises ApiError for what does not fit."""

    def __init__(self, loaded: LoadedModel, model_id: str) -> None:
        self._tokenizer = loaded.tokenizer
        self._config = loaded.config
        self._most = loaded.defaults.max_tokens
        self._model_id = model_id

    async def of_text(self, text: str) -> list[int]:
        self._check_length(len(text), "prompt")
        encode = self._tokenizer.encode
        return await asyncio.to_thread(encode, text) if len(text) > LONG_TEXT else encode(text)

    async def of_messages(
        self, messages: list[dict[str, Any]], variables: Mapping[str, Any] | None = None
    ) -> list[int]:
        """As the model's chat template has them; `variables` is what else it gets."""
        length = sum(len(message["content"]) for message in messages)
        self._check_length(length, "messages")
        apply = partial(self._tokenizer.apply_chat_template, messages, **(variables or {}))
        try:
            heavy = bool(variables) or length + MESSAGE_COST * len(messages) > LONG_TEXT
            return await asyncio.to_thread(apply) if heavy else apply()
        except ChatRefusal as error:
            raise ApiError(400, str(error), param="messages") from None
        except TemplateFault as error:  # the model's own fault, unless the client gave the template variables
            if variables:
                told = f"the chat template fails with {', '.join(sorted(variables))}: {error}"
                raise ApiError(400, told[:1000], param="chat_template_kwargs") from None
            raise ApiError(500, str(error), kind=SERVER_ERROR) from None

    def check(self, prompt: list[int], param: str, keep: int | None = None) -> None:
        """Not empty, of this vocabulary, and room for an answer to the last `keep` tokens of it."""
        if not prompt:
            raise ApiError(400, "the prompt is empty; give at least one token", param=param)
        low, high = min(prompt), max(prompt)
        if low < 0 or high >= self._config.vocab:
            bad = low if low < 0 else high
            shown = str(bad) if abs(bad) < 10**18 else "of more than 18 digits"
            raise ApiError(
                400,
                f"token {shown} is not in the vocabulary of {self._model_id} (0 to {self._config.vocab - 1})",
                param=param,
            )
        count = len(prompt) if keep is None else min(keep, len(prompt))
        if count >= self._config.context_length:
            raise self._too_long(f"{count + 1} tokens ({count} in the prompt, 1 in the completion)", param)

    def answer_tokens(self, prompt: list[int], max_tokens: int | None) -> int:
        """How many tokens may be generated: as asked for, or the model's default within what the context leaves."""
        room = self._config.context_length - len(prompt)
        wanted = min(room, self._most or room) if max_tokens is None else max_tokens
        if wanted > room:
            raise self._too_long(
                f"{len(prompt) + wanted} tokens ({len(prompt)} in the prompt, {wanted} in the completion)", "max_tokens"
            )
        return wanted

    def _check_length(self, characters: int, param: str) -> None:
        """Before minutes go into its tokens."""
        least = characters // MAX_TOKEN_BYTES
        if least > self._config.context_length:
            raise self._too_long(f"a prompt of at least {least} tokens", param)

    def _too_long(self, requested: str, param: str) -> ApiError:
        return ApiError(
            400,
            f"This model's maximum context length is {self._config.context_length} tokens. However, you requested "
            f"{requested}. Please reduce the length of the prompt or completion.",
            param=param,
            code="context_length_exceeded",
        )
