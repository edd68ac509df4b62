"""Whether a lab's paced workers can be trusted: their steps together, and each one's own computing."""

import json
from pathlib import Path
from typing import Any

from testbed.verify.pace import pace_reasons, pace_words, read_pace

S = 10**9


def row(steps: int, late: int = 0, overran: int = 0, lateness_ns: int = 0) -> dict[str, Any]:
    counts = {"steps": steps, "late": late, "overran": overran, "paced_ns": steps * S // 10, "lateness_ns": lateness_ns}
    return {"profile": "gpu", **counts}


def test_workers_that_keep_pace_give_no_reason() -> None:
    assert pace_reasons({}) == []
    assert pace_reasons({"p0": row(0)}) == []
    assert pace_reasons({"p0": row(1000, late=10, lateness_ns=S // 2), "md0": row(500)}) == []
    assert pace_reasons({"p0": row(20, late=1, overran=1, lateness_ns=S)}) == [], "a single one"


def test_late_steps_of_all_workers_count_together() -> None:
    assert pace_reasons({"p0": row(100, late=5), "md0": row(900, late=5)}) == []
    (reason,) = pace_reasons({"p0": row(100, late=5), "md0": row(900, late=6)})
    assert reason == "11 of 1,000 paced steps were late (limit 1%), most of them on md0 (6 of 900)"


def test_lateness_counts_by_its_share_of_all_time() -> None:
    (reason,) = pace_reasons({"p0": row(500, late=2, lateness_ns=S), "md0": row(500)})
    assert reason == "paced steps were late by 1.0% of their time in all (limit 0.5%)"


def test_a_worker_that_computes_too_slowly_does_not_hide_behind_others() -> None:
    assert pace_reasons({"p0": row(100, late=5, overran=5), "md0": row(9900)}) == []
    (reason,) = pace_reasons({"p0": row(100, late=6, overran=6), "md0": row(9900)})
    assert reason.startswith("p0 computed 6 of 100 steps in more than the time of gpu (limit 5%)")


def test_files_that_are_nobodys_word_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "pace-p0.json").write_text(json.dumps({"host": "p0", **row(1204, late=2)}))
    (tmp_path / "pace-x.json").write_text("[1]")
    (tmp_path / "pace-y.json").write_text("{")
    found = read_pace(tmp_path)
    assert list(found) == ["p0"]
    assert pace_words(found["p0"]) == "paced as gpu, 2 of 1,204 steps late"
