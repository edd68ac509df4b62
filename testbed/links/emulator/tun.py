"""TUN devices with virtio-net headers and TCP segmentation offload: opening one, writing frames to it.

Owns the ioctl calls (linux/if_tun.h). The device appears in the network namespace in which it is opened
and vanishes when its last descriptor closes.
"""

import fcntl
import os
import struct

from testbed.links.emulator.packet import Frame

_TUNSETIFF = 0x400454CA
_TUNSETOFFLOAD = 0x400454D0
_IFF_TUN = 0x0001
_IFF_NO_PI = 0x1000
_IFF_VNET_HDR = 0x4000
_TUN_F_CSUM = 0x01
_TUN_F_TSO4 = 0x02
_TUN_F_TSO_ECN = 0x08  # without it the kernel cuts super-packets that carry CWR in software


def open_tun(pattern: str) -> tuple[int, str]:
    """A new layer-3 device in the current network namespace: its descriptor (non-blocking) and its name.

    `pattern` may hold `%d`, which the kernel fills in. Raises OSError.
    """
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        request = struct.pack("16sH22x", pattern.encode(), _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR)
        answer = fcntl.ioctl(fd, _TUNSETIFF, request)
        fcntl.ioctl(fd, _TUNSETOFFLOAD, _TUN_F_CSUM | _TUN_F_TSO4 | _TUN_F_TSO_ECN)
    except OSError:
        os.close(fd)
        raise
    return fd, answer[:16].rstrip(b"\0").decode()


def write_frame(fd: int, frame: Frame) -> bool:
    """Hand one frame to the kernel; False when it refuses (interface down, nonsense in the packet)."""
    try:
        if isinstance(frame, bytes):
            os.write(fd, frame)
        else:
            os.writev(fd, frame)
    except OSError:
        return False
    return True
