"""An SVG drawing as a PNG. Needs the optional package resvg-py, which carries its renderer, and a font."""

import importlib
import sys
from types import ModuleType

PIXELS_PER_UNIT = 2.0  # sharp on dense screens and in print
_PROBE = '<svg xmlns="http://www.w3.org/2000/svg" width="20" height="20">{text}</svg>'


class PngError(Exception):
    """A PNG cannot be drawn here; one sentence with the next step."""


def draw_png(svg: str, fonts: str) -> bytes:
    """The drawing as PNG; `fonts` is the list of font families that it asks for. Raises PngError."""
    try:
        resvg = importlib.import_module("resvg_py")
    except ImportError:
        raise PngError(
            f"PNG needs the package resvg-py, which is not installed; get it with: {sys.executable} -m pip install "
            "resvg-py, or draw a .svg"
        ) from None
    if not _draws_text(resvg, fonts):
        raise PngError(
            "this machine has none of the fonts that the picture asks for, and its PNG would have no text; install one "
            "(apt-get install fonts-dejavu-core), or draw a .svg"
        )
    return bytes(resvg.svg_to_bytes(svg_string=svg, zoom=PIXELS_PER_UNIT))


def _draws_text(resvg: ModuleType, fonts: str) -> bool:
    """Whether text leaves a trace: without a font the renderer leaves it out and says nothing."""
    text = f'<text x="2" y="15" font-size="14" font-family="{fonts}">W</text>'
    with_text, without = (bytes(resvg.svg_to_bytes(svg_string=_PROBE.format(text=part))) for part in (text, ""))
    return with_text != without
