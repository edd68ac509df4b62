"""`pddbed experiment fit skew`: the free parameters, from transfers without queueing; writes fit.json and the round
trip in topologies/skew.yaml."""

import json
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from experiments.framework.directory import write_whole
from experiments.framework.errors import ExperimentError
from experiments.framework.lab import ExperimentLab
from experiments.skew.experiment import TOPOLOGY
from experiments.skew.fit import FIT_FILE, Fit, as_json, refit
from experiments.skew.rows import BLOCKS, FULL
from experiments.skew.session import open_session

_MISSED_BLOCKS = (1, 3, 6, 12, 26, 51, 102, 128, 154, 205, 256)
_TIMES = 5
_APART_NS = 350_000_000  # at most seven at once: nobody waits
_RTT = re.compile(r"^(\s+rtt: )[\d.]+ms", re.MULTILINE)


def refit_live(say: Callable[[str], None]) -> Iterator[str]:
    """Measure, solve, write. Yields what was found, in words. Raises ExperimentError."""
    before = Fit.read()
    missed = list(_MISSED_BLOCKS) * _TIMES
    with tempfile.TemporaryDirectory(prefix="pddbed-fit-") as directory:
        with ExperimentLab(TOPOLOGY, Path(directory), with_workers=False, on_step=say) as lab:
            with open_session(lab, FULL, before.connection_bps(FULL.bytes)) as session:
                say(f"measuring {len(missed)} transfers")
                starts_ns = [index * _APART_NS for index in range(len(missed))]
                found = session.transfers("fit", starts_ns, [BLOCKS - count for count in missed])
            reasons = lab.verify()["reasons"]
    if reasons:
        raise ExperimentError(f"the lab was not faithful, so nothing is fitted: {'; '.join(reasons)}; try again")
    queued = sum(transfer["queue_ns"] > 0 for transfer in found)
    if queued:
        raise ExperimentError(f"{queued} transfers had to wait for a connection; is the machine busy? Try again")
    measured = [
        (missed[transfer["index"]] / BLOCKS, (transfer["done_ns"] - transfer["asked_ns"]) / 1e6) for transfer in found
    ]
    how = (
        f"base and whole: least squares over {len(found)} transfers without queueing, at a round trip of "
        f"{before.rtt_ms} ms and {before.whole_configured_ms} ms for a whole prompt, moved to the published medians; "
        "spacing: bisection of a simulated first-come queue over 16 draws that no run uses"
    )
    fit = refit(before, measured, how)
    write_whole(FIT_FILE, json.dumps(as_json(fit), indent=1) + "\n")
    text, count = _RTT.subn(rf"\g<1>{fit.rtt_ms}ms", TOPOLOGY.read_text())
    if count != 1:
        raise ExperimentError(f"{TOPOLOGY} has {count} lines with rtt: instead of one; correct it by hand")
    write_whole(TOPOLOGY, text)
    for name, value in as_json(fit).items():
        yield f"{name:<20} {getattr(before, name)} -> {value}" if name != "how" else f"{name:<20} {value}"
