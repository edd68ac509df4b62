"""A worker as it introduces itself to others: what they must agree on."""

from workers.environment import WorkerEnvironment
from workers.models import LoadedModel
from workers.wire.connection import Local
from workers.wire.frames import PROTOCOL_VERSION
from workers.wire.messages import Facts


def local_facts(environment: WorkerEnvironment, loaded: LoadedModel) -> Local:
    """This worker as it introduces itself."""
    facts = Facts(
        name=environment.host,
        role=environment.role,
        protocol=PROTOCOL_VERSION,
        model=loaded.config.name,
        fingerprint=loaded.fingerprint,
        block_size=environment.serving.block_size,
        kv_shape=list(loaded.config.kv_shape),
        kv_dtype=loaded.spec.dtype,
    )
    return Local(facts, environment.secret)
