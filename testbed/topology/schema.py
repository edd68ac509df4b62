"""Contents of a topology file: one pydantic model per section, one field per key.

Owns names, types, defaults and descriptions (editors complete from them: `pddbed schema`). Validation sees
one value at a time; what must hold between values is in `checks`, and the meaning of what is left out in `resolve`.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator

from testbed.topology.endpoints import Address, Endpoint, PublishedPort, Subnet
from testbed.topology.fields import (
    Algorithm,
    Delay,
    Drain,
    Duration,
    FabricDelay,
    FabricRate,
    Factor,
    Flag,
    HostName,
    Line,
    Name,
    Percent,
    Quota,
    Rate,
    RateOrNone,
    Size,
    String,
    Variable,
    whole,
)
from testbed.topology.names import NAME_PATTERN
from testbed.topology.section import Section, nothing_is_empty
from testbed.topology.speeds import Profile, ScaleSection

MIN_MTU = 576  # what every IPv4 host must take (RFC 791); TCP's default segment fits it exactly
MAX_MTU = 65535
Mtu = Annotated[int, whole(MIN_MTU, MAX_MTU)]
Role = Literal["gateway", "prefill", "relay-decode", "main-decode"]


_PAIR = Field(min_length=2, max_length=2)
_NAMED: dict[str, Any] = {"propertyNames": {"pattern": NAME_PATTERN}}


class Jitter(Section):
    """Random variation of the delay. Packets keep their order unless `reorder` is asked for."""

    std: Duration = Field(description="Standard deviation of the delay.")
    distribution: Literal["normal", "uniform", "pareto", "paretonormal"] = "normal"


class GilbertElliott(Section):
    """Bursty loss: two states, each with its own loss (Gilbert-Elliott)."""

    good_to_bad: Percent = Field(description="Probability per packet of going from the good to the bad state.")
    bad_to_good: Percent = Field(description="Probability per packet of going back.")
    loss_bad: Percent = Field(default=1.0, description="Loss in the bad state.", json_schema_extra={"default": "100%"})
    loss_good: Percent = Field(default=0.0, description="Loss in the good state.", json_schema_extra={"default": "0%"})


Loss = Annotated[
    Annotated[Percent, Tag("percentage")] | Annotated[GilbertElliott, Tag("bursts")],
    Discriminator(lambda value: "bursts" if isinstance(value, dict | GilbertElliott) else "percentage"),
]


class Queue(Section):
    """The buffer in front of the bottleneck; what does not fit is dropped. One of `bdp` and `bytes`."""

    bdp: Factor | None = Field(default=None, description="As a multiple of the BDP: this direction's rate x the RTT.")
    bytes: Size | None = Field(default=None, description="As a size.")
    codel: Flag = Field(default=False, description="Drop early by CoDel instead of only at the end.")


class Direction(Section):
    """Treatment of packets in one direction of a WAN link."""

    rate: Rate | None = Field(default=None, description="Bottleneck rate; counts IP bytes. Left out: no limit.")
    delay: Delay | None = Field(default=None, description="One-way propagation delay.")
    jitter: Jitter | None = Field(default=None, description="Random variation of the delay.")
    loss: Loss | None = Field(default=None, description="Packets lost at random: a percentage, or bursts.")
    duplicate: Percent | None = Field(default=None, description="Packets that arrive twice.")
    corrupt: Percent | None = Field(default=None, description="Packets with a flipped bit.")
    reorder: Percent | None = Field(default=None, description="Packets that overtake those before them.")
    queue: Queue | None = Field(default=None, description="Bottleneck buffer. Default: 1 BDP, at least 64 packets.")


class Tcp(Section):
    """TCP of connections that cross this link (set on the routes of the hosts)."""

    congestion: Algorithm = Field(default="cubic", description="Congestion control.")
    initial_window: Annotated[int, whole(1, 1000)] = Field(default=10, description="Initial window in segments.")


class Wan(Direction):
    """A WAN link between the border routers of two datacenters."""

    name: Name | None = Field(default=None, description="Default: wan0, wan1 and so on, by position.")
    between: Annotated[tuple[Name, ...], Field(min_length=2, max_length=2)] = Field(
        description="The two datacenters; forward is from the first to the second."
    )
    driver: Literal["auto", "netem", "userspace"] = Field(
        default="auto", description="auto: netem where the kernel has it, else userspace."
    )
    mtu: Mtu = Field(default=1500, description="Largest IP packet in bytes.")
    rtt: Delay | None = Field(default=None, description="Round-trip propagation, instead of delay: half each way.")
    tcp: Annotated[Tcp, nothing_is_empty] = Field(default_factory=Tcp)
    forward: Direction | None = Field(
        default=None, description="Values that differ from the first datacenter to the second."
    )
    backward: Direction | None = Field(default=None, description="Values that differ from the second to the first.")
    cost: Annotated[int, whole(1, 1_000_000)] = Field(default=1, description="Routes take the least total cost.")


class Cpu(Section):
    """CPUs of a host's processes."""

    affinity: Annotated[tuple[Annotated[int, whole(0, 4095)], ...], Field(min_length=1)] | None = Field(
        default=None, description="CPU numbers; left out: all."
    )
    quota: Quota | None = Field(default=None, description="CPU time: 50% is half a CPU, 200% two.")


