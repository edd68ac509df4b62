"""Our netlink messages: complete, and independent of what pyroute2 has done before in the same process."""

import struct

from pyroute2.netlink.rtnl.tcmsg import tcmsg

from testbed.links.tc_messages import qdisc_message


def _encoded(kind: str, options: dict[str, object]) -> bytes:
    message = qdisc_message()
    message["attrs"] = [["TCA_KIND", kind], ["TCA_OPTIONS", options]]
    message.encode()
    return bytes(message.data)


def test_messages_do_not_depend_on_earlier_use_of_pyroute2s_own() -> None:
    """pyroute2 keeps the compiled attribute map on the class, where a subclass finds it."""
    theirs = tcmsg()
    theirs["attrs"] = [["TCA_KIND", "netem"], ["TCA_OPTIONS", {"delay": 1, "limit": 1}]]
    theirs.encode()
    options = {"limit": 7, "attrs": [["TCA_NETEM_LATENCY64", 300_000_000_000]]}
    assert struct.pack("<q", 300_000_000_000) in _encoded("netem", options)


def test_what_is_encoded_is_decoded_again() -> None:
    model = {"p": 1, "r": 2, "h": 3, "k1": 4}
    attributes = [
        ["TCA_NETEM_LATENCY64", 275_000_000_001],
        ["TCA_NETEM_JITTER64", 3],
        ["TCA_NETEM_RATE64", 1 << 33],
        ["TCA_NETEM_LOSS", {"attrs": [["NETEM_LOSS_GE", model]]}],
        ["TCA_NETEM_PRNG_SEED", 1 << 63],
        ["TCA_NETEM_DELAY_DIST", struct.pack("4h", -1, 0, 1, 32767)],
    ]
    decoded = qdisc_message(_encoded("netem", {"limit": 7, "attrs": attributes}))
    decoded.decode()
    options = decoded.get_attr("TCA_OPTIONS")
    assert options["limit"] == 7
    assert options.get_attr("TCA_NETEM_LATENCY64") == 275_000_000_001
    assert options.get_attr("TCA_NETEM_RATE64") == 1 << 33
    assert options.get_attr("TCA_NETEM_PRNG_SEED") == 1 << 63
    got = options.get_attr("TCA_NETEM_LOSS").get_attr("NETEM_LOSS_GE")
    assert {name: got[name] for name in model} == model
