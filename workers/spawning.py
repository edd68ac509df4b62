"""Messages between the fork server and whoever starts workers (docs/wire.md, "Fork server"): a struct each, JSON on the
socket, file descriptors beside them. Imports nothing else of the workers, so that the lab uses them as well.
"""

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

MAX_REQUEST_BYTES = 1 << 20
MAX_FDS = 16


class Spawn(Struct, tag_field="op", tag="spawn", frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Request for a worker: its environment, its log, and where it is to be born."""

    host: str
    env: dict[str, str]
    log: str
    namespaces_of: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    """The process whose network and mount namespaces it enters."""
    affinity: list[Annotated[int, Meta(ge=0, le=2**20)]] | None = None
    cgroup: str | None = None
    nice: Annotated[int, Meta(ge=-20, le=19)] = 0
    fd_env: Annotated[list[str], Meta(max_length=MAX_FDS)] = []
    """Variables that get the numbers of the descriptors beside the request, in their order."""


class Ready(Struct, tag_field="op", tag="ready", frozen=True):
    """The model is loaded."""

    ready: bool = True


class Spawned(Struct, tag_field="op", tag="spawned", frozen=True):
    """The worker was born."""

    host: str
    pid: int


class Failed(Struct, tag_field="op", tag="error", frozen=True):
    """A worker was not born, or (without a host) the request or the model is wrong; one sentence."""

    host: str | None
    message: str


class Exited(Struct, tag_field="op", tag="exited", frozen=True):
    """The worker has ended, with a wait status."""

    host: str
    pid: int
    status: int


Answer = Ready | Spawned | Failed | Exited
encode = msgspec.json.Encoder().encode
decode_request = msgspec.json.Decoder(Spawn).decode
decode_answer = msgspec.json.Decoder[Answer](Answer).decode
