"""The way of the recorder into the lab: user and PID namespace, then one network namespace after the other.

Runs in a child of the session. The recorder is a member of the lab's PID namespace, so it dies with the lab and its
sockets cannot keep a dead lab's network alive.
"""

import json
import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from testbed.capture.context import Context
from testbed.capture.recorder import Recorder, Source
from testbed.capture.ring import Ring, Selection
from testbed.netns import CLONE_NEWNET, CLONE_NEWPID, CLONE_NEWUSER, setns

NICENESS = -10  # a few percent of a CPU, in time, rather than lost packets beside busy workers


def enter_and_record(
    fds: Sequence[int],
    points: Sequence[dict[str, Any]],
    context: Context,
    selection: Selection,
    packets: int | None,
    out: int,
    report: int,
    stop: int,
) -> NoReturn:
    """In a forked child: join what `fds` name (see `points.capture`), record to `out`, end the process."""
    status = 1
    try:
        # Ctrl-C is the session's to handle; it reaches this process group, too
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT):
            signal.signal(number, signal.SIG_IGN)
        user, pid, *networks = fds
        if os.fstat(user).st_ino != Path("/proc/self/ns/user").stat().st_ino:
            setns(user, CLONE_NEWUSER)
        setns(pid, CLONE_NEWPID)  # takes effect for children only, hence the fork
        inner = os.fork()
        if inner == 0:
            sources = _open(points, networks, selection)
            recorder = Recorder(sources, out, report, stop, selection.snaplen or 0, packets)
            status = recorder.run(lambda begun_ns: replace(context, begun_ns=begun_ns).to_comment())
        else:
            for fd in (*fds, out, report, stop):
                os.close(fd)
            status = _wait(inner)
    except BaseException as error:  # a forked child must never return into the caller's code
        with suppress(OSError):
            os.write(report, json.dumps({"event": "failed", "error": str(error)}).encode() + b"\n")
    finally:
        os._exit(status)


def _open(points: Sequence[dict[str, Any]], networks: Sequence[int], selection: Selection) -> list[Source]:
    """A ring in each network namespace. Raises OSError with the point in its sentence."""
    with suppress(PermissionError):
        os.nice(NICENESS)
    sources = []
    for point, network in zip(points, networks, strict=True):
        setns(network, CLONE_NEWNET)
        try:
            ring = Ring(point["ifname"], selection, outgoing_only=point["arriving"] is None)
        except OSError as error:
            raise OSError(f"cannot capture {point['name']} ({point['description']}): {error.strerror}") from None
        sources.append(Source(ring, point["name"], point["description"]))
    return sources


def _wait(inner: int) -> int:
    """The recorder's status; this process dies of a signal as the recorder did, with the lab as a rule."""
    _, wait_status = os.waitpid(inner, 0)
    status = os.waitstatus_to_exitcode(wait_status)
    if status < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return status
