"""How layers get their parameters: named tensors of a checkpoint, cut for this rank, in a weight format."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
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
    """How a matrix is kept in memory and multiplied. Later ones keep AWQ, GPTQ, FP8 or GGUF blocks as is."""

    name: str

    def pack(
        self, ops: Ops, weights: Weights, parts: Mapping[str, int], inputs: int, dim: int
    ) -> PackedWeight:
        """Matrices (name: outputs) of ``inputs`` columns stacked into one; ``dim`` is cut by rank."""

    def pack_gate_up(
        self, ops: Ops, weights: Weights, gate: str, up: str, shape: tuple[int, int]
    ) -> PackedWeight:
        """A gate and an up matrix, both [outputs, inputs], for the fused product."""


class PlainFormat:
    """Weights as floats of the model's dtype, packed by the kernels' backend."""

    name = "plain"

    def pack(
        self, ops: Ops, weights: Weights, parts: Mapping[str, int], inputs: int, dim: int
    ) -> PackedWeight:
        read = [weights.tensor(f"{name}.weight", (rows, inputs), dim) for name, rows in parts.items()]
        return ops.pack(torch.cat(read) if len(read) > 1 else read[0], weights.dtype)

    def pack_gate_up(
        self, ops: Ops, weights: Weights, gate: str, up: str, shape: tuple[int, int]
    ) -> PackedWeight:
        read = [weights.tensor(f"{name}.weight", shape, 0) for name in (gate, up)]
        return ops.pack_gate_up(read[0], read[1], weights.dtype)


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

    def exact(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The named tensor in float32, for constants that bfloat16 would blur."""
        return self._read(name, shape, torch.float32)

    def tensor(self, name: str, shape: tuple[int, ...], dim: int | None = None) -> Tensor:
        """The named tensor; with ``dim``, this rank's equal share of it along that dimension.

        Raises ``ModelLoadError`` when it is not in the file, or is not of ``shape`` there.
        """
        whole = self._read(name, shape, self.dtype)
        if dim is None or self.world == 1:
            return whole.to(self.device)
        if whole.shape[dim] % self.world:
            raise ModelLoadError(f"{name} {tuple(whole.shape)} cannot be cut into {self.world} equal parts")
        return whole.chunk(self.world, dim)[self.rank].contiguous().to(self.device)

    def norm(self, name: str, size: int, offset: float = 0.0) -> Tensor:
        """A norm's weight.

        ``offset`` is what the architecture adds to it, unless the file holds it already.
        """
        if not offset or self.checkpoint.norms_hold_offset:
            return self.tensor(f"{name}.weight", (size,))
        return (self.exact(f"{name}.weight", (size,)) + offset).to(self.dtype).to(self.device)

    def _read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if name not in self._names:
            raise ModelLoadError(f"{self.checkpoint.where} lacks the tensor {name}")
        self._left.discard(name)
        tensor = self.checkpoint.read(name, dtype)
        if tensor.shape != shape:
            found = f"{name} of shape {tuple(tensor.shape)}"
            raise ModelLoadError(f"{self.checkpoint.where} holds {found}; its config asks for {shape}")
        return tensor

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
