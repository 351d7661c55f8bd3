"""Text as it grows: pieces that never hold half a character, and the search for stop strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"


class TextStream:
    """Decodes tokens one by one; the pieces join to exactly the decoded text.

    Decoding starts at the last place known to be a character's edge, with the tokens of one piece
    before it for tokenizers that join words by context; a tail that ends inside a character is held.

    Args:
        decode: ids -> text, special tokens skipped.
        stops: strings that end the text.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._ids: list[int] = []
        self._before = 0  # start of the tokens that give context
        self._read = 0  # tokens whose text is out
        self.text = ""
        self.stopped = False

    def push(self, token: int) -> bool:
        """Adds a token; returns whether a stop string is now complete (the text is cut before it)."""
        self._ids.append(token)
        known = self._decode(self._ids[self._before : self._read])
        whole = self._decode(self._ids[self._before :])
        if len(whole) > len(known) and not whole.endswith(REPLACEMENT):
            self.text += whole[len(known) :]
            self._before, self._read = self._read, len(self._ids)
            return self._cut(len(whole) - len(known))
        return False

    def finish(self) -> str:
        """The whole text; what was held back is decoded as it is."""
        if not self.stopped:
            known = self._decode(self._ids[self._before : self._read])
            tail = self._decode(self._ids[self._before :])[len(known) :]
            self.text += tail
            self._before = self._read = len(self._ids)
            self._cut(len(tail))
        return self.text

    def __deepcopy__(self, memo: object) -> TextStream:
        """A copy that can be pushed ahead; the decoder is shared."""
        other = TextStream(self._decode, self._stops)
        other._ids = self._ids[self._before :]
        other._read = self._read - self._before
        other.text, other.stopped = self.text[-self._longest :], self.stopped
        return other

    @property
    def safe(self) -> int:
        """How much of `text` can be shown: an end that may become a stop string is held back."""
        if self.stopped or not self._stops:
            return len(self.text)
        for size in range(min(self._longest - 1, len(self.text)), 0, -1):
            if any(stop.startswith(self.text[-size:]) for stop in self._stops):
                return len(self.text) - size
        return len(self.text)

    def _cut(self, added: int) -> bool:
        """Cuts before the earliest stop string; of two at one place the one that was complete first."""
        if not self._stops:
            return False
        start = max(0, len(self.text) - added - self._longest + 1)
        found = [at for stop in self._stops if (at := self.text.find(stop, start)) >= 0]
        if found:
            self.text, self.stopped = self.text[: min(found)], True
        return bool(found)
