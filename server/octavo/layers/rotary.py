"""Rotary position embeddings: tables of cosines and sines for each kind of scaling."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from octavo.layers.rope import RopeConfig


class RotaryTables:
    """Tables [positions, D/2] in float32, made once for each rotary embedding that the layers share.

    ``factors`` [D/2] divide the frequencies: GGUF files carry Llama 3's scaling as such a tensor.
    """

    def __init__(
        self, head_dim: int, positions: int, device: torch.device, factors: Tensor | None = None
    ) -> None:
        self._head_dim, self._positions, self._device = head_dim, positions, device
        self._factors = factors
        self._tables: dict[RopeConfig, tuple[Tensor, Tensor]] = {}

    def get(self, rope: RopeConfig) -> tuple[Tensor, Tensor]:
        """(cos, sin) of this rotary embedding."""
        if rope not in self._tables:
            frequencies = inverse_frequencies(rope, self._head_dim)
            if self._factors is not None:
                frequencies = frequencies / self._factors.float().cpu()
            angles = torch.arange(self._positions, dtype=torch.float32)[:, None] * frequencies
            self._tables[rope] = (angles.cos().to(self._device), angles.sin().to(self._device))
        return self._tables[rope]


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Angle per position of each pair of dimensions, float32 [head_dim / 2], scaled as the config says."""
    plain = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(plain, rope)
    return plain


def _llama3(plain: Tensor, rope: RopeConfig) -> Tensor:
    """Llama 3.1: long waves are stretched by ``factor``, short ones kept, those between blended."""
    context = rope.original_max_position
    wavelength = 2 * math.pi / plain
    blend = (context / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - blend) * plain / rope.factor + blend * plain
    stretched = torch.where(wavelength > context / rope.low_freq_factor, plain / rope.factor, blended)
    return torch.where(wavelength < context / rope.high_freq_factor, plain, stretched)
