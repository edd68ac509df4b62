"""Programs in a lab's hosts that take orders and report events, with the environment that the lab gives its workers.

This module is also the program that enters the host (`python -m experiments.framework.process RECORD HOST COMMAND...`),
because whoever enters a lab forks and waits; variables arrive in PDDBED_INSIDE as JSON.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from experiments.framework.base import ExperimentError
from testbed.lab.enter import run_inside
from testbed.lab.record import LabError, Record


class Process:
    """A program in a host that takes orders and reports events, one JSON object a line."""

    def __init__(self, host: str, command: list[str], variables: dict[str, str], log: Path) -> None:
        self.host = host
        self._log = log
        with log.open("ab") as errors:
            self._child = subprocess.Popen(
                command,
                env=variables,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,  # Ctrl-C is for the experiment, which ends this
            )

    def order(self, **fields: Any) -> None:
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(json.dumps(fields).encode() + b"\n")
            self._child.stdin.flush()
        except BrokenPipeError:
            raise self._lost() from None

    def events(self) -> Iterator[dict[str, Any]]:
        """Events that it reports, until it ends. Raises ExperimentError when it fails."""
        assert self._child.stdout is not None
        for line in self._child.stdout:
            event: dict[str, Any] = json.loads(line)
            if event["event"] == "failed":
                raise ExperimentError(event["error"])
            yield event
        raise self._lost()

    def wait_for(self, event: str) -> dict[str, Any]:
        """The next event of that name."""
        return next(found for found in self.events() if found["event"] == event)

    def close(self) -> None:
        assert self._child.stdin is not None
        with suppress(BrokenPipeError):
            self._child.stdin.close()
        try:
            self._child.wait(5)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        if self._child.stdout is not None:
            self._child.stdout.close()

    def _lost(self) -> ExperimentError:
        said = self._log.read_text(errors="replace").strip().splitlines()[-8:] if self._log.exists() else []
        return ExperimentError(f"the program on {self.host} ended" + "".join(f"\n    {line}" for line in said))


def main() -> int:
    record, host, *command = sys.argv[1:]
    try:
        return run_inside(Record(Path(record)), host, command, json.loads(os.environ.pop("PDDBED_INSIDE", "{}")))
    except LabError as error:
        print(f"pddbed: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
