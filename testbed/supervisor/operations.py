"""A running lab's answers on its control socket: one function per request (`messages`), looked up in `OPERATIONS`.

Each is called in a thread of its own with the lab and the request, and returns a reply. An exception becomes a Failure.
"""

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

from testbed.capture.capture_points import describe
from testbed.capture.counters import count_bytes
from testbed.congestion.control import Congestion
from testbed.lab import messages
from testbed.lab.control import Answered
from testbed.lab.endpoints import endpoints
from testbed.lab.messages import LabStatus
from testbed.lab.network import HOST_IFNAME, Network
from testbed.lab.processes import HostProcesses
from testbed.lab.record import Record
from testbed.lab.troubles import Troubles
from testbed.lab.tuning import applied
from testbed.lab.wan import WanControl
from testbed.model.plan import LabPlan
from testbed.model.timeline import Timeline
from testbed.verify.pace import read_pace
from testbed.verify.verification import Verification


@dataclass
class RunningLab:
    """A lab that is up, as its supervisor holds it."""

    plan: LabPlan
    record: Record
    network: Network
    processes: HostProcesses
    wan: WanControl
    verification: Verification
    measured_rtt_ns: dict[str, int]  # per WAN link, when the lab came up; empty where it was verified instead
    troubles: Troubles
    began: float = field(default_factory=time.monotonic)
    state: dict[str, Any] = field(default_factory=dict)  # as the record's state file has it
    stop: threading.Event = field(default_factory=threading.Event)
    congestion: Congestion = field(init=False)

    def __post_init__(self) -> None:
        self.congestion = Congestion(self.plan, self.record, self.network, self.wan, self.troubles)


def _status(lab: RunningLab, _request: messages.Status) -> LabStatus:
    processes, paces = lab.processes.snapshot(), read_pace(lab.record.results)
    idle = {"pid": None, "state": "idle", "exit_status": None}
    hosts = []
    for host in lab.plan.hosts:
        node = lab.network.hosts[host.name]
        gone = lab.network.is_gone(node)
        hosts.append(
            {
                "name": host.name,
                "datacenter": host.datacenter,
                "role": host.role,
                "command": host.command,
                "address": str(host.address.ip),
                "port": host.port,
                "profile": host.profile,
                "pace": paces.get(host.name),
                "settings": {} if gone else applied(node.pid, HOST_IFNAME),
                **processes.get(host.name, idle),
                **({"state": "gone"} if gone else {}),
            }
        )
    links = [{**link, "measured_rtt_ns": lab.measured_rtt_ns.get(link["name"])} for link in lab.wan.show()]
    state = {
        **lab.state,
        "verified": lab.verification.last,
        "unfaithful": lab.verification.faithfulness.reasons(),
        "troubles": lab.troubles.rows(),
    }
    status = {**state, "uptime_s": time.monotonic() - lab.began, "hosts": hosts, "links": links}
    return cast(LabStatus, status)


def _enter(lab: RunningLab, request: messages.Enter) -> tuple[messages.Entry, list[int]]:
    """Descriptors of a host's namespaces, in the order that `namespaces` names, and the variables of its processes."""
    pid = lab.network.pid_of(request.host)
    kinds = ("user", "pid", "net", "mnt")
    own = next((lab.processes.environment_of(host) for host in lab.plan.hosts if host.name == request.host), {})
    fds = [os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC) for kind in kinds]
    return messages.Entry(kinds, own), fds


def _endpoints(lab: RunningLab, request: messages.FindEndpoints) -> messages.Endpoints:
    """The measuring ends of a WAN link, made on first use: pids are of the lab's own PID namespace."""
    ends = endpoints(lab.plan, lab.network, request.link)
    return messages.Endpoints([messages.Endpoint(end.pid, str(end.address)) for end in ends])


def _down(lab: RunningLab, _request: messages.Down) -> messages.Nothing:
    lab.stop.set()
    return messages.Nothing()


def _wan_show(lab: RunningLab, _request: messages.WanShow) -> messages.LinksAndTimeline:
    return messages.LinksAndTimeline(lab.wan.show(), lab.congestion.state())


def _wan_playing(lab: RunningLab, _request: messages.WanPlaying) -> messages.Playing:
    """Only what plays: whoever follows a timeline must not hold up its changes by asking the links."""
    return messages.Playing(lab.congestion.state())


def _wan_play(lab: RunningLab, request: messages.WanPlay) -> messages.Played:
    return messages.Played(lab.congestion.play(Timeline.from_dict(request.timeline)))


def _wan_stop(lab: RunningLab, _request: messages.WanStop) -> messages.Played:
    return messages.Played(lab.congestion.stop())


def _wan_set(lab: RunningLab, request: messages.WanSet) -> messages.LinkSet:
    return messages.LinkSet(lab.wan.set(request.link, request.direction, request.values))


def _wan_reset(lab: RunningLab, request: messages.WanReset) -> messages.Links:
    lab.verification.faithfulness.forget(request.link)
    if request.link:
        return messages.Links([lab.wan.reset(request.link)])
    lab.wan.reset_all()
    return messages.Links(lab.wan.show())


def _faithful(lab: RunningLab, _request: messages.Faithful) -> messages.Reasons:
    return messages.Reasons(lab.verification.faithfulness.reasons())


def _wan_changes(lab: RunningLab, request: messages.WanChanges) -> messages.Changes:
    return lab.wan.history(request.since)


def _verify(lab: RunningLab, request: messages.Verify) -> messages.VerificationResult:
    if request.anew:
        lab.verification.faithfulness.forget()
    return lab.verification.run(request.quick)


def _capture(lab: RunningLab, request: messages.Capture) -> tuple[messages.CapturePoints, list[int]]:
    """Points, their context, and descriptors: the lab's user and PID namespace, then each point's network."""
    points, context = describe(lab, request.name, request.at)
    fds = [os.open(f"/proc/{os.getpid()}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC) for kind in ("user", "pid")]
    fds += [os.open(f"/proc/{point.pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC) for point in points]
    return messages.CapturePoints(points, context.to_comment()), fds


def _count_bytes(lab: RunningLab, _request: messages.CountBytes) -> messages.ByteCounts:
    return count_bytes(lab.record, lab.processes)


OPERATIONS: dict[type, Callable[[RunningLab, Any], Any]] = {
    messages.Status: _status,
    messages.FindEndpoints: _endpoints,
    messages.Down: _down,
    messages.Verify: _verify,
    messages.Faithful: _faithful,
    messages.WanShow: _wan_show,
    messages.WanPlay: _wan_play,
    messages.WanPlaying: _wan_playing,
    messages.WanStop: _wan_stop,
    messages.WanSet: _wan_set,
    messages.WanReset: _wan_reset,
    messages.WanChanges: _wan_changes,
    messages.CountBytes: _count_bytes,
}
WITH_DESCRIPTORS: dict[type, Callable[[RunningLab, Any], Answered]] = {
    messages.Enter: _enter,
    messages.Capture: _capture,
}


def answer(lab: RunningLab, request: messages.AnyRequest) -> Answered:
    """Look the operation up and run it."""
    if operation := WITH_DESCRIPTORS.get(type(request)):
        return operation(lab, request)
    return OPERATIONS[type(request)](lab, request), []
