"""Packets that got lost where nobody asked for it: at hosts, routers and switch ports, in the buffers of who measures.
WAN links count their own. Hosts and routers that are gone are told too: what they lost, nobody counts any more.

Reads /proc only. A packet that finds a CPU's receive backlog full is counted at its interface as well (the kernel's
enqueue_to_backlog); the backlog's own counter is the whole machine's, another lab's and any program's, so it is named
beside a loss of this lab, and is none by itself.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

Counts = dict[str, int]


class DropWatch:
    """Since it was made. `nodes`: a process in the namespaces of each node, by what people call it."""

    def __init__(self, nodes: Mapping[str, int]) -> None:
        self._nodes = dict(nodes)
        self._gone: dict[str, None] = {}
        self._before = self._read()
        self._backlog_before = backlog_drops()

    def reasons(self) -> Iterator[str]:
        """Reasons in words: packets that were dropped, interfaces that are gone."""
        now = self._read()
        backlog = backlog_drops() - self._backlog_before
        beside = (
            f" (meanwhile this machine's receive backlog dropped {backlog}, of any lab or program)" if backlog else ""
        )
        for where, count in now.items():
            lost = count - self._before.get(where, 0)
            if lost > 0:
                yield f"{lost} packets dropped unasked: {where}{beside}"
        for name in self._gone:
            yield f"{name} is gone: the process that held its network has ended"

    def _read(self) -> Counts:
        found: Counts = {}
        for name, pid in self._nodes.items():
            try:
                text = Path(f"/proc/{pid}/net/dev").read_text()
            except OSError:
                self._gone[name] = None
                continue
            found |= {f"{name}, interface {ifname}": count for ifname, count in device_drops(text).items()}
        return found


def device_drops(net_dev: str) -> Counts:
    """Drops of each interface in a /proc/PID/net/dev but WAN links' ends; both ways together."""
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
