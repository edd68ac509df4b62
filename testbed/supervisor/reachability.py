"""Waits until a lab forwards packets, by pinging from inside its namespaces. Owns one raw ICMP socket per probe."""

import os
import socket
import struct
import time
from dataclasses import dataclass

from testbed.machine.netns import network_namespace_of

ECHO_REQUEST, ECHO_REPLY = 8, 0


@dataclass(frozen=True, slots=True)
class Path:
    """From any process in the source's namespace to an address; `name` is for messages."""

    name: str
    pid: int
    destination: str
    rtt_ns: int


class Unreachable(Exception):
    """Some path did not answer in time; the message names every one."""


def _checksum(data: bytes) -> int:
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    total = (total >> 16) + (total & 0xFFFF)
    return ~(total + (total >> 16)) & 0xFFFF


def _echo(identifier: int, sequence: int) -> bytes:
    payload = struct.pack("!Q", time.monotonic_ns())
    header = struct.pack("!BBHHH", ECHO_REQUEST, 0, 0, identifier, sequence)
    return struct.pack("!BBHHH", ECHO_REQUEST, 0, _checksum(header + payload), identifier, sequence) + payload


def wait_until_reachable(paths: list[Path], patience_s: float = 10.0, interval_s: float = 0.05) -> dict[str, int]:
    """Ping every path until all have answered; returns the smallest RTT in ns seen per name.

    A lost echo is sent again after `interval_s` (or the path's RTT, if longer). Raises Unreachable after
    `patience_s` plus four RTTs.
    """
    sockets: dict[str, socket.socket] = {}
    for path in paths:
        with network_namespace_of(path.pid):
            sockets[path.name] = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)
    try:
        return _ping(paths, sockets, patience_s, interval_s)
    finally:
        for probe in sockets.values():
            probe.close()


def _ping(paths: list[Path], sockets: dict[str, socket.socket], patience_s: float, interval_s: float) -> dict[str, int]:
    # A raw socket sees every ICMP packet of its namespace, so each path has an identifier of its own.
    identifiers = {path.name: (os.getpid() + number) & 0xFFFF for number, path in enumerate(paths)}
    best: dict[str, int] = {}
    next_send = dict.fromkeys((path.name for path in paths), 0.0)
    deadline = time.monotonic() + patience_s + 4 * max((path.rtt_ns for path in paths), default=0) / 1e9
    sequence = 0
    while len(best) < len(paths):
        now = time.monotonic()
        if now > deadline:
            missing = ", ".join(path.name for path in paths if path.name not in best)
            raise Unreachable(f"no answer to pings on: {missing}")
        for path in paths:
            if path.name in best or now < next_send[path.name]:
                continue
            sequence = (sequence + 1) & 0xFFFF
            next_send[path.name] = now + max(interval_s, path.rtt_ns / 1e9)
            try:
                sockets[path.name].sendto(_echo(identifiers[path.name], sequence), (path.destination, 0))
            except OSError:  # the route is not up yet
                continue
        for path in paths:
            rtt_ns = _answer(sockets[path.name], identifiers[path.name])
            if rtt_ns is not None:
                best[path.name] = min(rtt_ns, best.get(path.name, rtt_ns))
        time.sleep(0.002)
    return best


def _answer(probe: socket.socket, identifier: int) -> int | None:
    """The round trip of one echo reply that has arrived, if any."""
    while True:
        try:
            packet = probe.recv(2048, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        now = time.monotonic_ns()
        icmp = packet[(packet[0] & 0x0F) * 4 :]
        if len(icmp) >= 16 and icmp[0] == ECHO_REPLY and struct.unpack("!H", icmp[4:6])[0] == identifier:
            sent: int = struct.unpack("!Q", icmp[8:16])[0]
            return now - sent
