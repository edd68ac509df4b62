"""WAN links: one interface (`base`), two drivers (`netem` in the kernel, `userspace` as an emulator process)."""

from pathlib import Path

from testbed.links.base import WanEnd, WanLink
from testbed.model.plan import WanPlan


def make_link(
    driver: str, plan: WanPlan, ends: tuple[WanEnd, WanEnd], node_pid: int, run_dir: Path, seed: int = 0
) -> WanLink:
    """The link of the named driver, not built yet."""
    return _driver(driver)(plan, ends, node_pid, run_dir, seed)


def _driver(name: str) -> type[WanLink]:
    """Drivers are imported when they are used."""
    if name == "netem":
        from testbed.links.netem import NetemLink

        return NetemLink
    if name == "userspace":
        from testbed.links.userspace import UserspaceLink

        return UserspaceLink
    raise ValueError(f"no WAN driver {name!r}")
