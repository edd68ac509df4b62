"""`pddbed logs`: what a host's process, or the supervisor, has written."""

import time
from pathlib import Path

import click

from testbed.cli.options import lab_option, sentences


@click.command()
@click.argument("host", required=False)
@lab_option
@click.option("--follow", "-f", is_flag=True, help="Keep printing what is added, until the lab ends or Ctrl-C.")
@sentences
def logs(host: str | None, lab: str | None, follow: bool) -> None:
    """Print the log of HOST, or of every host, the supervisor and the relays."""
    from testbed.lab.record import LabError, find_record

    record = find_record(lab)
    directory = record.log("x").parent
    available = sorted(path.name.removesuffix(".log") for path in directory.glob("*.log"))
    if host is not None and host not in available:
        raise LabError(f'no log of "{host}"; there are: {", ".join(available)}')
    files = [record.log(name) for name in ([host] if host else available)]
    offsets = dict.fromkeys(files, 0)
    try:
        while True:
            for file in files:
                offsets[file] += _print_from(
                    file, offsets[file], label=None if host else file.name.removesuffix(".log")
                )
            if not follow or record.guardian_pid() is None:
                return
            time.sleep(0.2)
    except KeyboardInterrupt:
        return


def _print_from(file: Path, offset: int, label: str | None) -> int:
    """Print whole lines from `offset` on; returns the number of bytes consumed."""
    try:
        with file.open("rb") as stream:
            stream.seek(offset)
            data = stream.read()
    except FileNotFoundError:
        return 0
    whole = data[: data.rfind(b"\n") + 1]
    for line in whole.decode(errors="replace").splitlines():
        click.echo(f"{label:<12} {line}" if label else line)
    return len(whole)
