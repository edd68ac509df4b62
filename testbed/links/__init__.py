"""WAN links: one interface (`base`), two drivers (`netem` in the kernel, `userspace` as a relay process)."""

from pathlib import Path

from testbed.links.base import WanEnd, WanLink
from testbed.model.impairment import Impairment
from testbed.model.plan import WanPlan


def refusal(driver: str, impairment: Impairment, mtu: int) -> str | None:
    """Reason why the named driver cannot do what one direction is asked; None when it can. See `WanLink.refuses`."""
    return _driver(driver).refuses(impairment, mtu)


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
