"""Chat templates: jinja2 in its sandbox, with the settings and helpers that templates of checkpoints expect.

A template is data from a downloaded file, so it runs sandboxed and cannot change what it is given.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from workers.models.config import ModelError


def render_chat(
    template: str, messages: Sequence[Mapping[str, Any]], special_tokens: Mapping[str, str] | None = None
) -> str:
    """Prompt text for `messages`, up to where the assistant's answer begins.

    `special_tokens` are names a template may use, such as `bos_token`. Raises ModelError when the template
    refuses the messages (say, an unknown role).
    """
    try:
        return _compile(template).render(messages=messages, add_generation_prompt=True, **(special_tokens or {}))
    except TemplateError as error:
        raise ModelError(f"the model's chat template refuses these messages: {error}; change the messages") from error


@lru_cache(maxsize=8)
def _compile(template: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    environment.filters["tojson"] = lambda value, **kwargs: json.dumps(value, ensure_ascii=False, **kwargs)
    return environment.from_string(template)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)
