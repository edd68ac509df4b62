"""Plays a timeline on the links of a running lab: waits for the next logical time, applies what is due, writes it down.

Owns the waiting and the order of things; `schedule` knows what is due, `apply` does it. Always wakes for logical times,
never for "now + dt", so that lateness does not add up.
"""

import os
import select
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic_ns

from testbed.congestion.apply import Applier, Done, Write
from testbed.congestion.schedule import Assign, Move, PrepareTraffic, Schedule, ServingEvent
from testbed.congestion.triggers import TriggerSocket, lengthen_datagram_queues
from testbed.lab import messages
from testbed.lab.messages import TimelineState
from testbed.model.timeline import CrossTraffic, Event, Timeline

_FIFO_PRIORITY = 15  # below the emulators': a change may wait for a packet, not the other way round
_PREPARE_PATIENCE_S = 20.0
_COUNTING_PATIENCE_S = 1.0  # between looks at cross traffic that is still being counted


class PlayError(Exception):
    """A timeline cannot be played; the message says why."""


@dataclass
class Progress:
    """The state of a player."""

    state: str = "preparing"  # preparing | playing | waiting | over | stopped | failed
    began_ns: int | None = None
    ended_ns: int | None = None
    applied: int = 0
    superseded: int = 0
    latest_ns: int = 0
    errors: list[str] = field(default_factory=list)


