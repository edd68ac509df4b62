"""Run by test_ring.py in a network namespace of its own: packets over `lo`, recorded with header-only rings.

Prints one JSON row per packet that was kept: protocol, kept bytes, original bytes, outgoing.
"""

import json
import socket
import subprocess
import sys
import time

from testbed.capture import pcapng
from testbed.capture.ring import Ring, Selection
from workers.linux import CLONE_NEWNET, call

PAYLOAD = bytes(range(256)) * 4


def exchange() -> None:
    """TCP with options, UDP whole and in fragments, ICMP."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as client:
        server, _ = listener.accept()
        client.sendall(PAYLOAD)
        received = 0
        while received < len(PAYLOAD):
            received += len(server.recv(1 << 16))
        server.close()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        udp.sendto(PAYLOAD, ("127.0.0.1", 9))
        udp.sendto(PAYLOAD * 3, ("127.0.0.1", 9))
    with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP) as icmp:
        icmp.sendto(b"\x08\x00\xf7\xff\x00\x00\x00\x00" + PAYLOAD, ("127.0.0.1", 0))


def main() -> None:
    call("unshare", CLONE_NEWNET)
    subprocess.run(["ip", "link", "set", "lo", "up", "mtu", "1500"], check=True)
    selection = Selection(headers_only=sys.argv[1] == "headers", snaplen=None, ring_bytes=4 << 20)
    ring = Ring("lo", selection, outgoing_only=sys.argv[2] == "outgoing")
    exchange()
    time.sleep(0.1)
    rows = []
    for packets in ring.ready_blocks():
        for _, data, original, way in packets:
            rows.append([data[23], (data[20] & 31) << 8 | data[21], len(data), original, way == pcapng.OUTBOUND])
    ring.count()
    ring.close()
    print(json.dumps({"rows": rows, "received": ring.received, "dropped": ring.dropped}))


if __name__ == "__main__":
    main()
