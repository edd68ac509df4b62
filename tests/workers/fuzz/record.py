"""Record what real workers say to each other, as seeds for the fuzzers: `python -m tests.workers.fuzz.record`.

Two requests through a cluster of the built-in model, for each of two kinds of hand-over; a file per connection and
direction in `seeds/`. To be run again when messages change; the committed files are the result.
"""

import asyncio
import tempfile
from pathlib import Path

import httpx

from tests.workers.fuzz.scripts import BLOCK_SIZE
from tests.workers.proxy import Proxy
from tests.workers.serving import eventually, prompt_of
from workers.local import InProcessCluster, Layout
from workers.models import ModelSpec, load_model
from workers.wire.frames import HEADER, parse_header

SEEDS = Path(__file__).parent / "seeds"
MOST_BYTES = 48 << 10


def whole_frames(data: bytes) -> bytes:
    """As many whole frames as fit a seed."""
    at = 0
    while at + HEADER.size <= len(data):
        header = parse_header(data[at : at + HEADER.size])
        end = at + HEADER.size + header.message_bytes + header.body_bytes
        if end > min(len(data), MOST_BYTES):
            break
        at = end
    return data[:at]


async def record(handoff: str) -> dict[str, bytes]:
    loaded = load_model(ModelSpec("tiny"))
    hops = (("gw0", "p0"), ("gw0", "md0"), ("p0", "rld0"), ("p0", "md0"), ("rld0", "md0"))
    ways = {hop: Proxy(record=True) for hop in hops}
    reroute = {way: (await proxy.__aenter__()).port for way, proxy in ways.items()}
    serving = {"block_size": BLOCK_SIZE, "kv_pool": {"connections": 1}, "kv_send": "chunked", "handoff": handoff}
    with tempfile.TemporaryDirectory() as folder:
        cluster = InProcessCluster(loaded, Layout(reroute=reroute, serving=serving), Path(folder))
        for (_, target), proxy in ways.items():
            proxy.aim(cluster.port(target))
        async with cluster, httpx.AsyncClient(base_url=cluster.base_url, timeout=60) as http:
            for length in (9, 11):
                body = {"prompt": prompt_of(length), "max_tokens": 30, "logprobs": 1}
                (await http.post("/v1/completions", json=body)).raise_for_status()
                await eventually(lambda: not cluster.gateway.dispatcher.live, 10, "settled")
    seeds = {}
    for (source, target), proxy in ways.items():
        for index, pair in enumerate(proxy.recorded):
            for name, data in zip(("there", "back"), pair, strict=True):
                seeds[f"{handoff}-{source}-{target}-{index}-{name}"] = whole_frames(bytes(data))
    return seeds


def main() -> None:
    SEEDS.mkdir(exist_ok=True)
    for old in SEEDS.glob("*.bin"):
        old.unlink()
    for handoff in ("catch-up", "kv"):
        for name, data in asyncio.run(record(handoff)).items():
            (SEEDS / f"{name}.bin").write_bytes(data)
            print(f"{name}: {len(data)} bytes")


if __name__ == "__main__":
    main()
