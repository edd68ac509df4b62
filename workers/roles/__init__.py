"""The three roles over an engine: prefill, relay decode, main decode. A request's life is told in docs/wire.md."""
