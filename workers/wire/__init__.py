"""The wire between workers: frames, messages, connections, KV transfers (docs/wire.md)."""
