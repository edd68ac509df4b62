"""What a caller may have left odd for a command: closed standard streams, SIGCHLD ignored, readers that go away."""

import os
import signal
import sys


def settle() -> None:
    """Open what is closed of the standard streams on /dev/null, and take back an ignored SIGCHLD.

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


def unwritten() -> OSError | None:
    """Write out what is buffered. What cannot be written goes to /dev/null, so that the interpreter's own flush at exit
    does not make 120 of whatever status the command ended with. Returns why, unless nobody reads it any more."""
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
