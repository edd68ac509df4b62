"""What crosses the network between workers: frames, messages, connections, KV transfers (docs/wire.md)."""
