"""`pddbed vm run -- CMD`: a command on a kernel with netem, in a small VM; `pddbed vm build` prepares it."""

import os
import sys
from pathlib import Path

import click

from testbed.cli import CommandError, Interrupted
from testbed.cli.output import echo
from testbed.vm.image import VmImage, default_cache, ensure_image
from testbed.vm.job import VmJob, guest_environment
from testbed.vm.run import default_cpus
from testbed.vm.run import run as run_vm
from testbed.vm.tools import VmError


def _say(line: str) -> None:
    echo(f"pddbed vm: {line}", err=True)


def _image(newest: bool = False) -> VmImage:
    try:
        return ensure_image(default_cache(), _say, newest)
    except VmError as error:
        raise CommandError(str(error)) from error


@click.group()
def vm() -> None:
    """Run a command on a kernel with netem, in a small VM."""


@vm.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=600,
    show_default=True,
    metavar="S",
    help="Seconds until the VM is ended with status 124; its boot takes about 4 of them.",
)
@click.option(
    "--memory", default="4G", show_default=True, help="Memory of the VM, which also holds files written in it."
)
@click.option(
    "--cpus", type=click.IntRange(1, 64), help="Number of emulated CPUs. [default: this machine's, at most 4]"
)
@click.option(
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Directory to which files below $PDDBED_VM_OUTPUT are copied, also after a failure.",
)
@click.option("--env", "names", multiple=True, metavar="NAME", help="Environment variable to pass on (repeatable).")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run(
    timeout: float,
    memory: str,
    cpus: int | None,
    output: Path | None,
    names: tuple[str, ...],
    command: tuple[str, ...],
) -> None:
    """Run COMMAND in the VM, as root, in this directory, with this machine's programs.

    The command sees this machine's files; what it writes is gone afterwards, except below $PDDBED_VM_OUTPUT.
    There is no network. The exit status is the command's own; 124 after a time-out, 125 when the VM died.
    """
    job = VmJob(
        argv=command,
        directory=Path.cwd(),
        environment=guest_environment(os.environ, names),
        timeout_s=timeout,
        memory=memory,
        cpus=cpus or default_cpus(),
        output=output,
    )
    image = _image()
    try:
        result = run_vm(job, image, default_cache(), say=_say)
    except VmError as error:
        raise CommandError(str(error)) from error
    except KeyboardInterrupt:
        raise Interrupted("interrupted; the VM is ended") from None
    if result.message:
        _say(result.message)
    sys.exit(result.status)


@vm.command()
def build() -> None:
    """Build the VM's image from the newest kernel package that apt knows."""
    image = _image(newest=True)
    echo(f"{image.directory} (Linux {image.kernel_release})")
