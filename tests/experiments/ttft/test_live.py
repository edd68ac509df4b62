"""A few requests of `split` in a lab: records of real workers, in the deployment's times, and books that agree."""

import json
from pathlib import Path

import pytest

from experiments.framework.base import Options
from experiments.framework.runner import run
from experiments.ttft.experiment import Split
from experiments.ttft.load import Shape


@pytest.mark.root
def test_a_few_requests_leave_records_figures_and_books_that_agree(tmp_path: Path) -> None:
    shape = Shape(requests=12, sessions=6, prompt_divisor=256, output_divisor=16, time_compression=24)
    evaluation = run(Split(shape), Options(seeds=1), tmp_path / "run", "auto", quiet=True)
    figures = {figure.key: figure for figure in evaluation.figures}
    assert figures["bytes_difference"].verdict == "met"
    records = [json.loads(line) for line in (tmp_path / "run" / "requests.jsonl").read_text().splitlines()]
    assert len(records) == 12
    assert "p-rld-md" in {record["pdd_pipeline"] for record in records}
    for record in records:
        assert record["output_len"] == record["pdd_rld_tokens"] + record["pdd_md_tokens"]
        assert record["ttft_ms"] == pytest.approx(record["ttft"] * 1000 * 24)
    pace = json.loads((tmp_path / "run" / "parts" / "pdd-seed1" / "part.json").read_text())["facts"]["pace"]
    assert sum(row["steps"] for row in pace.values()) > 0, "the workers were paced"
    assert (tmp_path / "run" / "report.html").exists()
