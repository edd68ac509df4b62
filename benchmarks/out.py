"""What a benchmark leaves where it is asked to (`--out`): its figures as JSON, and the table that it printed."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path


def add_option(parser: argparse.ArgumentParser) -> None:
    """`--out`, for `write`."""
    words = "write the figures as JSON, and the table, where there is one, beside it as .txt"
    parser.add_argument("--out", type=Path, metavar="FILE", help=words)


def write(file: Path | None, figures: object, lines: Sequence[str] = ()) -> None:
    """Nothing without a file."""
    if file is None:
        return
    file.with_suffix(".json").write_text(json.dumps(figures, indent=1) + "\n")
    if lines:
        file.with_suffix(".txt").write_text("\n".join(lines) + "\n")
