"""A worker's PDDBED_* variables (docs/wire.md, "Environment"), decoded once into immutable, bounded values.

The structs here are the contract. `serving:`, `model:` and `api:` of a topology file mean the same fields with the same
bounds and defaults (tests/workers/test_contract.py). Every variable that is wrong is named, with what it may be.
"""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct, inspect

from workers.engine.pacing import Profile
from workers.gateway.limits import ApiLimits
from workers.linefile import MOST_BYTES, Unwritten
from workers.models.config import ModelSpec
from workers.policy import BUSY_TOKENS, OFFLOAD_THRESHOLD
from workers.wire.deadlines import Path
from workers.wire.link_table import LinkTable
from workers.wire.peers import RANK, Peer

T = TypeVar("T")
MAX_NUMBER = 2**63 - 1  # of nanoseconds, bits a second or bytes
DEFAULT_KV_BYTES = 512 << 20

Role = Literal["gateway", "prefill", "relay-decode", "main-decode"]
Port = Annotated[int, Meta(ge=0, le=65535)]
Descriptor = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Tokens = Annotated[int, Meta(ge=0, le=1 << 30)]
Nanoseconds = Annotated[int, Meta(ge=0, le=MAX_NUMBER)]


class EnvironmentProblem(Exception):
    """The environment does not describe a worker; every problem found, one a line."""


class _Told(Struct, frozen=True, forbid_unknown_fields=True):
    """A JSON object of the environment."""


class KvPool(_Told, frozen=True):
    """Warm connections for KV between each pair of workers."""

    connections: Annotated[int, Meta(ge=1, le=256)] = 8
    wan_dtype: Literal["same", "fp8"] = "same"
    rate_bps: Annotated[int, Meta(ge=1000, le=MAX_NUMBER)] | None = msgspec.field(name="rate", default=None)
    """Of each connection across the WAN; None: no limit of its own."""
    warm: bool = True


class Speculative(_Told, frozen=True):
    """Main decode's guesses: the last `ngram` tokens are looked up, up to `draft` are guessed."""

    ngram: Annotated[int, Meta(ge=1, le=16)] = 3
    draft: Annotated[int, Meta(ge=1, le=64)] = 4


class Serving(_Told, frozen=True):
    """The way a lab serves (the topology file's `serving:`)."""

    pipeline: Literal["pdd", "cdc-pd", "idc-pd", "prfaas", "single"] = "pdd"
    relay_threshold: Annotated[float, Meta(ge=0, le=1)] = 0.95
    offload_threshold: Tokens = OFFLOAD_THRESHOLD
    busy_tokens: Tokens = BUSY_TOKENS
    handoff: Literal["auto", "one-shot", "catch-up", "overlap", "kv"] = "auto"
    end_on_rld: bool = False
    block_size: Annotated[int, Meta(ge=1, le=1024)] = 16
    kv_pool: KvPool = KvPool()
    kv_send: Literal["after-prefill", "chunked"] = "after-prefill"
    max_running: Annotated[int, Meta(ge=1, le=100_000)] = 256
    max_waiting: Annotated[int, Meta(ge=0, le=1_000_000)] = 1024
    drain_ns: Annotated[int, Meta(ge=0, le=3600 * 10**9)] = msgspec.field(name="drain", default=10 * 10**9)
    kv_chunk: Annotated[int, Meta(ge=1, le=1 << 20)] = 256
    speculative: Speculative | None = None
    """None: one token a step."""
    kv_bytes_per_token: Annotated[int, Meta(ge=1, le=MAX_NUMBER)] | None = None
    """What the lab's scale is made for; None: it has none."""


class WanPath(_Told, frozen=True):
    """The path to a datacenter, as the topology file has it; `row` says what it is now (PDDBED_LINKS)."""

    rtt_ns: Nanoseconds
    rate_bps: Annotated[int, Meta(ge=1, le=MAX_NUMBER)] | None = None
    queue_ns: Nanoseconds = 0
    row: Annotated[int, Meta(ge=0)] | None = None


class HostEntry(Struct, frozen=True):
    """A host of the lab. `role` is None where it runs a command of its own."""

    name: str
    role: str | None
    address: str
    port: Port
    datacenter: str | None = None


