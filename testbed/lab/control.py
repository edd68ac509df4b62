"""The control socket: one JSON request and one JSON reply per connection, descriptors beside the reply.

A Unix socket with a path crosses network namespaces, so a command on the machine talks to the supervisor inside.
"""

import json
import os
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from testbed.lab.record import LabError, Record

_LENGTH = struct.Struct("!I")
MAX_MESSAGE = 16 * 1024 * 1024
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
    header, fds, _, _ = socket.recv_fds(connection, _LENGTH.size, 8)
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
    return json.loads(data), fds


class ControlServer:
    """Serves `handle(request) -> (reply, fds)` in a thread per connection. Descriptors are closed after sending."""

    def __init__(self, path: Path, handle: Callable[[dict[str, Any]], Reply]) -> None:
        self._handle = handle
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        path.chmod(0o600)
        self._listener.listen(64)
        threading.Thread(target=self._accept, name="control", daemon=True).start()

    def _accept(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            connection.settimeout(30)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        fds: list[int] = []
        with connection:
            try:
                request, _ = _receive(connection)
                try:
                    reply, fds = self._handle(request)
                except Exception as error:
                    reply = {"error": str(error) or repr(error)}
                _send(connection, reply, fds)
            except (OSError, ValueError):  # the client went away or sent rubbish: nobody to tell
                pass
            finally:
                for fd in fds:
                    os.close(fd)


def ask_lab(record: Record, request: dict[str, Any], timeout_s: float = 15.0) -> Reply:
    """One request to a lab's supervisor. LabError when it does not answer or reports an error."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout_s)
        try:
            connection.connect(str(record.control_socket))
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
