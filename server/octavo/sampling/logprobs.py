"""Log probabilities of a drawn token and of the most likely ones."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from octavo.core.plan import TokenLogprobs


def token_logprobs(row: NDArray[np.float32], token: int, top: int) -> TokenLogprobs:
    """Natural logs of the softmax of ``row`` [V]: of ``token`` with its rank, and of the ``top`` most likely.

    Equal logits rank by token id, lowest first. All values of ``row`` are finite or -infinity, not all the
    latter.
    """
    peak = row.max()
    log_total = float(peak) + float(np.log(np.exp(row - peak).sum(dtype=np.float64)))
    rank = 1 + int((row > row[token]).sum()) + int((row[:token] == row[token]).sum())
    best = [(i, float(row[i]) - log_total) for i in _most_likely(row, top)]
    return TokenLogprobs(float(row[token]) - log_total, rank, best)


def _most_likely(row: NDArray[np.float32], count: int) -> list[int]:
    """Ids of the ``count`` largest values, largest first, equal ones by id."""
    if count == 0:
        return []
    count = min(count, len(row))
    threshold = np.partition(row, len(row) - count)[len(row) - count]
    ids = np.flatnonzero(row >= threshold)
    order = np.lexsort((ids, -row[ids]))
    chosen: list[int] = ids[order[:count]].tolist()
    return chosen
