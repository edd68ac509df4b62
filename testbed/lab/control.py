"""The control socket: one JSON request and one JSON reply per connection, descriptors beside the reply.

A Unix socket with a path crosses network namespaces, so a command on the machine talks to the supervisor inside.
"""

import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from testbed.lab.messages import AnyRequest, Failure, R, Request, encode, reply_type
from testbed.lab.record import LabError, Record

_LENGTH = struct.Struct("!I")
MAX_MESSAGE = 16 * 1024 * 1024
MAX_FDS = 8
BACKLOG = 1024
PATIENCE_S = 30.0  # with a client that sends half a request, or does not read its reply
BREATH_S = 0.1  # before the next attempt to accept, or to connect, where there was no room
Answered = tuple[Any, list[int]]
"""A reply, and descriptors to send beside it (closed afterwards)."""


def _send(connection: socket.socket, message: Any, fds: list[int]) -> None:
    data = encode(message)
    header = _LENGTH.pack(len(data))
    if fds:
        socket.send_fds(connection, [header], fds)
    else:
        connection.sendall(header)
    connection.sendall(data)


def _receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    header, fds, _, _ = socket.recv_fds(connection, _LENGTH.size, MAX_FDS)
    try:
        return _receive_message(connection, header), fds
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise


def _receive_message(connection: socket.socket, header: bytes) -> bytes:
    if len(header) < _LENGTH.size:
        raise ConnectionError("the peer closed the control socket")
    (length,) = _LENGTH.unpack(header)
    if length > MAX_MESSAGE:
        raise TooLong(f"a message of {length} bytes is refused; the most is {MAX_MESSAGE}")
    data = bytearray()
    while len(data) < length:
        part = connection.recv(length - len(data))
        if not part:
            raise ConnectionError("the peer closed the control socket")
        data += part
    return bytes(data)


class TooLong(Exception):
    """A message is longer than any that is meant."""


class ControlServer:
    """Serves `handle(request) -> (reply, fds)` in a thread per connection. Descriptors are closed after sending.

    What is no request is answered with a Failure, as is a request whose handling raises.
    """

    def __init__(self, path: Path, handle: Callable[[AnyRequest], Answered]) -> None:
        self._handle = handle
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        path.chmod(0o600)
        self._listener.listen(BACKLOG)
        threading.Thread(target=self._accept, name="control", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
                connection.settimeout(PATIENCE_S)
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()
            except Exception:  # no descriptor, or no thread, until some clients have gone: whatever it is, go on
                time.sleep(BREATH_S)

    def _serve(self, connection: socket.socket) -> None:
        fds: list[int] = []
        with connection:
            try:
                reply: Any
                try:
                    data, unwanted = _receive(connection)
                    for fd in unwanted:
                        os.close(fd)
                    reply, fds = self._handle(msgspec.convert(json.loads(data), AnyRequest))
                except (msgspec.ValidationError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
                    reply = Failure(f"this is no request that the lab knows: {error}; is it of another pddbed version?")
                except ConnectionError:
                    raise
                except Exception as error:
                    reply = Failure(str(error) or repr(error))
                _send(connection, reply, fds)
            except OSError:  # the client went away: nobody to tell
                pass
            finally:
                for fd in fds:
                    os.close(fd)


def _connect(connection: socket.socket, record: Record, timeout_s: float) -> None:
    """Connect, waiting for room in the queue: a Unix socket with a deadline refuses instead (EAGAIN)."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            connection.connect(str(record.control_socket))
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TimeoutError from None
            time.sleep(BREATH_S)


def ask_lab(record: Record, request: Request[R], timeout_s: float = 15.0) -> R:
    """One request to a lab's supervisor. LabError when it does not answer or reports an error."""
    reply, fds = ask_for_descriptors(record, request, timeout_s)
    for fd in fds:
        os.close(fd)
    return reply


def ask_for_descriptors(record: Record, request: Request[R], timeout_s: float = 15.0) -> tuple[R, list[int]]:
    """Do as `ask_lab`, and return the descriptors that come beside the reply as well."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout_s)
        try:
            _connect(connection, record, timeout_s)
            _send(connection, request, [])
            data, fds = _receive(connection)
        except PermissionError:
            raise LabError(f'lab "{record.name}" belongs to another user; use sudo') from None
        except (FileNotFoundError, ConnectionRefusedError):
            raise LabError(f'lab "{record.name}" is still starting, or going down; try again in a moment') from None
        except TimeoutError:
            raise LabError(
                f'lab "{record.name}" does not answer within {timeout_s:.0f} s; end it with: pddbed down {record.name}'
            ) from None
        except ConnectionError:
            raise LabError(f'lab "{record.name}" went away') from None
        except TooLong as error:
            raise LabError(f'lab "{record.name}": {error}') from None
    try:
        return _reply(request, data), fds
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise


def _reply(request: Request[R], data: bytes) -> R:
    try:
        value = json.loads(data)
        if isinstance(value, dict) and value.keys() == {"error"}:
            raise LabError(str(value["error"]))
        return msgspec.convert(value, reply_type(request))
    except (ValueError, RecursionError) as error:
        raise LabError(f"the lab's answer is of another pddbed version: {error}") from None
