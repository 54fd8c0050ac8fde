"""A model's forward pass over the buffers of one runner."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from octavo.core.plan import Row
from octavo.layers.batch import ForwardBatch
from octavo.models.base import CausalLM
from octavo.worker.inputs import StepInputs
from octavo.worker.pages import KVPages
from octavo_kernels import Ops, Replay


class Forward:
    """Inputs, model and pages together: rows in, hidden states [T, hidden] out.

    All buffers stay where they are from step to step. So the layers' operations are recorded, where the
    kernels can and ``eager`` is not asked for, and from then on run without Python. A CPU's recording, made
    in the first step, serves all. A GPU's is a graph that serves its own numbers of rows: :meth:`capture`
    makes some for decode steps, which are padded to the next of them; other steps run as they come.
    """

    def __init__(
        self, model: CausalLM, ops: Ops, inputs: StepInputs, pages: KVPages, eager: bool = False
    ) -> None:
        self._model, self._ops, self._inputs, self._pages = model, ops, inputs, pages
        self._replay: Replay | None = None
        self._to_record = ops.replays_any_size and not eager
        self._graphs: dict[int, Replay] = {}
        self._sizes: list[int] = []

    @torch.inference_mode()
    def capture(self, sizes: Sequence[int]) -> None:
        """Record decode steps of so many rows: the largest first, for the others fit into its memory."""
        for size in sorted(sizes, reverse=True):
            replay = self._ops.record(self._layers(self._inputs.fill((), size)))
            if replay is not None:
                self._graphs[size] = replay
        self._sizes = sorted(self._graphs)

    def __call__(self, rows: Sequence[Row]) -> Tensor:
        padded = self._padded(rows)
        batches = self._inputs.fill(rows, padded)
        layers = self._layers(batches)
        if self._to_record:
            self._replay, self._to_record = self._ops.record(layers), False
        self._model.embed(batches[0])
        replay = self._graphs.get(padded, self._replay)
        if replay is None:
            layers()
        else:
            replay(len(batches[0].token_ids), len(batches[0].attention.seq_lens))
        hidden = batches[0].activations.x
        return hidden[: len(rows)] if padded else hidden

    def _layers(self, batches: list[ForwardBatch]) -> partial[None]:
        return partial(self._model.run_layers, batches, self._pages.layers)

    def _padded(self, rows: Sequence[Row]) -> int:
        """Rows of the graph that serves a decode step; 0 where none does."""
        if not self._sizes or len(rows) > self._sizes[-1]:
            return 0
        if any(len(row.token_ids) + len(row.drafts) > 1 for row in rows):
            return 0
        return self._sizes[bisect_left(self._sizes, len(rows))]
