"""Fixtures of the gateway's tests: a cluster for each module that only asks."""

from collections.abc import Iterator

import pytest

from tests.workers.serving import Served
from workers.models import LoadedModel


@pytest.fixture(scope="module")
def lab(tiny: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with Served(tiny, tmp_path_factory.mktemp("lab")) as served:
        yield served
