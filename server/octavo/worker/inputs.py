"""A step plan's rows as the flat token batch that the model takes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.plan import NO_BLOCK, Row
from octavo.layers.batch import ActivationBuffers, ForwardBatch
from octavo.worker.device import Device
from octavo_kernels import AttentionBatch

JOINED_BYTES = 1 << 16  # of tables that did not change: copied sooner than one more copy starts


class StepInputs:
    """Persistent input buffers, written anew in each step and never reallocated.

    The numbers of rows are put together as lists: for the few rows of a decode step that takes less time than
    numpy's functions.

    Up to ``max_rows`` sequences and as many tokens as ``activations`` has rows, each with a block table in
    every one of ``num_groups`` KV groups. ``zero_page`` is the block that tables point to where nothing is
    kept. Views per size are made once.

    For a GPU the host writes to memory that stands beside: what was written is copied while the host goes on,
    and before it writes again it waits until those copies are done.
    """

    def __init__(
        self,
        activations: ActivationBuffers,
        max_rows: int,
        max_model_len: int,
        block_size: int,
        num_groups: int,
        zero_page: int,
        device: Device,
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
        self._host = {name: device.host(shape, dtype).zero_() for name, (dtype, shape) in shapes.items()}
        self._read = {name: device.mirror(host) for name, host in self._host.items()}
        self._copies = self._read["token_ids"] is not self._host["token_ids"]
        self._copied = device.event()
        arrays = {name: buffer.numpy() for name, buffer in self._host.items()}
        self._token_ids, self._positions = arrays["token_ids"], arrays["positions"]
        self._query_start, self._seq_lens = arrays["query_start"], arrays["seq_lens"]
        self._slots = [arrays[f"slots {group}"] for group in self._groups]
        self._tables = [arrays[f"tables {group}"] for group in self._groups]
        self._seen_tables: list[list[list[int]]] = [[[] for _ in range(max_rows)] for _ in self._groups]
        self._row_numbers = np.arange(max(max_rows, tokens) + 1)
        self._views: dict[tuple[str, int], Tensor] = {}

    def fill(self, rows: Sequence[Row], padded: int = 0) -> list[ForwardBatch]:
        """Write the rows into the buffers -> the batch as each KV group sees it, valid until the next call.

        A row's drafts follow its tokens. With ``padded`` each row has one token, and rows that see nothing
        and write nowhere (slot -1) follow, up to so many in all.
        """
        self._copied.synchronize()
        count, lengths = len(rows), [len(row.token_ids) + len(row.drafts) for row in rows]
        total, longest = sum(lengths), max(lengths, default=1)
        starts = [row.start for row in rows]
        self._query_start[1 : count + 1] = list(accumulate(lengths))
        self._seq_lens[:count] = [start + length for start, length in zip(starts, lengths, strict=True)]
        self._token_ids[:total] = [
            token for row in rows for part in (row.token_ids, row.drafts) for token in part
        ]
        size = self._block_size
        if longest == 1:
            self._positions[:total] = starts
        else:
            row_of = np.repeat(self._row_numbers[:count], lengths)
            first = np.array(starts) - self._query_start[:count]
            np.add(self._row_numbers[:total], first[row_of], out=self._positions[:total])
            block, offset = np.divmod(self._positions[:total], size)
        changed = []
        for group in self._groups:
            changed.append(self._fill_tables(rows, group))
            if longest == 1:
                self._slots[group][:total] = [
                    row.block_tables[group][row.start // size] * size + row.start % size for row in rows
                ]
            else:
                self._slots[group][:total] = self._tables[group][row_of, block] * size + offset
        if padded > count:
            self._pad(count, padded)
            total = count = padded
        if self._copies:
            self._copy(total, count, changed)
        return self._batches(total, count, longest)

    def _batches(self, tokens: int, rows: int, longest: int) -> list[ForwardBatch]:
        shared = self._view("token_ids", tokens), self._view("positions", tokens)
        bounds = self._view("query_start", rows + 1), self._view("seq_lens", rows)
        activations = self._activations.views(tokens)
        batches = []
        for group in self._groups:
            tables = self._view(f"tables {group}", rows)
            attention = AttentionBatch(*bounds, tables, self._block_size, longest)
            slots = self._view(f"slots {group}", tokens)
            batches.append(ForwardBatch(*shared, slots, attention, activations))
        return batches

    def _pad(self, count: int, padded: int) -> None:
        self._query_start[count + 1 : padded + 1] = self._row_numbers[count + 1 : padded + 1]
        for numbers in (self._seq_lens, self._token_ids, self._positions):
            numbers[count:padded] = 0
        for slots in self._slots:
            slots[count:padded] = -1

    def _copy(self, tokens: int, rows: int, changed: Sequence[Sequence[int]]) -> None:
        """Start the copies of this step; of tables, which may be long, those of the ``changed`` rows and few
        others between.
        """
        parts = [("token_ids", 0, tokens), ("positions", 0, tokens)]
        parts += [("query_start", 0, rows + 1), ("seq_lens", 0, rows)]
        for group in self._groups:
            parts.append((f"slots {group}", 0, tokens))
            apart = JOINED_BYTES // max(1, self._tables[group][:1].nbytes)
            parts += [(f"tables {group}", *run) for run in _runs(changed[group], apart)]
        for name, first, end in parts:
            self._device.copy(self._read[name][first:end], self._host[name][first:end])
        self._copied.record()

    def _fill_tables(self, rows: Sequence[Row], group: int) -> list[int]:
        """Block tables seldom change from step to step: only those that did are written -> which rows."""
        seen, changed = self._seen_tables[group], []
        for i, row in enumerate(rows):
            table = row.block_tables[group]
            if table != seen[i]:
                entries: NDArray[np.int32] = np.array(table, dtype=np.int32)
                entries[entries == NO_BLOCK] = self._zero_page
                self._tables[group][i, : len(table)] = entries
                seen[i] = list(table)
                changed.append(i)
        return changed

    def _view(self, name: str, size: int) -> Tensor:
        key = (name, size)
        if key not in self._views:
            self._views[key] = self._read[name][:size]
        return self._views[key]


def _runs(numbers: Sequence[int], apart: int) -> list[tuple[int, int]]:
    """Ascending numbers as runs [first, end), which may hold up to ``apart`` others between two of them."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and number - runs[-1][1] <= apart:
            runs[-1] = (runs[-1][0], number + 1)
        else:
            runs.append((number, number + 1))
    return runs
