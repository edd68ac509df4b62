"""The inference engine: paged KV, continuous batching, sampling. Knows nothing of networks or roles."""

from workers.engine.blocks import BlockPool, OutOfBlocks
from workers.engine.engine import Chunk, ContextTooLong, Engine, generate
from workers.engine.job import EngineFailed, Job, SequenceFailed, Stopped
from workers.engine.pacing import PaceCounts, Profile
from workers.engine.runner import EngineRunner
from workers.engine.sampling import Sampling
from workers.engine.sequence import Generated, Sequence
from workers.engine.speculation import Drafter, Speculation

__all__ = [
    "BlockPool",
    "Chunk",
    "ContextTooLong",
    "Drafter",
    "Engine",
    "EngineFailed",
    "EngineRunner",
    "Generated",
    "Job",
    "OutOfBlocks",
    "PaceCounts",
    "Profile",
    "Sampling",
    "Sequence",
    "SequenceFailed",
    "Speculation",
    "Stopped",
    "generate",
]
