"""A step plan's rows as the flat token batch that the model takes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from octavo.core.plan import Row
from octavo.layers.batch import ActivationBuffers, ForwardBatch
from octavo_kernels import AttentionBatch


class StepInputs:
    """Persistent input buffers, written anew in each step with numpy and never reallocated.

    Up to ``max_rows`` sequences and as many tokens as ``activations`` has rows. Views per size are made once.
    """

    def __init__(
        self,
        activations: ActivationBuffers,
        max_rows: int,
        max_model_len: int,
        block_size: int,
        device: torch.device,
    ) -> None:
        tokens, blocks = activations.max_tokens, -(-max_model_len // block_size)
        self._activations = activations
        self._block_size = block_size
        self._device = device
        self._host = {
            "token_ids": torch.zeros(tokens, dtype=torch.int64),
            "positions": torch.zeros(tokens, dtype=torch.int64),
            "slots": torch.zeros(tokens, dtype=torch.int64),
            "query_start": torch.zeros(max_rows + 1, dtype=torch.int32),
            "seq_lens": torch.zeros(max_rows, dtype=torch.int32),
            "tables": torch.zeros(max_rows, blocks, dtype=torch.int32),
        }
        self._token_ids, self._positions, self._slots, self._query_start, self._seq_lens, self._tables = (
            buffer.numpy() for buffer in self._host.values()
        )
        self._seen_tables: list[list[int]] = [[] for _ in range(max_rows)]
        self._row_numbers = np.arange(max(max_rows, tokens))
        self._views: dict[tuple[str, int], Tensor] = {}

    def fill(self, rows: Sequence[Row]) -> ForwardBatch:
        """Write the rows into the buffers -> the batch over them, valid until the next call."""
        count, lengths = len(rows), [len(row.token_ids) for row in rows]
        total, longest = sum(lengths), max(lengths)
        starts = np.array([row.start for row in rows])
        np.cumsum(lengths, out=self._query_start[1 : count + 1])
        self._seq_lens[:count] = starts + lengths
        self._token_ids[:total] = [token for row in rows for token in row.token_ids]
        row_of = self._row_numbers[:count]
        if longest == 1:
            self._positions[:total] = starts
        else:
            row_of = np.repeat(row_of, lengths)
            first = starts - self._query_start[:count]
            np.add(self._row_numbers[:total], first[row_of], out=self._positions[:total])
        self._fill_tables(rows)
        block, offset = np.divmod(self._positions[:total], self._block_size)
        self._slots[:total] = self._tables[row_of, block] * self._block_size + offset
        return ForwardBatch(
            self._view("token_ids", total),
            self._view("positions", total),
            self._view("slots", total),
            AttentionBatch(
                self._view("query_start", count + 1),
                self._view("seq_lens", count),
                self._view("tables", count),
                self._block_size,
                longest,
            ),
            self._activations.views(total),
        )

    def _fill_tables(self, rows: Sequence[Row]) -> None:
        """Block tables seldom change from step to step: only those that did are written."""
        for i, row in enumerate(rows):
            table = row.block_tables[0]
            if table != self._seen_tables[i]:
                self._tables[i, : len(table)] = table
                self._seen_tables[i] = list(table)

    def _view(self, name: str, size: int) -> Tensor:
        key = (name, size)
        if key not in self._views:
            self._views[key] = self._host[name][:size]
        view = self._views[key]
        return view if self._device.type == "cpu" else view.to(self._device)
