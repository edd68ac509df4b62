"""Jitter on a netem delay line: the qdisc's delay follows a process over time, so that packets keep their order.

netem's own jitter is drawn per packet: it reorders, or, where netem keeps order, lets every late packet hold up its
followers (1,200 packets/s, 50 +- 10 ms: mean 67.9 ms). So the same `JitterProcess` as in the userspace driver is
sampled here, and the delay changed to match, by one short netlink message each time. Owns the thread that does so.
"""

import os
import socket
import struct
import threading
import time
from random import Random

from testbed.links import qdisc
from testbed.links.emulator.jitter import JitterProcess
from testbed.machine.netns import network_namespace_of
from testbed.model.impairment import NS_PER_S, Impairment

# A ramp is climbed in steps of a tenth of a standard deviation (its slope is one half), but not more often than this.
STEP_DEVIATIONS = 0.2
STEP_MIN_NS = 2_000_000
ACKNOWLEDGEMENT_TIMEOUT_S = 20.0
NLMSG_HEADER = struct.Struct("=IHHII")


class Wanderer:
    """Moves the delay of one interface's root netem until `stop`, which comes before anyone else changes the qdisc."""

    def __init__(
        self, pid: int, index: int, netem: qdisc.Netem, impairment: Impairment, mtu: int, random: Random
    ) -> None:
        assert impairment.jitter is not None
        self._message, self._latency_at = qdisc.change_message(index, netem, mtu)
        self._delay_ns = impairment.delay_ns
        self._process = JitterProcess(impairment.jitter, random, time.monotonic_ns())
        self._step_s = max(round(impairment.jitter.std_ns * STEP_DEVIATIONS), STEP_MIN_NS) / NS_PER_S
        with network_namespace_of(pid):
            self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE)
        self._socket.settimeout(ACKNOWLEDGEMENT_TIMEOUT_S)
        self._stopping = threading.Event()
        self.latency_ns = netem.latency_ns
        self.changes = 0
        self.failure: str | None = None  # the latest; once there was one it stays
        self._thread = threading.Thread(target=self._run, name="wander", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Returns when the delay moves no more."""
        self._stopping.set()
        self._thread.join()
        self._socket.close()

    def _run(self) -> None:
        while not self._stopping.wait(self._step_s):
            try:
                latency_ns = max(0, self._delay_ns + self._process.offset_ns(time.monotonic_ns()))
                if latency_ns != self.latency_ns:
                    self._change(latency_ns)
            except Exception as error:  # told, and tried again: the next step finds the delay where it ought to be
                self.failure = getattr(error, "strerror", None) or str(error) or repr(error)

    def _change(self, latency_ns: int) -> None:
        struct.pack_into("=q", self._message, self._latency_at, latency_ns)
        self._socket.send(self._message)
        reply = self._socket.recv(65_536)
        (status,) = struct.unpack_from("=i", reply, NLMSG_HEADER.size)
        if status != 0:
            raise OSError(-status, os.strerror(-status))
        self.latency_ns = latency_ns
        self.changes += 1