@dataclass(frozen=True, slots=True)
class WorkerEnvironment:
    """Everything a worker knows of the world when it starts."""

    lab: str
    host: str
    role: Role
    address: str
    port: int
    secret: bytes
    model: ModelSpec
    datacenter: str = ""
    peers: tuple[Peer, ...] = ()
    serving: Serving = field(default_factory=Serving)
    kv_bytes: int = DEFAULT_KV_BYTES
    profile: Profile | None = None
    """None: as fast as this machine."""
    listen_fd: int | None = None
    api_fd: int | None = None
    ready_fd: int | None = None
    api: ApiLimits = field(default_factory=ApiLimits)
    restarted: bool = False
    """It takes the place of one that died, and serves at once, with the workers that are there."""
    records: FilePath | None = None
    records_limit_bytes: int = MOST_BYTES
    """Of `requests.jsonl`, which ends with a line that says so."""
    unwritten: Unwritten = field(default_factory=Unwritten, compare=False)
    """What this worker could not write to disk."""


def read_environment(variables: Mapping[str, str] | None = None) -> WorkerEnvironment:
    """Decode the PDDBED_* variables. Raises EnvironmentProblem."""
    reader = _Reader(os.environ if variables is None else variables)
    environment = reader.read()
    if reader.problems:
        raise EnvironmentProblem("\n".join(reader.problems))
    return environment


def read_model(variables: Mapping[str, str] | None = None) -> ModelSpec:
    """Decode PDDBED_MODEL alone. Raises EnvironmentProblem."""
    reader = _Reader(os.environ if variables is None else variables)
    model = reader.model()
    if reader.problems:
        raise EnvironmentProblem("\n".join(reader.problems))
    return model


class _Reader:
    def __init__(self, variables: Mapping[str, str]) -> None:
        self._variables = variables
        self.problems: list[str] = []

    def read(self) -> WorkerEnvironment:
        """What the variables say; where one is wrong, its default and a problem."""
        host, here = self._required("HOST", str, ""), self._value("DATACENTER", str, "")
        serving = self._json("SERVING", Serving, Serving())
        records = self._variables.get("PDDBED_RECORDS")
        return WorkerEnvironment(
            lab=self._value("LAB", str, "lab"),
            host=host,
            role=self._required("ROLE", Role, "gateway"),
            address=self._required("ADDRESS", str, ""),
            port=self._value("PORT", Port, 0),
            secret=self._secret(),
            model=self.model(),
            datacenter=here,
            peers=self._peers(host, here, serving.kv_pool.rate_bps),
            serving=serving,
            kv_bytes=self._value("KV_BYTES", Annotated[int, Meta(ge=1, le=MAX_NUMBER)], DEFAULT_KV_BYTES),
            profile=self._json("PROFILE", Profile, None),
            listen_fd=self._value("LISTEN_FD", Descriptor, None),
            api_fd=self._value("API_FD", Descriptor, None),
            ready_fd=self._value("READY_FD", Descriptor, None),
            api=self._json("API", ApiLimits, ApiLimits()),
            restarted=bool(self._value("RESTARTED", Annotated[int, Meta(ge=0, le=1)], 0)),
            records=FilePath(records) if records else None,
            records_limit_bytes=self._value("RECORDS_LIMIT", Annotated[int, Meta(ge=4096, le=MAX_NUMBER)], MOST_BYTES),
            unwritten=self._unwritten(),
        )

    def model(self) -> ModelSpec:
        return self._json("MODEL", ModelSpec, ModelSpec("tiny"))

    def _required(self, name: str, kind: Any, default: Any) -> Any:
        if f"PDDBED_{name}" not in self._variables:
            self.problems.append(f"PDDBED_{name} is not set")
        return self._value(name, kind, default)

    def _value(self, name: str, kind: Any, default: Any) -> Any:
        text = self._variables.get(f"PDDBED_{name}")
        return default if text is None else self._converted(name, kind, text, default, strict=False)

    def _json(self, name: str, kind: Any, default: T) -> T:
        text = self._variables.get(f"PDDBED_{name}")
        if text is None:
            return default
        try:
            value = msgspec.json.decode(text)
        except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
            self.problems.append(f"PDDBED_{name} is not JSON: {error}")
            return default
        return self._converted(name, kind, value, default)  # type: ignore[no-any-return]

    def _converted(self, name: str, kind: Any, value: Any, default: Any, *, strict: bool = True) -> Any:
        try:
            return msgspec.convert(value, kind, strict=strict)
        except msgspec.ValidationError as error:
            self.problems.append(_problem(f"PDDBED_{name}", kind, value, error))
            return default

    def _secret(self) -> bytes:
        text = self._required("SECRET", str, "")
        try:
            secret = bytes.fromhex(text)
        except ValueError:
            self.problems.append("PDDBED_SECRET is not hexadecimal")
            return b""
        if text and len(secret) < 16:
            self.problems.append(f"PDDBED_SECRET has {len(secret)} bytes; it needs at least 16")
        return secret

    def _peers(self, host: str, here: str, connection_bps: int | None) -> tuple[Peer, ...]:
        """Every other worker, and the path to it; its own datacenter's, too, where the fabric is slow."""
        patience = self._value("PATIENCE", Annotated[float, Meta(ge=0.01, le=1000)], 1.0)
        table, paths = self._link_table(), dict[str, Path]()
        for there, entry in self._json("WAN", dict[str, Any], dict[str, Any]()).items():
            path = self._converted(f"WAN.{there}", WanPath, entry, WanPath(0))
            present, limit_bps = None, None if there == here else connection_bps
            try:
                present = None if table is None or path.row is None else table.link(path.row)
            except ValueError as error:
                self.problems.append(f"PDDBED_WAN.{there}.row: PDDBED_LINKS is another lab's: {error}")
            paths[there] = Path(path.rtt_ns, path.rate_bps, patience, limit_bps, path.queue_ns, present)
        peers = []
        for other in self._json("PEERS", list[HostEntry], list[HostEntry]()):
            if other.name != host and other.role in RANK:
                there = other.datacenter or ""
                path_there = paths.get(there, Path(patience=patience))
                peers.append(Peer(other.name, other.role, there, other.address, other.port, path_there))
        return tuple(peers)

    def _unwritten(self) -> Unwritten:
        text = self._variables.get("PDDBED_UNWRITTEN")
        if not text:
            return Unwritten()
        row, _, path = text.partition(":")
        try:
            return Unwritten.in_lab(path, int(row))
        except (OSError, ValueError) as error:
            self.problems.append(f"PDDBED_UNWRITTEN is {text!r}: {error}; leave it out where no lab keeps such a file")
            return Unwritten()

    def _link_table(self) -> LinkTable | None:
        path = self._variables.get("PDDBED_LINKS")
        try:
            return LinkTable(path) if path else None
        except (OSError, ValueError) as error:
            self.problems.append(f"PDDBED_LINKS is {path!r}: {error}; leave it out where no lab keeps such a table")
            return None


