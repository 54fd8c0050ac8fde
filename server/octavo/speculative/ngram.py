"""Prompt lookup: what followed the last few tokens when they last came is a guess at what follows now.

The longest suffix of ``prompt_lookup_max`` down to ``prompt_lookup_min`` tokens that occurs earlier is taken,
at its most recent place. A text that repeats its prompt (summaries, edits, code) is guessed well so.
"""

from __future__ import annotations

from array import array

WIDTH = 4  # bytes of a token in the searched text


class NgramProposer:
    """Proposals for one sequence, whose tokens only grow: each is packed once, and found by a byte search."""

    def __init__(self, prompt_lookup_min: int, prompt_lookup_max: int) -> None:
        self._min, self._max = prompt_lookup_min, prompt_lookup_max
        self._packed = bytearray()

    def propose(self, token_ids: list[int], limit: int) -> list[int]:
        """Up to ``limit`` tokens; none where the last ``prompt_lookup_min`` tokens did not occur before."""
        self._packed += array("I", token_ids[len(self._packed) // WIDTH :]).tobytes()
        place = -1
        for size in range(self._min, min(self._max, len(token_ids) - 1) + 1):
            longer = self._last_before_end(size)
            if longer < 0:
                break  # no longer suffix occurs either
            place = longer + size
        return token_ids[place : place + limit] if place >= 0 else []

    def _last_before_end(self, size: int) -> int:
        """Where the last ``size`` tokens occurred before, most recently; -1 if they did not."""
        end = len(self._packed) - WIDTH
        suffix = bytes(self._packed[-size * WIDTH :])
        while (found := self._packed.rfind(suffix, 0, end)) >= 0:
            if found % WIDTH == 0:
                return found // WIDTH
            end = found + len(suffix) - 1  # between two tokens: look before
        return -1
