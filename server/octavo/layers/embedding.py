"""From token ids to the residual stream, and from there to logits."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.layers.batch import ForwardBatch
from octavo.layers.weights import Weights
from octavo_kernels import Ops, PackedWeight


class Embedding:
    """Rows of the embedding table, times ``scale`` (rounded to the model's dtype, as Gemma's code does).

    The table is packed as for a product, which the logits' is where the two are tied: it is held once.
    """

    def __init__(
        self,
        ops: Ops,
        weights: Weights,
        name: str,
        shape: tuple[int, int],
        scale: float = 1.0,
    ) -> None:
        self._lookup = ops.lookup
        (self.table,) = weights.format.pack(ops, weights, {name: shape[0]}, shape[1], None)
        # A tensor, not a number: torch wraps that in one at each call.
        self._scale: Tensor | None = None
        if scale != 1.0:
            self._scale = torch.tensor(scale, dtype=weights.dtype, device=weights.device)

    def __call__(self, batch: ForwardBatch) -> None:
        """Set the residual stream, and clear what would be added to it first."""
        a = batch.activations
        self._lookup(self.table, batch.token_ids, a.residual)
        if self._scale is not None:
            a.residual.mul_(self._scale)
        a.y.zero_()


class LogitsHead:
    """x [S, hidden] -> float32 logits [S, vocabulary]."""

    def __init__(self, ops: Ops, table: PackedWeight, softcap: float | None = None) -> None:
        self._matmul, self._weight = ops.matmul, table
        self._softcap = softcap

    def __call__(self, x: Tensor) -> Tensor:
        logits = self._matmul(x, self._weight, out_dtype=torch.float32)
        if self._softcap is not None:
            logits.div_(self._softcap).tanh_().mul_(self._softcap)
        return logits
