"""GGUF's blocks as numbers, many rows at a time: as float32, or as the integers and scales that they hold.

The layouts are ggml's (ggml-quants.c); results equal the gguf package's to the last bit, and come sooner.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from octavo_kernels import QuantisedWeight

_LOW_HALVES = 0x0F0F0F0F0F0F0F0F  # of eight bytes

Parts: TypeAlias = tuple[Tensor, Tensor, Tensor | None]
"""Of n blocks: values uint8 [n, numbers], scales float32 [n, groups], minima float32 [n, groups] or None."""


class BlockType(NamedTuple):
    """A type of blocks: a number of it is (value - zero) * scale, + minimum where it has minima."""

    numbers: int
    nbytes: int
    bits: int
    zero: int
    parts: Callable[[Tensor], Parts]
    """From the blocks' bytes, uint8 [n, nbytes]."""


def dequantize(raw: Tensor, kind: str) -> Tensor:
    """uint8 [rows, bytes of a row] -> float32 [rows, numbers of a row]. ``kind``: one of ``SUPPORTED``."""
    if kind in FLOATS:
        return raw.contiguous().view(FLOATS[kind]).float()
    block = BLOCKS[kind]
    values, scales, minima = block.parts(raw.reshape(-1, block.nbytes))
    numbers = values.view(*scales.shape, -1).float().sub_(block.zero).mul_(scales[..., None])
    if minima is not None:
        numbers.add_(minima[..., None])
    return numbers.view(raw.shape[0], -1)


def keep(raw: Tensor, kind: str) -> QuantisedWeight | None:
    """uint8 [rows, bytes of a row] -> the integers, and the scales as float16.

    float16 is what blocks hold; the products of two that K types make of them are rounded by 2^-11 at most.
    None where one is beyond float16's range.
    """
    block, rows = BLOCKS[kind], raw.shape[0]
    values, *floats = block.parts(raw.reshape(-1, block.nbytes))
    scales, minima = (None if f is None else f.to(torch.float16).view(rows, -1) for f in floats)
    assert scales is not None
    if not scales.isfinite().all() or (minima is not None and not minima.isfinite().all()):
        return None
    return QuantisedWeight(block.bits, block.zero, values.view(rows, -1), scales, minima)


def _half(raw: Tensor) -> Tensor:
    """Bytes [n, 2] as one float16 each -> float32 [n, 1]."""
    return raw.contiguous().view(torch.float16).float()


def _nibbles(raw: Tensor) -> Tensor:
    """The low halves of the bytes, a multiple of eight, then the high halves."""
    eights = raw.contiguous().view(torch.int64)
    return torch.cat([eights & _LOW_HALVES, eights >> 4 & _LOW_HALVES], dim=-1).view(torch.uint8)


def _q4_0(raw: Tensor) -> Parts:
    return _nibbles(raw[:, 2:]), _half(raw[:, :2]), None


def _q4_1(raw: Tensor) -> Parts:
    return _nibbles(raw[:, 4:]), _half(raw[:, :2]), _half(raw[:, 2:4])


def _q5_0(raw: Tensor) -> Parts:
    """The fifth bits of the 32 numbers stand in four bytes, lowest first."""
    bits = torch.arange(8, dtype=torch.uint8)
    high = (raw[:, 2:6, None] >> bits & 1).view(-1, 32)
    return _nibbles(raw[:, 6:]) | high << 4, _half(raw[:, :2]), None


def _q8_0(raw: Tensor) -> Parts:
    """Signed bytes."""
    return raw[:, 2:] ^ 0x80, _half(raw[:, :2]), None


def _q4_k(raw: Tensor) -> Parts:
    return _nibbles(raw[:, 16:].reshape(-1, 4, 32)).view(-1, 256), *_k_scales(raw)


def _q5_k(raw: Tensor) -> Parts:
    """As Q4_K, the fifth bits of the eight groups in the bits of 32 bytes."""
    low = _nibbles(raw[:, 48:].reshape(-1, 4, 32)).view(-1, 8, 32)
    groups = torch.arange(8, dtype=torch.uint8)[:, None]
    high = raw[:, None, 16:48] >> groups & 1
    return (low | high << 4).view(-1, 256), *_k_scales(raw)


def _k_scales(raw: Tensor) -> tuple[Tensor, Tensor]:
    """Eight groups of 32 with 6-bit scales and minima, packed in twelve bytes."""
    low, middle, high = raw[:, 4:8], raw[:, 8:12], raw[:, 12:16]
    scales = torch.cat([low & 0x3F, (high & 0xF) | (low >> 2 & 0x30)], dim=-1).float()
    minima = torch.cat([middle & 0x3F, (high >> 4) | (middle >> 2 & 0x30)], dim=-1).float()
    return scales * _half(raw[:, :2]), minima * -_half(raw[:, 2:4])


def _q6_k(raw: Tensor) -> Parts:
    """Two halves of 128: nibbles of 64 bytes, two high bits from 32 bytes; a scale for each 16 numbers."""
    low = _nibbles(raw[:, :128].reshape(-1, 2, 64)).view(-1, 2, 4, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    high = raw[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & 3
    scales = raw[:, 192:208].contiguous().view(torch.int8).float() * _half(raw[:, 208:])
    return (low | high << 4).view(-1, 256), scales, None


BLOCKS: dict[str, BlockType] = {
    "Q4_0": BlockType(32, 18, 4, 8, _q4_0),
    "Q4_1": BlockType(32, 20, 4, 0, _q4_1),
    "Q4_K": BlockType(256, 144, 4, 0, _q4_k),
    "Q5_0": BlockType(32, 22, 5, 16, _q5_0),
    "Q5_K": BlockType(256, 176, 5, 0, _q5_k),
    "Q6_K": BlockType(256, 210, 6, 32, _q6_k),
    "Q8_0": BlockType(32, 34, 8, 128, _q8_0),
}
FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
SUPPORTED = (*FLOATS, *BLOCKS)
"""The tensor types that are read."""
