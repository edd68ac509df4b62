"""One capture, from outside the lab: opens the file, sends the recorder into the lab, follows it, ends it cleanly.

    pddbed capture --fork--> joins the lab's PID namespace --fork--> recorder (sockets; dies with the lab)

Owns processes, descriptors and the file's last whole block; the recorder writes the packets. Asks the workers to
note their byte counters when recording has begun and before it ends, so that an audit can compare.
"""

import json
import os
import select
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testbed.capture import pcapng
from testbed.capture.context import Context
from testbed.capture.counters import CounterReader, lags_s
from testbed.capture.recorder import enter_and_record
from testbed.capture.ring import Selection
from testbed.lab.control import ask_for_descriptors
from testbed.lab.messages import Capture
from testbed.lab.record import LabError, Record

_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Parameters:
    """The parameters of a capture. `at`: one end of a link (a datacenter); None: each direction where it leaves."""

    name: str
    at: str | None
    selection: Selection
    duration_s: float | None
    packets: int | None
    settle_s: float  # at most how long to wait, at both ends, for a moment when no frame is on its way


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a capture. `error` is None when the capture ended as it should."""

    packets: int
    dropped: int | None  # None: not known, the recorder was killed
    file_bytes: int
    seconds: float
    counted: tuple[str, ...]  # workers whose counters an audit can compare with
    error: str | None


def open_output(file: Path, *, overwrite: bool) -> int:
    """A descriptor of the new file. Raises LabError."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (os.O_TRUNC if overwrite else os.O_EXCL)
    try:
        return os.open(file, flags, 0o644)
    except FileExistsError:
        raise LabError(f"{file} exists; choose another name, or -f to overwrite it") from None
    except OSError as error:
        raise LabError(f"cannot write {file}: {error.strerror}") from None


def capture(
    record: Record,
    parameters: Parameters,
    open_out: Callable[[], int],
    on_event: Callable[[dict[str, Any]], None] = lambda event: None,
) -> Outcome:
    """Capture until the duration or number of packets is reached, SIGINT or SIGTERM comes, or the lab ends.

    `open_out` is called when the lab has answered. Raises LabError when nothing can be captured.
    """
    reply, fds = ask_for_descriptors(record, Capture(parameters.name, parameters.at))
    context = Context.from_comment(reply.context)
    assert context is not None, "a lab of this version describes itself"
    try:
        out = open_out()
        reading, report = os.pipe()
        stop, stopping = os.pipe()
        child = os.fork()
        if child == 0:
            for fd in (reading, stopping):
                os.close(fd)
            enter_and_record(fds, reply.points, context, parameters.selection, parameters.packets, out, report, stop)
    finally:
        for fd in fds:  # a descriptor of its namespaces would keep a dead lab's network alive
            os.close(fd)
    for fd in (report, stop):
        os.close(fd)
    try:
        return _Run(record, parameters, context, child, out, reading, stopping, on_event).follow()
    finally:
        for fd in (out, reading):
            os.close(fd)


class _Run:
    """Follows one recorder."""

    def __init__(
        self,
        record: Record,
        parameters: Parameters,
        context: Context,
        child: int,
        out: int,
        reading: int,
        stopping: int,
        on_event: Callable[[dict[str, Any]], None],
    ) -> None:
        self._record = record
        self._parameters = parameters
        self._child = child
        self._out = out
        self._lines = _Lines(reading)
        self._stopping: int | None = stopping
        self._on_event = on_event
        self._packets = self._offset = 0
        self._dropped: int | None = None
        self._error: str | None = None
        self._lags_s = lags_s(context)
        self._began = 0.0
        self._interrupts = 0
        self._first = CounterReader(record, 0)  # made anew when recording begins
        self._first_is_done = False
        self._last: CounterReader | None = None

    def follow(self) -> Outcome:
        with self._interruptible():
            alive = True
            while alive:
                alive = self._step()
        self._end_recording()
        _, status = os.waitpid(self._child, 0)
        code = os.waitstatus_to_exitcode(status)
        if code != 0 and self._error is None:
            self._error, self._dropped = self._obituary(code), None
            self._trim()
        if not self._began and self._error is not None:
            raise LabError(self._error)
        return Outcome(
            packets=self._packets,
            dropped=self._dropped,
            file_bytes=self._offset,
            seconds=time.monotonic() - self._began,
            counted=tuple(sorted(self._noted())),
            error=self._error,
        )

    def _step(self) -> bool:
        """One event or one look at the clock; False when the recorder has ended."""
        for event in self._lines.within(_POLL_S):
            if event is None:
                return False
            self._take(event)
        if self._stopping is None or not self._began:
            return True
        if self._last is None and (self._interrupts or self._is_over()):
            self._last = CounterReader(self._record, self._parameters.settle_s, after_s=self._lags_s[1])
            self._on_event({"event": "settling"})
        if self._last is None:
            self._first_is_done = self._first_is_done or self._first.step()
        elif self._last.step() or self._interrupts > 1:
            self._end_recording()
        return True

    def _noted(self) -> set[str]:
        """The workers that noted their counters at both ends."""
        ends = [self._first.noted, self._last.noted if self._last else None]
        return set() if None in ends else set.intersection(*(end for end in ends if end is not None))

    def _is_over(self) -> bool:
        return self._parameters.duration_s is not None and time.monotonic() - self._began >= self._parameters.duration_s

    def _take(self, event: dict[str, Any]) -> None:
        for name in ("packets", "dropped", "offset"):
            if name in event:
                setattr(self, f"_{name}", event[name])
        if event["event"] == "started":
            self._began = time.monotonic()
            self._first = CounterReader(self._record, self._parameters.settle_s, before_s=self._lags_s[0])
        elif event["event"] == "full":
            self._end_recording()
        elif event["event"] == "failed":
            self._error = event["error"]
        self._on_event(event)

    def _end_recording(self) -> None:
        if self._stopping is not None:
            os.close(self._stopping)
            self._stopping = None

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        def interrupt(*_: Any) -> None:
            self._interrupts += 1

        before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _obituary(self, code: int) -> str:
        if self._record.guardian_pid() is None or code == -signal.SIGKILL:
            return f'lab "{self._record.name}" went away during the capture'
        return f"the recorder ended unexpectedly (status {code})"

    def _trim(self) -> None:
        """A recorder that was killed may have left part of a block at the end."""
        with suppress(OSError), open(os.dup(self._out), "rb") as stream:
            self._offset = pcapng.end_of_whole_blocks(stream, self._offset)
            os.ftruncate(self._out, self._offset)


class _Lines:
    """JSON lines from a pipe, without blocking for longer than asked."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._rest = b""

    def within(self, seconds: float) -> Iterator[dict[str, Any] | None]:
        """The events that have come; None at the end of file."""
        readable, _, _ = select.select([self._fd], [], [], seconds)
        if not readable:
            return
        data = os.read(self._fd, 1 << 16)
        if not data:
            yield None
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            yield json.loads(line)