class Player:
    """One timeline on one lab. `begin` returns once it plays; everything else happens in its own thread."""

    def __init__(self, timeline: Timeline, applier: Applier, write: Write, events_socket: Path) -> None:
        self._timeline = timeline
        self._applier = applier
        self._write = write
        self._events_socket = events_socket
        self._schedule = Schedule(timeline)
        self._active: dict[tuple[int, int], Move] = {}  # by event and occurrence: the last move of what goes on
        self._progress = Progress()
        self._began = threading.Event()
        self._stop_read, self._stop_write = os.pipe()
        self._stopping = False
        self._thread = threading.Thread(target=self._live, name="congestion", daemon=True)

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def begin(self) -> None:
        """Prepare and start; the timeline's zero is when this returns. Raises PlayError."""
        self._thread.start()
        self._began.wait()
        if self._progress.state == "failed":
            raise PlayError(self._progress.errors[-1])

    def stop(self) -> None:
        """End it early: outages heal, cross traffic ends, replays put back what they found; the rest stays."""
        self._stopping = True
        with suppress(OSError):
            os.write(self._stop_write, b"x")
        self._thread.join()

    def state(self) -> TimelineState:
        """The answer to `wan show` and `wan play`: durations in ns since the timeline began."""
        progress, now = self._progress, monotonic_ns()
        elapsed = None if progress.began_ns is None else (progress.ended_ns or now) - progress.began_ns
        upcoming = self._schedule.next_move if self.running else None
        return {
            "source": self._timeline.source,
            "state": progress.state,
            "elapsed_ns": elapsed,
            "length_ns": self._timeline.length_ns,
            "began_monotonic_ns": progress.began_ns,
            "events": len(self._timeline.events),
            "playing": [self._describe(move) for move in list(self._active.values())],
            "next": None if upcoming is None else {"at_ns": upcoming.at_ns, **self._describe(upcoming)},
            "waiting": [self._describe_trigger(event) for event in self._schedule.waiting()] if self.running else [],
            "applied": progress.applied,
            "superseded": progress.superseded,
            "latest_ns": progress.latest_ns,
            "errors": list(progress.errors),
        }

    def _live(self) -> None:
        events: TriggerSocket | None = None
        try:
            self._be_punctual()
            lengthen_datagram_queues()
            events = TriggerSocket(self._events_socket)
            self._prepare()
            self._play(events)
            self._finish("stopped" if self._stopping else "over")
        except Exception as error:
            self._progress.errors.append(str(error) or repr(error))
            self._finish("failed")
        finally:
            if events is not None:
                events.close()
            for fd in (self._stop_read, self._stop_write):
                os.close(fd)
            self._began.set()

    def _be_punctual(self) -> None:
        """This thread only, and not the processes that it starts. Where it is refused, lateness is recorded as ever."""
        with suppress(OSError):
            policy = os.SCHED_FIFO | os.SCHED_RESET_ON_FORK
            os.sched_setscheduler(0, policy, os.sched_param(_FIFO_PRIORITY))

    def _prepare(self) -> None:
        """Everything that takes a while, before the timeline's zero."""
        self._applier.set_up(self._timeline)
        streams = []
        for move in self._schedule.due(-1):
            streams += self._applier.prepare_traffic(move.event, move.occurrence)
        for event in self._schedule.waiting():
            if isinstance(event.what, CrossTraffic):
                streams += self._applier.prepare_traffic(event, 0)
        for stream in streams:
            if not stream.ready.wait(_PREPARE_PATIENCE_S):
                raise PlayError(f"cross traffic on {stream.source.link} is not ready after {_PREPARE_PATIENCE_S:.0f} s")

    def _play(self, events: TriggerSocket) -> None:
        zero = self._progress.began_ns = monotonic_ns()
        self._progress.state = "playing"
        self._write("begin", zero_ns=zero, timeline=self._timeline.to_dict(whole=False))
        self._began.set()
        schedule = self._schedule
        while not self._stopping and not (schedule.done and not self._applier.counting):
            upcoming = schedule.next_ns()
            self._progress.state = "playing" if upcoming is not None or self._active else "waiting"
            timeout = _COUNTING_PATIENCE_S if self._applier.counting else None
            if upcoming is not None:
                timeout = max(0, zero + upcoming - monotonic_ns()) / 1e9
            readable, _, _ = select.select([events.fileno(), self._stop_read], [], [], timeout)
            if self._stop_read in readable:
                return
            now = monotonic_ns()
            if events.fileno() in readable:
                for told, at_ns in events.listen(now):
                    self._hear(told, max(0, at_ns - zero), zero)
            for move, superseded in _latest_only(schedule.due(now - zero)):
                self._apply(move, superseded, zero)

    def _hear(self, told: ServingEvent, at_ns: int, zero: int) -> None:
        for event in self._schedule.tell(told, at_ns):
            message = {"told": told.event, "fraction": told.fraction, "request": told.request}
            self._write("triggered", event=event.number, kind=event.kind, logical_ns=at_ns, **message)
            if isinstance(event.what, CrossTraffic) and event in self._schedule.waiting():
                self._applier.prepare_traffic(event, self._schedule.occurrences(event))

    def _apply(self, move: Move, superseded: int, zero: int) -> None:
        due = zero + move.at_ns
        before = monotonic_ns()
        try:
            done = self._applier.perform(move, due)
        except Exception as error:  # one change that fails must not end the timeline; it is told and recorded
            self._progress.errors.append(f"congestion[{move.event.number}].{move.event.kind}: {error}")
            done = Done("error", {"error": str(error) or repr(error)}, monotonic_ns())
        self._track(move)
        if isinstance(move.action, PrepareTraffic):
            return
        self._progress.applied += done.what != "error"
        self._progress.superseded += superseded
        self._progress.latest_ns = max(self._progress.latest_ns, done.at_ns - due)
        self._write(
            done.what,
            event=move.event.number,
            kind=move.event.kind,
            occurrence=move.occurrence,
            targets=[list(target) for target in move.event.targets],
            logical_ns=move.at_ns,
            due_ns=due,
            late_ns=done.at_ns - due,
            took_ns=done.at_ns - before,
            **({"superseded": superseded} if superseded else {}),
            **done.fields,
        )

    def _track(self, move: Move) -> None:
        """Keep track of what goes on, from an occurrence's beginning to its last move."""
        key = (move.event.number, move.occurrence)
        if move.is_last:
            self._active.pop(key, None)
        elif move.at_ns >= move.start_ns:
            self._active[key] = move

    def _finish(self, state: str) -> None:
        try:
            for what, fields in self._applier.clear():
                self._write(what, **fields)
        except Exception as error:
            self._progress.errors.append(str(error) or repr(error))
        self._active.clear()
        self._progress.ended_ns = monotonic_ns()
        self._progress.state = state
        progress = {name: getattr(self._progress, name) for name in ("applied", "superseded", "latest_ns", "errors")}
        self._write("end", state=state, never_triggered=[e.number for e in self._schedule.waiting()], **progress)

    def _describe(self, move: Move) -> messages.Move:
        targets = [list(target) for target in move.event.targets]
        return {"event": move.event.number, "kind": move.event.kind, "targets": targets}

    def _describe_trigger(self, event: Event) -> messages.Waiting:
        trigger = event.trigger
        assert trigger is not None
        return {
            "event": event.number,
            "kind": event.kind,
            "targets": [list(target) for target in event.targets],
            "for": trigger.event,
            "fraction": trigger.fraction,
            "request": trigger.request,
        }


def _latest_only(batch: list[Move]) -> Iterator[tuple[Move, int]]:
    """A batch that is due at once, without values that a later move of the same occurrence replaces anyway.

    More than one of them are due only when the player is late; then only the last one still has an effect.
    """
    last: dict[tuple[int, int], int] = {}
    for position, move in enumerate(batch):
        if isinstance(move.action, Assign):
            last[(move.event.number, move.occurrence)] = position
    skipped: dict[tuple[int, int], int] = {}
    for position, move in enumerate(batch):
        key = (move.event.number, move.occurrence)
        if isinstance(move.action, Assign) and last[key] != position:
            skipped[key] = skipped.get(key, 0) + 1
        else:
            yield move, skipped.pop(key, 0) if isinstance(move.action, Assign) else 0
