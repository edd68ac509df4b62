"""A worker's environment variables, parsed once into immutable values. Every mistake is named at once."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any

from workers.engine.pacing import Profile
from workers.gateway.limits import ApiLimits, api_limits
from workers.handover import MODES
from workers.linefile import MOST_BYTES, Unwritten
from workers.models.config import ModelSpec
from workers.policy import BUSY_TOKENS, OFFLOAD_THRESHOLD
from workers.wire.deadlines import Path
from workers.wire.link_table import LinkTable
from workers.wire.peers import RANK, Peer

ROLES = tuple(RANK)
PIPELINES = ("pdd", "cdc-pd", "idc-pd", "prfaas", "single")
KV_WAN_DTYPES = ("same", "fp8")
KV_SENDS = ("after-prefill", "chunked")

DEFAULT_KV_BYTES = 512 << 20


class EnvironmentProblem(Exception):
    """The environment does not describe a worker; every problem found, one a line."""


@dataclass(frozen=True, slots=True)
class Speculative:
    """How main decode guesses ahead: the last `ngram` tokens are looked up, up to `draft` are guessed."""

    ngram: int = 3
    draft: int = 4


@dataclass(frozen=True, slots=True)
class Serving:
    """How a lab serves (the topology file's `serving:`)."""

    pipeline: str = "pdd"
    relay_threshold: float = 0.95
    offload_threshold: int = OFFLOAD_THRESHOLD
    busy_tokens: int = BUSY_TOKENS
    handoff: str = "auto"
    end_on_rld: bool = False
    block_size: int = 16
    kv_connections: int = 8
    kv_warm: bool = True
    kv_wan_dtype: str = "same"
    kv_rate_bps: int | None = None
    """Of each connection for KV across the WAN; None: no limit of its own."""
    kv_bytes_per_token: int | None = None
    """What the lab's scale is made for; None: it has none."""
    kv_send: str = "after-prefill"
    max_running: int = 256
    max_waiting: int = 1024
    drain_ns: int = 10_000_000_000
    kv_chunk: int = 256
    speculative: Speculative | None = None
    """None: one token a step."""


@dataclass(frozen=True, slots=True)
class WorkerEnvironment:
    """Everything a worker knows of the world when it starts."""

    lab: str
    host: str
    role: str
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
    """Parse the PDDBED_* variables (docs/wire.md, section "Environment"). Raises EnvironmentProblem."""
    return _Reader(os.environ if variables is None else variables).read()


class _Reader:
    def __init__(self, variables: Mapping[str, str]) -> None:
        self._variables = variables
        self._problems: list[str] = []
        self._patience = self._number("PDDBED_PATIENCE", 1.0, minimum=0.01, maximum=1000.0)

    def read(self) -> WorkerEnvironment:
        host = self._text("PDDBED_HOST")
        role = self._text("PDDBED_ROLE")
        if role and role not in ROLES:
            self._problems.append(f"PDDBED_ROLE is {role!r}; it must be one of {', '.join(ROLES)}")
        datacenter = self._text("PDDBED_DATACENTER", "")
        serving = self._serving()
        wan = self._wan(datacenter, serving.kv_rate_bps)
        records = self._variables.get("PDDBED_RECORDS")
        environment = WorkerEnvironment(
            lab=self._text("PDDBED_LAB", "lab"),
            host=host,
            role=role,
            address=self._text("PDDBED_ADDRESS"),
            port=self._integer("PDDBED_PORT", 0, minimum=0, maximum=65535),
            secret=self._secret(),
            model=self._model(),
            datacenter=datacenter,
            peers=self._peers(host, datacenter, wan),
            serving=serving,
            kv_bytes=self._integer("PDDBED_KV_BYTES", DEFAULT_KV_BYTES, minimum=1),
            profile=self._profile(),
            listen_fd=self._descriptor("PDDBED_LISTEN_FD"),
            api_fd=self._descriptor("PDDBED_API_FD"),
            ready_fd=self._descriptor("PDDBED_READY_FD"),
            api=self._api(),
            restarted=bool(self._integer("PDDBED_RESTARTED", 0, minimum=0, maximum=1)),
            records=FilePath(records) if records else None,
            records_limit_bytes=self._integer("PDDBED_RECORDS_LIMIT", MOST_BYTES, minimum=4096),
            unwritten=self._unwritten(),
        )
        if self._problems:
            raise EnvironmentProblem("\n".join(self._problems))
        return environment

    def _text(self, name: str, default: str | None = None) -> str:
        value = self._variables.get(name, default)
        if value is None:
            self._problems.append(f"{name} is not set")
            return ""
        return value

    def _integer(self, name: str, default: int, minimum: int, maximum: int = 1 << 62) -> int:
        text = self._variables.get(name)
        if text is None:
            return default
        try:
            value = int(text)
        except ValueError:
            value = minimum - 1
        if not minimum <= value <= maximum:
            self._problems.append(f"{name} is {text!r}; it must be a whole number from {minimum} to {maximum}")
            return default
        return value

    def _number(self, name: str, default: float, minimum: float, maximum: float) -> float:
        text = self._variables.get(name)
        if text is None:
            return default
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not minimum <= value <= maximum:  # so is NaN
            self._problems.append(f"{name} is {text!r}; it must be a number from {minimum} to {maximum}")
            return default
        return value

    def _descriptor(self, name: str) -> int | None:
        return self._integer(name, -1, minimum=0) if name in self._variables else None

    def _secret(self) -> bytes:
        text = self._text("PDDBED_SECRET")
        try:
            secret = bytes.fromhex(text)
        except ValueError:
            self._problems.append("PDDBED_SECRET is not hexadecimal")
            return b""
        if text and len(secret) < 16:
            self._problems.append(f"PDDBED_SECRET has {len(secret)} bytes; it needs at least 16")
        return secret

    def _json(self, name: str, kind: type, default: Any) -> Any:
        text = self._variables.get(name)
        if text is None:
            return default
        try:
            value = json.loads(text)
        except json.JSONDecodeError as error:
            self._problems.append(f"{name} is not JSON: {error}")
            return default
        if not isinstance(value, kind):
            self._problems.append(f"{name} must be a JSON {kind.__name__}, not {type(value).__name__}")
            return default
        return value

    def _model(self) -> ModelSpec:
        fields = self._json("PDDBED_MODEL", dict, {"name": "tiny"})
        try:
            return ModelSpec(**fields)
        except TypeError as error:
            self._problems.append(f"PDDBED_MODEL does not describe a model: {error}")
            return ModelSpec("tiny")

    def _profile(self) -> Profile | None:
        fields = self._json("PDDBED_PROFILE", dict, None)
        if fields is None:
            return None
        try:
            return Profile(**fields)
        except TypeError as error:
            self._problems.append(f"PDDBED_PROFILE does not describe a profile: {error}")
        except ValueError as error:
            self._problems.append(f"PDDBED_PROFILE: {error}")
        return None

    def _api(self) -> ApiLimits:
        try:
            return api_limits(self._json("PDDBED_API", dict, {}))
        except ValueError as error:
            self._problems.append(str(error))
            return ApiLimits()

    def _wan(self, here: str, connection_bps: int | None) -> dict[str, Path]:
        paths, table = {}, self._link_table()
        for datacenter, link in self._json("PDDBED_WAN", dict, {}).items():
            try:
                rate, row = link.get("rate_bps"), link.get("row")
                rate_bps = None if rate is None else int(rate)
                paths[datacenter] = Path(
                    int(link["rtt_ns"]),
                    rate_bps,
                    self._patience,
                    connection_bps if datacenter != here else None,
                    int(link.get("queue_ns", 0)),
                    None if table is None or row is None else table.link(int(row)),
                )
            except (KeyError, TypeError, ValueError, AttributeError):
                self._problems.append(f"PDDBED_WAN of {datacenter!r} is {link!r}; it needs rtt_ns and rate_bps")
        return paths

    def _unwritten(self) -> Unwritten:
        text = self._variables.get("PDDBED_UNWRITTEN")
        if not text:
            return Unwritten()
        row, _, path = text.partition(":")
        try:
            return Unwritten.in_lab(path, int(row))
        except (OSError, ValueError) as error:
            self._problems.append(f"PDDBED_UNWRITTEN is {text!r}: {error}; leave it out where no lab keeps such a file")
            return Unwritten()

    def _link_table(self) -> LinkTable | None:
        path = self._variables.get("PDDBED_LINKS")
        try:
            return LinkTable(path) if path else None
        except (OSError, ValueError) as error:
            self._problems.append(f"PDDBED_LINKS is {path!r}: {error}; leave it out where no lab keeps such a table")
            return None

    def _peers(self, host: str, datacenter: str, wan: Mapping[str, Path]) -> tuple[Peer, ...]:
        peers, local = [], Path(patience=self._patience)
        for entry in self._json("PDDBED_PEERS", list, []):
            try:
                # role is null for hosts that run a command of their own: not one of ours to talk to
                if entry["name"] == host or entry["role"] not in ROLES:
                    continue
                there = entry.get("datacenter") or ""
                path = wan.get(there, local)  # its own, too, where the fabric is slow
                peers.append(Peer(entry["name"], entry["role"], there, entry["address"], int(entry["port"]), path))
            except (KeyError, TypeError, ValueError, AttributeError):
                self._problems.append(f"PDDBED_PEERS has {entry!r}; a peer needs name, role, address and port")
        return tuple(peers)

    def _speculative(self, fields: Any) -> Speculative | None:
        if fields is None:
            return None
        try:
            speculative = Speculative(**fields)
        except TypeError:
            self._problems.append(f"serving.speculative is {fields!r}; it has ngram and draft, or is null")
            return None
        for name in ("ngram", "draft"):
            number = getattr(speculative, name)
            if not isinstance(number, int) or isinstance(number, bool) or number < 1:
                self._problems.append(f"serving.speculative.{name} is {number!r}; it must be a whole number from 1")
        return speculative

    def _serving(self) -> Serving:
        fields = self._json("PDDBED_SERVING", dict, {})
        defaults = Serving()
        pool = fields.get("kv_pool")
        serving = Serving(
            pipeline=str(fields.get("pipeline", defaults.pipeline)),
            relay_threshold=fields.get("relay_threshold", defaults.relay_threshold),
            offload_threshold=fields.get("offload_threshold", defaults.offload_threshold),
            busy_tokens=fields.get("busy_tokens", defaults.busy_tokens),
            handoff=str(fields.get("handoff", defaults.handoff)),
            end_on_rld=fields.get("end_on_rld", defaults.end_on_rld),
            block_size=fields.get("block_size", defaults.block_size),
            kv_connections=(pool or {}).get("connections", defaults.kv_connections),
            kv_warm=(pool or {}).get("warm", defaults.kv_warm),
            kv_wan_dtype=(pool or {}).get("wan_dtype", defaults.kv_wan_dtype),
            kv_rate_bps=(pool or {}).get("rate"),
            kv_bytes_per_token=fields.get("kv_bytes_per_token"),
            kv_send=str(fields.get("kv_send", defaults.kv_send)),
            kv_chunk=fields.get("kv_chunk", defaults.kv_chunk),
            max_running=fields.get("max_running", defaults.max_running),
            max_waiting=fields.get("max_waiting", defaults.max_waiting),
            drain_ns=fields.get("drain", defaults.drain_ns),
            speculative=self._speculative(fields.get("speculative")),
        )
        for name, value, known in (
            ("pipeline", serving.pipeline, PIPELINES),
            ("handoff", serving.handoff, MODES),
            ("kv_send", serving.kv_send, KV_SENDS),
            ("kv_pool.wan_dtype", serving.kv_wan_dtype, KV_WAN_DTYPES),
        ):
            if value not in known:
                self._problems.append(f"serving.{name} {value!r} is not built yet; use one of {', '.join(known)}")
        for name, number, maximum, *minimum in (
            ("block_size", serving.block_size, 4096),
            ("kv_pool.connections", serving.kv_connections, 256),
            ("kv_chunk", serving.kv_chunk, 1 << 20),
            ("max_running", serving.max_running, 100_000),
            ("max_waiting", serving.max_waiting, 1_000_000, 0),
            ("drain", serving.drain_ns, 3600 * 10**9, 0),
        ):
            least = minimum[0] if minimum else 1
            if not isinstance(number, int) or isinstance(number, bool) or not least <= number <= maximum:
                self._problems.append(
                    f"serving.{name} is {number!r}; it must be a whole number from {least} to {maximum}"
                )
        if not isinstance(serving.end_on_rld, bool):
            self._problems.append(f"serving.end_on_rld is {serving.end_on_rld!r}; it must be true or false")
        rate = serving.kv_rate_bps
        if rate is not None and (not isinstance(rate, int) or isinstance(rate, bool) or rate < 1000):
            self._problems.append(
                f"serving.kv_pool.rate is {rate!r}; it must be null or whole bits a second, from 1000"
            )
        if not isinstance(serving.kv_warm, bool):
            self._problems.append(f"serving.kv_pool.warm is {serving.kv_warm!r}; it must be true or false")
        for name in ("offload_threshold", "busy_tokens"):
            tokens = getattr(serving, name)
            if not isinstance(tokens, int) or isinstance(tokens, bool) or not 0 <= tokens <= 1 << 30:
                self._problems.append(f"serving.{name} is {tokens!r}; it must be a whole number of tokens")
        threshold = serving.relay_threshold
        if not isinstance(threshold, int | float) or not 0 <= threshold <= 1:
            self._problems.append(f"serving.relay_threshold is {threshold!r}; it must be a share from 0 to 1")
        return serving
