"""Raising and ending labs from outside: reserve the record, open the API socket, start the guardian, follow it.

All or nothing: whatever fails, or Ctrl-C at any moment, takes down what was built.
"""

import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TextIO

from testbed.lab import sandbox
from testbed.lab.control import ask_lab
from testbed.lab.record import LabError, Record, create_record, registry, sweep_dead
from testbed.topology.plan import LabPlan

GRACE_S = 5.0  # how long a supervisor may take to answer `down`, and then to end


@dataclass(frozen=True, slots=True)
class UpOptions:
    """What `pddbed up` adds to the file. `api` is (address, port), port 0 for any free one; None: no API socket."""

    driver: str
    with_workers: bool
    verify: bool
    api: tuple[str, int] | None


def listen(what: str, remedy: str, address: str, port: int) -> socket.socket:
    """Listen on the machine, before the lab enters its namespaces: a socket belongs to the one it was made in."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, port))
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise LabError(
            f"{what} cannot listen on {address}:{port} ({os.strerror(error.errno) if error.errno else error}); {remedy}"
        ) from None
    return listener


def up(plan: LabPlan, options: UpOptions, on_event: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Raise a lab; returns its state once it serves. Raises LabError, with nothing left behind."""
    from testbed.lab.supervisor import Settings, Supervisor, write_hosts_file

    sweep_dead()
    tether, holding = os.pipe()
    following, started = os.pipe()
    with registry() as root:
        api, published = _open_sockets(plan, options)
        record = create_record(root, plan.name)
        write_hosts_file(plan, record)
        settings = Settings(options.driver, options.with_workers, api, published, options.verify, started)
        listening = [entry[0] for entries in published.values() for entry in entries] + ([api] if api else [])
        keep = tuple(listener.fileno() for listener in listening)
        guardian = sandbox.start(record, Supervisor(plan, record, settings).run, tether, started, keep)
        diary = record.log("guardian").open()  # opened now: the record is swept when the lab ends
    for listener in listening:
        listener.close()
    try:
        state = _follow(following, diary, on_event)
        os.write(holding, b"1")
        return state
    except BaseException:
        with suppress(ProcessLookupError):
            os.kill(guardian, signal.SIGTERM)
        with suppress(ChildProcessError):
            os.waitpid(guardian, 0)
        record.sweep()  # the guardian has done so, unless it was killed as well
        raise
    finally:
        os.close(holding)
        os.close(following)
        diary.close()


def _open_sockets(
    plan: LabPlan, options: UpOptions
) -> tuple[socket.socket | None, dict[str, list[tuple[socket.socket, int]]]]:
    """The gateway's socket and those of `publish:`, all or none."""
    opened: list[socket.socket] = []
    try:
        api = None
        if options.api:
            api = listen("the API", "choose another address with --api HOST:PORT, or --api auto", *options.api)
            opened.append(api)
        published: dict[str, list[tuple[socket.socket, int]]] = {}
        for host in plan.hosts if options.with_workers else ():
            for entry in host.publish:
                remedy = f'change "publish" of host "{host.name}"'
                opened.append(listen("publish", remedy, entry.listen_address, entry.listen_port))
                published.setdefault(host.name, []).append((opened[-1], entry.host_port))
    except LabError:
        for listener in opened:
            listener.close()
        raise
    return api, published


def _follow(following: int, diary: TextIO, on_event: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    for event in _events(following):
        if event["event"] == "up":
            state: dict[str, Any] = event["state"]
            on_event(event)
            return state
        if event["event"] == "failed":
            raise LabError(event["error"])
        on_event(event)
    said = "".join(f"\n    {line}" for line in diary.read().splitlines()[-12:])
    raise LabError(f"the lab's supervisor ended while the lab was being built; nothing of it is left{said}")


def _events(following: int) -> Iterator[dict[str, Any]]:
    with os.fdopen(os.dup(following), "rb") as lines:
        for line in lines:
            yield json.loads(line)


def down(record: Record) -> None:
    """End a lab and wait until nothing of it is left: ask the supervisor, else its guardian, else the kernel."""
    guardian = record.guardian_pid()
    with suppress(LabError):
        ask_lab(record, {"op": "down"}, timeout_s=GRACE_S)
        if _gone(record, GRACE_S):
            return
    for number in (signal.SIGTERM, signal.SIGKILL):
        if guardian is None:
            break
        try:
            os.kill(guardian, number)
        except ProcessLookupError:
            break
        except PermissionError:
            raise LabError(f'lab "{record.name}" belongs to another user; use sudo') from None
        if _gone(record, GRACE_S):
            return
    sweep_dead()


def _gone(record: Record, patience_s: float) -> bool:
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        if record.guardian_pid() is None and not record.directory.exists():
            return True
        time.sleep(0.01)
    return False
