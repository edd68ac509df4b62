"""Chat templates: jinja2 in its sandbox, with the settings, tags and helpers that transformers gives to templates.

A template is data from a downloaded file, so it runs sandboxed and cannot change what it is given. Its own faults are
found when it is loaded, by rendering ordinary conversations, and are never blamed on the client.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from workers.models.config import ModelError

Messages = Sequence[Mapping[str, Any]]

_REASONING = ("reasoning_content", "thinking", "reasoning")
_PROBES: tuple[Messages, ...] = (
    [{"role": "user", "content": "Hello"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}],
    [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hello to you."},
        {"role": "user", "content": "And?"},
    ],
)


class ChatRefusal(ModelError):
    """Messages that the model takes no prompt from: its template refuses them, or it has none. The client's to mend."""


class TemplateFault(ModelError):
    """A chat template that is broken or fails: the model's own fault, whatever the client sent."""


class ChatTemplate:
    """A checkpoint's chat templates, compiled.

    `templates` maps names to sources: "default" renders chats, "tool_use", where there is one, those with tools.
    `special_tokens` are names that a template may use, such as `bos_token`; `place` is the file to name in errors.
    Raises TemplateFault when a template cannot be compiled, or fails on an ordinary conversation.
    """

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str], place: str) -> None:
        self._place = place
        self._special_tokens = dict(special_tokens)
        self._templates = {name: self._compile(name, source) for name, source in templates.items()}
        if "default" in self._templates:
            for messages in _PROBES:
                try:
                    self.render(messages)
                except ChatRefusal:
                    pass  # a model may well have no system role
                except TemplateFault:
                    self._render([{**m, "content": [{"type": "text", "text": m["content"]}]} for m in messages])

    def render(
        self,
        messages: Messages,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """Prompt text for `messages`, as transformers' `apply_chat_template` makes it of the same arguments.

        `variables` are what else a template may ask for, such as `enable_thinking`. Raises ChatRefusal where the
        template itself refuses the messages (`raise_exception`), TemplateFault where it fails.
        """
        return self._render(
            messages, tools=tools, documents=documents, add_generation_prompt=add_generation_prompt, **variables
        )

    def _render(self, messages: Messages, **variables: Any) -> str:
        tools = variables.setdefault("tools", None)
        variables = self._special_tokens | {"documents": None, "add_generation_prompt": True} | variables
        name = "tool_use" if tools is not None and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise ChatRefusal(
                f"this model's chat templates are {', '.join(sorted(self._templates))}, and none is the default; "
                "use /v1/completions, or an instruct model"
            )
        _RANGED.set(0)
        try:
            return self._templates[name].render(messages=_as_templates_expect(messages), **variables)
        except _RefusedError as error:
            raise ChatRefusal(
                f"the model's chat template refuses these messages: {_one_line(error)}; change the messages"
            ) from error
        except Exception as error:  # a template is foreign code: it can fail in every way that Python knows
            lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == _FILE]
            where = f"line {lines[-1]}" if lines else "an unknown line"
            raise TemplateFault(
                f"{self._place}: the chat template fails at its {where} "
                f"({type(error).__name__}: {_one_line(error)}); mend it, or fetch the model again"
            ) from error

    def _compile(self, name: str, source: str) -> Template:
        try:
            return _ENVIRONMENT.from_string(source)
        except TemplateSyntaxError as error:
            reason = f"line {error.lineno}: {_one_line(error.message)}"
        except Exception as error:  # also RecursionError, for one that is nested too deeply
            reason = f"{type(error).__name__}: {_one_line(error)}"
        called = "chat template" if name == "default" else f'chat template "{name}"'
        raise TemplateFault(f"{self._place}: the {called} is broken ({reason}); mend it, or fetch the model again")


def _as_templates_expect(messages: Messages) -> list[dict[str, Any]]:
    """Without keys that are None, which templates would print; reasoning under the names that they read."""
    normal = []
    for message in messages:
        kept = {key: value for key, value in message.items() if value is not None}
        reasoning = next((kept[key] for key in _REASONING if key in kept), None)
        if reasoning is not None:
            kept = {"thinking": reasoning, **kept, "reasoning_content": reasoning}
        normal.append(kept)
    return normal


class _RefusedError(TemplateError):
    """`raise_exception` was called."""


class _Generation(Extension):
    """`{% generation %}` ... `{% endgeneration %}`: marks what the assistant said, for training; no effect here."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def _raise_exception(message: str) -> NoReturn:
    raise _RefusedError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _one_line(error: object) -> str:
    return " ".join(str(error).split())


class _Environment(ImmutableSandboxedEnvironment):
    """Bounds what one multiplication or power in a template may make."""

    intercepted_binops = frozenset(("*", "**"))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        sizes = [len(side) if hasattr(side, "__len__") else side for side in (left, right)]
        repeats = operator == "*" and sizes != [left, right] and all(isinstance(size, int) for size in sizes)
        if (repeats and sizes[0] * sizes[1] > _MAX_REPEATED) or (operator == "**" and right > _MAX_EXPONENT):
            raise OverflowError(f"{operator} of {sizes[0]} and {sizes[1]}")
        return super().call_binop(context, operator, left, right)


def _range(*bounds: int) -> range:
    """`range`, of so many numbers in one rendering that loops in loops end."""
    numbers = range(*bounds)
    _RANGED.set(_RANGED.get() + len(numbers))
    if _RANGED.get() > _MAX_RANGED:
        raise OverflowError(f"range over more than {_MAX_RANGED} numbers")
    return numbers


_RANGED: ContextVar[int] = ContextVar("numbers that one rendering went through", default=0)
_MAX_RANGED = 1_000_000
_MAX_REPEATED = 10_000_000
_MAX_EXPONENT = 1000


def _environment() -> ImmutableSandboxedEnvironment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.globals |= {"range": _range, "raise_exception": _raise_exception, "strftime_now": _strftime_now}
    environment.filters["tojson"] = _to_json
    return environment


_ENVIRONMENT = _environment()
_FILE = "<template>"  # what jinja2 calls a template that came as a string, in tracebacks
