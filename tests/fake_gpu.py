"""A GPU that needs none: its memory is host memory, its copies end only when somebody waits for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from octavo.worker.gpu import Gpu
from octavo_kernels.reference import ReferenceOps

GIB = 2**30


@dataclasses.dataclass
class Copy:
    """One under way: ``held`` is what its source had when it started."""

    target: Tensor
    source: Tensor
    held: Tensor
    to_host: bool

    def end(self) -> None:
        if self.to_host:
            self.target.copy_(self.held)
        else:
            assert torch.equal(self.source, self.held), "the host wrote to memory while it was copied"


class FakeEvent:
    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu, self._before = gpu, 0

    def record(self) -> None:
        self._before = self._gpu.started

    def synchronize(self) -> None:
        self._gpu.finish(self._before)


class FakeGpu(Gpu):
    """Copies to the device are seen by what runs after them; they must find their source unchanged until an
    event after them was waited for. Copies to the host bring nothing until then: ``BEFORE`` is there.

    Memory: ``GIB * 8``, less ``taken`` and, of each captured graph that lives, what ``GraphOps`` counts.
    """

    torch_device = torch.device("cpu")
    collectives = "gloo"
    computes_bfloat16 = True
    description = "Fake (compute capability 9.0)"
    BEFORE = -7  # no token

    def __init__(self, taken: int = 0, ops: GraphOps | None = None) -> None:
        self.taken, self.ops = taken, ops
        self.started = 0
        self.under_way: list[tuple[int, Copy]] = []
        self.highest = self.tensors = 0
        self._hosts: dict[int, Tensor] = {}
        super().__init__()

    def host(self, shape, dtype):
        memory = torch.full(tuple(shape), self.BEFORE, dtype=dtype)
        self._hosts[memory.untyped_storage().data_ptr()] = memory
        return memory

    def mirror(self, host):
        return torch.zeros_like(host)

    def copy(self, target, source):
        to_host = target.untyped_storage().data_ptr() in self._hosts
        self.under_way.append((self.started, Copy(target, source, source.clone(), to_host)))
        self.started += 1
        if not to_host:
            target.copy_(source)

    def event(self):
        return FakeEvent(self)

    def tensor(self, values):
        return torch.tensor(values, dtype=torch.int64)

    def finish(self, before: int) -> None:
        """End the copies that were started first, up to so many of all."""
        while self.under_way and self.under_way[0][0] < before:
            self.under_way.pop(0)[1].end()

    def total(self):
        return 8 * GIB

    def free(self):
        graphs = sum(self.ops.graphs) if self.ops is not None else 0
        return self.total() - self.taken - graphs

    def allocated(self):
        return self.tensors

    def peak(self):
        return self.highest

    def reset_peak(self):
        self.highest = self.tensors


class GraphOps(ReferenceOps):
    """The reference with graphs as a GPU's: each runs the very operations on the very tensors it was made of.

    ``graphs`` are the bytes of those that were captured: the first has memory that the others share.
    """

    replays_any_size = False

    def __init__(self) -> None:
        self.graphs: list[int] = []
        self.captured: list[int] = []  # tokens of each, in order
        self.replayed: list[tuple[int, int]] = []
        self._tokens = 0

    def record(self, forward: Callable[[], None]):
        forward()
        tokens = self._tokens
        self.captured.append(tokens)
        self.graphs.append((100 if not self.graphs else 0) * 2**20 + 2**20)

        def replay(rows: int, sequences: int) -> None:
            assert rows == sequences == tokens, "a graph serves its own number of rows"
            self.replayed.append((rows, sequences))
            forward()

        return replay

    def write_kv(self, k, v, cache, slots, *rest):
        self._tokens = len(slots)
        self.last_slots = slots.tolist()
        super().write_kv(k, v, cache, slots, *rest)
