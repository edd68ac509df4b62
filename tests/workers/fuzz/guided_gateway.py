"""Coverage-guided fuzzing of request bodies: `python -m tests.workers.fuzz.guided_gateway [-max_total_time=60]`.

atheris (libFuzzer) mutates valid bodies and keeps what reaches new branches of `workers.gateway`. An input that raises
anything but an ApiError, takes longer than 5 s or more than 1 GB of memory ends the run with a status other than 0.
"""

import sys
from pathlib import Path

import atheris

from tests.workers.fuzz.guide import guide

with atheris.instrument_imports(include=["workers.gateway"]):
    from tests.workers.fuzz import gateway_targets

LIMITS = ("-timeout=5", "-rss_limit_mb=1024", "-max_len=4096")


def write_seeds(corpus: Path) -> None:
    for number, seed in enumerate(gateway_targets.SEEDS):
        (corpus / str(number)).write_bytes(seed)


def main() -> None:
    guide(write_seeds, gateway_targets.bodies, *LIMITS, *sys.argv[1:])


if __name__ == "__main__":
    main()
