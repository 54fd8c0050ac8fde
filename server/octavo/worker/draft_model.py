"""Speculation with a smaller model of the same vocabulary (Leviathan et al., arXiv 2211.17192).

The draft model's keys and values lie in pages of the target's own blocks, so whatever happens to a block
(sharing, copies, swaps, the prefix cache) happens to both. It draws with the target's random numbers: where
the two distributions are close, so are the draws.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from octavo.core.plan import Row, RowResult
from octavo.sampling.rules import Past
from octavo.sampling.sampler import Draw
from octavo.worker.draws import Drawer, Wanted, moved
from octavo.worker.forward import Forward
from octavo.worker.pages import KVPages


class DraftModel:
    """Follows the target step by step and proposes what comes next.

    Its layers use the block tables of the first KV group, which keeps every token.
    """

    def __init__(self, forward: Forward, drawer: Drawer, pages: KVPages, block_size: int) -> None:
        self.forward, self._drawer, self.pages = forward, drawer, pages
        self._block_size = block_size

    def propose(self, rows: Sequence[Row], results: Sequence[RowResult]) -> dict[str, list[int]]:
        """Compute what the target has just computed, and its new tokens -> the proposals of each request.

        Drafts that the target refused are computed over: the row's next tokens take their places.
        """
        lines = [
            _Line(row, result, self._block_size)
            for row, result in zip(rows, results, strict=True)
            if row.propose and result.error is None
        ]
        under_way = lines
        while under_way:
            hidden = self.forward([line.row for line in under_way])
            ends = np.cumsum([len(line.row.token_ids) for line in under_way]).tolist()
            drawing = [(line, end - 1) for line, end in zip(under_way, ends, strict=True) if line.draws]
            draws = self._drawer.draw(hidden, [line.wanted(token) for line, token in drawing])
            under_way = [line for (line, _), draw in zip(drawing, draws, strict=True) if line.take(draw)]
        return {line.row.request_id: line.proposed for line in lines}


class _Line:
    """What the draft model computes of one sequence in this step: ``row``, then its own proposals one by one.

    ``draws`` as long as a draw from its last token is wanted.
    """

    def __init__(self, row: Row, result: RowResult, block_size: int) -> None:
        blocks = row.block_tables[0]
        self._end = len(blocks) * block_size  # first position that has no place
        drawn = result.token_ids if len(row.samples) == 1 else []
        start = row.start if row.drafted < 0 else row.drafted
        behind = row.history[start : row.start] if row.history is not None else []
        known = [*behind, *row.token_ids, *drawn]
        self.row = Row(row.request_id, known[: self._end - start], start, [blocks])
        self.proposed: list[int] = []
        self.draws = bool(drawn) and start + len(known) <= self._end
        self._wanted = row.propose
        self._history, self._drawn = row.history, drawn
        self._spec = msgspec.structs.replace(row.samples[0], logprobs=None) if self.draws else None

    def wanted(self, token: int) -> Wanted:
        """The draw that follows the last token, which is the batch's ``token``."""
        assert self._spec is not None
        spec = moved(self._spec, len(self._drawn) + len(self.proposed))
        if self._history is None:
            return token, spec, None
        return token, spec, Past(self.row.request_id, self._history, [*self._drawn, *self.proposed])

    def take(self, draw: Draw) -> bool:
        """Propose what was drawn. Returns whether to go on from it; ``row`` then computes it."""
        row, position = self.row, self.row.start + len(self.row.token_ids)
        if draw.error is not None:
            return False
        self.proposed.append(draw.token)
        self.row = Row(row.request_id, [draw.token], position, row.block_tables)
        return len(self.proposed) < self._wanted and position < self._end
