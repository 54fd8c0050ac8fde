"""By which means a victim gives up its blocks: computed again later, or copied to host memory and back."""

from __future__ import annotations

from typing import Literal

Means = Literal["recompute", "swap"]
HALF_LIFE_BYTES = float(1 << 30)  # copied bytes after which an old measurement of the rate counts half
FIRST_COPY_RATE = 2e9  # bytes a second, until one copy was measured: what host memory does at the least


class CopyRate:
    """Bytes a second that transfers move, a ratio of decaying sums."""

    def __init__(self) -> None:
        self._bytes = 0.0
        self._seconds = 0.0

    @property
    def bytes_per_s(self) -> float:
        return self._bytes / self._seconds if self._seconds > 0 else FIRST_COPY_RATE

    def measure(self, size: int, seconds: float) -> None:
        keep = 0.5 ** (size / HALF_LIFE_BYTES)
        self._bytes = keep * self._bytes + size
        self._seconds = keep * self._seconds + seconds


def tokens_kept(computed: int, free: int, others: int, block_size: int) -> int:
    """Of ``computed`` tokens of a victim, how many its prefix will likely still find when it comes back.

    Its blocks are the last to be evicted, its tail before its head, after the ``free`` blocks that were there
    before it; each of the ``others`` that run on takes about one until there is room again.
    """
    lost = max(0, others - free) * block_size
    return max(0, computed // block_size * block_size - lost)


def choose(tokens: int, tokens_per_s: float, size: int, bytes_per_s: float) -> Means:
    """The cheaper of computing ``tokens`` again and of copying ``size`` bytes out and back.

    An unknown rate of computing (0.0) says that nothing was computed yet: then there is little to save.
    """
    if tokens_per_s <= 0:
        return "recompute"
    return "swap" if 2 * size / bytes_per_s < tokens / tokens_per_s else "recompute"
