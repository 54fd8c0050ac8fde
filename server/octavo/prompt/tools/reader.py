"""Text that arrives in pieces, for code that reads it as if it were whole.

The methods are generators: they yield where they need more text, and ``yield from`` returns what they found.
Each sees only the text, never where it was cut; what stays unread is never longer than a marker, so that the
work is linear in the length of the text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
_SPACE = re.compile(r"\s*")


class Literals:
    """Several texts to look for at once; of those that begin at the same place the longest counts."""

    def __init__(self, texts: tuple[str, ...]) -> None:
        ordered = sorted(texts, key=len, reverse=True)
        self._texts = ordered
        self._pattern = re.compile("|".join(map(re.escape, ordered)))
        self._firsts = re.compile("[" + re.escape("".join({text[0] for text in ordered})) + "]")

    def find(self, text: str, start: int) -> re.Match[str] | None:
        return self._pattern.search(text, start)

    def may_begin(self, text: str, start: int) -> int:
        """Where the end of ``text`` may be the beginning of one; its length where it cannot."""
        place = max(start, len(text) - len(self._texts[0]) + 1)
        while first := self._firsts.search(text, place):
            place = first.start()
            rest = text[place:]
            if any(one.startswith(rest) for one in self._texts):
                return place
            place += 1
        return len(text)


class Reader:
    def __init__(self) -> None:
        self.ended = False
        self._text = ""
        self._place = 0
        self._taken: list[str] | None = None  # what was read since the mark, but for the text at hand,
        self._mark = 0  # of which this is the place

    def push(self, text: str) -> None:
        """More text."""
        if self._taken is not None:
            self._taken.append(self._text[self._mark : self._place])
        self._text = self._text[self._place :] + text
        self._place = self._mark = 0

    def mark(self) -> None:
        """Keep what is read from here on, for ``rewind`` and ``taken``."""
        self._taken = []
        self._mark = self._place

    def unmark(self) -> None:
        self._taken = None

    def taken(self) -> str:
        """What was read since the mark; nothing where there is none."""
        if self._taken is None:
            return ""
        return "".join([*self._taken, self._text[self._mark : self._place]])

    def rewind(self) -> None:
        """Go back to the mark, which stays."""
        assert self._taken is not None
        if self._taken:
            self._text = "".join([*self._taken, self._text[self._mark :]])
            self._mark = 0
            self._taken = []
        self._place = self._mark

    def more(self) -> Steps[bool]:
        """Whether there is a next character."""
        while self._place == len(self._text):
            if self.ended:
                return False
            yield
        return True

    def peek(self) -> Steps[str]:
        """The next character, not read yet; empty at the end."""
        return self._text[self._place] if (yield from self.more()) else ""

    def space(self) -> Steps[None]:
        """Read over white space."""
        while (yield from self.more()):
            self._place = _SPACE.match(self._text, self._place).end()  # type: ignore[union-attr]
            if self._place < len(self._text):
                return

    def literal(self, wanted: str, *, cut: bool = False) -> Steps[bool]:
        """Read ``wanted``, or nothing if anything else follows. ``cut``: where the text ends in the middle of
        it, what there is of it is read too.
        """
        while True:
            there = min(len(wanted), len(self._text) - self._place)
            if not self._text.startswith(wanted[:there], self._place):
                return False
            if there == len(wanted):
                self._place += there
                return True
            if self.ended:
                if cut:
                    self._place += there
                return False
            yield

    def fixed(self, wanted: str, *, cut: bool = False) -> Steps[bool]:
        """Read the parts of ``wanted``, with any white space before each; ``cut`` as for ``literal``."""
        for part in wanted.split():
            yield from self.space()
            if not (yield from self.literal(part, cut=cut)):
                return False
        return True

    def run(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Read the characters that ``pattern`` (a class, repeated) takes."""
        parts = []
        while (yield from self.more()):
            match = pattern.match(self._text, self._place)
            if match is None:
                break
            parts.append(match.group())
            self._place = match.end()
            if self._place < len(self._text):
                break
        return "".join(parts)

    def until(self, literals: Literals, sink: Callable[[str], None]) -> Steps[str]:
        """Give what comes before one of ``literals`` to ``sink``, and return that one, not read yet; empty at
        the end.
        """
        while True:
            if found := literals.find(self._text, self._place):
                sink(self._text[self._place : found.start()])
                self._place = found.start()
                return found.group()
            keep = len(self._text) if self.ended else literals.may_begin(self._text, self._place)
            sink(self._text[self._place : keep])
            self._place = keep
            if self.ended:
                return ""
            yield

    def feed(self, take: Callable[[str, int], int]) -> bool:
        """Let ``take`` read from a place in the text; it returns where it stopped. True if it stopped before
        the end.
        """
        self._place = take(self._text, self._place)
        return self._place < len(self._text)
