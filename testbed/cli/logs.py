"""`pddbed logs`: the log of a host's process, or of one of the lab's own."""

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from testbed.cli.options import lab_errors, lab_option
from testbed.cli.output import echo

if TYPE_CHECKING:
    from testbed.lab.record import Record

OWN = "lab/"  # before the names of the lab's own processes; no host's name can have a slash


@click.command()
@click.argument("host", required=False)
@lab_option
@click.option("--follow", "-f", is_flag=True, help="Keep printing new lines until the lab ends or Ctrl-C.")
@lab_errors
def logs(host: str | None, lab: str | None, follow: bool) -> None:
    """Print the log of HOST (or of a process of the lab itself, such as lab/guardian), or every log of the lab."""
    from testbed.lab.record import find_record

    record = find_record(lab)
    files = _logs(record)
    if host is not None:
        files = {host: _chosen(files, host)}
    offsets = dict.fromkeys(files.values(), 0)
    try:
        while True:
            for name, file in files.items():
                # A line that is not complete yet may be, the next time.
                offsets[file] += _print_from(file, offsets[file], label=None if host else name, whole=follow)
            if not follow or record.guardian_pid() is None:
                return
            time.sleep(0.2)
    except KeyboardInterrupt:
        return


def _logs(record: "Record") -> dict[str, Path]:
    """Every log by the name that it is asked for with: hosts first, then the lab's own."""
    found: dict[str, Path] = {}
    for prefix, directory in (("", record.host_logs), (OWN, record.logs)):
        found.update({prefix + path.name.removesuffix(".log"): path for path in sorted(directory.glob("*.log"))})
    return found


def _chosen(files: dict[str, Path], name: str) -> Path:
    from testbed.lab.record import LabError

    file = files.get(name) or files.get(OWN + name)
    if file is None:
        raise LabError(f'no log of "{name}"; there are: {", ".join(files)}')
    return file


def _print_from(file: Path, offset: int, label: str | None, whole: bool) -> int:
    """Print the lines from `offset` on, or only whole ones; returns the number of bytes consumed."""
    try:
        with file.open("rb") as stream:
            stream.seek(offset)
            data = stream.read()
    except FileNotFoundError:
        return 0
    if whole:
        data = data[: data.rfind(b"\n") + 1]
    for line in data.decode(errors="replace").removesuffix("\n").split("\n") if data else ():
        echo(f"{label:<12} {line}" if label else line)
    return len(data)
