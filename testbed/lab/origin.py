"""Origin of a lab: its user, checkout and file: written into its record, so that a command that was not told which
lab it is about can say whose it takes, and leave somebody else's alone.
"""

import json
import os
import pwd
from dataclasses import asdict, dataclass
from pathlib import Path

from testbed.lab.record import Record
from testbed.model.units import printable

CHECKOUT = str(Path(__file__).resolve().parents[2])


@dataclass(frozen=True, slots=True)
class Origin:
    """`uid` is that of the person at the terminal, also below sudo. `file` is None where the plan came from none."""

    file: str | None
    checkout: str
    uid: int


def own_origin(file: Path | None) -> Origin:
    """Origin with which a lab raised by this process is written down."""
    return Origin(None if file is None else str(file), CHECKOUT, _person())


def write_origin(record: Record, origin: Origin) -> None:
    record.origin_file.write_text(json.dumps(asdict(origin)))


def read_origin(record: Record) -> Origin | None:
    """None where a lab of another version, or somebody's hand, left no such file."""
    try:
        found = json.loads(record.origin_file.read_text())
        origin = Origin(found["file"], found["checkout"], found["uid"])
    except (OSError, ValueError, TypeError, KeyError):
        return None
    right = isinstance(origin.file, str | None) and isinstance(origin.checkout, str) and isinstance(origin.uid, int)
    return origin if right else None


def describe(record: Record) -> str:
    """`lab "two-dc" (topologies/two-dc.yaml)`."""
    origin = read_origin(record)
    file = f" ({printable(origin.file)})" if origin and origin.file else ""
    return f'lab "{printable(record.name)}"{file}'


def foreign(record: Record) -> str | None:
    """User or checkout that raised the lab, in words; None where this user did, from this checkout."""
    origin = read_origin(record)
    if origin is None:
        return "an unknown user (its record does not say)"
    if origin.uid != _person():
        return f"user {_name(origin.uid)}"
    if origin.checkout != CHECKOUT:
        return f"another checkout ({printable(origin.checkout)})"
    return None


def _person() -> int:
    """The user who typed the command: sudo says who that was."""
    said = os.environ.get("SUDO_UID", "")
    return int(said) if os.geteuid() == 0 and said.isascii() and said.isdigit() and len(said) < 11 else os.geteuid()


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OverflowError):
        return str(uid)
