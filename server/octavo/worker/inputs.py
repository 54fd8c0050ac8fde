"""A step plan's rows as the flat token batch that the model takes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.plan import NO_BLOCK, Row
from octavo.layers.batch import ActivationBuffers, ForwardBatch
from octavo_kernels import AttentionBatch


class StepInputs:
    """Persistent input buffers, written anew in each step with numpy and never reallocated.

    Up to ``max_rows`` sequences and as many tokens as ``activations`` has rows, each with a block table in
    every one of ``num_groups`` KV groups. ``zero_page`` is the block that tables point to where nothing is
    kept. Views per size are made once.
    """

    def __init__(
        self,
        activations: ActivationBuffers,
        max_rows: int,
        max_model_len: int,
        block_size: int,
        num_groups: int,
        zero_page: int,
        device: torch.device,
    ) -> None:
        tokens, blocks = activations.max_tokens, -(-max_model_len // block_size)
        self._activations = activations
        self._block_size = block_size
        self._zero_page = zero_page
        self._device = device
        self._groups = range(num_groups)
        shapes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
            "token_ids": (torch.int64, (tokens,)),
            "positions": (torch.int64, (tokens,)),
            "query_start": (torch.int32, (max_rows + 1,)),
            "seq_lens": (torch.int32, (max_rows,)),
        }
        for group in self._groups:
            shapes[f"slots {group}"] = (torch.int64, (tokens,))
            shapes[f"tables {group}"] = (torch.int32, (max_rows, blocks))
        self._host = {name: torch.zeros(shape, dtype=dtype) for name, (dtype, shape) in shapes.items()}
        arrays = {name: buffer.numpy() for name, buffer in self._host.items()}
        self._token_ids, self._positions = arrays["token_ids"], arrays["positions"]
        self._query_start, self._seq_lens = arrays["query_start"], arrays["seq_lens"]
        self._slots = [arrays[f"slots {group}"] for group in self._groups]
        self._tables = [arrays[f"tables {group}"] for group in self._groups]
        self._seen_tables: list[list[list[int]]] = [[[] for _ in range(max_rows)] for _ in self._groups]
        self._row_numbers = np.arange(max(max_rows, tokens))
        self._views: dict[tuple[str, int], Tensor] = {}

    def fill(self, rows: Sequence[Row]) -> list[ForwardBatch]:
        """Write the rows into the buffers -> the batch as each KV group sees it, valid until the next call.

        A row's drafts follow its tokens.
        """
        count, lengths = len(rows), [len(row.token_ids) + len(row.drafts) for row in rows]
        total, longest = sum(lengths), max(lengths)
        starts = np.array([row.start for row in rows])
        np.cumsum(lengths, out=self._query_start[1 : count + 1])
        self._seq_lens[:count] = starts + lengths
        self._token_ids[:total] = [
            token for row in rows for part in (row.token_ids, row.drafts) for token in part
        ]
        row_of = self._row_numbers[:count]
        if longest == 1:
            self._positions[:total] = starts
        else:
            row_of = np.repeat(row_of, lengths)
            first = starts - self._query_start[:count]
            np.add(self._row_numbers[:total], first[row_of], out=self._positions[:total])
        block, offset = np.divmod(self._positions[:total], self._block_size)
        shared = self._view("token_ids", total), self._view("positions", total)
        bounds = self._view("query_start", count + 1), self._view("seq_lens", count)
        activations = self._activations.views(total)
        batches = []
        for group in self._groups:
            self._fill_tables(rows, group)
            self._slots[group][:total] = self._tables[group][row_of, block] * self._block_size + offset
            tables = self._view(f"tables {group}", count)
            attention = AttentionBatch(*bounds, tables, self._block_size, longest)
            batches.append(ForwardBatch(*shared, self._view(f"slots {group}", total), attention, activations))
        return batches

    def _fill_tables(self, rows: Sequence[Row], group: int) -> None:
        """Block tables seldom change from step to step: only those that did are written."""
        seen = self._seen_tables[group]
        for i, row in enumerate(rows):
            table = row.block_tables[group]
            if table != seen[i]:
                entries: NDArray[np.int32] = np.array(table, dtype=np.int32)
                entries[entries == NO_BLOCK] = self._zero_page
                self._tables[group][i, : len(table)] = entries
                seen[i] = list(table)

    def _view(self, name: str, size: int) -> Tensor:
        key = (name, size)
        if key not in self._views:
            self._views[key] = self._host[name][:size]
        view = self._views[key]
        return view if self._device.type == "cpu" else view.to(self._device)
