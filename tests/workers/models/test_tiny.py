"""The built-in model: the same for a seed, different for another, and no bore."""

import pytest

from tests.workers.engine.drive import prompt
from workers.engine import BlockPool, Sampling, generate
from workers.models import LoadedModel, ModelSpec, load_model


def test_a_seed_names_the_weights(tiny: LoadedModel) -> None:
    assert load_model(ModelSpec("tiny", seed=0)).fingerprint == tiny.fingerprint
    assert load_model(ModelSpec("tiny", seed=1)).fingerprint != tiny.fingerprint
    assert tiny.fingerprint == "def0ed0b3402a27968251bd4a9fecd52"  # on every machine


@pytest.mark.parametrize("name", ["tiny", "tiny-mla"])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("text", ["", "a", "Hello, who are you?", "x" * 40, "0123456789" * 5])
def test_answers_are_varied_readable_text(name: str, seed: int, text: str) -> None:
    loaded = load_model(ModelSpec(name, seed))
    answer = generate(loaded, loaded.tokenizer.encode(text), Sampling(max_tokens=150, ignore_eos=True))
    triples = {tuple(answer[i : i + 3]) for i in range(148)}
    assert len(triples) > 0.5 * 148  # a loop has a handful; the least here is 92
    assert loaded.tokenizer.decode(answer).isprintable()


def test_the_latent_cache_is_kv_rank_and_rope_dim_numbers_a_layer(tiny: LoadedModel, tiny_mla: LoadedModel) -> None:
    assert tiny_mla.config.kv_shape == (4, 48 + 16)
    assert BlockPool(tiny_mla.config, 2).bytes_per_token == 4 * 64 * 4 == BlockPool(tiny.config, 2).bytes_per_token / 2


def test_answers_end_by_themselves_now_and_then(tiny: LoadedModel) -> None:
    lengths = [len(generate(tiny, prompt(tiny, n), Sampling(max_tokens=300))) for n in range(8, 13)]
    assert min(lengths) < 300
    assert max(lengths) > 50
