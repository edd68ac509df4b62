"""The netem driver: tbf on each border router for rate and queue, netem in the link's own node for the rest.

    router a --veth-- [port-a  bridge  port-b] --veth-- router b          forward:  tbf at a, netem at port-b
                      (the link's node)                                   backward: tbf at b, netem at port-a

Owns the devices and qdiscs of one link, through netlink only. What the values mean is in `shaping`, what the
kernel does with them in `qdisc`. No process of its own: everything vanishes with the namespaces.
"""

import errno
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from pyroute2.netlink.exceptions import NetlinkError

from testbed.impairment import Impairment
from testbed.links import qdisc, segment
from testbed.links.base import DIRECTIONS, Direction, LinkError, WanEnd, WanLink
from testbed.links.ordering import keep_flows_in_order
from testbed.links.shaping import TIMER_LATENESS_NS, Shape, refuse_beyond_memory, shape, wide_open
from testbed.links.tc_messages import open_netlink
from testbed.topology.plan import WanPlan


class NetemLink(WanLink):
    """One WAN link of the netem driver. See `WanLink`."""

    driver = "netem"

    def __init__(self, plan: WanPlan, ends: tuple[WanEnd, WanEnd], node_pid: int, run_dir: Path) -> None:
        super().__init__(plan, ends, node_pid, run_dir)
        # An emulated machine's timers are later than a real one's; the VM says so.
        self._timer_lateness_ns = int(os.environ.get("PDDBED_TIMER_LATENESS_NS", TIMER_LATENESS_NS))
        self._asked: dict[Direction, Impairment] = {"forward": plan.forward, "backward": plan.backward}

    @classmethod
    def refuses(cls, impairment: Impairment, mtu: int) -> str | None:
        try:
            shape(impairment, mtu)
        except ValueError as error:
            return str(error)
        return None

    def build(self) -> None:
        for direction in DIRECTIONS:
            self._shape(direction, self._asked[direction])
        self._refuse_beyond_memory()
        with self._errors("cannot be built"):
            segment.build(self.plan.mtu, self.ends, self.node_pid)
            for pid in (self.ends[0].pid, self.node_pid, self.ends[1].pid):
                keep_flows_in_order(pid)
            for direction in DIRECTIONS:
                self._install(direction, self._asked[direction])

    def apply(self, direction: Direction, impairment: Impairment) -> None:
        self._shape(direction, impairment)
        before = self._asked[direction]
        self._asked[direction] = impairment
        try:
            self._refuse_beyond_memory()
            with self._errors("cannot be changed"):
                self._install(direction, impairment)
        except LinkError:
            self._asked[direction] = before
            raise

    def applied(self) -> Mapping[Direction, dict[str, Any]]:
        return {direction: self._applied(direction) for direction in DIRECTIONS}

    def counters(self) -> Mapping[Direction, dict[str, int]]:
        return {direction: self._counters(direction) for direction in DIRECTIONS}

    def close(self) -> None:
        """Nothing was started: the devices go with their namespaces."""

    def _shape(self, direction: Direction, impairment: Impairment) -> Shape:
        try:
            return shape(impairment, self.plan.mtu, self._timer_lateness_ns)
        except ValueError as error:
            raise LinkError(f'wan "{self.plan.name}" ({direction}): {error}') from error

    def _refuse_beyond_memory(self) -> None:
        try:
            refuse_beyond_memory(
                f'wan "{self.plan.name}"',
                tuple(self._asked.values()),
                self.plan.mtu,
                psutil.virtual_memory().available,
            )
        except ValueError as error:
            raise LinkError(str(error)) from error

    def _sender(self, direction: Direction) -> WanEnd:
        return self.ends[0] if direction == "forward" else self.ends[1]

    def _install(self, direction: Direction, impairment: Impairment) -> None:
        """Both stages of one direction, then what the kernel says about them. netem first: a rate that falls must
        not meet a delay line that is still too short, and one that rises finds it long enough."""
        wanted = self._shape(direction, impairment)
        mtu = self.plan.mtu
        with self._node() as (netlink, index):
            port = index(segment.PORTS[direction])
            present = qdisc.installed(netlink, port, mtu)
            qdisc.install(netlink, port, wanted.netem, mtu, present is not None and present.kind == "netem")
            self._compare(direction, wanted.netem, qdisc.installed(netlink, port, mtu))
        with self._router(direction) as (netlink, index):
            interface = index(self._sender(direction).ifname)
            netlink.link("set", index=interface, gso_max_segs=1 if wanted.split else segment.GSO_SEGMENTS)
            present = qdisc.installed(netlink, interface, mtu)
            limited = present is not None and present.kind == "tbf"
            tbf = wanted.tbf or (wide_open(mtu) if limited else None)
            if tbf is not None:
                qdisc.install(netlink, interface, tbf, mtu, limited)
                self._compare(direction, tbf, qdisc.installed(netlink, interface, mtu))

    def _compare(self, direction: Direction, asked: qdisc.Tbf | qdisc.Netem, got: qdisc.Installed | None) -> None:
        wrong = qdisc.differences(asked, got.settings if got else None)
        if got is not None and not got.charges_ip_bytes:
            wrong.append("size table: asked for, not there")
        if wrong:
            raise LinkError(
                f'wan "{self.plan.name}" ({direction}): the kernel does not do what it was told '
                f"(asked, got): {'; '.join(wrong)}; report this with the kernel's version"
            )

    def _applied(self, direction: Direction) -> dict[str, Any]:
        mtu = self.plan.mtu
        with self._router(direction) as (netlink, index):
            limiter = qdisc.installed(netlink, index(self._sender(direction).ifname), mtu)
        with self._node() as (netlink, index):
            delay = qdisc.installed(netlink, index(segment.PORTS[direction]), mtu)
        tbf, netem = limiter.settings if limiter else None, delay.settings if delay else None
        values: dict[str, Any] = {"driver": self.driver, "rate_bps": None, "queue_bytes": None, "burst_bytes": None}
        if isinstance(tbf, qdisc.Tbf) and tbf.rate_bytes_per_s != wide_open(mtu).rate_bytes_per_s:
            values["rate_bps"] = tbf.rate_bytes_per_s * 8
            values["queue_bytes"] = tbf.limit_bytes
            values["burst_bytes"] = tbf.burst_bytes
        if isinstance(netem, qdisc.Netem):
            one = qdisc.PROBABILITY_ONE
            values |= {
                "delay_ns": netem.latency_ns,
                "delay_line_packets": netem.limit_packets,
                "serialization_bps": netem.rate_bytes_per_s * 8,
                "loss": netem.loss / one,
                "duplication": netem.duplicate / one,
                "corruption": netem.corrupt / one,
                "reordering": netem.reorder / one,
            }
            if netem.gilbert_elliott is not None:
                ge = netem.gilbert_elliott
                values["loss"] = {
                    "good_to_bad": ge.good_to_bad / one,
                    "bad_to_good": ge.bad_to_good / one,
                    "loss_bad": 1 - ge.kept_bad / one,
                    "loss_good": ge.loss_good / one,
                }
        return values

    def _counters(self, direction: Direction) -> dict[str, int]:
        mtu = self.plan.mtu
        with self._router(direction) as (netlink, index):
            interface = index(self._sender(direction).ifname)
            limiter = qdisc.installed(netlink, interface, mtu)
            dropped = segment.dropped(netlink, interface)
        with self._node() as (netlink, index):
            delay = qdisc.installed(netlink, index(segment.PORTS[direction]), mtu)
            dropped += sum(segment.dropped(netlink, index(port)) for port in segment.PORTS.values())
        assert delay is not None
        impaired = isinstance(delay.settings, qdisc.Netem) and (
            delay.settings.loss or delay.settings.gilbert_elliott is not None or delay.settings.corrupt
        )
        drops = delay.statistics.drops
        return {
            "packets": delay.statistics.packets,
            "bytes": delay.statistics.bytes,
            "dropped_queue": limiter.statistics.drops if limiter and limiter.kind == "tbf" else 0,
            # netem counts what it loses on purpose and what its limit refuses together; the limit is sized so that
            # the rate cannot reach it.
            "dropped_loss": drops if impaired else 0,
            "dropped_unasked": dropped + (0 if impaired else drops),
            "queued_bytes": limiter.statistics.queued_bytes if limiter else 0,
            "in_flight_packets": delay.statistics.queued_packets,
        }

    @contextmanager
    def _node(self) -> Iterator[tuple[Any, Any]]:
        with open_netlink(self.node_pid) as netlink:
            yield netlink, segment.index_by_name(netlink)

    @contextmanager
    def _router(self, direction: Direction) -> Iterator[tuple[Any, Any]]:
        with open_netlink(self._sender(direction).pid) as netlink:
            yield netlink, segment.index_by_name(netlink)

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except NetlinkError as error:
            reason = error.args[1] if len(error.args) > 1 and error.args[1] else errno.errorcode.get(error.code, "?")
            raise LinkError(f'wan "{self.plan.name}" {what}: the kernel says "{reason}"') from error
        except OSError as error:
            raise LinkError(f'wan "{self.plan.name}" {what}: {error}') from error
