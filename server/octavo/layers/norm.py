"""Root-mean-square norms."""

from __future__ import annotations

from torch import Tensor

from octavo.layers.batch import ActivationViews
from octavo.layers.weights import Weights
from octavo_kernels import Ops


class RMSNorm:
    """x / rms(x) * w over the last dimension. ``offset`` is what the architecture adds to the stored w."""

    def __init__(
        self, ops: Ops, weights: Weights, name: str, size: int, eps: float, offset: float = 0.0
    ) -> None:
        self._norm, self._add_norm = ops.rms_norm, ops.add_rms_norm
        self._weight = weights.norm(name, size, offset)
        self._eps = eps

    def in_place(self, x: Tensor) -> None:
        """Norm each row of x [..., D] where it lies."""
        self._norm(x, self._weight, self._eps, x)

    def add_and_norm(self, a: ActivationViews) -> None:
        """Add ``y`` to the residual stream and leave its norm in ``x``."""
        self._add_norm(a.y, a.residual, self._weight, self._eps, a.x)
