"""What ranks on the C++ kernels say to each other, in memory that all of them have mapped."""

from __future__ import annotations

import ctypes
import mmap
import os

import torch
from torch import Tensor

from octavo_kernels.cpu.backend import DTYPES
from octavo_kernels.cpu.library import Ranks, open_library

_LINE = 64
"""Bytes of a cache line, of which each counter has its own."""
_PARTS = 16
"""Counters of a rank (kMostParts)."""
_LEAST_SLOT = 1 << 20
"""Bytes of a rank that a stage brings together: two slots of each rank stay in a CPU's caches."""


def shared_memory(world: int, widest: int) -> int:
    """A descriptor of memory for so many ranks and rows of up to ``widest`` bytes (a memfd, zeroed).

    It is the caller's to hand on to the other processes, and to close once each of them has joined.
    """
    slot = -(-max(widest, _LEAST_SLOT) // _LINE) * _LINE
    memory = os.memfd_create("octavo-ranks")
    os.truncate(memory, _header(world) + world * 2 * slot)
    return memory


def _header(world: int) -> int:
    """Bytes before the slots: a flag, whether the group is broken, and the counters."""
    return _LINE * (1 + world * _PARTS)


class SharedMemoryCommunicator:
    """A :class:`octavo_kernels.communicator.Communicator` of processes of one machine.

    ``memory``: a descriptor of what one of them got from :func:`shared_memory`. What a row becomes does not
    depend on the rows beside it, nor on how many threads a rank has.
    """

    def __init__(self, rank: int, world: int, memory: int) -> None:
        self.rank, self.world = rank, world
        library = open_library()
        self._all_reduce, self._gather = library.long.all_reduce, library.long.gather
        self._memory = mmap.mmap(memory, 0)
        header = _header(world)
        self._slot_bytes = (len(self._memory) - header) // (2 * world)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._ranks = Ranks(start, start + _LINE, start + header, self._slot_bytes, 0, rank, world)
        self._address = ctypes.addressof(self._ranks)

    def all_reduce(self, x: Tensor) -> None:
        if x.dtype not in DTYPES:
            raise TypeError(f"the C++ kernels sum float32 or bfloat16, not {x.dtype}")
        tokens, n = x.shape
        self._check_row(n * x.element_size())
        self._all_reduce(self._address, x.data_ptr(), x.stride(0), tokens, n, DTYPES[x.dtype])

    def gather(self, x: Tensor, columns: int) -> Tensor:
        if x.dtype is not torch.float32:
            raise TypeError(f"the C++ kernels gather float32, not {x.dtype}")
        self._check_row(-(-columns // self.world) * x.element_size())
        out = torch.empty((x.shape[0], columns)) if self.rank == 0 else x
        self._gather(
            self._address, x.data_ptr(), x.stride(0), x.shape[0], out.data_ptr(), out.stride(0), columns
        )
        return out

    def _check_row(self, size: int) -> None:
        if size > self._slot_bytes:
            raise ValueError(f"a row has {size} bytes, the ranks' memory room for {self._slot_bytes}")

    def abort(self) -> None:
        self._memory[0] = 1

    @property
    def broken(self) -> bool:
        return self._memory[0] != 0

    def close(self) -> None:
        self._memory.close()
