"""The KV cache in memory: equal pages, of which a block of one KV group is one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.layers.batch import ActivationShape
from octavo_kernels import Ops
from octavo_kernels.memory import aligned_zeros


@dataclasses.dataclass(frozen=True)
class KVPages:
    """Block b is page b of every tensor: tensor i holds the i-th layer of whichever group the block is of.

    ``layers`` gives each layer of the model its group and its tensor.
    """

    tensors: list[Tensor]
    layers: list[tuple[int, Tensor]]

    @classmethod
    def allocate(
        cls,
        ops: Ops,
        shape: ActivationShape,
        places: Sequence[tuple[int, int]],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> KVPages:
        """``places`` are (group, place within it) of each layer. One page more than ``num_blocks`` stays
        zero: tables point to it where a group keeps nothing.
        """
        size = ops.kv_cache_shape(num_blocks + 1, block_size, shape.kv_heads, shape.head_dim, dtype)
        count = 1 + max(place for _, place in places)
        tensors = [zeroed(size, dtype, device) for _ in range(count)]
        return cls(tensors, [(group, tensors[place]) for group, place in places])


def page_bytes(ops: Ops, shape: ActivationShape, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block in one layer, with what the kernels pad it by."""
    page = ops.kv_cache_shape(1, block_size, shape.kv_heads, shape.head_dim, dtype)
    return math.prod(page) * dtype.itemsize


def zeroed(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on a CPU they take memory only once blocks in them are used."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return aligned_zeros(shape, dtype)
