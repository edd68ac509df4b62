"""`generation_config.json` of a Hugging Face checkpoint as defaults of requests, as vLLM takes them.

vLLM's `--generation-config auto` (`ModelConfig.get_diff_sampling_param`) takes a few keys and ignores the others, also
`do_sample`; so do we, and say which. The table in docs/engine.md has all. Its `eos_token_id` is `hf_config.py`'s.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from workers.models.config import ModelError
from workers.models.hf_config import read_json

MOST = 1 << 31  # of a count, as in requests


@dataclass(frozen=True)
class RequestDefaults:
    """Defaults of requests that say nothing themselves; None: the API's own default. `unapplied` is told once."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None
    unapplied: tuple[str, ...] = ()

    @property
    def given(self) -> dict[str, float]:
        """Those that the model has, by the names that requests use."""
        return {key: value for key, value in asdict(self).items() if key != "unapplied" and value is not None}

    @property
    def told(self) -> str:
        """Both kinds in a line; empty when there are none."""
        given = [f"{key} {value}" for key, value in self.given.items()]
        parts = [
            "defaults of requests: " + ", ".join(given) if given else "",
            "not applied, as in vLLM: " + ", ".join(self.unapplied) if self.unapplied else "",
        ]
        return "; ".join(filter(None, parts))[:1000]


NO_DEFAULTS = RequestDefaults()
TAKEN: dict[str, tuple[type, Callable[[Any], bool], str]] = {
    "temperature": (float, lambda value: 0 <= value <= 1e6, "0 or more"),
    "top_p": (float, lambda value: 0 < value <= 1, "above 0 and at most 1"),
    "top_k": (int, lambda value: -1 <= value <= MOST, "-1, 0 (all) or more"),
    "min_p": (float, lambda value: 0 <= value <= 1, "from 0 to 1"),
    "repetition_penalty": (float, lambda value: 0 < value <= 1e308, "above 0"),
    "max_new_tokens": (int, lambda value: 1 <= value <= MOST, "1 or more"),
}
"""Keys that are defaults, and what they may be."""
NEUTRAL = (
    *("_.*", ".*_version", "(eos|bos|pad|unk|sep|cls|mask|decoder_start)_token_id", "output_.*", "return_dict.*"),
    *("use_cache", ".*cache_.*", ".*compile.*", ".*assistant.*", "prompt_lookup_num_tokens", "low_memory"),
)
"""Patterns of keys that change no answer: bookkeeping, and how transformers computes."""
_OFF_AT = {
    **{"do_sample": True, "num_beams": 1, "num_beam_groups": 1, "num_return_sequences": 1, "typical_p": 1},
    **{"top_h": 1, "length_penalty": 1, "encoder_repetition_penalty": 1, "guidance_scale": 1},
}
"""Values of other keys that mean nothing is done, where those are neither false nor 0 nor empty."""


def request_defaults(directory: Path) -> RequestDefaults:
    """The defaults that a checkpoint brings. Raises ModelError for what cannot be had."""
    place = directory / "generation_config.json"
    given = {key: value for key, value in read_json(place).items() if value is not None} if place.exists() else {}
    taken: dict[str, Any] = {}
    for key, (kind, fits, allowed) in TAKEN.items():
        value = given.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | kind) or not fits(value):
            raise ModelError(f"{place}: {key} = {value!r:.60} is not {allowed}; fetch the checkpoint again")
        taken["max_tokens" if key == "max_new_tokens" else key] = kind(value)
    unapplied = [
        f"{key if key.isidentifier() else repr(key)} = {value!r:.60}"
        for key, value in given.items()
        if (value != _OFF_AT[key] if key in _OFF_AT else value)
        and key not in TAKEN
        and not any(re.fullmatch(pattern, key) for pattern in NEUTRAL)
    ]
    return RequestDefaults(**taken, unapplied=tuple(unapplied))
