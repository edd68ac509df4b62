"""What a running lab answers on its control socket: one function per operation, looked up in `OPERATIONS`.

Each is called in a thread of its own with the lab and the request, and returns a reply and descriptors to send with
it (closed afterwards). An exception becomes the reply's error.
"""

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from testbed.capture.capture_points import capture
from testbed.capture.counters import count_bytes
from testbed.congestion.control import Congestion
from testbed.congestion.timeline import Timeline
from testbed.lab.control import Reply
from testbed.lab.endpoints import endpoints
from testbed.lab.network import HOST_IFNAME, Network
from testbed.lab.pace import read_pace
from testbed.lab.processes import HostProcesses
from testbed.lab.record import Record
from testbed.lab.troubles import Troubles
from testbed.lab.tuning import applied
from testbed.lab.verification import Verification
from testbed.lab.wan import WanControl
from testbed.topology.plan import LabPlan


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


def _status(lab: RunningLab, _request: dict[str, Any]) -> Reply:
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
    return {**state, "uptime_s": time.monotonic() - lab.began, "hosts": hosts, "links": links}, []


def _enter(lab: RunningLab, request: dict[str, Any]) -> Reply:
    """Descriptors of a host's namespaces, in the order that `namespaces` names, and the variables of its processes."""
    pid = lab.network.pid_of(request["host"])
    kinds = ("user", "pid", "net", "mnt")
    own = next((lab.processes.environment_of(host) for host in lab.plan.hosts if host.name == request["host"]), {})
    fds = [os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC) for kind in kinds]
    return {"namespaces": kinds, "environment": own}, fds


def _endpoints(lab: RunningLab, request: dict[str, Any]) -> Reply:
    """The measuring ends of a WAN link, made on first use: pids are of the lab's own PID namespace."""
    ends = endpoints(lab.plan, lab.network, request["link"])
    return {"endpoints": [{"pid": end.pid, "address": str(end.address)} for end in ends]}, []


def _down(lab: RunningLab, _request: dict[str, Any]) -> Reply:
    lab.stop.set()
    return {}, []


def _wan_show(lab: RunningLab, _request: dict[str, Any]) -> Reply:
    return {"links": lab.wan.show(), "congestion": lab.congestion.state()}, []


def _wan_playing(lab: RunningLab, _request: dict[str, Any]) -> Reply:
    """Only what plays: whoever follows a timeline must not hold up its changes by asking the links."""
    return {"congestion": lab.congestion.state()}, []


def _wan_play(lab: RunningLab, request: dict[str, Any]) -> Reply:
    return {"congestion": lab.congestion.play(Timeline.from_dict(request["timeline"]))}, []


def _wan_stop(lab: RunningLab, _request: dict[str, Any]) -> Reply:
    return {"congestion": lab.congestion.stop()}, []


def _wan_set(lab: RunningLab, request: dict[str, Any]) -> Reply:
    return {"link": lab.wan.set(request["link"], request["direction"], request["values"])}, []


def _wan_reset(lab: RunningLab, request: dict[str, Any]) -> Reply:
    lab.verification.faithfulness.forget(request["link"])
    if request["link"]:
        return {"links": [lab.wan.reset(request["link"])]}, []
    lab.wan.reset_all()
    return {"links": lab.wan.show()}, []


def _faithful(lab: RunningLab, _request: dict[str, Any]) -> Reply:
    return {"reasons": lab.verification.faithfulness.reasons()}, []


def _wan_changes(lab: RunningLab, request: dict[str, Any]) -> Reply:
    return lab.wan.history(int(request["since"])), []


def _verify(lab: RunningLab, request: dict[str, Any]) -> Reply:
    if request.get("anew"):
        lab.verification.faithfulness.forget()
    return lab.verification.run(request["quick"]), []


OPERATIONS: dict[str, Callable[[RunningLab, dict[str, Any]], Reply]] = {
    "status": _status,
    "enter": _enter,
    "endpoints": _endpoints,
    "down": _down,
    "verify": _verify,
    "faithful": _faithful,
    "wan-show": _wan_show,
    "wan-play": _wan_play,
    "wan-playing": _wan_playing,
    "wan-stop": _wan_stop,
    "wan-set": _wan_set,
    "wan-reset": _wan_reset,
    "wan-changes": _wan_changes,
    "capture": capture,
    "count-bytes": count_bytes,
}


def answer(lab: RunningLab, request: dict[str, Any]) -> Reply:
    """Look the operation up and run it."""
    operation = OPERATIONS.get(str(request.get("op")))
    if operation is None:
        raise ValueError(f"the lab knows no operation {request.get('op')!r}; is it of another pddbed version?")
    return operation(lab, request)
