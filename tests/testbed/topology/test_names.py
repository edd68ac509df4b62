"""Names: whatever a person would type is taken as typed; what could not be used is refused with the reason."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from testbed.topology.names import (
    MAX_NAME,
    InvalidName,
    check_host_name,
    check_name,
    lookup_key,
    resolvable_name,
)

GOOD = [
    "SW_SUPERVISOR_1",
    "edge-1.rack:2",
    "very-long-name-1",
    "very-long-name-2",
    "verylongname1",
    "a",
    "0a",
    "_x",
    "a@b+c",
    "on",
    "null",
    "x" * MAX_NAME,
    "node.with.dots",
    "3com",
]


@pytest.mark.parametrize("name", GOOD)
def test_what_people_type_is_a_name(name: str) -> None:
    assert check_host_name(name) == name


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("", "is empty"),
        ("two words", "white space"),
        ("tab\tbed", "white space"),
        ("a/b", '"/" in it'),
        ("a#b", '"#" in it'),
        ("münchen", 'the non-ASCII character "ü"'),
        ("a\u00a0b", "white space"),
        ("a\nb", "white space"),
        ("a\x1bb", r'"\\x1b" in it'),
        ("-x", "must begin with"),
        (".x", "must begin with"),
        ("..", "must begin with"),
        ("x" * 64, "has 64 characters"),
    ],
)
def test_what_cannot_be_a_file_or_a_word_on_a_command_line_is_refused(name: str, reason: str) -> None:
    with pytest.raises(InvalidName, match=reason) as caught:
        check_name(name)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("name", ["1", "10.1", "10.0.0.1", "0x7f", "010", "a::b", "fe80::1"])
def test_a_host_whose_name_resolvers_take_for_an_address_is_refused(name: str) -> None:
    with pytest.raises(InvalidName, match="IP address"):
        check_host_name(name)


@given(st.text(max_size=70))
def test_every_accepted_name_is_safe_in_a_path_and_on_a_command_line(text: str) -> None:
    try:
        name = check_name(text)
    except InvalidName:
        return
    assert name == text
    assert name.isascii()
    assert len(name) <= MAX_NAME
    assert not name.startswith(("-", "."))
    assert not set(name) & set("/ \t\n\0#'\"\\$&|;<>*?()[]{}!~`^=%")


def test_names_that_a_resolver_cannot_tell_apart_have_equal_keys() -> None:
    assert lookup_key("GW0") == lookup_key("gw0")
    assert lookup_key("rack:2") == lookup_key("rack-2")
    assert lookup_key("a.b") != lookup_key("a-b")


@pytest.mark.root
def test_the_c_library_resolves_every_accepted_name_in_its_resolvable_form(tmp_path: Path) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("".join(f"10.9.0.{i} {resolvable_name(name)}\n" for i, name in enumerate(GOOD, 1)))
    script = (
        "import socket, sys\n"
        "for name in sys.argv[1:]:\n"
        "    print(socket.getaddrinfo(name, 80, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])\n"
    )
    command = 'mount --bind "$0" /etc/hosts && exec "$@"'
    names = [resolvable_name(name) for name in GOOD]
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", command, str(hosts), sys.executable, "-c", script, *names],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [f"10.9.0.{i}" for i in range(1, len(GOOD) + 1)]