class Host(Section):
    """A host: a worker (`role`), any program (`command`), or neither: a plain host for `pddbed exec`."""

    role: Role | None = Field(default=None, description="Role of the host's worker.")
    command: Line | None = Field(default=None, description="A program to run instead of a worker (by /bin/sh).")
    address: Address | None = Field(default=None, description="Default: the next free one of the subnet.")
    device: Literal["cpu", "cuda"] | None = Field(
        default=None, description="Device on which the worker computes. Default: cpu."
    )
    profile: Name | None = Field(
        default=None, description="Name under profiles: of the worker's speed. Default: native, no pacing."
    )
    cpu: Annotated[Cpu, nothing_is_empty] = Field(default_factory=Cpu)
    publish: tuple[PublishedPort, ...] = Field(default=(), description="Ports made reachable from this machine.")
    environment: dict[Variable, String] = Field(default_factory=dict, description="Variables of its process.")


class Fabric(Section):
    """The network inside a datacenter, standing in for RDMA."""

    mtu: Mtu = Field(default=9000, description="Largest IP packet in bytes.")
    rate: FabricRate | None = Field(
        default=None, description="Limit of what each host sends and receives. Left out: as fast as this machine."
    )
    delay: FabricDelay | None = Field(default=None, description="One-way delay between two hosts; needs netem.")


class Datacenter(Section):
    """Hosts behind one switch and one border router, which has the subnet's first address."""

    subnet: Subnet
    fabric: Annotated[Fabric, nothing_is_empty] = Field(default_factory=Fabric)
    switch: Literal["linux-bridge", "ovs"] = "linux-bridge"
    hosts: Annotated[dict[HostName, Annotated[Host, nothing_is_empty]], nothing_is_empty] = Field(
        default_factory=dict, description="Hosts by name.", json_schema_extra=_NAMED
    )


class Model(Section):
    """The model that every worker loads."""

    name: Line = Field(
        default="tiny", description="tiny, tiny-mla, smollm2-135m, or a path (a checkpoint directory or .gguf)."
    )
    seed: Annotated[int, whole(0, 2**32 - 1)] = Field(default=0, description="Seed of random weights.")
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"


class KvPool(Section):
    """Warm connections for KV between each pair of workers."""

    connections: Annotated[int, whole(1, 256)] = 8
    wan_dtype: Literal["same", "fp8"] = Field(default="same", description="Form of KV on the WAN; fp8 is lossy.")
    rate: Rate | None = Field(
        default=None, description="Rate limit of each connection across the WAN. Left out: no limit."
    )
    warm: Flag = Field(default=True, description="Open the connections' TCP windows with padding when they are new.")


class Speculative(Section):
    """Main decode guesses several tokens ahead, by looking up what followed the last ones before, and verifies them."""

    ngram: Annotated[int, whole(1, 16)] = Field(default=3, description="Tokens that are looked up.")
    draft: Annotated[int, whole(1, 64)] = Field(default=4, description="Tokens guessed at most.")


