"""Rules of names: of labs, datacenters, hosts and WAN links.

Names are what a person would type, and stay as typed wherever a person sees them. They become file
names below /run, words on a command line and lines of /etc/hosts; the rules demand no more than those
do. Interface names are derived elsewhere.
"""

import re
import socket

from testbed.model.units import printable, quote

MAX_NAME = 63  # a label of a host name (RFC 1035); Python's resolver refuses longer ones
ACCEPTED = f"at most {MAX_NAME} letters, digits and . _ - : @ +"
NAME_PATTERN = rf"^[A-Za-z0-9_][A-Za-z0-9._:@+\-]{{0,{MAX_NAME - 1}}}$"
_FOREIGN = re.compile(r"[^A-Za-z0-9._:@+\-]")


class InvalidName(ValueError):
    """A name cannot be used; the message quotes it and says why."""


def check_name(text: str) -> str:
    """`text`, unchanged. Raises InvalidName when a file name or a command line could not carry it."""
    shown = quote(text, most=MAX_NAME + 20)
    if not text:
        raise InvalidName(f'"" is empty; a name is {ACCEPTED}')
    foreign = _FOREIGN.search(text)
    if foreign is not None:
        character = foreign.group()
        kind = "white space" if character.isspace() else f'"{printable(character)}"'
        if not character.isascii() and not character.isspace():
            kind = f"the non-ASCII character {kind}"
        raise InvalidName(f"{shown} has {kind} in it; a name is {ACCEPTED}")
    if len(text) > MAX_NAME:
        raise InvalidName(f"{shown} has {len(text)} characters; a name is {ACCEPTED}")
    if "mininet:" in text:  # in the arguments of `pddbed up --name`, which the lab's processes keep
        raise InvalidName(f'{shown} has "mininet:" in it, by which `mn -c` finds processes to end; choose another')
    if not re.match("[A-Za-z0-9_]", text):
        raise InvalidName(f"{shown} must begin with a letter, a digit or _")
    return text


def check_host_name(text: str) -> str:
    """`text`, unchanged. Raises InvalidName when it could not be looked up as a host's name either."""
    check_name(text)
    shown = quote(text, most=MAX_NAME + 20)
    if _is_address(text):
        raise InvalidName(f"{shown} would be read as an IP address; put a letter in the name")
    if text.endswith(".") or ".." in text:
        raise InvalidName(f"{shown} has an empty part between its dots; a resolver refuses such a name")
    if lookup_key(text) == "localhost":
        raise InvalidName(f"{shown} is every machine's own name for itself; choose another")
    return text


def resolvable_name(name: str) -> str:
    """The form of a host's name for /etc/hosts: glibc takes whatever has a colon for an IPv6 address."""
    return name.replace(":", "-")


def lookup_key(name: str) -> str:
    """Names with equal keys cannot be told apart by a resolver, which ignores case."""
    return resolvable_name(name).lower()


def _is_address(text: str) -> bool:
    """True when a resolver takes `text` for an address: 10.1.0.3, but also 1, 10.3, 0x7f and ::1."""
    try:
        socket.inet_aton(text)
    except OSError:
        pass
    else:
        return True
    try:
        socket.inet_pton(socket.AF_INET6, text)
    except OSError:
        return False
    return True
