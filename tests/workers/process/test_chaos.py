"""The chaos of `benchmarks/chaos.py` in its short form: rude clients and faults of workers beside right requests."""

from pathlib import Path

import pytest

from benchmarks.chaos import over_a_cluster, verdict


@pytest.mark.quiet
@pytest.mark.parametrize(("mode", "seed"), [("catch-up", 1), ("overlap", 2)])
def test_right_requests_are_answered_among_rude_clients_and_failing_workers(
    mode: str, seed: int, tmp_path: Path
) -> None:
    row = over_a_cluster(requests=60, faults=60, clients=6, seed=seed, mode=mode, directory=tmp_path)
    print(row)
    assert verdict(row) == []
    assert sum(row["faults"].values()) >= 60
