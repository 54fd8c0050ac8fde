"""GGUF's blocks as float32 numbers, many rows at a time.

The layouts are ggml's (ggml-quants.c); results equal the gguf package's to the last bit, and come sooner.
Each function takes the blocks' bytes, uint8 [blocks, bytes of a block], and gives float32 [blocks, numbers].
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def dequantize(raw: Tensor, kind: str) -> Tensor:
    """uint8 [rows, bytes of a row] -> float32 [rows, numbers of a row]. ``kind``: one of ``DEQUANTIZERS``."""
    block_bytes, function = DEQUANTIZERS[kind]
    return function(raw.reshape(-1, block_bytes)).view(raw.shape[0], -1)


def _half(raw: Tensor) -> Tensor:
    """Bytes [n, 2] as one float16 each -> float32 [n, 1]."""
    return raw.contiguous().view(torch.float16).float()


def _nibbles(raw: Tensor) -> Tensor:
    """The low halves of the bytes, then the high halves."""
    return torch.cat([raw & 0xF, raw >> 4], dim=-1)


def _f32(raw: Tensor) -> Tensor:
    return raw.view(torch.float32)


def _f16(raw: Tensor) -> Tensor:
    return raw.view(torch.float16).float()


def _bf16(raw: Tensor) -> Tensor:
    return raw.view(torch.bfloat16).float()


def _q4_0(raw: Tensor) -> Tensor:
    return _nibbles(raw[:, 2:]).float().sub_(8).mul_(_half(raw[:, :2]))


def _q4_1(raw: Tensor) -> Tensor:
    return _nibbles(raw[:, 4:]).float().mul_(_half(raw[:, :2])).add_(_half(raw[:, 2:4]))


def _q5_0(raw: Tensor) -> Tensor:
    """The fifth bits of the 32 numbers stand in four bytes, lowest first."""
    bits = torch.arange(8, dtype=torch.uint8)
    high = (raw[:, 2:6, None] >> bits & 1).view(-1, 32)
    return (_nibbles(raw[:, 6:]) | high << 4).float().sub_(16).mul_(_half(raw[:, :2]))


def _q8_0(raw: Tensor) -> Tensor:
    return raw[:, 2:].view(torch.int8).float().mul_(_half(raw[:, :2]))


def _q4_k(raw: Tensor) -> Tensor:
    """Eight groups of 32 with 6-bit scales and minima, packed in twelve bytes."""
    low, middle, high = raw[:, 4:8], raw[:, 8:12], raw[:, 12:16]
    scales = torch.cat([low & 0x3F, (high & 0xF) | (low >> 2 & 0x30)], dim=-1).float()
    minima = torch.cat([middle & 0x3F, (high >> 4) | (middle >> 2 & 0x30)], dim=-1).float()
    scales, minima = scales * _half(raw[:, :2]), minima * _half(raw[:, 2:4])
    numbers = _nibbles(raw[:, 16:].reshape(-1, 4, 32)).view(-1, 8, 32).float()
    return numbers.mul_(scales[..., None]).sub_(minima[..., None]).view(-1, 256)


def _q6_k(raw: Tensor) -> Tensor:
    """Two halves of 128: nibbles of 64 bytes, two high bits from 32 bytes; a scale for each 16 numbers."""
    low = _nibbles(raw[:, :128].reshape(-1, 2, 64)).view(-1, 2, 4, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    high = raw[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & 3
    scales = raw[:, 192:208].contiguous().view(torch.int8).float() * _half(raw[:, 208:])
    numbers = (low | high << 4).float().sub_(32).view(-1, 16, 16)
    return numbers.mul_(scales[..., None]).view(-1, 256)


DEQUANTIZERS: dict[str, tuple[int, Callable[[Tensor], Tensor]]] = {
    "F32": (4, _f32),
    "F16": (2, _f16),
    "BF16": (2, _bf16),
    "Q4_0": (18, _q4_0),
    "Q4_1": (20, _q4_1),
    "Q4_K": (144, _q4_k),
    "Q5_0": (22, _q5_0),
    "Q6_K": (210, _q6_k),
    "Q8_0": (34, _q8_0),
}
"""For each supported tensor type: bytes of a block, and what turns blocks into numbers."""
