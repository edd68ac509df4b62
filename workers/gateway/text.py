"""From token ids to the text that may be sent now: whole characters only, and never past a stop string. Pure."""

from collections.abc import Sequence

from workers.models import Detokenizer


class AnswerText:
    """Text of one answer, token by token. Holds back what may turn out to be the beginning of a stop string."""

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str]) -> None:
        self._detokenizer = detokenizer
        self._stops = stops
        self._held = ""
        self.stopped = False

    def push(self, token_id: int) -> str:
        """Text that is certain after this token; empty, too, once a stop string was found."""
        return self._release(self._detokenizer.push(token_id), final=False)

    def flush(self) -> str:
        """The rest, at the end of the answer."""
        return self._release(self._detokenizer.flush(), final=True)

    def _release(self, text: str, *, final: bool) -> str:
        if self.stopped:
            return ""
        text = self._held + text
        self._held = ""
        found = min((index for stop in self._stops if (index := text.find(stop)) >= 0), default=None)
        if found is not None:
            self.stopped = True
            return text[:found]
        if final:
            return text
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper beginning of `stop` that `text` ends with."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
