"""GET /metrics: Prometheus text from the gateway's own counters and what the workers last said of themselves."""

from collections.abc import Iterable

from workers.gateway.dispatcher import Dispatcher


def render_metrics(dispatcher: Dispatcher) -> str:
    """Prometheus text exposition, version 0.0.4."""
    lines: list[str] = []

    def metric(name: str, kind: str, meaning: str, samples: Iterable[tuple[dict[str, str], float]]) -> None:
        lines.extend((f"# HELP {name} {meaning}", f"# TYPE {name} {kind}"))
        for labels, value in samples:
            shown = ",".join(f'{key}="{_escape(label)}"' for key, label in labels.items())
            lines.append(f"{name}{{{shown}}} {value}" if shown else f"{name} {value}")

    gateway = dispatcher.environment.host
    links = {name: dispatcher.peers.link(name) for name in dispatcher.peers.known}
    statuses = {name: link.peer_status for name, link in links.items() if link is not None and link.peer_status}
    counters = {gateway: dispatcher.peers.local.counters.rows()}
    counters |= {name: status.counters for name, status in statuses.items()}
    metric(
        "pddbed_worker_up",
        "gauge",
        "Whether the gateway is connected to the worker.",
        [({"instance": name}, int(link is not None)) for name, link in links.items()],
    )
    metric("pddbed_requests_running", "gauge", "Requests not yet let go.", [({}, len(dispatcher.live))])
    metric(
        "pddbed_kv_blocks",
        "gauge",
        "KV blocks of a worker.",
        [
            ({"instance": name, "state": state}, value)
            for name, status in statuses.items()
            for state, value in (
                ("free", status.free_blocks),
                ("cached", status.cached_blocks),
                ("used", status.blocks - status.free_blocks - status.cached_blocks),
            )
        ],
    )
    metric(
        "pddbed_wire_bytes_total",
        "counter",
        "TCP payload bytes between workers, headers included.",
        [
            ({"instance": name, "peer": peer, "direction": direction, "class": traffic}, size)
            for name, rows in counters.items()
            for peer, direction, traffic, size, _ in rows
        ],
    )
    metric(
        "pddbed_wire_rtt_seconds",
        "gauge",
        "Last round trip of a ping on the control connection.",
        [
            ({"instance": gateway, "peer": name}, link.rtt_ns / 1e9)
            for name, link in links.items()
            if link is not None and link.rtt_ns is not None
        ],
    )
    return "\n".join(lines) + "\n"


def _escape(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
