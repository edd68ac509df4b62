"""Loading a topology file for a command: every problem in it is printed before the command fails."""

from pathlib import Path

from testbed.cli import CommandError
from testbed.topology.plan import LabPlan


def load_or_fail(file: Path, name: str | None = None) -> LabPlan:
    """The plan, or CommandError that lists all problems."""
    from testbed.topology import TopologyErrors, load_plan

    try:
        return load_plan(file, name)
    except TopologyErrors as errors:
        raise CommandError(str(errors)) from None
