"""WAN links: one interface (`base`), two drivers (`netem` in the kernel, `userspace` as a relay process)."""

from pathlib import Path

from testbed.links.base import WanEnd, WanLink
from testbed.topology.plan import WanPlan


def make_link(driver: str, plan: WanPlan, ends: tuple[WanEnd, WanEnd], node_pid: int, run_dir: Path) -> WanLink:
    """The link of the named driver, not built yet. Drivers are imported when they are used."""
    if driver == "netem":
        from testbed.links.netem import NetemLink

        return NetemLink(plan, ends, node_pid, run_dir)
    if driver == "userspace":
        from testbed.links.userspace import UserspaceLink

        return UserspaceLink(plan, ends, node_pid, run_dir)
    raise ValueError(f"no WAN driver {driver!r}")
