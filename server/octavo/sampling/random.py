"""Random numbers as a pure function of (seed, sample, position): counter-based, so any draw can be replayed
alone.

Philox4x32-10 of Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011): the key is the seed,
the counter holds position and sample. The same whatever the batch, the machine or the order of the draws.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_ROUNDS = 10

Words = tuple[NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint64], NDArray[np.uint64]]


def philox(counter: Words, key: tuple[NDArray[np.uint64], NDArray[np.uint64]]) -> Words:
    """Four random 32-bit words for each 128-bit counter and 64-bit key (32-bit words held in uint64)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        first, second = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (second >> _HALF) ^ c1 ^ k0, second & _LOW, (first >> _HALF) ^ c3 ^ k1, first & _LOW
        k0, k1 = (k0 + np.uint64(_WEYL[0])) & _LOW, (k1 + np.uint64(_WEYL[1])) & _LOW
    return c0, c1, c2, c3


def uniforms(draws: Sequence[tuple[int, int, int]]) -> NDArray[np.float64]:
    """One number in [0, 1) with 53 random bits for each (seed, sample_index, position).

    Seeds are any 64-bit integers, signed or not; sample indices below 2**32, positions below 2**64.
    """
    seed = np.array([d[0] & (2**64 - 1) for d in draws], dtype=np.uint64)
    sample = np.array([d[1] for d in draws], dtype=np.uint64)
    position = np.array([d[2] for d in draws], dtype=np.uint64)
    counter = (position & _LOW, position >> _HALF, sample & _LOW, np.zeros_like(sample))
    high, low, _, _ = philox(counter, (seed & _LOW, seed >> _HALF))
    bits = ((high << _HALF) | low) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53
