"""Names that are too long for their place, with what tells them apart kept: the beginning and the end. Pure."""

ELLIPSIS = "\u2026"


def shorten(text: str, most: int) -> str:
    """`text` in at most `most` characters (at least 3), its middle left out where needed."""
    if len(text) <= most:
        return text
    tail = (most - 1) // 2
    return text[: most - 1 - tail] + ELLIPSIS + text[-tail:]


def cut(text: str, most: int) -> str:
    """`text` in at most `most` characters, its end left out where needed: for what is read from the beginning."""
    return text if len(text) <= most else text[: most - 1] + ELLIPSIS
