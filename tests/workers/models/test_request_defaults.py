"""`generation_config.json` as defaults of requests: what vLLM takes, what is refused by name, what is told."""

import json
from pathlib import Path
from typing import Any

import pytest

from workers.models import ModelError, ModelSpec, load_model
from workers.models.generation_config import RequestDefaults, request_defaults

TAKEN = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.05, "max_new_tokens": 9}
BOOKKEEPING = {
    **{"_from_model_config": True, "transformers_version": "5.0", "eos_token_id": [1, 2], "bos_token_id": 1},
    **{"use_cache": True, "cache_implementation": "static", "pad_token_id": 0, "return_dict_in_generate": True},
}
OFF: dict[str, Any] = {
    **{"do_sample": True, "num_beams": 1, "typical_p": 1.0, "no_repeat_ngram_size": 0, "suppress_tokens": []},
    **{"repetition_penalty": None, "length_penalty": 1, "early_stopping": False, "temperature": None, "top_k": None},
}


def of(directory: Path, **given: Any) -> RequestDefaults:
    (directory / "generation_config.json").write_text(json.dumps(given))
    return request_defaults(directory)


def test_what_vllm_takes_is_a_default_and_bookkeeping_is_not_told(tmp_path: Path) -> None:
    assert request_defaults(tmp_path) == RequestDefaults()
    assert of(tmp_path, **BOOKKEEPING, **OFF) == RequestDefaults()
    found = of(tmp_path, **BOOKKEEPING, **OFF | TAKEN)
    assert found == RequestDefaults(0.6, 0.95, 20, 0.05, repetition_penalty=1.05, max_tokens=9)
    told = "temperature 0.6, top_p 0.95, top_k 20, min_p 0.05, repetition_penalty 1.05, max_tokens 9"
    assert found.told == f"defaults of requests: {told}"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[("do_sample", False), ("max_length", 20), ("min_new_tokens", 1), ("no_repeat_ngram_size", 3)],
        *[("num_beams", 4), ("typical_p", 0.9), ("suppress_tokens", [5]), ("presence_penalty", 1.5), ("unheard", "of")],
    ],
)
def test_what_vllm_ignores_is_told(key: str, value: Any, tmp_path: Path) -> None:
    found = of(tmp_path, **BOOKKEEPING, **{key: value})
    assert (found.given, found.told) == ({}, f"not applied, as in vLLM: {key} = {value!r}")


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        *[
            ("repetition_penalty", value, "is not above 0")
            for value in (-1, 0, True, "1", [], float("inf"), float("nan"))
        ],
        *[("temperature", value, "is not 0 or more") for value in (-1, True, "hot", float("nan"), 10**400, [1])],
        *[("top_p", value, "is not above 0 and at most 1") for value in (0, 1.5, float("inf"))],
        *[("top_k", value, "is not -1, 0") for value in (-2, 2.5, 1 << 40)],
        *[("min_p", -0.1, "is not from 0 to 1"), ("max_new_tokens", 0, "is not 1 or more")],
    ],
)
def test_what_cannot_be_had_is_refused_by_name(key: str, value: Any, told: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=rf"generation_config\.json: {key} = .* {told}"):
        of(tmp_path, **{key: value})


def test_a_built_in_model_has_no_defaults() -> None:
    assert load_model(ModelSpec("tiny")).defaults == RequestDefaults()
