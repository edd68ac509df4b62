"""The `pddbed` command: a group that imports each command only when it is used, and turns errors into one sentence.

A command is one module; `COMMANDS` says where it lives. Exit status: 0 ok, 1 failed, 2 usage.
"""

import importlib
import sys
from typing import Any

import click

from testbed.cli.output import flush_standard_streams, harmless, open_standard_streams

# group -> command -> "module:attribute" (imported on use: torch and mininet are slow to import)
COMMANDS: dict[str, dict[str, str]] = {
    "Files": {
        "validate": "testbed.cli.validate:validate",
        "schema": "testbed.cli.validate:schema",
        "graph": "testbed.cli.graph:graph",
    },
    "Lab": {
        "up": "testbed.cli.up:up",
        "down": "testbed.cli.down:down",
        "ps": "testbed.cli.ps:ps",
        "status": "testbed.cli.status:status",
        "logs": "testbed.cli.logs:logs",
        "exec": "testbed.cli.exec:exec_",
        "shell": "testbed.cli.exec:shell",
    },
    "WAN": {
        "wan": "testbed.cli.wan:wan",
        "capture": "testbed.cli.capture:capture",
        "audit": "testbed.cli.audit:audit",
        "verify": "testbed.cli.verify:verify",
    },
    "Serving": {
        "ask": "testbed.cli.ask:ask_command",
        "bench": "experiments.cli.bench:bench",
        "model": "testbed.cli.model:model",
    },
    "Experiments": {
        "trace": "experiments.cli.trace:trace",
        "experiment": "experiments.cli.experiment:experiment",
        "report": "experiments.cli.experiment:report",
        "compare": "experiments.cli.compare:compare",
        "sim": "experiments.cli.sim:sim",
    },
    "Machine": {
        "doctor": "testbed.cli.doctor:doctor",
        "vm": "testbed.cli.vm:vm",
    },
}


class CommandError(click.ClickException):
    """A failure and the next step, in one sentence. Exit status 1."""

    exit_code = 1

    def show(self, file: Any = None) -> None:
        click.echo(harmless(f"pddbed: {self.format_message()}"), file=file or sys.stderr, err=file is None)


class Interrupted(CommandError):
    """Ctrl-C ended the command; the sentence says what is left of what it did. Exit status 130, as of a shell's."""

    exit_code = 130

    def __init__(self, message: str = "interrupted") -> None:
        super().__init__(message)


class LazyGroup(click.Group):
    """A click group whose commands are imported when they are named."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        open_standard_streams()
        try:
            return super().main(*args, **kwargs)
        except SystemExit as end:
            problem, code = flush_standard_streams(), end.code
        except KeyboardInterrupt:  # before any command was invoked
            Interrupted().show()
            problem, code = flush_standard_streams(), Interrupted.exit_code
        except OSError as error:  # before any command was invoked: `--help` into a full disk
            problem, code = flush_standard_streams() or error, None
        if problem is not None and not code:
            click.echo(f"pddbed: the output cannot be written: {problem.strerror}", err=True)
            code = 1
        sys.exit(code)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; a full disk, say, is no reason for a traceback. Click handles a reader that went away."""
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            error.message = harmless(error.message)  # type: ignore[misc]  # it quotes the command line, which names of files may be on
            raise
        except (KeyboardInterrupt, click.Abort):
            raise Interrupted from None
        except BrokenPipeError:
            raise
        except OSError as error:
            raise CommandError(str(error)) from error

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for commands in COMMANDS.values() for name in commands]

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        for commands in COMMANDS.values():
            if name in commands:
                module, attribute = commands[name].split(":")
                command: click.Command = getattr(importlib.import_module(module), attribute)
                return command
        return None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, names in COMMANDS.items():
            rows = []
            for name in names:
                command = self.get_command(ctx, name)
                if command is not None:
                    rows.append((name, command.get_short_help_str(limit=200)))
            with formatter.section(title):
                formatter.write_dl(rows)


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="pddbed")
def main() -> None:
    """Two datacenters on one machine: a testbed for cross-datacenter LLM inference.

    \b
    sudo pddbed up topologies/two-dc.yaml     build the lab and start its workers
    pddbed ask "What is a WAN?"               one answer, relayed across the WAN
    sudo pddbed down                          everything gone again
    """
