"""Which driver a link gets: the one that its file names, or for `auto` one that is here and can do what is asked."""

from dataclasses import replace
from ipaddress import IPv4Interface

import pytest

from testbed.model.impairment import CoDel, Impairment
from testbed.model.plan import WanPlan
from testbed.supervisor.preflight import choose_driver

ADDRESSES = (IPv4Interface("172.31.0.0/31"), IPv4Interface("172.31.0.1/31"))
PLAIN = Impairment(rate_bps=10**8, queue_bytes=10**6)
CODEL = replace(PLAIN, codel=CoDel())
BOTH = {"netem": None, "userspace": None}
ONLY_NETEM = {"netem": None, "userspace": "there is no /dev/net/tun"}
ONLY_USERSPACE = {"netem": "this kernel has no sch_netem", "userspace": None}
NEITHER = {"netem": "this kernel has no sch_netem", "userspace": "there is no /dev/net/tun"}


def link(driver: str, backward: Impairment) -> WanPlan:
    return WanPlan("wan0", "a", "b", *ADDRESSES, forward=PLAIN, backward=backward, driver=driver)


@pytest.mark.parametrize(
    ("asked", "backward", "missing", "chosen"),
    [
        ("auto", PLAIN, BOTH, "netem"),
        ("auto", PLAIN, ONLY_USERSPACE, "userspace"),
        ("auto", CODEL, BOTH, "userspace"),
        ("userspace", PLAIN, BOTH, "userspace"),
        ("userspace", CODEL, BOTH, "userspace"),
    ],
)
def test_a_link_gets_a_driver_that_can_do_what_it_asks(
    asked: str, backward: Impairment, missing: dict[str, str | None], chosen: str
) -> None:
    assert choose_driver(link(asked, backward), missing) == (chosen, None)


@pytest.mark.parametrize(
    ("asked", "backward", "missing", "words"),
    [
        ("netem", CODEL, BOTH, ["codel: the netem driver has no CoDel stage; use driver: userspace"]),
        ("netem", PLAIN, ONLY_USERSPACE, ["the netem driver does not work here: this kernel has no sch_netem"]),
        ("auto", CODEL, ONLY_NETEM, ["no CoDel stage", "the userspace driver does not work here: there is no"]),
        ("auto", PLAIN, NEITHER, ["this kernel has no sch_netem", "there is no /dev/net/tun"]),
    ],
)
def test_a_link_that_no_driver_can_be_is_refused_with_every_reason(
    asked: str, backward: Impairment, missing: dict[str, str | None], words: list[str]
) -> None:
    _, problem = choose_driver(link(asked, backward), missing)
    assert problem is not None
    assert all(word in problem for word in words)
