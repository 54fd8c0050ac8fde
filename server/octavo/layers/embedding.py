"""From token ids to the residual stream, and from there to logits."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.layers.batch import ForwardBatch
from octavo.layers.weights import Weights
from octavo_kernels import Ops, PackedWeight


class Embedding:
    """Rows of the embedding table, times ``scale`` (rounded to the model's dtype, as Gemma's code does).

    A table that is also the logits' (``tied``) is held once, packed for that product.
    """

    def __init__(
        self,
        ops: Ops,
        weights: Weights,
        name: str,
        shape: tuple[int, int],
        scale: float = 1.0,
        *,
        tied: bool = False,
    ) -> None:
        self._lookup = ops.lookup
        self.table: Tensor | PackedWeight = weights.tensor(f"{name}.weight", shape)
        if tied:
            self.table = ops.pack(self.table, weights.dtype)
        self._scale = float(torch.tensor(scale).to(weights.dtype))

    def __call__(self, batch: ForwardBatch) -> None:
        """Set the residual stream, and clear what would be added to it first."""
        a = batch.activations
        if isinstance(self.table, PackedWeight):
            self._lookup(self.table, batch.token_ids, a.residual)
        else:
            torch.index_select(self.table, 0, batch.token_ids, out=a.residual)
        if self._scale != 1.0:
            a.residual.mul_(self._scale)
        a.y.zero_()


class LogitsHead:
    """x [S, hidden] -> float32 logits [S, vocabulary]."""

    def __init__(self, ops: Ops, table: Tensor | PackedWeight, softcap: float | None = None) -> None:
        self._matmul = ops.matmul
        self._weight = table if isinstance(table, PackedWeight) else ops.pack(table, table.dtype)
        self._softcap = softcap

    def __call__(self, x: Tensor) -> Tensor:
        logits = self._matmul(x, self._weight, out_dtype=torch.float32)
        if self._softcap is not None:
            logits.div_(self._softcap).tanh_().mul_(self._softcap)
        return logits
