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
        grown = whole[len(known) :]
        if grown.endswith(REPLACEMENT) or self._part_of_run(token, grown, whole):  # only a stop string before it counts
            return self._stops_within(grown.rstrip(REPLACEMENT))
        if grown:
            self.text += grown
            self._before, self._read = self._read, len(self._ids)
        return self._cut(len(grown))

    def finish(self) -> str:
        """The whole text; what was held back is decoded as it is."""
        if not self.stopped:
            known = self._decode(self._ids[self._before : self._read])
            tail = self._decode(self._ids[self._before :])[len(known) :]
            self.text += tail
            self._before = self._read = len(self._ids)
            self._cut(len(tail))
        return self.text

    def _part_of_run(self, token: int, grown: str, whole: str) -> bool:
        """Whether what follows may still change this: some tokenizers decode runs of bytes, all or nothing."""
        if grown.isascii() or not self._decode([token]).endswith(REPLACEMENT):
            return False
        return not self._decode([*self._ids[self._before :], token]).startswith(whole)

    @property
    def safe(self) -> int:
        """How much of `text` can be shown: an end that may become a stop string is held back."""
        if self.stopped or not self._stops:
            return len(self.text)
        for size in range(min(self._longest - 1, len(self.text)), 0, -1):
            if any(stop.startswith(self.text[-size:]) for stop in self._stops):
                return len(self.text) - size
        return len(self.text)

    def _stops_within(self, certain: str) -> bool:
        """Whether the text ends within these next characters; they become part of it only then."""
        text = self.text
        self.text += certain
        if self._cut(len(certain)):
            return True
        self.text = text
        return False

    def _cut(self, added: int) -> bool:
        """Cuts before the earliest stop string; of two at one place the one that was complete first."""
        if not self._stops:
            return False
        start = max(0, len(self.text) - added - self._longest + 1)
        found = [at for stop in self._stops if (at := self.text.find(stop, start)) >= 0]
        if found:
            self.text, self.stopped = self.text[: min(found)], True
        return bool(found)