def _problem(name: str, kind: Any, value: Any, error: msgspec.ValidationError) -> str:
    """One sentence: which part of a variable is wrong, and what it may be."""
    message, _, path = str(error).partition(" - at `$")
    expected = inspect.type_info(kind)
    for step in re.findall(r"\w+", path):
        options = expected.types if isinstance(expected, inspect.UnionType) else (expected,)
        expected = options[0]
        if isinstance(expected, inspect.StructType):
            expected = next(field.type for field in expected.fields if field.encode_name == step)
            value = value.get(step) if isinstance(value, dict) else None
        elif isinstance(expected, inspect.ListType):
            expected, value = expected.item_type, value[int(step)]
        name = f"{name}.{step}"
    if message.startswith("Object"):  # has a field that is not known, or lacks one
        return f"{name}: {message[0].lower()}{message[1:]}; it must be {_described(expected)}"
    return f"{name} is {json.dumps(value)[:60]}; it must be {_described(expected)}"


def _described(kind: inspect.Type) -> str:
    match kind:
        case inspect.UnionType(types):
            return " or ".join(_described(one) for one in types)
        case inspect.IntType() | inspect.FloatType():
            number = "a whole number" if isinstance(kind, inspect.IntType) else "a number"
            return f"{number} from {kind.ge}" + (f" to {kind.le}" if kind.le is not None else "")
        case inspect.LiteralType(values):
            return f"one of {', '.join(map(str, values))}"
        case inspect.StructType():
            return f"an object with {', '.join(field.encode_name for field in kind.fields)}"
        case inspect.BoolType():
            return "true or false"
        case inspect.NoneType():
            return "null"
        case inspect.ListType(item) | inspect.VarTupleType(item):
            return f"a list, each {_described(item)}"
        case inspect.DictType():
            return "an object"
    return "text"
