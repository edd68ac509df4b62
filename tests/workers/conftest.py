"""Real models for the tests of workers: `tiny` from its seed, SmolLM2 fetched the way a user fetches it."""

import pytest
import torch

from workers.models import LoadedModel, ModelSpec, load_model
from workers.models.fetch import FETCHABLE, fetch


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)  # two on a busy machine with two cores wait for each other and take ten times as long


@pytest.fixture(scope="session")
def tiny() -> LoadedModel:
    return load_model(ModelSpec("tiny"))


@pytest.fixture(scope="session")
def tiny_mla() -> LoadedModel:
    return load_model(ModelSpec("tiny-mla"))


@pytest.fixture(scope="session")
def smollm2() -> LoadedModel:
    fetch(FETCHABLE["smollm2-135m"])
    return load_model(ModelSpec("smollm2-135m"))
