"""How layers get their parameters: named tensors of a checkpoint, cut for this rank, in a weight format."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from octavo.errors import ModelLoadError
from octavo_kernels import Ops, PackedWeight, QuantisedWeight
from octavo_kernels.communicator import Communicator
from octavo_kernels.quantised import GROUP, stack


class Checkpoint(Protocol):
    """Named tensors under Hugging Face's names and in its layout, read one at a time."""

    where: str
    norms_hold_offset: bool
    """True when norm weights already include the +1 that Gemma's code adds (GGUF)."""

    def names(self) -> set[str]:
        """Every tensor's name, ``.weight`` or ``.bias`` included."""

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        """The tensor on the CPU as ``dtype``, dequantised if need be. Raises ``ModelLoadError``."""

    def read_quantised(self, name: str) -> QuantisedWeight | None:
        """The tensor as the integers that it is stored as; None if it cannot be kept so."""
        return None


class Outputs(NamedTuple):
    """The outputs of a matrix [outputs, inputs], and the most shares that they are cut into, where there is a
    limit (heads of keys and values: of more ranks several have the same share).
    """

    size: int
    most_shares: int | None = None


class WeightFormat(Protocol):
    """How matrices are kept in memory and multiplied."""

    name: str

    def pack(
        self, ops: Ops, weights: Weights, parts: Mapping[str, Outputs], inputs: int, dim: int
    ) -> list[PackedWeight]:
        """Matrices by name, of ``inputs`` columns, stacked into as few as can be.

        Ranks share dimension ``dim`` of [outputs, inputs].
        """

    def pack_gate_up(
        self, ops: Ops, weights: Weights, gate: str, up: str, shape: tuple[int, int]
    ) -> PackedWeight:
        """A gate and an up matrix, both [outputs, inputs], for the fused product."""


class PlainFormat:
    """Weights as floats of the model's dtype, packed by the kernels' backend."""

    name = "plain"

    def pack(
        self, ops: Ops, weights: Weights, parts: Mapping[str, Outputs], inputs: int, dim: int
    ) -> list[PackedWeight]:
        read = [
            weights.tensor(f"{name}.weight", (rows.size, inputs), dim, rows.most_shares)
            for name, rows in parts.items()
        ]
        return [ops.pack(torch.cat(read) if len(read) > 1 else read[0], weights.dtype)]

    def pack_gate_up(
        self, ops: Ops, weights: Weights, gate: str, up: str, shape: tuple[int, int]
    ) -> PackedWeight:
        read = [weights.tensor(f"{name}.weight", shape, 0) for name in (gate, up)]
        return ops.pack_gate_up(read[0], read[1], weights.dtype)


class QuantisedFormat:
    """Weights that the checkpoint holds as integers stay so; the others are plain."""

    name = "quantised"

    def pack(
        self, ops: Ops, weights: Weights, parts: Mapping[str, Outputs], inputs: int, dim: int
    ) -> list[PackedWeight]:
        packed = []
        read = [self._read(weights, f"{name}.weight", rows, inputs, dim) for name, rows in parts.items()]
        for _, run in itertools.groupby(read, lambda w: w.layout if isinstance(w, QuantisedWeight) else None):
            alike = list(run)
            quantised = [w for w in alike if isinstance(w, QuantisedWeight)]
            plain = [w for w in alike if isinstance(w, Tensor)]
            packed.append(ops.pack(stack(quantised) if quantised else torch.cat(plain), weights.dtype))
        return packed

    def pack_gate_up(
        self, ops: Ops, weights: Weights, gate: str, up: str, shape: tuple[int, int]
    ) -> PackedWeight:
        first, second = (weights.quantised(f"{name}.weight", shape, 0) for name in (gate, up))
        if first is None or second is None or first.layout != second.layout:
            return PlainFormat().pack_gate_up(ops, weights, gate, up, shape)
        return ops.pack_gate_up(first, second, weights.dtype)

    def _read(
        self, weights: Weights, name: str, rows: Outputs, inputs: int, dim: int
    ) -> QuantisedWeight | Tensor:
        shape = rows.size, inputs
        quantised = weights.quantised(name, shape, dim, rows.most_shares)
        return weights.tensor(name, shape, dim, rows.most_shares) if quantised is None else quantised


