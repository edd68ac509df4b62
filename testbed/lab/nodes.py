"""Mininet's node, switch and link, with their devices made through netlink.

Mininet configures each interface with several shell commands; pyroute2 does the same in one message, which
makes a lab come up several times faster under emulation, and reports errors instead of logging them.
"""

import os
from typing import Any

from mininet.link import Intf, Link
from mininet.moduledeps import pathCheck
from mininet.node import Node, Switch

from testbed.machine.netns import netlink_in

MININETS_MARK, OWN_MARK = "mininet:", "pddbed-node:"


class LabNode(Node):
    """A host, router or WAN node: a shell in its own network and mount namespace (`node.pid`)."""

    @classmethod
    def setup(cls) -> None:
        pathCheck("mnexec", moduleName="Mininet")

    def _popen(self, cmd: list[str], **params: Any) -> Any:
        """The shell without its caller's habits: TMOUT would end an idle shell, and with it the node's network.

        Nor does it carry Mininet's mark: `mn -c`, run by anybody on the machine, ends every process that has it among
        its arguments (mininet/clean.py).
        """
        cmd = [word.replace(MININETS_MARK, OWN_MARK) for word in cmd]
        environment = {"PATH": os.environ.get("PATH", os.defpath), "TERM": "dumb"}
        return super()._popen(cmd, **{"env": environment, **params, "close_fds": True})

    def startShell(self, mnopts: str | None = None) -> None:
        """Without mnexec's -c: it closes every descriptor number that is allowed, one by one, open or not."""
        super().startShell("-d")

    def config(self, **_: Any) -> dict[str, Any]:
        """Nothing: the builder sets addresses and routes. Mininet would add one of its own from 10.0.0.0/8."""
        return {}


class Interface(Intf):
    """One end of a veth pair. Addresses and state are set by the builder, per namespace, in one go."""

    def config(self, **_: Any) -> dict[str, Any]:
        return {}


class VethLink(Link):
    """A veth pair made with one netlink message, each end in its node's namespace."""

    def __init__(self, node1: Node, node2: Node, **params: Any) -> None:
        super().__init__(node1, node2, **{**params, "intf": Interface})

    @classmethod
    def makeIntfPair(
        cls,
        intfname1: str,
        intfname2: str,
        addr1: str | None = None,
        addr2: str | None = None,
        node1: Node | None = None,
        node2: Node | None = None,
        deleteIntfs: bool = True,
    ) -> None:
        assert node1 is not None
        assert node2 is not None
        with netlink_in(node1.pid) as ip:
            peer = {"ifname": intfname2, "address": addr2, "net_ns_pid": node2.pid}
            ip.link("add", ifname=intfname1, kind="veth", address=addr1, peer=peer)


class Bridge(Switch):
    """A Linux bridge in the lab's own root namespace. It has no shell: nothing is ever run in it.

    It is made before its links are, so that a port never has the interface index of its peer in a host (2): the
    kernel's linkwatch takes such a pair for a non-urgent event, and the port starts to forward a second later.
    """

    @classmethod
    def setup(cls) -> None:
        return

    def startShell(self, mnopts: str | None = None) -> None:
        """Create the bridge: no spanning tree, so that ports forward at once."""
        self.pid = os.getpid()
        with netlink_in(self.pid) as ip:
            ip.link(
                "add",
                ifname=self.name,
                kind="bridge",
                br_stp_state=0,
                br_forward_delay=0,
                br_mcast_snooping=0,
            )

    def start(self, controllers: list[Any]) -> None:
        """Enslave this switch's ports and raise them."""
        with netlink_in(self.pid) as ip:
            bridge = ip.link_lookup(ifname=self.name)[0]
            for name in self.nameToIntf:
                if name != "lo":
                    port = ip.link_lookup(ifname=name)[0]
                    ip.link("set", index=port, master=bridge, state="up", mtu=self.params["mtu"])
            ip.link("set", index=bridge, state="up")

    def terminate(self) -> None:
        return