class Serving(Section):
    """Serving of requests: pipeline, hand-over, KV, queues."""

    pipeline: Literal["pdd", "cdc-pd", "idc-pd", "prfaas", "single"] = Field(
        default="pdd", description="PDD, or a baseline."
    )
    relay_threshold: Percent = Field(
        default=0.95,
        description="Hit rate above which a request goes straight from P to MD.",
        json_schema_extra={"default": "95%"},
    )
    offload_threshold: Annotated[int, whole(0, 1 << 30)] = Field(
        default=512, description="Uncached tokens above which prfaas prefills in P's datacenter."
    )
    busy_tokens: Annotated[int, whole(0, 1 << 30)] = Field(
        default=256, description="Cached tokens of a prompt that outweigh one more request on a worker."
    )
    handoff: Literal["auto", "one-shot", "catch-up", "overlap", "kv"] = Field(
        default="auto", description="Mode in which MD takes over from RLD. auto: catch-up, or one-shot from a busy RLD."
    )
    end_on_rld: Flag = Field(
        default=False, description="An answer that ends on RLD does not complete MD's cache: for the experiment."
    )
    block_size: Annotated[int, whole(1, 1024)] = Field(default=16, description="Tokens in a KV block.")
    kv_pool: Annotated[KvPool, nothing_is_empty] = Field(default_factory=KvPool)
    kv_send: Literal["after-prefill", "chunked"] = Field(
        default="after-prefill", description="Moment at which P sends KV."
    )
    max_running: Annotated[int, whole(1, 100_000)] = Field(
        default=256, description="Requests that workers have at once; others wait in the gateway."
    )
    max_waiting: Annotated[int, whole(0, 1_000_000)] = Field(
        default=1024, description="Requests that wait in the gateway; others are refused with 429."
    )
    drain: Drain = Field(
        default=10 * 10**9,
        description="Time that a gateway which is ended leaves running answers to end.",
        json_schema_extra={"default": "10s"},
    )
    kv_chunk: Annotated[int, whole(1, 1 << 20)] = Field(
        default=256, description="Tokens whose KV leaves at once with kv_send chunked; whole blocks."
    )
    speculative: Speculative | None = Field(default=None, description="Speculative decoding on MD. Left out: none.")


class Api(Section):
    """The OpenAI-compatible API on this machine."""

    listen: Endpoint = Field(default=("127.0.0.1", 8000), json_schema_extra={"default": "127.0.0.1:8000"})
    names: list[String] = Field(
        default_factory=list,
        description="Names, beside this machine's own, that the API answers to, and whose pages may use it.",
    )
    connections: Annotated[int, whole(1, 60_000)] | None = Field(
        default=None, description="Open at once; one more closes the one idle for longest. Default 1000."
    )
    keep_alive: Duration | None = Field(default=None, description="Idle time between two requests. Default 75s.")
    head_timeout: Duration | None = Field(default=None, description="For a request's headers to come. Default 20s.")
    body_timeout: Duration | None = Field(default=None, description="For a request's body to come. Default 60s.")
    unread_timeout: Duration | None = Field(
        default=None, description="Longest time in which a client takes nothing of its answer. Default 120s."
    )
    max_body: Size | None = Field(default=None, description="Bytes of a request. Default 16 MiB.")
    max_answer: Size | None = Field(
        default=None, description="Bytes of an answer that is not streamed. Default 64 MiB."
    )


class When(Section):
    """Something that is told while requests are served, in place of a time."""

    event: Name = Field(description="Name of the event: kv-transfer, or that of the program which tells it.")
    fraction: Percent | None = Field(
        default=None, description="Share of the event that is done. Left out: as soon as it is told."
    )
    request: Line = Field(default="any", description="any: the first; each: once for every request; or a request's id.")


class Repeat(Section):
    """The same again, at even distances."""

    every: Duration = Field(description="From one start to the next.")
    times: Annotated[int, whole(2, 10_000)] = Field(description="Number of times, the first included.")


class Timed(Section):
    """Time and place that every entry of a timeline has."""

    at: Duration | None = Field(default=None, description="Since the timeline began. Either this or `when`.")
    when: When | None = Field(
        default=None, description="Event, told out of band, with which the entry begins; it may never come."
    )
    link: Name | None = Field(default=None, description="The WAN link. May be left out where there is only one.")
    direction: Literal["both", "forward", "backward"] = Field(
        default="both", description="Direction of the link that changes."
    )
    repeat: Repeat | None = Field(default=None, description="Again and again.")


class Step(Timed, Direction):
    """From here on, other values; what is left out keeps its value."""

    rate: RateOrNone | None = Field(default=None, description="Bottleneck rate; none: no limit.")
    queue: Queue | None = Field(default=None, description="Bottleneck buffer; left out: as large as it is.")


class Ramp(Timed):
    """From one value to another, evenly, in small steps."""

    duration: Duration = Field(description="From the first value to the last.")
    rate: Annotated[tuple[Rate, ...], _PAIR] | None = Field(default=None, description="From, to.")
    delay: Annotated[tuple[Delay, ...], _PAIR] | None = Field(default=None, description="From, to.")
    loss: Annotated[tuple[Percent, ...], _PAIR] | None = Field(default=None, description="From, to.")


