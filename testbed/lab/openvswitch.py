"""Open vSwitch as a datacenter's switch: one database and one daemon per lab, the kernel's datapath, a bridge each.

Everything runs in the lab's own namespaces and ends with them; the machine's own Open vSwitch, if it has one, knows
nothing of it. Bridges stand alone, without a controller: they learn addresses, as a Linux bridge does.
"""

import errno
import os
import socket
import struct
import subprocess
from pathlib import Path
from typing import Any

from mininet.node import Switch

from testbed.links.base import LinkError
from testbed.machine.netns import netlink_in
from testbed.machine.programs import find_tool

PROGRAMS = ("ovsdb-tool", "ovsdb-server", "ovs-vswitchd", "ovs-vsctl")
SCHEMA = Path("/usr/share/openvswitch/vswitch.ovsschema")
FAMILY = b"ovs_datapath\0"  # the kernel module's generic netlink family
NETLINK_GENERIC, GENL_ID_CTRL, NLM_F_REQUEST, NLMSG_ERROR = 16, 0x10, 1, 2
CTRL_CMD_GETFAMILY, CTRL_ATTR_FAMILY_NAME = 3, 2
PATIENCE_S = 60  # for the daemon to do what it is told, on an emulated CPU


def openvswitch_problem() -> str | None:
    """Reason why this machine has no Open vSwitch for labs, with the next step; None when it has."""
    if any(find_tool(program) is None for program in PROGRAMS) or not SCHEMA.exists():
        return "Open vSwitch's programs are not here; install them with: apt-get install openvswitch-switch"
    if not _kernel_has_datapath():
        return (
            "this kernel has no Open vSwitch; load it with: modprobe openvswitch, "
            "or run in a VM that has it (docs/vagrant.md)"
        )
    return None


class Daemons:
    """A lab's database server and switch daemon. They end with the lab's PID namespace."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Start both, once; returns when the database answers. Raises LinkError."""
        if self._processes:
            return
        self._directory.mkdir(exist_ok=True)
        self._run("ovsdb-tool", "create", str(self._directory / "conf.db"), str(SCHEMA))
        self._spawn("ovsdb-server", str(self._directory / "conf.db"), f"--remote=p{self._database}")
        self.vsctl("--no-wait", "init")
        self._spawn("ovs-vswitchd", self._database)

    def ended(self) -> list[str]:
        """Programs of those that were started which have ended."""
        return [name for name, process in self._processes.items() if process.poll() is not None]

    def vsctl(self, *arguments: str) -> None:
        """One transaction; unless it says --no-wait, returns when the switch daemon has done it. Raises LinkError."""
        self._run("ovs-vsctl", f"--db={self._database}", f"--timeout={PATIENCE_S}", "--retry", *arguments)

    @property
    def _database(self) -> str:
        return f"unix:{self._directory}/db"

    def _environment(self) -> dict[str, str]:
        return {**os.environ, "OVS_RUNDIR": str(self._directory), "OVS_DBDIR": str(self._directory)}

    def _spawn(self, program: str, *arguments: str) -> None:
        control = f"--unixctl={self._directory}/{program}.ctl"
        with (self._directory / f"{program}.log").open("ab") as log:
            self._processes[program] = subprocess.Popen(
                [find_tool(program) or program, *arguments, control],
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def _run(self, program: str, *arguments: str) -> None:
        done = subprocess.run(
            [find_tool(program) or program, *arguments],
            env=self._environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        if done.returncode != 0:
            said = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise LinkError(
                f"Open vSwitch refuses: {program} {arguments[0]}: {said}; see the logs in {self._directory}"
            )


class OpenVSwitch(Switch):
    """A bridge of the lab's Open vSwitch, in the lab's own root namespace. It has no shell, as `nodes.Bridge`."""

    @classmethod
    def setup(cls) -> None:
        return

    def startShell(self, mnopts: str | None = None) -> None:
        """Start the lab's daemons, when this is its first switch, and make the bridge."""
        self.pid = os.getpid()
        daemons: Daemons = self.params["daemons"]
        daemons.start()
        bridge = ("set", "bridge", self.name, "fail_mode=standalone", "stp_enable=false", "mcast_snooping_enable=false")
        daemons.vsctl("--", "add-br", self.name, "--", *bridge)

    def start(self, controllers: list[Any]) -> None:
        """Raise this switch's ports and add them."""
        ports = [name for name in self.nameToIntf if name != "lo"]
        with netlink_in(self.pid) as ip:
            for name in ports:
                port = ip.link_lookup(ifname=name)[0]
                ip.link("set", index=port, state="up", mtu=self.params["mtu"])
        self.params["daemons"].vsctl(*(word for name in ports for word in ("--", "add-port", self.name, name)))

    def terminate(self) -> None:
        return


def _kernel_has_datapath() -> bool:
    """Asks for the family by name, upon which the kernel loads the module if it has it."""
    attribute = struct.pack("=HH", 4 + len(FAMILY), CTRL_ATTR_FAMILY_NAME) + FAMILY
    attribute += b"\0" * (-len(attribute) % 4)
    body = struct.pack("=BBH", CTRL_CMD_GETFAMILY, 1, 0) + attribute
    header = struct.pack("=IHHII", 16 + len(body), GENL_ID_CTRL, NLM_F_REQUEST, 1, 0)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETLINK_GENERIC) as netlink:
        netlink.bind((0, 0))
        netlink.send(header + body)
        reply = netlink.recv(8192)
    (kind,) = struct.unpack_from("=H", reply, 4)
    if kind != NLMSG_ERROR:
        return True
    (code,) = struct.unpack_from("=i", reply, 16)
    return -code != errno.ENOENT
