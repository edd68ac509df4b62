"""The built-in model: the same for a seed, different for another, and no bore."""

import pytest

from tests.workers.engine.drive import prompt
from workers.engine import Sampling, generate
from workers.models import LoadedModel, ModelSpec, load_model


def test_a_seed_names_the_weights(tiny: LoadedModel) -> None:
    assert load_model(ModelSpec("tiny", seed=0)).fingerprint == tiny.fingerprint
    assert load_model(ModelSpec("tiny", seed=1)).fingerprint != tiny.fingerprint
    assert tiny.fingerprint == "3a3749af53da29d94376b51dd3e121c6"  # on every machine


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("text", ["", "a", "Hello, who are you?", "x" * 40, "0123456789" * 5])
def test_answers_are_varied_readable_text(seed: int, text: str) -> None:
    loaded = load_model(ModelSpec("tiny", seed))
    answer = generate(loaded, loaded.tokenizer.encode(text), Sampling(max_tokens=150, ignore_eos=True))
    triples = {tuple(answer[i : i + 3]) for i in range(148)}
    assert len(triples) > 0.5 * 148  # a loop has a handful; the least here is 98, after forty times x
    assert loaded.tokenizer.decode(answer).isprintable()


def test_answers_end_by_themselves_now_and_then(tiny: LoadedModel) -> None:
    lengths = [len(generate(tiny, prompt(tiny, n), Sampling(max_tokens=300))) for n in range(8, 13)]
    assert min(lengths) < 300
    assert max(lengths) > 50
