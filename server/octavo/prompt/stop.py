"""Find stop strings in text that arrives in pieces, without ever sending a part of one."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Holds back text that may be the beginning of a stop string.

    The stop string that is complete first wins (of several that end at the same place, the longest), however
    the text is cut into pieces. Joined, what ``push`` and ``flush`` return is the text before that stop
    string, or with it when ``include`` is set.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = sorted(stops, key=len, reverse=True)
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """The part of the text so far that can be sent; nothing more once ``matched`` is set."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        if found := self._first(text):
            start, self.matched = found
            self._held = ""
            return text[: start + len(self.matched)] if self._include else text[:start]
        keep = self._possible_start(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was held back, once no more text comes."""
        held, self._held = self._held, ""
        return held

    def _first(self, text: str) -> tuple[int, str] | None:
        """Start and stop string of the match that ends first."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0 and (best is None or start + len(stop) < best[0]):
                best = (start + len(stop), start, stop)
        return (best[1], best[2]) if best else None

    def _possible_start(self, text: str) -> int:
        """Length of the longest end of ``text`` that begins some stop string."""
        longest = min(len(self._stops[0]) - 1, len(text))
        for length in range(longest, 0, -1):
            end = text[len(text) - length :]
            if any(stop.startswith(end) for stop in self._stops if len(stop) > length):
                return length
        return 0
