"""What `chip-bias` measures of each chip: prompts one after the other, and answers of one and of several at once."""

from experiments.framework.experiment import Options, Part

CHIPS = ("gpu-a", "chip-e")
AT_ONCE = (1, 4)
SHORT_PROMPT = 8
_PROMPT_NS, _STEP_NS = 14_000_000, 150_000_000  # about; for the ETA


def parts(options: Options) -> list[Part]:
    """Of one chip all together: they share a lab."""
    lengths = [40, 60, 80] if options.quick else [20, 50, 80, 100, 130, 160, 200, 250, 300, 400]
    tokens = 24 if options.quick else 100
    made = []
    for chip in CHIPS:
        for seed in range(1, options.seeds + 1):
            seconds = 3 + sum(lengths) * _PROMPT_NS / 1e9
            detail = {"row": f"{chip}, prefill", "chip": chip, "kind": "prefill", "lengths": lengths}
            made.append(Part(f"{chip}-prefill-seed{seed}", seed, seconds, detail, variant=chip))
            for at_once in AT_ONCE:
                row = f"{chip}, {at_once} at once"
                decode = {"row": row, "chip": chip, "kind": "decode", "at_once": at_once, "tokens": tokens}
                name, seconds = f"{chip}-decode{at_once}-seed{seed}", 3 + tokens * _STEP_NS / 1e9
                made.append(Part(name, seed, seconds, decode, variant=chip))
    return made
