"""What `skew` runs: two published rows over seeds, and rows that only the fitted parameters predict. Pure."""

from dataclasses import dataclass

from experiments.framework.experiment import Options, Part
from experiments.skew.fit import TRANSFERS, Fit
from experiments.traces.hit_rates import BIMODAL, DISTRIBUTIONS, MEAN_MATCHED, SKEWED, UNIFORM, MissRates, draw
from experiments.transport.memory import Shape

BLOCKS = 256  # of a whole prompt: miss rates come in steps of 0.4 %
FULL = Shape(tokens=4096, block_size=16, bytes_per_token=256)
QUICK = Shape(tokens=1024, block_size=4, bytes_per_token=256)  # a quarter of the bytes, in the same times
QUICK_TRANSFERS = 80
PREDICTED_TRANSFERS = 192
SETTLE_S = 6.0  # warm-up and ends of a part


@dataclass(frozen=True, slots=True)
class Row:
    """Transfers of one distribution at one spacing. `load`: of the arrivals, as a multiple of the published rows'."""

    name: str
    rates: MissRates
    transfers: int
    load: float = 1.0


PREDICTED = (
    Row("uniform, load +10 %", UNIFORM, PREDICTED_TRANSFERS, 1.10),
    Row("mean-matched", MEAN_MATCHED, PREDICTED_TRANSFERS),
    Row("bimodal", BIMODAL, PREDICTED_TRANSFERS),
)


def shape(options: Options) -> Shape:
    return QUICK if options.quick else FULL


def published(options: Options) -> tuple[Row, Row]:
    """The two rows; the same arrivals for both."""
    count = QUICK_TRANSFERS if options.quick else TRANSFERS
    return Row("skewed", SKEWED, count), Row("uniform", UNIFORM, count)


def parts(options: Options, fit: Fit) -> list[Part]:
    """Seed by seed, then, of a full run, the predictions with the first seed."""
    seeds = range(1, options.seeds + 1)
    made = [_part(row, seed, fit) for seed in seeds for row in published(options)]
    if not options.quick:
        made += [_part(row, 1, fit) for row in PREDICTED]
    return made


def _part(row: Row, seed: int, fit: Fit) -> Part:
    spacing_ms = fit.spacing_ms / row.load
    last_ms = fit.predict_waits_ms(row.rates, row.transfers, seed, spacing_ms)[-1]
    seconds = (row.transfers * spacing_ms + last_ms + fit.hold_ms(row.rates.mean)) / 1000 + SETTLE_S
    plain = row.name.replace(", ", "-").replace(" ", "-").replace("%", "percent").replace("+", "plus-")
    detail = {
        "row": row.name,
        "distribution": row.rates.name,
        "transfers": row.transfers,
        "spacing_ms": spacing_ms,
        "load": row.load,
    }
    return Part(f"{plain}-seed{seed}", seed, seconds, detail)


def first_blocks(part: Part) -> list[int]:
    """Of each transfer, how many blocks the receiver holds. At least one block misses: the last token's."""
    misses = draw(DISTRIBUTIONS[part.detail["distribution"]], part.detail["transfers"], part.seed)
    return [BLOCKS - min(BLOCKS, max(1, round(miss * BLOCKS))) for miss in misses]
