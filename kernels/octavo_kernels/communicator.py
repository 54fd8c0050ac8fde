"""What the ranks of a model say to each other in a step: each holds a share of every layer's weights
(Megatron-LM, arXiv 1909.08053), and after products whose inputs were shared out their results are summed.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d


class Communicator(Protocol):
    """The ranks of a tensor parallel group, as one of them sees them.

    All call the same methods in the same order, with tensors of the same shapes but for :meth:`gather`'s; a
    call returns when the result can be used, or once the group is broken, with whatever lies there then.
    """

    rank: int
    """0 .. world - 1; 0 is the engine's own process."""
    world: int

    def all_reduce(self, x: Tensor) -> None:
        """x [T, N] becomes the sum of all ranks', in place. ``Ops.record`` notes it among its operations."""

    def gather(self, x: Tensor, columns: int) -> Tensor:
        """Side by side the ranks' float32 x [S, N]: on rank 0 [S, columns], on the others their own x.

        N is ``ceil(columns / world)``, on the last ranks less where columns are left over. Not recorded.
        """

    def abort(self) -> None:
        """Let no rank wait any more: one is gone. From any thread; the group is broken from then on."""

    @property
    def broken(self) -> bool:
        """Whether :meth:`abort` was called by any rank. After it no result counts."""

    def close(self) -> None:
        """Let go of what the group holds; no other call follows."""


MANY_BYTES = 1 << 18  # of an all-reduce: below, its time is that of starting it


class TorchCommunicator:
    """Through torch.distributed: NCCL between GPUs; Gloo for kernels that have no communicator of their own.

    ``meeting``: the path of an empty file, or of none yet, the same for all ranks of one machine. Raises
    RuntimeError where they cannot reach each other.
    """

    def __init__(self, rank: int, world: int, backend: str, meeting: Path) -> None:
        self.rank, self.world = rank, world
        self._broken = False
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # not what the host's name resolves to
        kind = {"nccl": "ProcessGroupNCCL", "gloo": "ProcessGroupGloo"}[backend]
        # Not torch's default group, of which a process has one only.
        self._group = getattr(dist, kind)(dist.FileStore(str(meeting), world), rank, world)
        self._all_gather = distributed_c10d.AllgatherOptions()
        self._all_to_all = distributed_c10d.AllToAllOptions()
        self._gather = dist.GatherOptions()
        for options in (self._all_gather, self._all_to_all, self._gather):
            options.asyncOp = False  # NCCL: in the stream of the other kernels

    def all_reduce(self, x: Tensor) -> None:
        """In float32, rank by rank, rounded once. In the libraries' own sums the order depends on where in
        ``x`` a number lies: a row's sum would depend on the rows beside it.

        Of few numbers every rank gets all parts. Of many each gets the parts of its share, and the others'
        sums: what it receives is less then, from three ranks on.
        """
        numbers = x.contiguous().view(-1)
        if self.world < 3 or x.nbytes < MANY_BYTES or x.numel() % self.world:
            parts = numbers.new_empty(self.world * x.numel())
            self._group._allgather_base(parts, numbers, self._all_gather).wait()
            total = self._sum(parts)
        else:
            parts, total = torch.empty_like(numbers), torch.empty_like(numbers)
            self._group.alltoall_base(parts, numbers, [], [], self._all_to_all).wait()
            share = self._sum(parts).to(x.dtype)
            self._group._allgather_base(total, share, self._all_gather).wait()
        x.copy_(total.view(x.shape))

    def _sum(self, parts: Tensor) -> Tensor:
        """Of the ranks' equal parts, one after the other, in float32."""
        first, *others = parts.chunk(self.world)
        total = first.to(torch.float32, copy=True)
        for part in others:
            total += part
        return total

    def gather(self, x: Tensor, columns: int) -> Tensor:
        widest = -(-columns // self.world)
        padded = torch.nn.functional.pad(x, (0, widest - x.shape[1])).contiguous()
        if self.rank > 0:
            self._group.gather([], [padded], self._gather).wait()
            return x
        parts = [torch.empty_like(padded) for _ in range(self.world)]
        self._group.gather([parts], [padded], self._gather).wait()
        return torch.cat(parts, dim=1)[:, :columns]

    def abort(self) -> None:
        self._broken = True
        self._group.abort()

    @property
    def broken(self) -> bool:
        return self._broken

    def close(self) -> None:
        self.abort()  # the others may be gone already, and an orderly end would wait for them
