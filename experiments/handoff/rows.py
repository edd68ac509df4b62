"""What `handoff` runs: KV streamed and tokens recomputed, each on the calm and on the congested WAN. Pure."""

from experiments.framework.experiment import Options, Part
from experiments.handoff.fit import SPACING_S

SMOLLM2 = "smollm2-135m"
SMOLLM2_SPACING_S = 1.2
_FULL = {"kv": (40, 160), "recompute": (48, 48)}  # calm, congested
_QUICK = {"kv": (6, 14), "recompute": (6, 6)}
_SMOLLM2_COUNT = 40
SETTLE_S = 3.0


def parts(options: Options, smollm2: bool) -> list[Part]:
    """Seed by seed; then, of a full run and where the model has been fetched, SmolLM2 as fast as it is."""
    counts = _QUICK if options.quick else _FULL
    made = [
        _part(kind, where, seed, count, "tiny", SPACING_S)
        for seed in range(1, options.seeds + 1)
        for kind, pair in counts.items()
        for where, count in zip(("calm", "congested"), pair, strict=True)
    ]
    if smollm2 and not options.quick:
        made += [
            _part("smollm2", where, 1, _SMOLLM2_COUNT, SMOLLM2, SMOLLM2_SPACING_S) for where in ("calm", "congested")
        ]
    return made


def _part(kind: str, where: str, seed: int, count: int, model: str, spacing_s: float) -> Part:
    detail = {"row": f"{kind}, {where}", "kind": kind, "congested": where == "congested", "count": count}
    detail |= {"model": model, "spacing_s": spacing_s}
    return Part(f"{kind}-{where}-seed{seed}", seed, count * spacing_s + SETTLE_S, detail)
