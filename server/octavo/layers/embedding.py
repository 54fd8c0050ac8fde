"""From token ids to the residual stream, and from there to logits."""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.layers.batch import ForwardBatch
from octavo.layers.linear import COLUMNS
from octavo.layers.weights import Outputs, Weights
from octavo_kernels import Ops, PackedWeight
from octavo_kernels.communicator import Communicator


class Embedding:
    """Rows of the embedding table, times ``scale`` (rounded to the model's dtype, as Gemma's code does).

    The table is packed as for a product, which the logits' is where the two are tied: it is held once. Ranks
    share its rows.
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
        self.table = vocabulary_table(ops, weights, name, shape)
        self._communicator, self._rows = weights.communicator, weights.share(shape[0])
        # A tensor, not a number: torch wraps that in one at each call.
        self._scale: Tensor | None = None
        if scale != 1.0:
            self._scale = torch.tensor(scale, dtype=weights.dtype, device=weights.device)

    def __call__(self, batch: ForwardBatch) -> None:
        """Set the residual stream, and clear what would be added to it first."""
        a = batch.activations
        if self._communicator is None:
            self._lookup(self.table, batch.token_ids, a.residual)
        else:
            self._look_up_share(batch.token_ids, a.residual)
            self._communicator.all_reduce(a.residual)
        if self._scale is not None:
            a.residual.mul_(self._scale)
        a.y.zero_()

    def _look_up_share(self, token_ids: Tensor, out: Tensor) -> None:
        """Zeros for the tokens of other ranks."""
        own = token_ids - self._rows.start
        others = (own < 0) | (own >= self.table.shape[0])
        self._lookup(self.table, own.masked_fill_(others, 0), out)
        out.masked_fill_(others[:, None], 0.0)


class LogitsHead:
    """x [S, hidden] -> float32 logits [S, vocabulary]; on ranks but the first only what they add to these."""

    def __init__(
        self,
        ops: Ops,
        table: PackedWeight,
        vocab_size: int,
        softcap: float | None = None,
        communicator: Communicator | None = None,
    ) -> None:
        self._matmul, self._weight = ops.matmul, table
        self._vocab_size, self._softcap = vocab_size, softcap
        self._communicator = communicator

    def __call__(self, x: Tensor) -> Tensor:
        logits = self._matmul(x, self._weight, out_dtype=torch.float32)
        if self._communicator is not None:
            logits = self._communicator.gather(logits, self._vocab_size)
        if self._softcap is not None:
            logits.div_(self._softcap).tanh_().mul_(self._softcap)
        return logits


def vocabulary_table(ops: Ops, weights: Weights, name: str, shape: tuple[int, int]) -> PackedWeight:
    """The named matrix [vocabulary, hidden], or this rank's rows of it."""
    (table,) = weights.format.pack(ops, weights, {name: Outputs(shape[0])}, shape[1], COLUMNS)
    return table
