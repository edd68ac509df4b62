"""Coverage-guided fuzzing of the wire: `python -m tests.workers.fuzz.guided TARGET [-max_total_time=60] [FLAG...]`.

atheris (libFuzzer) mutates the recorded seeds and keeps what reaches new branches of `workers.wire`. An input that
raises, takes longer than 5 s or more than 1 GB of memory is written to the current directory and ends the run with a
status other than 0. Targets: `dissect`, `messages`, `transfers`, `tails`, `control`, `handshake`, `handshake_script`.
"""

import logging
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import atheris

from tests.workers.fuzz.guide import guide

with atheris.instrument_imports(include=["workers.wire"]):
    from tests.workers.fuzz import targets
    from tests.workers.fuzz.scripts import from_stream, without_handshake

SEEDS = Path(__file__).parent / "seeds"  # not from `record`: that would load models
RAW = ("dissect", "handshake")  # the others take scripts
LIMITS = ("-timeout=5", "-rss_limit_mb=1024", "-max_len=32768")


def target_named(name: str) -> Callable[[bytes], object]:
    if name in ("dissect", "messages"):
        target: Callable[[bytes], object] = getattr(targets, name)
    else:
        target = getattr(targets.Wire(), name)
    return target


def write_seeds(name: str, directory: Path) -> None:
    for path in SEEDS.glob("*.bin"):
        stream = path.read_bytes()
        if name == "dissect":
            stream = b"\x01\x10\x80\x03\xff\x00\x00\x00" + stream  # how it is cut
        elif name not in RAW:
            stream = from_stream(stream if name in ("messages", "handshake_script") else without_handshake(stream))
        (directory / path.stem).write_bytes(stream)


def main() -> None:
    name, *flags = sys.argv[1:]
    logging.disable(logging.CRITICAL)
    guide(partial(write_seeds, name), target_named(name), *LIMITS, *flags)


if __name__ == "__main__":
    main()