class Outage(Timed):
    """Every packet that arrives is dropped; what is in flight arrives."""

    duration: Duration = Field(description="Duration of the entry.")


class Bursts(Section):
    """On and off by turns, for exponentially distributed times."""

    on: Duration = Field(description="Mean length of a burst.")
    off: Duration = Field(description="Mean length of a pause.")


class CrossTraffic(Timed):
    """Traffic of others through the same bottleneck, between the link's own end hosts."""

    duration: Duration = Field(description="Duration of the entry.")
    protocol: Literal["tcp", "udp"] = Field(default="tcp", description="tcp yields to others; udp does not.")
    rate: Rate | None = Field(
        default=None,
        description="Rate of all flows together while they are on, in IP bytes. Left out, for TCP: all it gets.",
    )
    flows: Annotated[int, whole(1, 64)] = Field(default=1, description="Sources, each with its own bursts.")
    bursts: Bursts | None = Field(default=None, description="Left out: on for the whole duration.")


class Replay(Timed):
    """A recorded trace of rates (and delays and losses), from its beginning."""

    trace: Line = Field(description="Its file; relative to this file.")
    format: Literal["auto", "mahimahi", "csv"] = Field(default="auto", description="auto: csv by its name's ending.")
    duration: Duration | None = Field(default=None, description="Left out: once; longer than the trace: again.")
    granularity: Duration | None = Field(
        default=None, description="Time over which a Mahimahi trace's rate is averaged. Default: 20ms."
    )


class CongestionEntry(Section):
    """One entry of a timeline: exactly one of these."""

    model_config = ConfigDict(extra="forbid", frozen=True, json_schema_extra={"minProperties": 1, "maxProperties": 1})

    step: Step | None = Field(default=None, description="Other values from a moment on.")
    ramp: Ramp | None = Field(default=None, description="From one value to another.")
    outage: Outage | None = Field(default=None, description="Nothing gets onto the link.")
    cross_traffic: CrossTraffic | None = Field(default=None, description="Others share the bottleneck.")
    replay: Replay | None = Field(default=None, description="As a recorded trace.")

    @model_validator(mode="after")
    def _is_one_thing(self) -> Self:
        given = [name for name in type(self).model_fields if name in self.model_fields_set]
        if not given:
            raise ValueError(f"says nothing; write one of {', '.join(type(self).model_fields)}")
        if len(given) > 1:
            raise ValueError(f"is {' and '.join(given)} at once; write an entry (a line that begins with -) for each")
        return self


Congestion = Annotated[tuple[CongestionEntry, ...], BeforeValidator(lambda value: [] if value is None else value)]


class TimelineFile(Section):
    """A timeline without a topology, as `pddbed wan play` reads it."""

    congestion: Congestion = ()


class TopologyFile(Section):
    """A lab: datacenters, the WAN between them, and what is served on them."""

    name: Name | None = Field(default=None, description="Name of the lab. Default: the file's name.")
    seed: Annotated[int, whole(0, 2**32 - 1)] = Field(
        default=0, description="Seed of every random decision in the lab."
    )
    datacenters: Annotated[dict[Name, Datacenter], Field(min_length=1)] = Field(
        description="Datacenters by name.", json_schema_extra=_NAMED
    )
    wan: Annotated[tuple[Wan, ...], BeforeValidator(lambda value: [] if value is None else value)] = Field(
        default=(), description="WAN links between datacenters."
    )
    model: Annotated[Model, nothing_is_empty] = Field(default_factory=Model)
    serving: Annotated[Serving, nothing_is_empty] = Field(default_factory=Serving)
    congestion: Congestion = Field(default=(), description="A timeline of changes, outages and cross traffic.")
    profiles: Annotated[dict[Name, Annotated[Profile, nothing_is_empty]], nothing_is_empty] = Field(
        default_factory=dict, description="Hardware by name, with its speed.", json_schema_extra=_NAMED
    )
    scale: ScaleSection | None = Field(default=None, description="The real deployment that this lab models.")
    api: Annotated[Api, nothing_is_empty] = Field(default_factory=Api)


def json_schema() -> dict[str, Any]:
    """The JSON Schema (2020-12) of a topology file; pydantic's generated titles only repeat the keys."""
    schema = TopologyFile.model_json_schema()
    for section in [schema, *schema["$defs"].values()]:
        for field in section.get("properties", {}).values():
            field.pop("title", None)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema, "title": "pddbed topology"}
