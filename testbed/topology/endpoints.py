"""IPv4 subnets, addresses and ports as a topology file writes them, as pydantic types.

Owns the syntax of single values; whether subnets overlap or ports clash is for `checks`.
"""

import re
from ipaddress import IPv4Address, IPv4Network, IPv6Address
from typing import Annotated, Any

from testbed.model.plan import Publish
from testbed.model.units import quote
from testbed.topology.fields import Reads, text_of

MAX_PORT = 65535
LOOPBACK = "127.0.0.1"
_OCTETS = r"[0-9]{1,3}(\.[0-9]{1,3}){3}"
SUBNET_ACCEPTED = "an IPv4 subnet such as 10.1.0.0/24"
ADDRESS_ACCEPTED = "an IPv4 address such as 10.1.0.5"
ENDPOINT_ACCEPTED = f"ADDRESS:PORT on this machine, such as {LOOPBACK}:8000"
PUBLISH_ACCEPTED = f"ADDRESS:PORT:HOSTPORT such as {LOOPBACK}:9000:8000, or PORT:HOSTPORT (on {LOOPBACK})"


def parse_subnet(value: Any) -> IPv4Network:
    """`10.1.0.0/24`. Raises ValueError, for IPv6 and for host bits with sentences of their own."""
    text = text_of(value, SUBNET_ACCEPTED)
    address, slash, prefix = text.partition("/")
    _refuse_ipv6(text, address, SUBNET_ACCEPTED)
    if not slash:
        raise ValueError(f"{quote(text)} has no prefix length; write {SUBNET_ACCEPTED}")
    if not _is_ipv4(address) or not re.fullmatch("[0-9]{1,2}", prefix, re.ASCII) or int(prefix) > 32:
        raise ValueError(f"{quote(text)} is not {SUBNET_ACCEPTED}")
    network = IPv4Network(text, strict=False)
    if network.network_address != IPv4Address(address):
        raise ValueError(f"{quote(text)} has host bits set; the subnet is {network}")
    return network


def parse_address(value: Any) -> IPv4Address:
    """`10.1.0.5`. Raises ValueError."""
    text = text_of(value, ADDRESS_ACCEPTED)
    _refuse_ipv6(text, text, ADDRESS_ACCEPTED)
    if not _is_ipv4(text):
        raise ValueError(f"{quote(text)} is not {ADDRESS_ACCEPTED}")
    return IPv4Address(text)


def parse_endpoint(value: Any) -> tuple[str, int]:
    """`127.0.0.1:8000` as (address, port). Raises ValueError."""
    text = text_of(value, ENDPOINT_ACCEPTED)
    address, _, port = text.rpartition(":")
    _refuse_ipv6(text, address.strip("[]"), ENDPOINT_ACCEPTED)
    if not _is_ipv4(address):
        raise ValueError(f"{quote(text)} is not {ENDPOINT_ACCEPTED}")
    return address, _port(port, text)


def parse_publish(value: Any) -> Publish:
    """`127.0.0.1:9000:8000`, or `9000:8000` for the same on loopback. Raises ValueError."""
    text = text_of(value, PUBLISH_ACCEPTED)
    _refuse_ipv6(text, text[1:].partition("]")[0] if text.startswith("[") else "", PUBLISH_ACCEPTED)
    parts = text.split(":")
    if len(parts) == 2:
        parts.insert(0, LOOPBACK)
    if len(parts) != 3 or not _is_ipv4(parts[0]):
        raise ValueError(f"{quote(text)} is not {PUBLISH_ACCEPTED}")
    return Publish(parts[0], _port(parts[1], text), _port(parts[2], text))


def _refuse_ipv6(text: str, address: str, accepted: str) -> None:
    try:
        IPv6Address(address)
    except ValueError:
        return
    raise ValueError(f"{quote(text)} is IPv6, which labs do not have; write {accepted}")


def _is_ipv4(text: str) -> bool:
    """Four decimal numbers; shorthands (`10.1`) and leading zeros mean different things to different readers."""
    if not re.fullmatch(_OCTETS, text, re.ASCII):
        return False
    try:
        IPv4Address(text)
    except ValueError:
        return False
    return True


def _port(text: str, whole: str) -> int:
    if not re.fullmatch("[0-9]{1,5}", text, re.ASCII) or not 1 <= int(text) <= MAX_PORT:
        raise ValueError(f"{quote(whole)}: {quote(text)} is not a port from 1 to {MAX_PORT}")
    return int(text)


_PORT = "[0-9]{1,5}"
Subnet = Annotated[
    IPv4Network,
    Reads(parse_subnet, type="string", pattern=f"^{_OCTETS}/[0-9]{{1,2}}$", description=SUBNET_ACCEPTED),
]
Address = Annotated[
    IPv4Address,
    Reads(parse_address, type="string", pattern=f"^{_OCTETS}$", description=ADDRESS_ACCEPTED),
]
Endpoint = Annotated[
    tuple[str, int],
    Reads(parse_endpoint, type="string", pattern=f"^{_OCTETS}:{_PORT}$", description=ENDPOINT_ACCEPTED),
]
PublishedPort = Annotated[
    Publish,
    Reads(parse_publish, type="string", pattern=f"^({_OCTETS}:)?{_PORT}:{_PORT}$", description=PUBLISH_ACCEPTED),
]
