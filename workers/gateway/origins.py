"""Names that the API answers to: a guard against pages of other sites, which a browser lets talk to this machine.

A page may post without asking (its Origin is foreign), or come from a name that its owner points at this machine for a
moment (DNS rebinding: Host is foreign). Clients that are no browsers send no Origin, and a Host that is right.
"""

import ipaddress
import socket
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from workers.gateway.errors import ApiError, json_response

# Nobody can register a name under these: RFC 6761, 6762, 8375; ICANN keeps .internal private
PRIVATE_ENDS = (".localhost", ".local", ".internal", ".home.arpa", ".localdomain", ".lan", ".test", ".invalid")


class Origins:
    """An ASGI application in front of another one. `answer`: how an ApiError is sent."""

    def __init__(self, app: ASGIApp, names: Iterable[str]) -> None:
        self._app = app
        self._names = {name.lower().rstrip(".") for name in (*names, *own_names())}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (error := self._problem(scope)) is not None:
            await json_response(error.status, error.body())(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _problem(self, scope: Scope) -> ApiError | None:
        headers = {name: value.decode("latin-1").strip() for name, value in scope["headers"]}
        host = host_of(headers.get(b"host", ""))
        if host and _is_loopback(scope["server"][0]) and not self._is_ours(host):
            return ApiError(
                403,
                f"the API does not go by the name {host[:200]!r}; reach it by address, or add the name to api.names",
                code="foreign_host",
            )
        origin = headers.get(b"origin", "")
        parts = urlsplit(origin) if origin.isprintable() else None
        if origin and (origin == "null" or parts is None or parts.scheme in ("http", "https")):
            there = host_of(parts.netloc) if parts is not None else ""
            if not there or (there != host and not _is_loopback(there) and not self._is_ours(there, addresses=False)):
                return ApiError(
                    403, f"pages of {origin[:200]!r} may not use the API; api.names allows them", code="foreign_origin"
                )
        elif not origin and headers.get(b"sec-fetch-site") == "cross-site" and scope["method"] == "POST":
            return ApiError(403, "pages of other sites may not use the API", code="foreign_origin")
        return None

    def _is_ours(self, host: str, *, addresses: bool = True) -> bool:
        """One label alone is no name of the public DNS; an address cannot be rebound."""
        if _address(host) is not None:
            return addresses
        return host in self._names or "." not in host or host.endswith(PRIVATE_ENDS)


def own_names() -> set[str]:
    """This machine's name, in its domains, and what its administrator calls it. Looks nothing up."""
    name = socket.gethostname()
    names = {name}
    with suppress(OSError, UnicodeDecodeError):
        for line in Path("/etc/hosts").read_text().splitlines():
            names.update(line.partition("#")[0].split()[1:])
    with suppress(OSError, UnicodeDecodeError):
        for line in Path("/etc/resolv.conf").read_text().splitlines():
            word, *domains = line.split() or [""]
            if word in ("search", "domain"):
                names.update(f"{name}.{domain}" for domain in domains)
    return names


def host_of(netloc: str) -> str:
    """The host of `host:port`, in small letters, without the brackets of an IPv6 address."""
    host = netloc.rpartition("@")[2]
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower().rstrip(".")


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None


def _is_loopback(host: str) -> bool:
    address = _address(host)
    return host == "localhost" if address is None else address.is_loopback
