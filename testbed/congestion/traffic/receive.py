"""The receiving end of cross traffic: accepts and counts until it is told to report. Says its port when it is ready.

A flow's first byte (TCP), or each packet's (UDP), is its number.
"""

import selectors
import socket
import struct
import sys
from time import monotonic_ns
from typing import Any

_SO_RCVBUFFORCE, _SO_MEMINFO, _MEMINFO_DROPS = 33, 55, 8
_UDP_BUFFER_BYTES = 8 << 20
_BATCH = 64


class Receiver:
    def __init__(self, protocol: str, address: str, flows: int) -> None:
        self._udp = protocol == "udp"
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM if self._udp else socket.SOCK_STREAM)
        if self._udp:
            self._socket.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _UDP_BUFFER_BYTES)
        self._socket.bind((address, 0))
        if not self._udp:
            self._socket.listen(128)
        self._socket.setblocking(False)
        self.port: int = self._socket.getsockname()[1]
        self._bytes = [0] * flows
        self._packets = [0] * flows
        self._first_ns = self._last_ns = 0
        self._selector = selectors.DefaultSelector()
        self._buffer = bytearray(1 << 18)

    def run(self) -> dict[str, Any]:
        """Count until a line, or the end, of standard input; returns the report."""
        self._selector.register(sys.stdin, selectors.EVENT_READ, None)
        self._selector.register(self._socket, selectors.EVENT_READ, self._datagrams if self._udp else self._accept)
        while True:
            for key, _ in self._selector.select():
                if key.data is None:
                    return self._report()
                key.data(key.fileobj)

    def _accept(self, listener: socket.socket) -> None:
        connection, _ = listener.accept()
        connection.setblocking(False)
        flow: list[int] = []  # its number, once its first byte is here
        self._selector.register(connection, selectors.EVENT_READ, lambda source: self._stream(source, flow))

    def _stream(self, connection: socket.socket, flow: list[int]) -> None:
        try:
            count = connection.recv_into(self._buffer)
        except BlockingIOError:
            return
        except OSError:  # reset: the sender has stopped
            count = 0
        if count == 0:
            self._selector.unregister(connection)
            connection.close()
            return
        if not flow:
            flow.append(self._buffer[0])
        self._count(flow[0], count, 0)

    def _datagrams(self, source: socket.socket) -> None:
        for _ in range(_BATCH):
            try:
                count = source.recv_into(self._buffer)
            except BlockingIOError:
                return
            self._count(self._buffer[0], count, 1)

    def _count(self, flow: int, count: int, packets: int) -> None:
        now = monotonic_ns()
        self._first_ns = self._first_ns or now
        self._last_ns = now
        if flow < len(self._bytes):
            self._bytes[flow] += count
            self._packets[flow] += packets

    def _report(self) -> dict[str, Any]:
        dropped = 0
        if self._udp:
            memory = self._socket.getsockopt(socket.SOL_SOCKET, _SO_MEMINFO, 36)
            dropped = struct.unpack("=9I", memory)[_MEMINFO_DROPS]
        flows = [{"bytes": count} for count in self._bytes]
        if self._udp:
            for flow, packets in zip(flows, self._packets, strict=True):
                flow["packets"] = packets
        span = {"first_ns": self._first_ns, "last_ns": self._last_ns}
        return {"bytes": sum(self._bytes), "dropped_at_socket": dropped, **span, "flows": flows}
