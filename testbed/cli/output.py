"""The standard streams of a command: opened, written to and flushed so that nothing of others' text drives a terminal.

Control characters in text of files, servers, models and hosts' programs are escaped where it is printed, wherever it
goes; `--json` has them as JSON writes them.
"""

import os
import re
import signal
import sys
from typing import Any

import click

# C0 but tab and newline, DEL and C1 (in UTF-8 too, terminals take U+009B for the beginning of a sequence); what turns
# the direction of text (it makes a line read as another); halves of surrogate pairs, which cannot be encoded.
_DRIVES = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def harmless(text: str) -> str:
    """`text` with control characters as escapes (`\\x1b`); tabs and ends of lines stay."""
    return _DRIVES.sub(lambda found: found.group().encode("unicode_escape").decode(), text.replace("\r\n", "\n"))


def echo(text: Any = "", *, fg: str | None = None, dim: bool = False, err: bool = False, nl: bool = True) -> None:
    """Print, escaped, in a colour where that is a terminal. NO_COLOR is heeded."""
    click.secho(harmless(str(text)), fg=fg, dim=dim or None, err=err, nl=nl)


def json_text(value: str) -> str:
    """JSON text for a terminal: what JSON may have as it is and a terminal may not, written as JSON's escapes."""
    return _DRIVES.sub(lambda found: f"\\u{ord(found.group()):04x}", value)


def open_standard_streams() -> None:
    """Open on /dev/null each standard stream that the caller closed, and take back an ignored SIGCHLD.

    A descriptor opened while one of 0, 1 and 2 is free would become that stream, and a child's output would go into
    it; while SIGCHLD is ignored, nobody can wait for a child's status.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def flush_standard_streams() -> OSError | None:
    """Write out what is buffered; returns the error where that fails, unless nobody reads the stream any more.

    Text that cannot be written goes to /dev/null: the interpreter's own flush at exit would turn whatever status the
    command ended with into 120.
    """
    problem = None
    for stream, fd in ((sys.stdout, 1), (sys.stderr, 2)):
        try:
            stream.flush()
        except ValueError:  # closed: nothing is left
            continue
        except OSError as error:
            problem = problem if isinstance(error, BrokenPipeError) else error
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, fd)
            os.close(null)
    return problem
