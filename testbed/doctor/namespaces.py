"""A program that `examination` runs inside new namespaces: makes what a lab is made of, prints as JSON what worked.

Everything it makes is gone when it ends. Each entry is null, or the sentence that the kernel's error comes to.
"""

import errno
import json
import os
from collections.abc import Callable
from typing import Any

from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

CONGESTION_CONTROLS = ("cubic", "reno", "bbr")
LOOPBACK_INDEX = 1


def examine() -> dict[str, Any]:
    """Make each thing in the namespaces that this process is in."""
    with IPRoute() as netlink:
        netlink.link("set", index=LOOPBACK_INDEX, state="up")
        return {
            "bridge": _attempt(lambda: netlink.link("add", ifname="probe-br", kind="bridge")),
            "veth": _attempt(lambda: netlink.link("add", ifname="probe-a", kind="veth", peer={"ifname": "probe-b"})),
            "congestion": {
                name: _attempt(lambda name=name: _route_with(netlink, name))  # type: ignore[misc]
                for name in CONGESTION_CONTROLS
            },
            "real_time": _attempt(lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))),
        }


def _route_with(netlink: Any, congestion: str) -> None:
    """The way a lab sets congestion control: on a route, where the sysctl is refused."""
    netlink.route("replace", dst="192.0.2.0/24", oif=LOOPBACK_INDEX, metrics={"cc_algo": congestion})


def _attempt(make: Callable[[], Any]) -> str | None:
    try:
        make()
    except NetlinkError as error:
        known = {errno.EOPNOTSUPP: "this kernel has none", errno.ENOENT: "this kernel has none"}
        return known.get(error.code, os.strerror(error.code))
    except OSError as error:
        return os.strerror(error.errno or 0)
    return None


if __name__ == "__main__":
    print(json.dumps(examine()))
