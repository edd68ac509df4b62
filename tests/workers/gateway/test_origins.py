"""Pages of other sites are refused, whatever they send; programs and this machine's own pages are not."""

import asyncio
import socket
from typing import Any

import pytest

from workers.gateway.origins import Origins, host_of


def status(
    *headers: tuple[str, str], method: str = "POST", server: str = "127.0.0.1", names: tuple[str, ...] = ()
) -> int:
    """What a request with these headers is answered; 200 by the application behind."""
    seen: list[int] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(200)

    async def send(message: Any) -> None:
        if message["type"] == "http.response.start":
            seen.append(message["status"])

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    scope = {
        "type": "http",
        "method": method,
        "server": (server, 8000),
        "headers": [(name.lower().encode(), value.encode()) for name, value in headers],
    }
    asyncio.run(Origins(app, names)(scope, receive, send))
    (one,) = seen
    return one


HOSTS = (
    "localhost", "localhost:8000", "LOCALHOST", "127.0.0.1:8000", "127.1.2.3", "[::1]:8000", "0.0.0.0:8000", "gw0",
    "192.168.1.5:18000", "host.docker.internal", "box.local", "app.localhost", "x", f"{socket.gethostname()}:8000",
    "svc.ns.svc.cluster.local", "localhost.",
)  # fmt: skip
FOREIGN = ("evil.example.com", "evil.example.com:8000", "localhost.evil.com", "127.0.0.1.nip.io", "a.b", "box.com.")


@pytest.mark.parametrize("host", HOSTS)
def test_the_api_goes_by_its_addresses_and_private_names(host: str) -> None:
    assert status(("Host", host)) == 200
    assert status(("Host", host), ("Origin", f"http://{host}")) == 200


@pytest.mark.parametrize("host", FOREIGN)
def test_a_name_that_somebody_may_own_is_refused_on_loopback(host: str) -> None:
    for method in ("GET", "POST"):
        assert status(("Host", host), method=method) == 403
        assert status(("Host", host), method=method, names=(host_of(host).upper(),)) == 200
    assert status(("Host", host), server="10.0.0.5") == 200, "as whoever listens on 0.0.0.0 is reached"


ORIGINS = (
    "http://evil.example.com",
    "https://localhost.evil.com",
    "null",
    "http://1.2.3.4",
    "http://",
    "https://x y.z",
)


@pytest.mark.parametrize("origin", ORIGINS)
def test_a_page_of_another_site_is_refused(origin: str) -> None:
    for server in ("127.0.0.1", "10.0.0.5"):
        assert status(("Host", "localhost:8000"), ("Origin", origin), server=server) == 403


@pytest.mark.parametrize(
    "origin",
    [
        "http://localhost:3000",
        "http://127.0.0.1:8000",
        "http://[::1]",
        "http://x.local",
        "vscode-webview://abc",
        "app://x",
    ],
)
def test_a_page_of_this_machine_is_not(origin: str) -> None:
    assert status(("Host", "127.0.0.1:8000"), ("Origin", origin)) == 200


def test_a_page_of_a_configured_name_is_not() -> None:
    assert status(("Host", "localhost"), ("Origin", "https://chat.example.com")) == 403
    assert status(("Host", "localhost"), ("Origin", "https://chat.example.com"), names=("chat.example.com",)) == 200


def test_a_post_that_a_browser_calls_cross_site_is_refused_and_a_link_is_not() -> None:
    assert status(("Host", "localhost"), ("Sec-Fetch-Site", "cross-site")) == 403
    assert status(("Host", "localhost"), ("Sec-Fetch-Site", "cross-site"), method="GET") == 200


def test_a_program_that_sends_neither_is_served() -> None:
    assert status() == 200
