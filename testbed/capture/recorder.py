"""The recording process: enters the lab, opens a ring at each capture point, writes one pcapng file in order of time.

A forked child of the capture's process (`run`). It joins the lab's user and PID namespace, so it dies with the lab and
its sockets cannot keep a dead lab's network alive. Reports in JSON lines on `report`; a byte or end of file on `stop`
ends it.
"""

import errno
import json
import os
import select
import signal
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any, NoReturn

from testbed.capture import pcapng
from testbed.capture.context import Context
from testbed.capture.ring import RETIRE_MS, InterfaceGone, Ring, Selection
from testbed.lab.messages import CapturePoint
from workers.linux import CLONE_NEWNET, CLONE_NEWPID, CLONE_NEWUSER, setns

# A ring hands a block over at most two retire times after its first packet. Packets wait this long before they are
# written, so that those of several rings come out sorted.
_HOLD_NS = 5 * RETIRE_MS * 1_000_000
_POLL_S = 0.05
_REPORT_NS = 500_000_000
NICENESS = -10  # a few percent of a CPU, in time, rather than lost packets beside busy workers
_by_time = itemgetter(0)


def enter_and_record(
    fds: Sequence[int],
    points: Sequence[CapturePoint],
    context: Context,
    selection: Selection,
    packets: int | None,
    out: int,
    report: int,
    stop: int,
) -> NoReturn:
    """In a forked child: join what `fds` name (see `capture_points.capture`), record to `out`, end the process."""
    status = 1
    try:
        # Ctrl-C is the parent's to handle; it reaches this process group, too
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


def _open(points: Sequence[CapturePoint], networks: Sequence[int], selection: Selection) -> "list[Source]":
    """A ring in each network namespace. Raises OSError with the point in its sentence."""
    with suppress(PermissionError):
        os.nice(NICENESS)
    sources = []
    for point, network in zip(points, networks, strict=True):
        setns(network, CLONE_NEWNET)
        try:
            ring = Ring(point.ifname, selection, outgoing_only=point.arriving is None)
        except OSError as error:
            raise OSError(f"cannot capture {point.name} ({point.description}): {error.strerror}") from None
        sources.append(Source(ring, point.name, point.description))
    return sources


def _wait(inner: int) -> int:
    """The recorder's status; this process dies of a signal as the recorder did, with the lab as a rule."""
    _, wait_status = os.waitpid(inner, 0)
    status = os.waitstatus_to_exitcode(wait_status)
    if status < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return status


@dataclass(frozen=True, slots=True)
class Source:
    """An open ring, and the name of its interface in the file."""

    ring: Ring
    name: str
    description: str


