"""Matrices: a linear layer over one or several stacked parameters, and the gated MLP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from octavo.layers.batch import ActivationShape, ActivationViews
from octavo.layers.weights import Outputs, Weights
from octavo_kernels import Ops

COLUMNS, ROWS = 0, 1  # which dimension of [N, K] a rank holds a share of: outputs, or inputs


class Linear:
    """y = x W^T (+ b). Several parts, by name, are stacked (q, k and v).

    They are one product, or as many as they have ways of being kept. Where ranks share its inputs (``ROWS``),
    what they made of theirs is summed.
    """

    def __init__(
        self,
        ops: Ops,
        weights: Weights,
        parts: Mapping[str, Outputs],
        inputs: int,
        dim: int,
        bias: bool = False,
    ) -> None:
        self._matmul = ops.matmul
        self._weights = weights.format.pack(ops, weights, parts, inputs, dim)
        self._communicator = weights.communicator if dim == ROWS else None
        self._bias: Tensor | None = None
        if bias:
            cut = COLUMNS if dim == COLUMNS else None
            read = [
                weights.tensor(f"{name}.bias", (rows.size,), cut, rows.most_shares)
                for name, rows in parts.items()
            ]
            if dim == COLUMNS or weights.rank == 0:  # of a sum it is added once
                self._bias = torch.cat(read)

    def __call__(self, x: Tensor, out: Tensor) -> None:
        """x [T, K] -> out [T, N]."""
        self._multiply(x, out)
        if self._communicator is not None:
            self._communicator.all_reduce(out)

    def _multiply(self, x: Tensor, out: Tensor) -> None:
        if len(self._weights) == 1:
            self._matmul(x, self._weights[0], out, self._bias)
            return
        start = 0
        for weight in self._weights:
            columns = slice(start, start + weight.shape[0])
            self._matmul(x, weight, out[:, columns], None if self._bias is None else self._bias[columns])
            start = columns.stop


class GatedMLP:
    """down(act(gate(x)) * up(x)); reads ``x``, leaves the result in ``y``."""

    def __init__(
        self,
        ops: Ops,
        weights: Weights,
        name: str,
        shape: ActivationShape,
        activation: Literal["silu", "gelu_tanh"],
    ) -> None:
        inner, hidden = shape.intermediate, shape.hidden
        self._gate_up = ops.gate_up
        self._activation = activation
        gate, up = f"{name}gate_proj", f"{name}up_proj"
        self._weight = weights.format.pack_gate_up(ops, weights, gate, up, (inner, hidden))
        self._down = Linear(ops, weights, {f"{name}down_proj": Outputs(hidden)}, inner, ROWS)

    def __call__(self, a: ActivationViews) -> None:
        self._gate_up(a.x, self._weight, self._activation, a.mlp)
        self._down(a.mlp, a.y)
