"""A mixture of experts in the engine: which experts a token gets depends on the token alone, not on its neighbours."""

import pytest

from tests.workers.engine.drive import Stand, relative_difference
from tests.workers.models.test_checkpoints import random_model, save
from workers.engine import Chunk, Sampling, generate
from workers.models import LoadedModel, ModelSpec, load_model


@pytest.fixture(scope="module", params=["deepseek v2, experts in groups", "deepseek v3, experts"])
def mixed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(ModelSpec(str(save(random_model(request.param), tmp_path_factory.mktemp("experts")))))


def prompt(length: int) -> list[int]:
    return [(37 * n + length) % 250 for n in range(length)]


def test_sequences_in_a_batch_answer_as_alone(mixed: LoadedModel) -> None:
    stand = Stand(mixed, num_blocks=60)
    sequences = [stand.admit(prompt(n), max_tokens=30) for n in (3, 16, 40, 41, 90)]
    stand.finish(*sequences)
    for sequence in sequences:
        alone = generate(mixed, sequence.tokens[: sequence.prompt_len], Sampling(max_tokens=30, ignore_eos=True))
        assert stand.answer(sequence) == alone
        assert len(set(alone)) > 5, "an answer that repeats one token would prove nothing"


def test_an_extend_computes_the_kv_that_single_steps_would(mixed: LoadedModel) -> None:
    stepped, extended = Stand(mixed), Stand(mixed)
    one, other = (stand.admit(prompt(60), max_tokens=30) for stand in (stepped, extended))
    stepped.finish(one)
    extended.feed(other, 60)
    other.tokens.pop()
    extended.engine.append(other, stepped.answer(one)[:-1])
    extended.step(Chunk(other, other.pending))
    assert other.tokens == one.tokens
    computed = other.computed
    assert relative_difference(extended.kv(other, computed), stepped.kv(one, computed)) <= 1e-5