class Recorder:
    """Writes what `sources` see to the descriptor `out`. `limit` packets at most, None: no limit."""

    def __init__(
        self, sources: Sequence[Source], out: int, report: int, stop: int, snaplen: int, limit: int | None
    ) -> None:
        self._sources = sources
        self._out = out
        self._report_fd = report
        self._stop = stop
        self._snaplen = snaplen
        self._limit = limit
        self._pending: list[tuple[int, bytes]] = []  # (time, packet block)
        self._written = self._offset = 0
        self._counting = True
        self._begun_ns = 0
        self._ended_ns: int | None = None

    def run(self, comment: Callable[[int], str]) -> int:
        """Record to the end; returns the exit status. `comment` gets the time from which everything is recorded."""
        try:
            self._begin(comment)
            gone = self._loop()
            self._end()
            if gone is not None:
                self._report("failed", error=gone, **self._account())
                return 1
        except OSError as error:
            self._report("failed", error=_sentence(error), **self._account())
            return 1
        finally:
            for source in self._sources:
                source.ring.close()
        return 0

    def _begin(self, comment: Callable[[int], str]) -> None:
        self._begun_ns = time.time_ns()
        blocks = [pcapng.section_block(comment(self._begun_ns))]
        blocks += [
            pcapng.interface_block(source.name, source.description, source.ring.linktype, self._snaplen)
            for source in self._sources
        ]
        self._write(b"".join(blocks))
        self._report("started", offset=self._offset)

    def _loop(self) -> str | None:
        """Record until told to stop; returns the reason where something else ended it."""
        waiting_for = [*(source.ring.fileno() for source in self._sources), self._stop]
        reported_ns = time.monotonic_ns()
        full = False
        while True:
            # half a retire time of rest lets blocks fill: fewer wake-ups beside a busy emulator
            readable, _, _ = select.select([self._stop], [], [], RETIRE_MS / 2000)
            if not readable:
                readable, _, _ = select.select(waiting_for, [], [], _POLL_S)
            now_ns = time.time_ns()
            if self._stop in readable:
                self._ended_ns = self._ended_ns or now_ns
                return None
            took = self._drain()
            if full:
                self._pending.clear()
                continue
            self._flush(now_ns - _HOLD_NS if len(self._sources) > 1 else now_ns)
            if self._limit is not None and self._written >= self._limit:
                full = True
                self._report("full")
            if not took and readable:
                try:
                    for source in self._sources:
                        source.ring.check()
                except InterfaceGone:
                    return "the interface went away: its link or the lab has ended"
            if time.monotonic_ns() - reported_ns > _REPORT_NS:
                reported_ns = time.monotonic_ns()
                self._report("progress", **self._account())

    def _drain(self) -> bool:
        """Take what the rings have ready; whether that was anything."""
        pack, pending = pcapng.packet_block, self._pending
        before = len(pending)
        for interface, source in enumerate(self._sources):
            for packets in source.ring.ready_blocks():
                pending += [
                    (time_ns, pack(interface, time_ns, data, original, way)) for time_ns, data, original, way in packets
                ]
        return len(pending) > before

    def _flush(self, until_ns: int) -> None:
        """Write, in order, the packets that are not younger than `until_ns`."""
        self._pending.sort(key=_by_time)
        ripe = bisect_right(self._pending, until_ns, key=_by_time)
        if self._limit is not None and self._written + ripe >= self._limit:
            ripe = self._limit - self._written
            if ripe:
                self._ended_ns = self._pending[ripe - 1][0]
        if not ripe:
            return
        self._write(b"".join([block for _, block in self._pending[:ripe]]))
        del self._pending[:ripe]
        self._written += ripe

    def _end(self) -> None:
        """The last packets, up to the moment of the stop, and each interface's account."""
        self._ended_ns = self._ended_ns or time.time_ns()
        self._count()  # now: what arrives from here on is not part of the capture
        self._counting = False
        time.sleep(3 * RETIRE_MS / 1000)
        self._drain()
        self._flush(self._ended_ns)
        accounts = [
            pcapng.Statistics(number, self._begun_ns, self._ended_ns, source.ring.received, source.ring.dropped)
            for number, source in enumerate(self._sources)
        ]
        self._write(b"".join(pcapng.statistics_block(account) for account in accounts))
        self._report("ended", **self._account())

    def _count(self) -> None:
        for source in self._sources if self._counting else ():
            source.ring.count()

    def _account(self) -> dict[str, int]:
        self._count()
        dropped = sum(source.ring.dropped for source in self._sources)
        return {"packets": self._written, "dropped": dropped, "offset": self._offset}

    def _write(self, data: bytes) -> None:
        """All of it or, on a full disk, none of it, so that the file ends with a whole block."""
        left = memoryview(data)
        try:
            while left:
                left = left[os.write(self._out, left) :]
        except OSError:
            with suppress(OSError):  # a pipe or a device has no length to restore
                os.ftruncate(self._out, self._offset)
            raise
        self._offset += len(data)

    def _report(self, event: str, **details: Any) -> None:
        with suppress(OSError):  # the parent is gone; the end of file on `stop` says so, too
            os.write(self._report_fd, json.dumps({"event": event, **details}).encode() + b"\n")


def _sentence(error: OSError) -> str:
    if error.errno == errno.ENOSPC:
        return "no space left on the disk; the file holds the packets until then"
    if error.errno == errno.EPIPE:
        return "nobody reads the output any more"
    return error.strerror or str(error)
