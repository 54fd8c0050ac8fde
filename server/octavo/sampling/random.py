"""Random numbers as a pure function of (seed, sample, position): counter-based, so any draw can be replayed
alone.

Philox4x32-10 of Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011): the key is the seed,
the counter holds position and sample. The same whatever the batch, the machine or the order of the draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF
_HALF = 32
_ROUNDS = 10
_FEW = 16  # draws that cost less one by one

Word = TypeVar("Word", int, NDArray[np.uint64])


def philox(counter: tuple[Word, Word, Word, Word], key: tuple[Word, Word]) -> tuple[Word, Word, Word, Word]:
    """Four random 32-bit words for each 128-bit counter and 64-bit key (32-bit words, arrays' in uint64)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        first, second = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (second >> _HALF) ^ c1 ^ k0, second & _LOW, (first >> _HALF) ^ c3 ^ k1, first & _LOW
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3


def uniforms(draws: Sequence[tuple[int, int, int]]) -> list[float]:
    """One number in [0, 1) with 53 random bits for each (seed, sample_index, position).

    Seeds are any 64-bit integers, signed or not; sample indices below 2**32, positions below 2**64.
    """
    if len(draws) <= _FEW:
        return [_number(_bits(seed & (2**64 - 1), sample, position)) for seed, sample, position in draws]
    seeds = np.array([draw[0] & (2**64 - 1) for draw in draws], dtype=np.uint64)
    samples = np.array([draw[1] for draw in draws], dtype=np.uint64)
    positions = np.array([draw[2] for draw in draws], dtype=np.uint64)
    return [_number(bits) for bits in _bits(seeds, samples, positions).tolist()]


def _bits(seed: Word, sample: Word, position: Word) -> Word:
    counter = (position & _LOW, position >> _HALF, sample & _LOW, sample & 0)
    high, low, _, _ = philox(counter, (seed & _LOW, seed >> _HALF))
    bits: Word = ((high << _HALF) | low) >> 11
    return bits


def _number(bits: int) -> float:
    return bits * 2.0**-53
