"""When the tokens of one streamed answer came: by token, not by chunk.

A chunk may hold several tokens, and the first one of a chat holds none. How many a chunk holds is known from
its token ids (``return_token_ids``), else from usage that counts on in each chunk, else the answer's usage is
shared out over the chunks by the length of their text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any


class Tally:
    """Takes the events of one answer with the times of their coming, in seconds."""

    def __init__(self) -> None:
        self.text = ""
        self.usage: Mapping[str, Any] = {}
        self._times: list[float] = []
        self._chars: list[int] = []
        self._ids: list[int] = []  # token ids in each chunk
        self._so_far: list[int | None] = []  # usage's count with each chunk

    def add(self, time: float, event: Mapping[str, Any]) -> None:
        choices = event.get("choices") or ()
        self.usage = event.get("usage") or self.usage
        ids = sum(len(choice.get("token_ids") or ()) for choice in choices)
        shown = [_text(choice) for choice in choices]
        self.text += "".join(said for said, _ in shown)
        if ids or any(chars for _, chars in shown):
            self._times.append(time)
            self._chars.append(sum(chars for _, chars in shown))
            self._ids.append(ids)
            self._so_far.append((event.get("usage") or {}).get("completion_tokens"))

    @property
    def counted_by(self) -> str:
        """What the counts of single chunks rest on."""
        if any(self._ids):
            return "token ids"
        if self._so_far and all(count is not None for count in self._so_far):
            return "usage of chunks"
        return "text" if self.usage else "chunks"

    @property
    def prompt_tokens(self) -> int:
        return self.usage.get("prompt_tokens") or 0

    @property
    def cached_tokens(self) -> int:
        return (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0

    @property
    def output_tokens(self) -> int:
        """As the endpoint counts them; without its word, what was seen."""
        return self.usage.get("completion_tokens") or sum(count for _, count in self.chunks())

    def chunks(self) -> list[tuple[float, int]]:
        """Time and number of tokens of each chunk that held any."""
        by = self.counted_by
        if by == "token ids":
            counts = self._ids
        elif by == "usage of chunks":
            totals = [0, *(count or 0 for count in self._so_far)]
            counts = [max(0, b - a) for a, b in pairwise(totals)]
        elif by == "text":
            counts = shared_out(self.usage.get("completion_tokens") or len(self._chars), self._chars)
        else:
            counts = [1] * len(self._times)
        return [(time, count) for time, count in zip(self._times, counts, strict=True) if count]


def shared_out(total: int, chars: Sequence[int]) -> list[int]:
    """``total`` tokens over chunks of so many characters: one each where there are enough, the rest by
    length.
    """
    each = 1 if total >= len(chars) else 0
    rest, whole = total - each * len(chars), max(1, sum(chars))
    ends, seen = [0], 0
    for count in chars:
        seen += count
        ends.append(rest * seen // whole)
    return [each + b - a for a, b in pairwise(ends)]


def gaps(chunks: Sequence[tuple[float, int]]) -> list[float]:
    """Seconds between tokens: those of a chunk share the time since the one before. What came with the first
    has no gap: nothing tells when it was made.
    """
    return [(time - before) / count for (before, _), (time, count) in pairwise(chunks) for _ in range(count)]


def _text(choice: Mapping[str, Any]) -> tuple[str, int]:
    """What a choice says, and how many characters it made, reasoning and tool calls included."""
    delta = choice.get("delta") or choice
    said = delta.get("content") or delta.get("text") or ""
    calls = [call.get("function") or {} for call in delta.get("tool_calls") or ()]
    made = [said, delta.get("reasoning") or delta.get("reasoning_content") or ""]
    made += [part for call in calls for part in (call.get("name"), call.get("arguments")) if part]
    return said, sum(map(len, made))
