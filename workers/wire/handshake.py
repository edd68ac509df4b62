"""The handshake: compared facts and a shared secret, proved in both directions. Pure; connection.py does the I/O.

dialer -> Hello(facts, nonce) ; listener -> Welcome(facts, nonce, proof) ; dialer -> Proof. A proof is HMAC-SHA256 over
everything said so far under a label of its own direction, so that a proof can be neither replayed nor reflected.
"""

import hashlib
import hmac
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from workers.wire.frames import WireError
from workers.wire.messages import Count, Message, Name, Text


class Facts(Struct, frozen=True, kw_only=True):
    """Facts that two workers must agree on before KV may pass between them, and the name of the one that speaks."""

    name: Name
    role: Name
    protocol: Count
    model: Name
    fingerprint: Name
    block_size: Count
    kv_shape: list[Count]  # of one token, such as [layers, 2, kv_heads, head_dim]
    kv_dtype: Name


class Hello(Message, tag="hello", frozen=True):
    """Dialer, first message. `channel` is "control" (one per pair) or "kv" (the warm pool)."""

    facts: Facts
    channel: Name
    nonce: Annotated[bytes, Meta(min_length=32, max_length=32)]


class Welcome(Message, tag="welcome", frozen=True):
    """Listener's answer: its own facts, its nonce, and the proof that it knows the secret."""

    facts: Facts
    nonce: Annotated[bytes, Meta(min_length=32, max_length=32)]
    proof: Annotated[bytes, Meta(min_length=32, max_length=32)]


class Proof(Message, tag="proof", frozen=True):
    """Dialer's proof that it knows the secret. It may send at once after this."""

    proof: Annotated[bytes, Meta(min_length=32, max_length=32)]


class Refused(Message, tag="refused", frozen=True):
    """Either side, before it closes the connection: one sentence."""

    reason: Text


class AuthenticationFailed(WireError):
    """The peer does not know this lab's secret."""

    name = "authentication_failed"


class Incompatible(WireError):
    """The peers' models, block sizes or protocols differ: KV of one means nothing to the other."""

    name = "incompatible_peer"


_COMPARED = {
    "protocol": "wire protocol",
    "model": "model",
    "fingerprint": "model fingerprint",
    "block_size": "block size",
    "kv_shape": "KV shape of a token",
    "kv_dtype": "KV dtype",
}


def _proof(secret: bytes, label: bytes, hello: Hello, facts: Facts, nonce: bytes) -> bytes:
    mac = hmac.new(secret, digestmod=hashlib.sha256)
    for part in (label, msgspec.msgpack.encode(hello), msgspec.msgpack.encode(facts), nonce):
        mac.update(len(part).to_bytes(4, "big"))
        mac.update(part)
    return mac.digest()


def listener_proof(secret: bytes, hello: Hello, facts: Facts, nonce: bytes) -> bytes:
    """The listener's answer to `hello`: 32 bytes."""
    return _proof(secret, b"pddbed listener", hello, facts, nonce)


def dialer_proof(secret: bytes, hello: Hello, facts: Facts, nonce: bytes) -> bytes:
    """The dialer's answer to a welcome of `facts` and `nonce`: 32 bytes."""
    return _proof(secret, b"pddbed dialer", hello, facts, nonce)


def check_proof(expected: bytes, given: bytes, peer: str) -> None:
    """Raise AuthenticationFailed unless the proofs are equal (in constant time)."""
    if not hmac.compare_digest(expected, given):
        raise AuthenticationFailed(
            f"{peer} does not know this lab's secret (PDDBED_SECRET); start both workers from the same lab"
        )


def check_facts(mine: Facts, theirs: Facts) -> None:
    """Raise Incompatible, naming every difference with both values."""
    differences = [
        f"{label} is {getattr(mine, field)} on {mine.name} and {getattr(theirs, field)} on {theirs.name}"
        for field, label in _COMPARED.items()
        if getattr(mine, field) != getattr(theirs, field)
    ]
    if differences:
        raise Incompatible("; ".join(differences) + "; start both workers with the same model and serving settings")
