"""Runs inside the VM: reports as JSON on stdout what the guest is like, one word on stderr, and status 42."""

import json
import os
import subprocess
import sys
from pathlib import Path


def succeeds(*command: str) -> bool:
    return subprocess.run(command, capture_output=True).returncode == 0


terminal = os.openpty()
marker = Path(sys.argv[1])
before = marker.read_text()
marker.write_text("changed in the guest")
output = Path(os.environ["PDDBED_VM_OUTPUT"])
(output / "below").mkdir()
(output / "below" / "file").write_bytes(bytes(range(256)))
(output / "link").symlink_to("below/file")

report = {
    "argv": sys.argv[2:],
    "odd": os.environ.get("ODD"),
    "secret": os.environ.get("SECRET"),
    "cwd": str(Path.cwd()),
    "uid": os.geteuid(),
    "stdin": sys.stdin.read(),
    "python": sys.version.split()[0],
    "marker_before": before,
    "marker_after": marker.read_text(),
    "pty": os.ttyname(terminal[1]),
    "tun": os.access("/dev/net/tun", os.R_OK | os.W_OK),
    "cgroup": Path("/sys/fs/cgroup/cgroup.controllers").exists(),
    "shm": os.path.ismount("/dev/shm"),
    "interfaces": sorted(path.name for path in Path("/sys/class/net").iterdir()),
    "netem": succeeds("tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"),
    "modprobe": succeeds("modprobe", "sch_ets"),
    "congestion": Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control").read_text().split(),
    "unshare": succeeds("unshare", "--net", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc", "true"),
}
print(json.dumps(report))
print("one line of complaint", file=sys.stderr)
sys.exit(42)
