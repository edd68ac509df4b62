"""The userspace WAN driver: two TUN devices joined by an emulator, for kernels without netem.

Owns making, moving and addressing the devices, starting and ending the emulator, and the memory it may hold.
What happens to a packet is `testbed.links.emulator`'s; this file never sees one.
"""

import contextlib
import json
import os
import socket
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from pyroute2.netlink.exceptions import NetlinkError

from testbed.links.base import LinkCounters, LinkError, WanEnd, WanLink
from testbed.links.emulator import messages
from testbed.links.emulator.memory import MemoryLimitError, available_bytes, line_limit_bytes
from testbed.links.emulator.tun import open_tun
from testbed.machine.netns import netlink_in, network_namespace_of
from testbed.machine.programs import environment, program
from testbed.model.direction import DIRECTIONS, Direction
from testbed.model.impairment import Impairment
from testbed.model.plan import WanPlan

# A TUN drops silently beyond this many packets. 0.2 s of MTU packets at 1 Gbit/s: what the kernel's throttling
# of a busy real-time thread (50 ms a second) can let wait.
TXQUEUELEN = 20_000
_ANSWER_TIMEOUT_S = 20.0  # generous: a machine that builds several labs is busy


class UserspaceLink(WanLink):
    """See `WanLink`. `seed` makes the random decisions (loss and the like) of each direction repeatable."""

    driver = "userspace"

    def __init__(self, plan: WanPlan, ends: tuple[WanEnd, WanEnd], node_pid: int, run_dir: Path, seed: int = 0) -> None:
        super().__init__(plan, ends, node_pid, run_dir, seed)
        self._asked: dict[Direction, Impairment] = {"forward": plan.forward, "backward": plan.backward}
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._answers = b""
        self._requests = 0
        self._lock = threading.Lock()
        self._machine_bytes = 0  # available when the link was built, before its own packets took any

    @property
    def log_path(self) -> Path:
        return self.run_dir / f"wan-{self.plan.name}.relay.log"

    def build(self) -> None:
        self._machine_bytes = available_bytes()
        limits = self._line_limits(self._asked)
        tuns: list[int] = []
        try:
            for end in self.ends:
                tuns.append(self._make_end(end))
            self._start_emulator(tuns, limits)
        except BaseException:
            self.close()
            raise
        finally:
            # The emulator holds the only descriptors: when it ends, so do the devices.
            for fd in tuns:
                os.close(fd)

    def apply(self, direction: Direction, impairment: Impairment) -> None:
        asked = {**self._asked, direction: impairment}
        limits = self._line_limits(asked)
        self._ask(
            messages.Apply(direction=direction, impairment=impairment.to_dict(), line_limit_bytes=limits[direction])
        )
        self._asked = asked

    def applied(self) -> Mapping[Direction, dict[str, Any]]:
        answer = self._ask(messages.Applied())
        health = self.health()
        for direction, end in zip(DIRECTIONS, self.ends, strict=True):
            attributes = self._device(end)
            answer[direction].update(
                mtu=attributes.get("IFLA_MTU"),
                txqueuelen=attributes.get("IFLA_TXQLEN"),
                realtime=health["realtime"],
                realtime_refused=health["realtime_refused"],
            )
        return answer

    def counters(self) -> Mapping[Direction, LinkCounters]:
        """As `WanLink.counters`; `dropped_unasked` includes what the TUN's own queue dropped on the way in."""
        answer = self._ask(messages.Counters())
        for direction, end in zip(DIRECTIONS, self.ends, strict=True):
            dropped = self._device(end)["IFLA_STATS64"]["tx_dropped"]
            answer[direction]["dropped_tun"] = dropped
            answer[direction]["dropped_unasked"] += dropped
        return answer

    def lateness(self) -> Mapping[Direction, messages.DirectionLateness]:
        """Lateness of packets (frames: super-packets count once), read late or written late, since `forget`.

        count, mean_ns, p50_ns, p99_ns, max_ns, buckets; `unfaithful`: None, or how many `windows` were and the
        `first`, `worst` and `last` of them (`from` and `to` in seconds of the epoch, packets, late, worst_ns, limit);
        `measuring`: the same, of what passed while `measure` was on.
        """
        return self._ask(messages.Lateness())

    def measure(self, on: bool) -> None:
        """Begin or end a time in which the lab itself loads the link as much as it may be: lateness is kept apart."""
        self._ask(messages.Measure(on=on))

    def forget(self) -> None:
        """Forget how late and how busy the emulator was so far."""
        self._ask(messages.Forget())

    def health(self) -> messages.Health:
        """State: pid, busy_last, busy_max and busy_max_measuring (share of one CPU, 1 s windows), realtime,
        realtime_refused."""
        return self._ask(messages.GetHealth())

    def punctuality(self) -> Mapping[str, Any] | None:
        return {"lateness": self.lateness(), "health": self.health()}

    def close(self) -> None:
        with self._lock:
            if self._control is not None:
                self._control.close()  # end of file is the emulator's order to go
                self._control = None
            process, self._process = self._process, None
        if process is not None:
            try:
                process.wait(timeout=2)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _line_limits(self, asked: Mapping[Direction, Impairment]) -> dict[Direction, int]:
        """Memory for each direction's packets. Raises LinkError where the machine cannot hold them."""
        try:
            return line_limit_bytes(asked, self._machine_bytes)
        except MemoryLimitError as error:
            raise LinkError(f'wan "{self.plan.name}": {error}') from None

    def _make_end(self, end: WanEnd) -> int:
        """One TUN device, moved into the router's namespace, addressed and up. Returns its descriptor."""
        try:
            with network_namespace_of(self.node_pid):
                fd, temporary = open_tun("wan%d")
        except OSError as error:
            raise LinkError(
                f'wan "{self.plan.name}": cannot open a TUN device ({error.strerror}); '
                "the userspace driver needs /dev/net/tun and CAP_NET_ADMIN"
            ) from error
        try:
            self._move(temporary, end)
            with netlink_in(end.pid) as netlink:
                index = netlink.link_lookup(ifname=end.ifname)[0]
                netlink.link("set", index=index, mtu=self.plan.mtu, txqlen=TXQUEUELEN)
                netlink.addr("add", index=index, address=str(end.address.ip), prefixlen=end.address.network.prefixlen)
                self._silence_ipv6(end)
                netlink.link("set", index=index, state="up")
        except NetlinkError as error:
            os.close(fd)
            raise LinkError(
                f'wan "{self.plan.name}": cannot set up interface {end.ifname} with {end.address}: {error}'
            ) from error
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _move(self, temporary: str, end: WanEnd) -> None:
        """From the link's namespace to the router's, renamed on the way. Addresses and state do not survive it."""
        target = os.open(f"/proc/{end.pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            with netlink_in(self.node_pid) as netlink:
                index = netlink.link_lookup(ifname=temporary)[0]
                netlink.link("set", index=index, net_ns_fd=target, ifname=end.ifname)
        finally:
            os.close(target)

    def _silence_ipv6(self, end: WanEnd) -> None:
        """No router solicitations on the WAN. The emulator ignores what comes where IPv6 cannot be switched off."""
        with network_namespace_of(end.pid), contextlib.suppress(OSError):
            Path(f"/proc/sys/net/ipv6/conf/{end.ifname}/disable_ipv6").write_text("1")

    def _device(self, end: WanEnd) -> dict[str, Any]:
        """The end's netlink attributes, read from the kernel."""
        try:
            with netlink_in(end.pid) as netlink:
                (link,) = netlink.link("get", ifname=end.ifname)
                return dict(link["attrs"])
        except (NetlinkError, OSError) as error:
            raise LinkError(f'wan "{self.plan.name}": interface {end.ifname} is gone ({error})') from error

    def _start_emulator(self, tuns: list[int], limits: Mapping[Direction, int]) -> None:
        ours, theirs = socket.socketpair()
        ours.settimeout(_ANSWER_TIMEOUT_S)
        self._control = ours
        variables = {**environment(), "PYTHONDONTWRITEBYTECODE": "1"}
        descriptors = [*tuns, theirs.fileno()]
        with theirs, self.log_path.open("ab") as log, network_namespace_of(self.node_pid):
            self._process = subprocess.Popen(
                [*program("testbed.links.emulator"), *map(str, descriptors)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=descriptors,
                env=variables,
                start_new_session=True,  # the lab's Ctrl-C is not the emulator's
            )
        sides = {way: messages.Side(self._asked[way].to_dict(), limits[way]) for way in DIRECTIONS}
        start = messages.Start(0, self.plan.name, self.seed, **sides)
        self._exchange(start)

    def _ask(self, request: messages.Request[messages.R]) -> messages.R:
        """One request to the emulator and its answer. Raises LinkError."""
        return msgspec.convert(self._exchange(request), messages.answer_type(request))

    def _exchange(self, message: msgspec.Struct) -> dict[str, Any]:
        """One message to the emulator and what it answers, without "id" and "ok". Raises LinkError."""
        with self._lock:
            if self._control is None:
                raise LinkError(f'wan "{self.plan.name}": the emulator is not running; build the link first')
            self._requests += 1
            try:
                line = json.dumps({**msgspec.to_builtins(message), "id": self._requests})
                self._control.sendall(line.encode() + b"\n")
                while (answer := json.loads(self._read_line())).pop("id") != self._requests:
                    pass  # the late answer to a request that was given up
            except (OSError, EOFError) as error:
                raise LinkError(self._obituary(error)) from error
        if not answer.pop("ok"):
            raise LinkError(f'wan "{self.plan.name}": the emulator refused: {answer["error"]}')
        return answer  # type: ignore[no-any-return]

    def _read_line(self) -> bytes:
        assert self._control is not None
        while b"\n" not in self._answers:
            received = self._control.recv(1 << 20)
            if not received:
                raise EOFError("end of file")
            self._answers += received
        line, _, self._answers = self._answers.partition(b"\n")
        return line

    def _obituary(self, error: Exception) -> str:
        status = None
        if self._process is not None and not isinstance(error, TimeoutError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = self._process.wait(timeout=1)  # its socket closes a moment before it is gone
        fate = "does not answer" if status is None else f"has ended with status {status}"
        # of a lab that is not up yet the log goes with it, so that the sentence has its last line
        said = self.log_path.read_text(errors="replace").splitlines() if self.log_path.exists() else []
        return f'wan "{self.plan.name}": the emulator {fate} ({said[-1] if said else error}); see {self.log_path}'
