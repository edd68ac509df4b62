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

from testbed.lab.record import LabError, Record

_LENGTH = struct.Struct("!I")
MAX_MESSAGE = 16 * 1024 * 1024
MAX_FDS = 8
BACKLOG = 1024
PATIENCE_S = 30.0  # with a client that sends half a request, or does not read its reply
BREATH_S = 0.1  # before the next attempt to accept, or to connect, where there was no room
Reply = tuple[dict[str, Any], list[int]]


def _send(connection: socket.socket, message: dict[str, Any], fds: list[int]) -> None:
    data = json.dumps(message).encode()
    header = _LENGTH.pack(len(data))
    if fds:
        socket.send_fds(connection, [header], fds)
    else:
        connection.sendall(header)
    connection.sendall(data)


def _receive(connection: socket.socket) -> Reply:
    header, fds, _, _ = socket.recv_fds(connection, _LENGTH.size, MAX_FDS)
    try:
        return _receive_message(connection, header), fds
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise


def _receive_message(connection: socket.socket, header: bytes) -> Any:
    if len(header) < _LENGTH.size:
        raise ConnectionError("the peer closed the control socket")
    (length,) = _LENGTH.unpack(header)
    if length > MAX_MESSAGE:
        raise ConnectionError(f"a control message of {length} bytes is refused")
    data = bytearray()
    while len(data) < length:
        part = connection.recv(length - len(data))
        if not part:
            raise ConnectionError("the peer closed the control socket")
        data += part
    return json.loads(data)


class ControlServer:
    """Serves `handle(request) -> (reply, fds)` in a thread per connection. Descriptors are closed after sending."""

    def __init__(self, path: Path, handle: Callable[[dict[str, Any]], Reply]) -> None:
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
                request, unwanted = _receive(connection)
                for fd in unwanted:
                    os.close(fd)
                try:
                    if not isinstance(request, dict):
                        raise TypeError("a request is a JSON object")
                    reply, fds = self._handle(request)
                except KeyError as error:
                    reply = {"error": f"the request lacks {error}; is it of another pddbed version?"}
                except Exception as error:
                    reply = {"error": str(error) or repr(error)}
                _send(connection, reply, fds)
            except (OSError, ValueError, RecursionError):  # the client went away or sent rubbish: nobody to tell
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


def ask_lab(record: Record, request: dict[str, Any], timeout_s: float = 15.0) -> Reply:
    """One request to a lab's supervisor. LabError when it does not answer or reports an error."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout_s)
        try:
            _connect(connection, record, timeout_s)
            _send(connection, request, [])
            reply, fds = _receive(connection)
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
    if "error" in reply:
        raise LabError(reply["error"])
    return reply, fds
