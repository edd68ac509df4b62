"""Runs a command in a host of a running lab with the environment that the lab gives its workers.

A program of its own (`python -m experiments.framework.inside RECORD HOST COMMAND...`), because whoever enters a lab
forks and waits; variables arrive in PDDBED_INSIDE as JSON.
"""

import json
import os
import sys
from pathlib import Path

from testbed.lab.enter import run_inside
from testbed.lab.record import LabError, Record


def main() -> int:
    record, host, *command = sys.argv[1:]
    try:
        return run_inside(Record(Path(record)), host, command, json.loads(os.environ.pop("PDDBED_INSIDE", "{}")))
    except LabError as error:
        print(f"pddbed: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
