"""Two hosts, two border routers and one WAN link between them, without Mininet: where drivers are tried.

Owns five network namespaces and the veth pairs between hosts and routers; knows of the driver only what
`WanLink` says. Used by the drivers' tests and benchmarks.

    host_a (10.91.0.2) -- router_a (.1) ==WAN 172.31.9.0/31== router_b (.1) -- host_b (10.92.0.2)
"""

import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from ipaddress import IPv4Interface
from pathlib import Path
from typing import Any

from testbed.links.base import WanEnd, WanLink
from testbed.machine.netns import netlink_in, network_namespace_of
from testbed.model.impairment import Impairment
from testbed.model.plan import WanPlan

HOST_A, HOST_B = "10.91.0.2", "10.92.0.2"
_ROUTER_A, _ROUTER_B = "10.91.0.1", "10.92.0.1"
WAN_A, WAN_B = IPv4Interface("172.31.9.0/31"), IPv4Interface("172.31.9.1/31")
_TCP_BUFFERS = "4096 131072 2147483647"  # no flow in a rig is held back by its window
MakeLink = Callable[[WanPlan, tuple[WanEnd, WanEnd], int, Path], WanLink]


@contextmanager
def namespace() -> Iterator[int]:
    """A network namespace with loopback up, as the pid of a process in it; gone with the block or with us."""
    # `cat` ends when our end of its standard input closes, however we die.
    holder = subprocess.Popen(
        ["unshare", "--net", "--", "sh", "-c", "echo in; exec cat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        assert holder.stdout is not None
        if holder.stdout.readline() != b"in\n":
            raise RuntimeError("cannot make a network namespace; are you root?")
        with netlink_in(holder.pid) as netlink:
            netlink.link("set", index=1, state="up")
        yield holder.pid
    finally:
        holder.communicate()


class Rig:
    """`host_a`, `router_a`, `node`, `router_b`, `host_b` are pids; `link` is built and carries traffic."""

    def __init__(self, pids: Sequence[int], link: WanLink) -> None:
        self.host_a, self.router_a, self.node, self.router_b, self.host_b = pids
        self.link = link

    def popen(self, pid: int, command: Sequence[str], **options: Any) -> "subprocess.Popen[str]":
        """Start a program in the network namespace of `pid`."""
        with network_namespace_of(pid):
            return subprocess.Popen(command, text=True, **options)

    def run(self, pid: int, command: Sequence[str], timeout_s: float = 60) -> str:
        """Run a program there and return what it printed. Raises CalledProcessError or TimeoutExpired."""
        with network_namespace_of(pid):
            return subprocess.run(
                command, text=True, check=True, timeout=timeout_s, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            ).stdout


@contextmanager
def rig(
    make: MakeLink,
    run_dir: Path,
    forward: Impairment,
    backward: Impairment | None = None,
    mtu: int = 1500,
    fabric_mtu: int = 1500,
) -> Iterator[Rig]:
    """Raise the five namespaces and the link; `backward` is the same as `forward` unless given."""
    with ExitStack() as stack:
        pids = [stack.enter_context(namespace()) for _ in range(5)]
        host_a, router_a, node, router_b, host_b = pids
        _join(host_a, router_a, HOST_A, _ROUTER_A, fabric_mtu)
        _join(host_b, router_b, HOST_B, _ROUTER_B, fabric_mtu)
        for pid in (router_a, router_b):
            with network_namespace_of(pid):
                Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
        for pid in (host_a, host_b):
            with network_namespace_of(pid):
                for name in ("tcp_rmem", "tcp_wmem"):
                    Path(f"/proc/sys/net/ipv4/{name}").write_text(_TCP_BUFFERS)
                Path("/proc/sys/net/ipv4/tcp_slow_start_after_idle").write_text("0")
        plan = WanPlan("rig", "a", "b", WAN_A, WAN_B, forward, backward or forward, mtu=mtu)
        link = make(plan, (WanEnd(router_a, "wan-a", WAN_A), WanEnd(router_b, "wan-b", WAN_B)), node, run_dir)
        stack.callback(link.close)
        link.build()
        for pid, subnet, gateway in ((router_a, "10.92.0.0/24", WAN_B.ip), (router_b, "10.91.0.0/24", WAN_A.ip)):
            with netlink_in(pid) as netlink:
                netlink.route("add", dst=subnet, gateway=str(gateway))
        yield Rig(pids, link)


def _join(host: int, router: int, host_address: str, router_address: str, mtu: int) -> None:
    with netlink_in(host) as netlink:
        netlink.link("add", ifname="eth0", kind="veth", peer={"ifname": "lan0", "net_ns_pid": router})
        index = netlink.link_lookup(ifname="eth0")[0]
        netlink.link("set", index=index, mtu=mtu, state="up")
        netlink.addr("add", index=index, address=host_address, prefixlen=24)
    with netlink_in(router) as netlink:
        index = netlink.link_lookup(ifname="lan0")[0]
        netlink.link("set", index=index, mtu=mtu, state="up")
        netlink.addr("add", index=index, address=router_address, prefixlen=24)
    with netlink_in(host) as netlink:
        netlink.route("add", dst="default", gateway=router_address)
