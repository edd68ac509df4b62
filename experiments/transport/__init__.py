"""The workers' own KV transport between hosts of a lab, with plain memory where a model would be.

What moves, waits, is checked and is counted is `workers.wire`: handshake, connection pool, frames, checksums, answers.
Only what the bytes mean is left out, so that thousands of transfers need no prefill.
"""
