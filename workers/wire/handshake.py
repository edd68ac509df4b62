"""Who may speak: compared facts and a shared secret, proved in both directions. Pure; connection.py does the I/O.

dialer -> Hello(facts, nonce) ; listener -> Welcome(facts, nonce, proof) ; dialer -> Proof. A proof is HMAC-SHA256 over
everything said so far under a label of its own direction, so that a proof can be neither replayed nor reflected.
"""

import hashlib
import hmac

import msgspec

from workers.wire.frames import WireError
from workers.wire.messages import Facts, Hello, encode


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
    for part in (label, encode(hello), msgspec.msgpack.encode(facts), nonce):
        mac.update(len(part).to_bytes(4, "big"))
        mac.update(part)
    return mac.digest()


def listener_proof(secret: bytes, hello: Hello, facts: Facts, nonce: bytes) -> bytes:
    """What a listener answers to `hello`: 32 bytes."""
    return _proof(secret, b"pddbed listener", hello, facts, nonce)


def dialer_proof(secret: bytes, hello: Hello, facts: Facts, nonce: bytes) -> bytes:
    """What the dialer answers to a welcome of `facts` and `nonce`: 32 bytes."""
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
