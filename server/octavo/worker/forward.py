"""A model's forward pass over the buffers of one runner."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from octavo.core.plan import Row
from octavo.models.base import CausalLM
from octavo.worker.inputs import StepInputs
from octavo.worker.pages import KVPages
from octavo_kernels import Ops, Replay


class Forward:
    """Inputs, model and pages together: rows in, hidden states [T, hidden] out.

    All buffers stay where they are from step to step. So the layers' operations are recorded in the first
    step, where the kernels can, and from then on run without Python.
    """

    def __init__(self, model: CausalLM, ops: Ops, inputs: StepInputs, pages: KVPages) -> None:
        self._model, self._ops, self._inputs, self._pages = model, ops, inputs, pages
        self._replay: Replay | None = None
        self._recorded = False

    def __call__(self, rows: Sequence[Row]) -> Tensor:
        batches = self._inputs.fill(rows)
        layers = partial(self._model.run_layers, batches, self._pages.layers)
        if not self._recorded:
            self._replay, self._recorded = self._ops.record(layers), True
        self._model.embed(batches[0])
        if self._replay is None:
            layers()
        else:
            self._replay(len(batches[0].token_ids), len(rows))
        return batches[0].activations.x
