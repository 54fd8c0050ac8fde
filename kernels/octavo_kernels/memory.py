"""Memory of a CPU for caches of keys and values."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

CACHE_LINE = 64
"""Bytes, of x86-64."""


def aligned_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros from calloc, so that pages take memory only once they are used; numpy asks for huge ones.

    They begin with a line of the CPU's cache, and numpy's memory does not: each load would touch two.
    """
    size = math.prod(shape) * dtype.itemsize
    memory = np.zeros(size + CACHE_LINE, np.uint8)
    start = -memory.ctypes.data % CACHE_LINE
    return torch.from_numpy(memory[start : start + size]).view(dtype).view(shape)
