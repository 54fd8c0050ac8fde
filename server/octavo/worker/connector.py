"""Moving KV blocks out of the pool and back in, beside the steps: to host memory now, to other pods later.

The scheduler decides what moves and when (``octavo.core.plan.Transfer``); a connector only copies. The host
tier follows the PagedAttention paper (SOSP 2023, section 4.5): equal blocks, and many of them in one copy,
since many small copies would not use the bus.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Protocol

import torch
from torch import Tensor

from octavo.core.plan import Transfer, TransferDone
from octavo.worker.host import page_lock
from octavo.worker.pages import zeroed
from octavo_kernels.ops import as_bytes

LONG_RUN = 8  # blocks: runs of so many on average are worth a copy each


class KVConnector(Protocol):
    """Starts transfers, and tells which have ended."""

    def save(self, transfer: Transfer) -> None:
        """Start copying blocks of the pool, as all steps so far left them, to where they are kept."""

    def load(self, transfer: Transfer) -> None:
        """Start copying kept blocks into the pool."""

    def finished(self, *, wait: bool) -> list[TransferDone]:
        """Those that ended since the last call; with ``wait`` at least one, where any is under way."""


class NullConnector:
    """Keeps nothing: the engine has no host memory to give."""

    def save(self, transfer: Transfer) -> None:
        raise ValueError(f"transfer {transfer.id} saves blocks, but this engine has no host tier")

    load = save

    def finished(self, *, wait: bool) -> list[TransferDone]:
        return []


class HostConnector:
    """Keeps ``num_blocks`` blocks in host memory: of each tensor of ``pages`` [blocks, ...] as many pages.

    One thread copies, in the order of the calls, in a few calls that leave Python's lock to the others.
    """

    def __init__(self, pages: Sequence[Tensor], num_blocks: int) -> None:
        self._pages = [as_bytes(tensor) for tensor in pages]
        self._kept = [_host_memory(tensor, num_blocks) for tensor in self._pages]
        self._thread = ThreadPoolExecutor(1, "kv-copies")
        self._under_way: dict[Future[float], int] = {}
        self._stream = torch.cuda.Stream() if pages[0].device.type == "cuda" else None

    def save(self, transfer: Transfer) -> None:
        self._start(transfer)

    def load(self, transfer: Transfer) -> None:
        self._start(transfer)

    def finished(self, *, wait: bool) -> list[TransferDone]:
        if wait and self._under_way:
            _wait(self._under_way, return_when=FIRST_COMPLETED)
        ended = [future for future in self._under_way if future.done()]
        return [TransferDone(self._under_way.pop(future), future.result()) for future in ended]

    def _start(self, transfer: Transfer) -> None:
        earlier = None
        if self._stream is not None:
            earlier = torch.cuda.Event()
            earlier.record()  # in the stream of the steps: what they still write or read comes first
        self._under_way[self._thread.submit(self._copy, transfer, earlier)] = transfer.id

    def _copy(self, transfer: Transfer, earlier: torch.cuda.Event | None) -> float:
        """Copy, and wait until it is done -> seconds."""
        began = time.perf_counter()
        if self._stream is None or earlier is None:
            self._copy_blocks(transfer)
        else:
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(earlier)
                self._copy_blocks(transfer)
            self._stream.synchronize()
        return time.perf_counter() - began

    def _copy_blocks(self, transfer: Transfer) -> None:
        """Runs of blocks as they lie; blocks that lie scattered are gathered, moved as one, and scattered."""
        found = runs(transfer.blocks)
        ids = torch.tensor(transfer.blocks)
        for pages, kept in zip(self._pages, self._kept, strict=True):
            sides = ((kept, 1), (pages, 0)) if transfer.load else ((pages, 0), (kept, 1))
            (source, a), (target, b) = sides
            if len(found) * LONG_RUN > len(transfer.blocks):
                gathered = source.index_select(0, ids[:, a].to(source.device)).to(target.device)
                target.index_copy_(0, ids[:, b].to(target.device), gathered)
                continue
            for run in found:
                ours = target.narrow(0, run[b], run[2])
                ours.copy_(source.narrow(0, run[a], run[2]), non_blocking=True)


_wait = wait  # the methods' own argument has the name


def runs(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Pairs of blocks as (first, first, count): consecutive on both sides are one."""
    found: list[tuple[int, int, int]] = []
    for device, host in sorted(pairs):
        if found and (device - found[-1][0], host - found[-1][1]) == (found[-1][2],) * 2:
            found[-1] = (*found[-1][:2], found[-1][2] + 1)
        else:
            found.append((device, host, 1))
    return found


def _host_memory(pages: Tensor, num_blocks: int) -> Tensor:
    """Room for so many blocks; page-locked where a GPU copies from it."""
    memory = zeroed((num_blocks, *pages.shape[1:]), pages.dtype, torch.device("cpu"))
    if pages.device.type == "cuda":
        page_lock(memory)
    return memory
