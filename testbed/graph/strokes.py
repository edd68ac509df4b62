"""Lines of box-drawing characters on a grid: they join where they turn and cross where they meet. Pure."""

UP, DOWN, LEFT, RIGHT = 1, 2, 4, 8
_CHARACTERS = {
    0: " ",
    UP | DOWN: "│",
    LEFT | RIGHT: "─",
    UP | LEFT: "┘",
    DOWN | LEFT: "┐",
    UP | DOWN | LEFT | RIGHT: "┼",
}


class Strokes:
    """A grid of `lines` x `columns` characters."""

    def __init__(self, lines: int, columns: int) -> None:
        self._arms = [[0] * columns for _ in range(lines)]
        self._words: dict[int, tuple[int, str]] = {}

    def bracket(self, column: int, first: int, last: int) -> None:
        """From the left edge of line `first` to `column`, down, and back to the left edge of line `last`."""
        for line, arm in ((first, DOWN), (last, UP)):
            for cell in range(column):
                self._arms[line][cell] |= LEFT | RIGHT
            self._arms[line][column] |= LEFT | arm
        for line in range(first + 1, last):
            self._arms[line][column] |= UP | DOWN

    def write(self, line: int, column: int, text: str) -> None:
        """`text` over what is drawn there; one a line."""
        self._words[line] = (column, text)

    def render(self, line: int) -> str:
        """One line, without blanks at its end."""
        drawn = "".join(_CHARACTERS[arms] for arms in self._arms[line])
        if line in self._words:
            column, text = self._words[line]
            drawn = drawn[:column] + text + drawn[column + len(text) :]
        return drawn.rstrip()
