"""Whether a chat's earlier answers come back as the tokens they were. Pure; keeps only the latest conversations.

A client sends an answer back as text. Tokenised again it may differ from what was generated (a word split another way,
bytes that were no character), and from there on no cache matches, although to the client nothing looks wrong.
"""

from array import array
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence

import xxhash

from workers.cache.hashing import token_bytes

REMEMBERED_TOKENS = 4_000_000  # 16 MB


class Conversations:
    """Token ids of answered chats, by their messages."""

    def __init__(self, eos_ids: Collection[int], remembered_tokens: int = REMEMBERED_TOKENS) -> None:
        self._eos_ids = eos_ids
        self._room = remembered_tokens
        self._known: OrderedDict[bytes, array[int]] = OrderedDict()

    def note(self, messages: Sequence[Mapping[str, str]], answer: str, ids: Sequence[int]) -> None:
        """A chat of `messages` was answered with `answer`; `ids` are those of prompt and answer."""
        key = _key([*messages, {"role": "assistant", "content": answer}])
        self._forget(key)
        kept = array("I", ids[:-1] if ids[-1] in self._eos_ids else ids)
        self._known[key] = kept
        self._room -= len(kept)
        while self._room < 0:
            self._forget(next(iter(self._known)))

    def retokenised(self, messages: Sequence[Mapping[str, str]], prompt: Sequence[int]) -> int | None:
        """How many tokens of the latest known turn the prompt no longer begins with; None: no earlier turn is known."""
        for count in range(len(messages) - 1, 0, -1):
            if messages[count - 1]["role"] != "assistant":
                continue
            known = self._known.get(_key(messages[:count]))
            if known is not None:
                return len(known) - _common(known, array("I", prompt))
        return None

    def _forget(self, key: bytes) -> None:
        self._room += len(self._known.pop(key, ()))


def _key(messages: Sequence[Mapping[str, str]]) -> bytes:
    hasher = xxhash.xxh3_128()
    for message in messages:
        for part in (message["role"], message["content"]):
            data = part.encode("utf-8", "surrogatepass")
            hasher.update(token_bytes([len(data)]))
            hasher.update(data)
    return hasher.digest()


def _common(left: "array[int]", right: "array[int]") -> int:
    """Length of the common beginning."""
    count = min(len(left), len(right))
    if left[:count] == right[:count]:
        return count
    return next(index for index in range(count) if left[index] != right[index])
