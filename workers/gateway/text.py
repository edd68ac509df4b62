"""From token ids to the text that may be sent now: whole characters only, and never past a stop string. Pure."""

from collections.abc import Sequence

from workers.models import Tokenizer


class AnswerText:
    """Text of one answer, token by token. Holds back what may turn out to be the beginning of a stop string.

    A stop string is looked for in the text that is shown and in the text with every special token written out, so that
    "<|im_end|>" stops an answer which does not show it. The one that is complete first ends the answer, however the
    text was cut into tokens. With `with_stop` it belongs to the answer; with `special` special tokens are shown. In the
    first `at_least` tokens none is looked for.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: Sequence[str] = (),
        *,
        with_stop: bool = False,
        special: bool = False,
        at_least: int = 0,
    ) -> None:
        self._detokenizer = tokenizer.detokenizer()
        self._special_text = tokenizer.special_text
        self._stops = stops
        self._with_stop = with_stop
        self._show_special = special
        self._unstoppable = at_least
        self._held: list[tuple[str, bool]] = []
        """Characters that are not out yet, and whether they are shown."""
        self.stopped = False

    def push(self, token_id: int) -> str:
        """Text that is certain after this token; empty, too, once a stop string was found."""
        special = self._special_text(token_id)
        text, shown = (special, self._show_special) if special else (self._detokenizer.push(token_id), True)
        if self._unstoppable > 0:
            self._unstoppable -= 1
            return text if shown else ""
        return self._release(text, shown)

    def flush(self) -> str:
        """The rest, at the end of the answer."""
        out = self._release(self._detokenizer.flush(), True)
        held, self._held = self._held, []
        return out if self.stopped else out + _shown(held)

    def _release(self, text: str, shown: bool) -> str:
        if self.stopped:
            return ""
        if not self._stops:
            return text if shown else ""
        held = self._held + [(character, shown) for character in text]
        whole = range(len(held))
        visible = [index for index in whole if held[index][1]]
        views = [whole] if len(visible) == len(held) else [whole, visible]
        ends = [end for view in views for end in _stops_in(held, view, self._stops)]
        if ends:
            end, start = min(ends)
            self.stopped = True
            self._held = []
            return _shown(held[: end if self._with_stop else start])
        keep = min((_beginning(held, view, self._stops) for view in views), default=len(held))
        self._held = held[keep:]
        return _shown(held[:keep])


def _shown(characters: Sequence[tuple[str, bool]]) -> str:
    return "".join([character for character, shown in characters if shown])


def _stops_in(held: Sequence[tuple[str, bool]], view: Sequence[int], stops: Sequence[str]) -> list[tuple[int, int]]:
    """Where each stop string that `view` of the text contains first ends and begins in the text."""
    text = "".join([held[index][0] for index in view])
    found = [(at, stop) for stop in stops if (at := text.find(stop)) >= 0]
    return [(view[at + len(stop) - 1] + 1, view[at]) for at, stop in found]


def _beginning(held: Sequence[tuple[str, bool]], view: Sequence[int], stops: Sequence[str]) -> int:
    """Where in the text the longest proper beginning of a stop string starts that `view` of it ends with."""
    text = "".join([held[index][0] for index in view])
    keep = max(_overlap(text, stop) for stop in stops)
    return view[len(view) - keep] if keep else len(held)


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper beginning of `stop` that `text` ends with."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
