"""The netem driver: tbf on each border router for rate and queue, netem in the link's own node for the rest.

    router a --veth-- [port-a  bridge  port-b] --veth-- router b          forward:  tbf at a, netem at port-b
                      (the link's node)                                   backward: tbf at b, netem at port-a

Owns the devices and qdiscs of one link, through netlink only, and the threads that move a delay with jitter. What the
values mean is in `shaping`, what the kernel does with them in `qdisc`. Devices vanish with their namespaces.
"""

import errno
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import psutil
from pyroute2.netlink.exceptions import NetlinkError

from testbed.links import qdisc, segment
from testbed.links.base import LinkCounters, LinkError, WanEnd, WanLink
from testbed.links.netem_drops import Drops
from testbed.links.ordering import keep_flows_in_order
from testbed.links.shaping import TIMER_LATENESS_NS, Shape, refuse_beyond_memory, shape, wide_open
from testbed.links.tc_messages import open_netlink
from testbed.links.wander import Wanderer
from testbed.model.direction import DIRECTIONS, Direction
from testbed.model.impairment import Impairment
from testbed.model.plan import WanPlan

Done = TypeVar("Done")


@dataclass(frozen=True, slots=True)
class _Port:
    """An interface that a direction leaves through, and a netlink socket in its namespace."""

    netlink: Any
    index: int
    mtu: int

    def read(self) -> qdisc.Installed | None:
        return qdisc.installed(self.netlink, self.index, self.mtu)

    def install(self, settings: qdisc.Tbf | qdisc.Netem) -> list[str]:
        """Add or change the root qdisc; returns where the kernel differs from what it was told."""
        present = self.read()
        kind = type(settings).__name__.lower()
        qdisc.install(self.netlink, self.index, settings, self.mtu, present is not None and present.kind == kind)
        got = self.read()
        wrong = qdisc.differences(settings, got.settings if got else None)
        if got is not None and not got.charges_ip_bytes:
            wrong.append("size table: asked for, not there")
        return wrong


