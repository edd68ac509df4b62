"""Raising and ending labs from outside: reserve the record, open the API socket, start the guardian, follow it.

All or nothing: whatever fails, or Ctrl-C at any moment, takes down what was built.
"""

import json
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TextIO

from testbed.lab.control import ask_lab
from testbed.lab.environment import hosts_file
from testbed.lab.messages import Down
from testbed.lab.origin import own_origin, write_origin
from testbed.lab.record import ELSEWHERE, LabError, Record, create_record, refuse_taken, registry, sweep_dead
from testbed.model.plan import LabPlan
from testbed.supervisor import sandbox

LAST_WORDS_S = 2.0
GRACE_S = 5.0  # how long a supervisor may take to answer `down`, and then to end


@dataclass(frozen=True, slots=True)
class UpOptions:
    """Options of `pddbed up`. `api` is (address, port), port 0 for any free one; None: no API socket."""

    driver: str
    with_workers: bool
    verify: bool
    api: tuple[str, int] | None
    tethered: bool = False  # the lab ends with this process, however that ends


def listen(what: str, remedy: str, address: str, port: int) -> socket.socket:
    """Listen on the machine, before the lab enters its namespaces: a socket belongs to the one it was made in."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, port))
        listener.listen(1024)
    except (OSError, UnicodeError) as error:
        listener.close()
        reason = getattr(error, "strerror", None) or error
        raise LabError(f"{what} cannot listen on {address}:{port} ({reason}); {remedy}") from None
    return listener


def up(plan: LabPlan, options: UpOptions, on_event: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Raise a lab; returns its state once it serves. Raises LabError, with nothing left behind."""
    sweep_dead()
    with ExitStack() as opened:
        guardian, record, following, holding = _start_guardian(plan, options, opened)
        try:
            with record.log("guardian").open() as diary:  # opened now: the record is swept when the lab ends
                state = _follow(following, guardian, diary, on_event)
            if options.tethered:
                os.dup(holding)  # stays open for as long as this process lives
            else:
                os.write(holding, b"1")
            return state
        except BaseException:
            with suppress(ProcessLookupError):
                os.kill(guardian, signal.SIGTERM)
            with suppress(ChildProcessError):
                os.waitpid(guardian, 0)
            sweep_dead()  # the guardian has done so, unless it was killed as well
            raise


def _start_guardian(plan: LabPlan, options: UpOptions, opened: ExitStack) -> tuple[int, Record, int, int]:
    """Reserve the name and fork the guardian: its pid, the record, and the ends of two pipes.

    Progress is read from the first, which closes when the supervisor ends; closing the second, the tether, ends the
    lab. Whatever fails, both are closed with `opened`, and the record is swept.
    """
    from testbed.supervisor.supervisor import Settings, Supervisor

    with _readable_files(), registry() as root, ExitStack() as sockets:
        refuse_taken(root, plan.name)
        api, published = _open_sockets(plan, options)
        listening = [entry[0] for entries in published.values() for entry in entries] + ([api] if api else [])
        for listener in listening:
            sockets.callback(listener.close)
        tether, holding = os.pipe()
        opened.callback(os.close, holding)
        following, started = os.pipe()
        opened.callback(os.close, following)
        record = create_record(root, plan.name)
        try:
            record.hosts_file.write_text(hosts_file(plan))  # becomes the lab's /etc/hosts
            write_origin(record, own_origin(plan.file))
            settings = Settings(options.driver, options.with_workers, api, published, options.verify, started)
            keep = tuple(listener.fileno() for listener in listening)
            guardian = sandbox.start(record, Supervisor(plan, record, settings).run, tether, started, keep)
        except (OSError, sandbox.SandboxError) as error:
            record.sweep()
            raise LabError(f'lab "{plan.name}" cannot be started in {root}: {error}') from None
        except BaseException:
            record.sweep()
            raise
    return guardian, record, following, holding


@contextmanager
def _readable_files() -> Iterator[None]:
    """Records are for everybody to read and for nobody else to write, whatever the caller's umask."""
    before = os.umask(0o022)
    try:
        yield
    finally:
        os.umask(before)


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


def _follow(following: int, guardian: int, diary: TextIO, on_event: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    for event in _events(following):
        if event["event"] == "up":
            state: dict[str, Any] = event["state"]
            on_event(event)
            return state
        if event["event"] == "failed":
            raise LabError(event["error"])
        on_event(event)
    _wait_for_last_words(guardian)
    said = "".join(f"\n    {line}" for line in diary.read().splitlines()[-12:])
    raise LabError(f"the lab's supervisor ended while the lab was being built; nothing of it is left{said}")


def _wait_for_last_words(guardian: int) -> None:
    """The supervisor has ended: its PID 1 and then the guardian may still say why. Neither is waited for for ever."""
    watch = os.pidfd_open(guardian)
    try:
        select.select([watch], [], [], LAST_WORDS_S)
    finally:
        os.close(watch)


def _events(following: int) -> Iterator[dict[str, Any]]:
    with os.fdopen(os.dup(following), "rb") as lines:
        for line in lines:
            yield json.loads(line)


def down(record: Record) -> None:
    """End a lab and wait until nothing of it is left: ask the supervisor, else its guardian, else the kernel."""
    guardian = record.guardian_pid()
    with suppress(LabError):
        ask_lab(record, Down(), timeout_s=GRACE_S)
        if _gone(record, GRACE_S):
            return
    if guardian == ELSEWHERE:
        raise LabError(f'lab "{record.name}" is not of this PID namespace; end it on the machine where it was raised')
    for number in (signal.SIGTERM, signal.SIGKILL):
        if guardian is None:
            break
        try:
            if not record.signal_guardian(guardian, number):
                break
            record.signal_guardian(guardian, signal.SIGCONT)  # a stopped one would not hear it
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
