"""Matrices kept as integers with scales, as GGUF's blocks hold them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

GROUP = 32
"""Numbers of a row of activations that share a scale when they meet such a matrix."""


@dataclass(frozen=True, slots=True)
class QuantisedWeight:
    """[N, K] numbers (value - zero) * scale + minimum, K a multiple of 32.

    A scale covers 32 numbers of a row, of 6-bit values 16. There may be minima of 4-bit and 5-bit values.
    """

    bits: int
    """4, 5, 6 or 8."""
    zero: int
    values: Tensor
    """uint8 [N, K], below 2 ** bits."""
    scales: Tensor
    """float16 [N, K / 32], of 6-bit values [N, K / 16]."""
    minima: Tensor | None = None
    """float16 [N, K / 32]."""

    def __post_init__(self) -> None:
        if self.bits not in (4, 5, 6, 8) or (self.minima is not None and self.bits > 5):
            minima = "without" if self.minima is None else "with"
            raise ValueError(
                f"{self.bits} bits {minima} minima: weights are kept in 4 or 5 bits, with or without minima, "
                "or in 6 or 8 without"
            )
        if self.shape[1] % GROUP:
            raise ValueError(f"a quantised weight has columns in multiples of {GROUP}, not {self.shape[1]}")

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.values.shape
        return rows, columns

    @property
    def layout(self) -> tuple[int, int, bool]:
        """What two weights must share to be packed as one."""
        return self.bits, self.zero, self.minima is not None

    def dequantised(self) -> Tensor:
        """float32 [N, K]."""
        rows, columns = self.shape
        numbers = self.values.view(rows, self.scales.shape[1], -1).float().sub_(self.zero)
        numbers = numbers.mul_(self.scales.float()[..., None]).view(rows, columns)
        if self.minima is None:
            return numbers
        grouped = numbers.view(rows, -1, GROUP)
        return grouped.add_(self.minima.float()[..., None]).view(rows, columns)

    def part(self, rows: slice, columns: slice) -> QuantisedWeight:
        """The numbers in these rows and columns; the columns begin and end at multiples of 32."""

        def cut(floats: Tensor) -> Tensor:
            covered = self.shape[1] // floats.shape[1]
            start, stop, _ = columns.indices(self.shape[1])
            return floats[rows, start // covered : stop // covered].contiguous()

        minima = None if self.minima is None else cut(self.minima)
        values = self.values[rows, columns].contiguous()
        return QuantisedWeight(self.bits, self.zero, values, cut(self.scales), minima)

    def rearranged(self, order: Tensor) -> QuantisedWeight:
        """The rows in another order (int64 [N])."""
        minima = None if self.minima is None else self.minima[order]
        return QuantisedWeight(self.bits, self.zero, self.values[order], self.scales[order], minima)


def stack(weights: list[QuantisedWeight]) -> QuantisedWeight:
    """Weights of one layout and K, one under the other."""
    first = weights[0]
    if any(w.layout != first.layout for w in weights):
        raise ValueError(f"weights of different layouts cannot be stacked: {[w.layout for w in weights]}")
    if len(weights) == 1:
        return first
    minima = None if first.minima is None else torch.cat([w.minima for w in weights if w.minima is not None])
    values, scales = torch.cat([w.values for w in weights]), torch.cat([w.scales for w in weights])
    return QuantisedWeight(first.bits, first.zero, values, scales, minima)


def quantise_activations(x: Tensor) -> Tensor:
    """x [M, K] as its product with a quantised weight sees it: groups of 32 as 8-bit integers times a scale.

    -> float32 [M, K].
    """
    groups = x.float().view(x.shape[0], -1, GROUP)
    most = groups.abs().amax(dim=-1, keepdim=True)
    largest = torch.full_like(most, 127)  # a tensor: torch turns 127 / x into 127 * (1 / x), rounded twice
    inverse = torch.where(most > 0, largest / most, torch.zeros_like(most))
    return (groups * inverse).round_().mul_(most / largest).view(x.shape)