class NetemLink(WanLink):
    """See `WanLink`. `seed` makes jitter repeatable, and from Linux 6.7 on the kernel's random decisions too."""

    driver = "netem"

    def __init__(self, plan: WanPlan, ends: tuple[WanEnd, WanEnd], node_pid: int, run_dir: Path, seed: int = 0) -> None:
        super().__init__(plan, ends, node_pid, run_dir, seed)
        # An emulated machine's timers are later than a real one's; the VM says so.
        self._timer_lateness_ns = int(os.environ.get("PDDBED_TIMER_LATENESS_NS", TIMER_LATENESS_NS))
        self._asked: dict[Direction, Impairment] = {"forward": plan.forward, "backward": plan.backward}
        self._random = {direction: Random(f"{seed}/{plan.name}/{direction}") for direction in DIRECTIONS}
        self._limiters: dict[Direction, _Port] = {}
        self._lines: dict[Direction, _Port] = {}
        self._limits: dict[Direction, qdisc.Tbf | None] = {}  # what the limiters were told last
        self._wanderers: dict[Direction, Wanderer] = {}
        self._drops = {direction: Drops() for direction in DIRECTIONS}
        self._closed = False
        self._available_bytes = 0  # when the link was built, before its own packets took any
        self._sockets = ExitStack()
        # pyroute2 opens a new socket, in the caller's own namespace, when a second thread uses a handle. So one
        # thread makes the sockets and uses them, one request at a time, whoever asks.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"netem-{plan.name}")

    def build(self) -> None:
        self._available_bytes = psutil.virtual_memory().available
        shapes = {direction: self._shape(direction, self._asked[direction]) for direction in DIRECTIONS}
        self._refuse_beyond_memory(self._asked)
        self._do("cannot be built", lambda: self._build(shapes))

    def apply(self, direction: Direction, impairment: Impairment) -> None:
        wanted = self._shape(direction, impairment)
        self._refuse_beyond_memory({**self._asked, direction: impairment})

        def change() -> None:
            self._asked[direction] = impairment
            self._install(direction, wanted)

        self._do("cannot be changed", change)

    def applied(self) -> Mapping[Direction, dict[str, Any]]:
        return self._do("cannot be read", lambda: {way: self._applied(way) for way in DIRECTIONS})

    def counters(self) -> Mapping[Direction, LinkCounters]:
        return self._do("cannot be read", lambda: {way: self._counters(way) for way in DIRECTIONS})

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._do("cannot be closed", self._end)
        self._thread.shutdown()

    def _do(self, what: str, work: Callable[[], Done]) -> Done:
        """Run `work` in the thread of the sockets; `what` is for the message of a LinkError."""

        def run() -> Done:
            with self._errors(what):
                return work()

        return self._thread.submit(run).result()

    def _build(self, shapes: Mapping[Direction, Shape]) -> None:
        segment.build(self.plan.mtu, self.ends, self.node_pid)
        for pid in (self.ends[0].pid, self.node_pid, self.ends[1].pid):
            keep_flows_in_order(pid)
        node = self._sockets.enter_context(open_netlink(self.node_pid))
        for direction, end in zip(DIRECTIONS, self.ends, strict=True):
            router = self._sockets.enter_context(open_netlink(end.pid))
            self._limiters[direction] = self._port(router, end.ifname)
            self._lines[direction] = self._port(node, segment.PORTS[direction])
            self._install(direction, shapes[direction])

    def _end(self) -> None:
        for direction in DIRECTIONS:
            self._stop_wandering(direction)
        self._sockets.close()

    def _shape(self, direction: Direction, impairment: Impairment) -> Shape:
        try:
            return shape(impairment, self.plan.mtu, self._timer_lateness_ns)
        except ValueError as error:
            raise LinkError(f'wan "{self.plan.name}" ({direction}): {error}') from error

    def _refuse_beyond_memory(self, asked: Mapping[Direction, Impairment]) -> None:
        try:
            what = f'wan "{self.plan.name}"'
            refuse_beyond_memory(what, tuple(asked.values()), self.plan.mtu, self._available_bytes)
        except ValueError as error:
            raise LinkError(str(error)) from error

    def _port(self, netlink: Any, name: str) -> _Port:
        return _Port(netlink, segment.index_of(netlink, name), self.plan.mtu)

    def _install(self, direction: Direction, wanted: Shape) -> None:
        """Both stages of one direction. The delay line first: a rate that rises finds it long enough, and one that
        falls leaves packets in it that came faster."""
        limiter, line = self._limiters[direction], self._lines[direction]
        self._stop_wandering(direction)
        # A change starts the kernel's random numbers anew: with one seed for all, each would repeat the last.
        seed = self._random[direction].getrandbits(64)
        self._drops[direction].count(line.read())
        self._refuse_difference(direction, line.install(wanted.with_seed(seed)))
        segments = 1 if wanted.netem.split else segment.GSO_SEGMENTS
        limiter.netlink.link("set", index=limiter.index, gso_max_segs=segments)
        before = self._limits.get(direction)
        tbf = wanted.tbf or (wide_open(self.plan.mtu) if before else None)
        if tbf is not None and tbf != before:
            self._limits[direction] = tbf
            self._refuse_difference(direction, limiter.install(tbf))
        asked = self._asked[direction]
        if asked.jitter is not None:
            random = Random(self._random[direction].getrandbits(64))
            self._wanderers[direction] = Wanderer(self.node_pid, line.index, wanted.netem, asked, self.plan.mtu, random)

    def _stop_wandering(self, direction: Direction) -> None:
        wanderer = self._wanderers.pop(direction, None)
        if wanderer is not None:
            wanderer.stop()

    def _refuse_difference(self, direction: Direction, wrong: list[str]) -> None:
        if wrong:
            raise LinkError(
                f'wan "{self.plan.name}" ({direction}): the kernel does not do what it was told '
                f"(asked, got): {'; '.join(wrong)}; report this with the kernel's version"
            )

    def _applied(self, direction: Direction) -> dict[str, Any]:
        limiter, line = self._limiters[direction].read(), self._lines[direction].read()
        values: dict[str, Any] = {"driver": self.driver, "rate_bps": None, "queue_bytes": None, "burst_bytes": None}
        tbf, netem = limiter.settings if limiter else None, line.settings if line else None
        if isinstance(tbf, qdisc.Tbf) and tbf.rate_bytes_per_s != wide_open(self.plan.mtu).rate_bytes_per_s:
            values["rate_bps"] = tbf.rate_bytes_per_s * 8
            told = self._limits[direction]
            values["buffer_bytes"] = tbf.limit_bytes + tbf.burst_bytes  # of tiny queues a packet or two more
            as_told = told is not None and not qdisc.differences(told, tbf)
            values["queue_bytes"] = self._asked[direction].queue_bytes if as_told else values["buffer_bytes"]
            values["burst_bytes"] = tbf.burst_bytes
        if isinstance(netem, qdisc.Netem):
            values |= netem.describe()
        wanderer, asked = self._wanderers.get(direction), self._asked[direction]
        if wanderer is not None and asked.jitter is not None:
            values["delay_now_ns"] = values["delay_ns"]
            values["delay_ns"] = asked.delay_ns
            values["jitter"] = {"std_ns": asked.jitter.std_ns, "distribution": asked.jitter.distribution}
            values["delay_changes"] = wanderer.changes
            if wanderer.failure is not None:
                values["jitter"] = f"interrupted: {wanderer.failure}"
        return values

    def _counters(self, direction: Direction) -> LinkCounters:
        limiter, line = self._limiters[direction], self._lines[direction]
        limited, delayed = limiter.read(), line.read()
        if delayed is None or not isinstance(delayed.settings, qdisc.Netem):
            raise LinkError(f'wan "{self.plan.name}" ({direction}): its netem is gone; take the lab down and up')
        drops = self._drops[direction]
        drops.count(delayed)
        # The routers' ends drop nothing on their own; frames for nobody would be counted at the ports.
        dropped = sum(segment.dropped(port.netlink, port.index) for port in (limiter, line))
        return {
            "packets": delayed.statistics.packets,
            "bytes": delayed.statistics.bytes,
            "dropped_queue": limited.statistics.drops if limited and limited.kind == "tbf" else 0,
            # The delay line's limit is sized so that the rate cannot reach it.
            "lost": drops.lost,
            "dropped_unasked": dropped + drops.unasked,
            "queued_bytes": limited.statistics.queued_bytes if limited else 0,
            "in_flight_packets": delayed.statistics.queued_packets,
        }

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except NetlinkError as error:
            reason = error.args[1] if len(error.args) > 1 and error.args[1] else errno.errorcode.get(error.code, "?")
            raise LinkError(f'wan "{self.plan.name}" {what}: the kernel says "{reason}"') from error
        except OSError as error:
            raise LinkError(f'wan "{self.plan.name}" {what}: {error}') from error
