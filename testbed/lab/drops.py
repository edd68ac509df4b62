"""Packets that got lost where nobody asked for it: at hosts, routers and switch ports, in the machine's receive
backlog, in the buffers of who measures. WAN links count their own.

Reads /proc only. The backlog's counter is the whole machine's: another lab's loss counts here as well, since what made
it happen is a machine that is too busy for both.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

Counts = dict[str, int]


class DropWatch:
    """Since it was made. `nodes`: a process in the namespaces of each node, by what people call it."""

    def __init__(self, nodes: Mapping[str, int]) -> None:
        self._nodes = dict(nodes)
        self._before = self._read()

    def reasons(self) -> Iterator[str]:
        """What was dropped, in words."""
        for where, count in self._read().items():
            lost = count - self._before.get(where, 0)
            if lost > 0:
                yield f"{lost} packets dropped unasked: {where}"

    def _read(self) -> Counts:
        found = {"this machine's receive backlog (softnet_stat)": backlog_drops()}
        for name, pid in self._nodes.items():
            try:
                text = Path(f"/proc/{pid}/net/dev").read_text()
            except OSError:
                continue  # somebody ended the node's shell, which is told elsewhere
            found |= {f"{name}, interface {ifname}": count for ifname, count in device_drops(text).items()}
        return found


def device_drops(net_dev: str) -> Counts:
    """Of each interface in a /proc/PID/net/dev but WAN links' ends; both ways together."""
    found = {}
    for line in net_dev.splitlines()[2:]:
        name, _, counters = line.partition(":")
        fields = counters.split()
        if not name.strip().startswith(("wan", "lo")):
            found[name.strip()] = int(fields[3]) + int(fields[11])
    return found


def backlog_drops(softnet_stat: Path = Path("/proc/net/softnet_stat")) -> int:
    """Packets that a CPU dropped because its backlog was full, of all CPUs (the second column, in hexadecimal)."""
    try:
        return sum(int(line.split()[1], 16) for line in softnet_stat.read_text().splitlines())
    except OSError:
        return 0


def receive_buffer_errors(pid: int) -> int:
    """UDP datagrams that a namespace's sockets had no room for."""
    try:
        lines = Path(f"/proc/{pid}/net/snmp").read_text().splitlines()
    except OSError:
        return 0
    names, values = (line.split()[1:] for line in lines if line.startswith("Udp:"))
    return int(dict(zip(names, values, strict=True)).get("RcvbufErrors", 0))
