"""The cross traffic of a lab: starts the processes of each source ahead of time, sets them off, counts, reports.

Owns their lives; what they do is `traffic`'s. Each source has a thread that waits for it, so that whoever plays the
timeline never does.
"""

import subprocess
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from testbed.congestion.traffic import messages
from testbed.congestion.traffic.pacing import burst_seed
from testbed.machine.netns import network_namespace_of
from testbed.machine.programs import environment, program
from testbed.model.timeline import CrossTraffic

READY_PATIENCE_S = 20.0
_LEAST_LINGER_S, _MOST_LINGER_S = 0.3, 60.0
Report = Callable[..., None]


@dataclass(frozen=True, slots=True)
class Source:
    """The place of cross traffic: processes whose network namespaces are used, the far address, the link's MTU."""

    link: str
    direction: str
    sender_pid: int
    receiver_pid: int
    receiver_address: str
    mtu: int
    # how long what was sent last may still be on its way, as the link is when asked: the RTT and a full queue
    drain_ns: Callable[[], int]


class Stream:
    """The processes of one source of one occurrence. `start` and `stop` return at once."""

    def __init__(self, wanted: CrossTraffic, source: Source, seeds: list[str], report: Report) -> None:
        self.source = source
        self._wanted = wanted
        self._seeds = seeds
        self._report = report
        self._start_ns: int | None = None
        self._told = threading.Event()
        self._stopped = False
        self._sender: subprocess.Popen[str] | None = None
        self.ready = threading.Event()
        self._thread = threading.Thread(target=self._live, name="cross-traffic", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    @property
    def started(self) -> bool:
        return self._start_ns is not None

    def start(self, start_ns: int) -> None:
        """Set the flows off at `start_ns` (CLOCK_MONOTONIC)."""
        self._start_ns = start_ns
        self._told.set()

    def stop(self) -> None:
        """End the flows before their time, or the processes before their flows."""
        self._stopped = True
        self._told.set()
        sender = self._sender
        if sender is not None and sender.stdin is not None:
            with suppress(OSError, ValueError):
                sender.stdin.write("stop\n")
                sender.stdin.flush()

    def wait(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _live(self) -> None:
        children: list[subprocess.Popen[str]] = []
        try:
            self._run(children)
        except Exception as error:
            self._report("error", error=f"cross traffic on {self.source.link}: {error!r}")
        finally:
            self.ready.set()
            for child in children:
                _end(child)

    def _run(self, children: list[subprocess.Popen[str]]) -> None:
        wanted, source = self._wanted, self.source
        receiver = _spawn(source.receiver_pid)
        children.append(receiver)
        _tell(receiver, messages.BeReceiver(wanted.protocol, source.receiver_address, wanted.flows))
        sender = _spawn(source.sender_pid)
        children.append(sender)
        rate_bps = None if wanted.rate_bps is None else max(1, wanted.rate_bps // wanted.flows)
        order = messages.BeSender(
            protocol=wanted.protocol,
            address=source.receiver_address,
            port=_hear(receiver, messages.Listening).port,
            mtu=source.mtu,
            seeds=self._seeds,
            rate_bps=rate_bps,
            duration_ns=wanted.duration_ns,
            on_ns=wanted.on_ns,
            off_ns=wanted.off_ns,
        )
        _tell(sender, order)
        _hear(sender, messages.Ready)
        self._sender = sender
        self.ready.set()
        self._told.wait()
        if self._start_ns is None:
            return
        if not self._stopped:
            _tell(sender, messages.Begin(self._start_ns))
            sent = _hear(sender, messages.Sent)
            # What is on its way is still to be counted.
            linger_s = min(_MOST_LINGER_S, max(_LEAST_LINGER_S, 1.2 * source.drain_ns() / 1e9))
            with suppress(subprocess.TimeoutExpired):
                receiver.wait(linger_s)
            _tell(receiver, messages.Report())
            received = _hear(receiver, messages.Received)
            self._report("traffic", sent=sent, received=received, **self._rates(sent, received))

    def _rates(self, sent: messages.Sent, received: messages.Received) -> dict[str, int]:
        span_ns = sent["ended_ns"] - sent["began_ns"]
        rate = 0 if span_ns <= 0 else round(received["bytes"] * 8e9 / span_ns)
        return {"received_payload_bps": rate, "late_ns": sent["late_ns"]}


class TrafficPool:
    """The streams of a timeline, by event, occurrence and target."""

    def __init__(self, seed: int, report: Report) -> None:
        self._seed = seed
        self._report = report
        self._streams: dict[tuple[int, int, int], Stream] = {}

    def prepare(self, event: int, occurrence: int, wanted: CrossTraffic, sources: list[Source]) -> list[Stream]:
        """Start the processes of an occurrence, once."""
        streams = []
        for target, source in enumerate(sources):
            key = (event, occurrence, target)
            if key not in self._streams:
                self._streams = {known: stream for known, stream in self._streams.items() if stream.running}
                seeds = [burst_seed(self._seed, event, occurrence, target, flow) for flow in range(wanted.flows)]
                self._streams[key] = Stream(wanted, source, seeds, self._reporting(event, occurrence, source))
            streams.append(self._streams[key])
        return streams

    def _reporting(self, event: int, occurrence: int, source: Source) -> Report:
        where = {"event": event, "occurrence": occurrence, "link": source.link, "direction": source.direction}
        return lambda what, **fields: self._report(what, **where, **fields)

    @property
    def counting(self) -> bool:
        """True when any stream sends, or is still being counted."""
        return any(stream.started and stream.running for stream in self._streams.values())

    def stop(self, patience_s: float = _MOST_LINGER_S + 5) -> None:
        """End everything, and wait for the last counts."""
        for stream in self._streams.values():
            stream.stop()
        for stream in self._streams.values():
            stream.wait(patience_s)


def _spawn(pid: int) -> "subprocess.Popen[str]":
    variables = {**environment(), "PYTHONDONTWRITEBYTECODE": "1"}
    with network_namespace_of(pid):
        return subprocess.Popen(
            program("testbed.congestion.traffic"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=variables,
            start_new_session=True,
        )


def _tell(child: "subprocess.Popen[str]", message: object) -> None:
    assert child.stdin is not None
    child.stdin.write(messages.line_of(message))
    child.stdin.flush()


def _hear(child: "subprocess.Popen[str]", kind: type[messages.T]) -> messages.T:
    assert child.stdout is not None
    line = child.stdout.readline()
    if not line:
        raise OSError(f"the process ended with status {child.wait()}")
    return messages.read_line(line, kind)


def _end(child: "subprocess.Popen[str]") -> None:
    """The end of its standard input is its order to go."""
    for stream in (child.stdin, child.stdout):
        if stream is not None:
            with suppress(OSError):
                stream.close()
    try:
        child.wait(2)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
