"""Abilities of this kernel for a WAN link, tried out in namespaces that vanish at once.

Owns the probes behind `auto` and `doctor`. Each returns None when the thing works, else one sentence that says
why not and what to do. Nothing stays behind, except that the kernel may have loaded a module it has.
"""

import errno
import functools
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from workers import linux

LOOPBACK_INDEX = 1
Driver = Literal["netem", "userspace"]


def automatic_driver() -> tuple[Driver | None, str]:
    """The driver that `auto` means on this machine, and why; None when neither works."""
    without_netem = netem_problem()
    if without_netem is None:
        return "netem", "this kernel has sch_netem and sch_tbf"
    without_tun = tun_problem()
    if without_tun is None:
        return "userspace", without_netem
    return None, f"{without_netem}; {without_tun}"


@functools.cache
def netem_problem() -> str | None:
    """True when a qdisc of each kind that the netem driver needs can be made, in a network namespace made for it."""
    return qdisc_problem("netem") or qdisc_problem("tbf")


@functools.cache
def qdisc_problem(kind: Literal["netem", "tbf"]) -> str | None:
    """True when a qdisc of that kind can be made."""
    if os.geteuid() != 0:
        return _without_root(kind)
    return _in_new_network_namespace(lambda: _try_qdisc(kind))


@functools.cache
def tun_problem() -> str | None:
    """True when /dev/net/tun opens for this user."""
    try:
        os.close(os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENODEV):
            return "there is no /dev/net/tun (load it with: modprobe tun)"
        return f"/dev/net/tun does not open ({error.strerror}); run as root or allow it for this user"
    return None


@functools.cache
def user_namespaces_work() -> bool:
    """True when this user may make a user namespace with a network namespace in it."""
    command = ["unshare", "--user", "--map-root-user", "--net", "--pid", "--mount", "--fork", "true"]
    try:
        return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True).returncode == 0
    except OSError:
        return False


_OPTIONS = {
    "netem": {"delay": 1000, "limit": 10},
    "tbf": {"rate": 125_000, "burst": 3000, "limit": 10_000},
}


def _try_qdisc(kind: str) -> str | None:
    with IPRoute() as netlink:
        try:
            netlink.tc("replace", kind, LOOPBACK_INDEX, "1:", **_OPTIONS[kind])
        except NetlinkError as error:
            if error.code == errno.ENOENT:
                return f"this kernel has no sch_{kind}"
            return f"a {kind} qdisc cannot be made here ({os.strerror(error.code)})"
    return None


def _in_new_network_namespace(probe: Callable[[], str | None]) -> str | None:
    """Run `probe` in a thread of its own: a thread may leave its process's namespace, and its new one dies with it."""

    def enter_and_probe() -> str | None:
        try:
            linux.call("unshare", linux.CLONE_NEWNET)
        except OSError as error:
            return f"a network namespace cannot be made here ({error.strerror or error})"
        return probe()

    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(enter_and_probe).result()


def _without_root(kind: str) -> str | None:
    """The same probe as root of a user namespace, which only a new process can enter."""
    if not user_namespaces_work():
        return "namespaces need root here"
    program = "import sys; from testbed.links import kernel; print(kernel._try_qdisc(sys.argv[1]) or '')"
    command = ["unshare", "--user", "--map-root-user", "--net", sys.executable, "-c", program, kind]
    result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if result.returncode != 0:
        return "the kernel's qdiscs cannot be tried out in a user namespace"
    return result.stdout.strip() or None
