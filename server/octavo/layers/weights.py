"""How layers get their parameters:

named tensors of a checkpoint, cut for this rank, stored in a weight format.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from octavo.errors import ModelLoadError
from octavo_kernels import Ops, PackedWeight


class Checkpoint(Protocol):
    """Named tensors under Hugging Face's names and in its layout, read one at a time."""

    where: str
    norms_hold_offset: bool
    """True when norm weights already include the +1 that Gemma's code adds (GGUF)."""

    def names(self) -> set[str]:
        """Every tensor's name, ``.weight`` or ``.bias`` included."""

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """The tensor on the CPU as ``dtype``, dequantised if need be. Raises ``ModelLoadError``."""


class WeightFormat(Protocol):
    """How a matrix is kept in memory and multiplied;

    later formats keep AWQ, GPTQ, FP8 or GGUF blocks as they are.
    """

    name: str

    def pack(self, ops: Ops, weights: Weights, names: Sequence[str], dim: int) -> PackedWeight:
        """Matrices of equal width stacked into one; ``dim`` is the one that is cut by rank."""

    def pack_gate_up(self, ops: Ops, weights: Weights, gate: str, up: str) -> PackedWeight:
        """A gate and an up matrix, for the fused product."""


class PlainFormat:
    """Weights as floats of the model's dtype, packed by the kernels' backend."""

    name = "plain"

    def pack(self, ops: Ops, weights: Weights, names: Sequence[str], dim: int) -> PackedWeight:
        parts = [weights.tensor(f"{name}.weight", dim) for name in names]
        return ops.pack(torch.cat(parts) if len(parts) > 1 else parts[0], weights.dtype)

    def pack_gate_up(self, ops: Ops, weights: Weights, gate: str, up: str) -> PackedWeight:
        return ops.pack_gate_up(
            weights.tensor(f"{gate}.weight", 0), weights.tensor(f"{up}.weight", 0), weights.dtype
        )


@dataclasses.dataclass
class Weights:
    """Reads parameters for one rank of ``world``, and knows at the end what was missing or left over."""

    checkpoint: Checkpoint
    dtype: torch.dtype
    device: torch.device
    rank: int = 0
    world: int = 1
    format: WeightFormat = dataclasses.field(default_factory=PlainFormat)

    def __post_init__(self) -> None:
        self._names = frozenset(self.checkpoint.names())
        self._left = set(self._names)

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds the tensor."""
        return name in self._names

    def exact(self, name: str) -> Tensor:
        """The named tensor in float32, for constants that bfloat16 would blur."""
        return self._read(name, torch.float32)

    def tensor(self, name: str, dim: int | None = None) -> Tensor:
        """The named tensor; with ``dim``, this rank's equal share of it along that dimension."""
        whole = self._read(name, self.dtype)
        if dim is None or self.world == 1:
            return whole.to(self.device)
        if whole.shape[dim] % self.world:
            raise ModelLoadError(f"{name} {tuple(whole.shape)} cannot be cut into {self.world} equal parts")
        return whole.chunk(self.world, dim)[self.rank].contiguous().to(self.device)

    def norm(self, name: str, offset: float = 0.0) -> Tensor:
        """A norm's weight.

        ``offset`` is what the architecture adds to it, unless the file holds it already.
        """
        if not offset or self.checkpoint.norms_hold_offset:
            return self.tensor(f"{name}.weight")
        return (self.exact(f"{name}.weight") + offset).to(self.dtype).to(self.device)

    def _read(self, name: str, dtype: torch.dtype) -> Tensor:
        if name not in self._names:
            raise ModelLoadError(f"{self.checkpoint.where} lacks the tensor {name}")
        self._left.discard(name)
        return self.checkpoint.read(name, dtype)

    def ignore(self, *names: str) -> None:
        """Tensors that may be in the file and are not needed (a tied head stored twice)."""
        self._left.difference_update(names)

    def finish(self) -> None:
        """Raise ``ModelLoadError`` when the file holds tensors that no layer took."""
        if self._left:
            shown = ", ".join(sorted(self._left)[:5]) + (" ..." if len(self._left) > 5 else "")
            raise ModelLoadError(
                f"{self.checkpoint.where} holds {len(self._left)} unexpected tensors: {shown}"
            )
