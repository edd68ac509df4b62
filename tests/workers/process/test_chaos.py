"""The chaos of `benchmarks/chaos.py` in its short form: rude clients and faults of workers beside right requests."""

from pathlib import Path

import pytest

from benchmarks.chaos import over_a_cluster, verdict


@pytest.mark.quiet
def test_right_requests_are_answered_among_rude_clients_and_failing_workers(tmp_path: Path) -> None:
    row = over_a_cluster(requests=50, faults=50, clients=6, seed=2, mode="overlap", directory=tmp_path)
    print(row)
    assert verdict(row) == []
    assert sum(row["faults"].values()) >= 50