@dataclasses.dataclass
class Weights:
    """Reads parameters for one rank, and knows at the end what was missing or left over."""

    checkpoint: Checkpoint
    dtype: torch.dtype
    device: torch.device
    format: WeightFormat = dataclasses.field(default_factory=PlainFormat)
    cache_dtype: torch.dtype | None = None
    """Of keys and values; None: that of all else."""
    communicator: Communicator | None = None
    """Of the ranks that share the model; None: it is whole."""

    def __post_init__(self) -> None:
        self._names = frozenset(self.checkpoint.names())
        self._left = set(self._names)
        self.rank, self.world = 0, 1
        if self.communicator is not None:
            self.rank, self.world = self.communicator.rank, self.communicator.world

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds the tensor."""
        return name in self._names

    def exact(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The named tensor in float32, for constants that bfloat16 would blur."""
        return self._read(name, shape, torch.float32)

    def scale(self, name: str) -> float:
        """The named tensor's one number. Raises ``ModelLoadError`` where it is none to divide by."""
        self._take(name)
        numbers = self.checkpoint.read(name, torch.float32)
        if numbers.numel() != 1 or not 0 < numbers.item() < math.inf:
            raise ModelLoadError(
                f"{self.checkpoint.where}: {name} of shape {tuple(numbers.shape)} is not one number above 0"
            )
        return numbers.item()

    def tensor(
        self, name: str, shape: tuple[int, ...], dim: int | None = None, most_shares: int | None = None
    ) -> Tensor:
        """The named tensor; with ``dim``, this rank's share of it along that dimension (:meth:`share`).

        Raises ``ModelLoadError`` when it is not in the file, or is not of ``shape`` there.
        """
        whole = self._read(name, shape, self.dtype)
        if dim is None or self.world == 1:
            return whole.to(self.device)
        return whole[self._cut(shape, dim, most_shares)].contiguous().to(self.device)

    def quantised(
        self, name: str, shape: tuple[int, int], dim: int, most_shares: int | None = None
    ) -> QuantisedWeight | None:
        """This rank's share of the named tensor as in ``tensor``, as the integers that it is stored as.

        None where it is stored otherwise, or the cut goes through a group; raises as ``tensor`` does.
        """
        self._take(name)
        whole = self.checkpoint.read_quantised(name)
        if whole is None:
            return None
        self._check(name, whole.shape, shape)
        if self.world == 1:
            return whole
        if dim == 1 and shape[1] // self.world % GROUP:
            return None
        return whole.part(*self._cut(shape, dim, most_shares))

    def share(self, count: int, most_shares: int | None = None) -> slice:
        """This rank's share of ``count`` rows or columns. Shares are equal runs; where they cannot be, the
        last are smaller. Of more ranks than ``most_shares``, several in a row have the same one.
        """
        parts = min(self.world, most_shares or self.world)
        size = -(-count // parts)
        first = min(count, self.rank * parts // self.world * size)
        return slice(first, min(count, first + size))

    def _cut(self, shape: tuple[int, ...], dim: int, most_shares: int | None) -> tuple[slice, ...]:
        """Where this rank's share along ``dim`` lies."""
        cut = [slice(None)] * len(shape)
        cut[dim] = self.share(shape[dim], most_shares)
        return tuple(cut)

    def norm(self, name: str, size: int, offset: float = 0.0) -> Tensor:
        """A norm's weight.

        ``offset`` is what the architecture adds to it, unless the file holds it already.
        """
        if not offset or self.checkpoint.norms_hold_offset:
            return self.tensor(f"{name}.weight", (size,))
        return (self.exact(f"{name}.weight", (size,)) + offset).to(self.dtype).to(self.device)

    def _read(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        self._take(name)
        tensor = self.checkpoint.read(name, dtype)
        self._check(name, tuple(tensor.shape), shape)
        return tensor

    def _take(self, name: str) -> None:
        if name not in self._names:
            raise ModelLoadError(f"{self.checkpoint.where} lacks the tensor {name}")
        self._left.discard(name)

    def _check(self, name: str, found: tuple[int, ...], shape: tuple[int, ...]) -> None:
        if found != shape:
            holds = f"{name} of shape {found}"
            raise ModelLoadError(f"{self.checkpoint.where} holds {holds}; its config asks for {shape}")

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
