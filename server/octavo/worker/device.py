"""Where a worker's tensors lie, and how numbers get there and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor


class Event(Protocol):
    """A point in the work of a device."""

    def record(self) -> None:
        """Now: after all that was started so far."""

    def synchronize(self) -> None:
        """Wait until the work has come to that point; not at all if it was never recorded."""


class Device:
    """The CPU: the host reads and writes what the kernels do, so nothing is copied, and nothing waits.

    ``octavo.worker.gpu.Gpu`` is the other one. Work on a device runs in the order in which it was started.
    """

    torch_device = torch.device("cpu")
    collectives = "gloo"  # the library by which ranks speak, where their kernels have no way of their own

    def host(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """New memory of the host, which :meth:`copy` can copy from and to."""
        return torch.empty(tuple(shape), dtype=dtype)

    def mirror(self, host: Tensor) -> Tensor:
        """Where the kernels read ``host``: there, or in as much memory of the device, filled with zeros."""
        return host

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Start to copy between host memory of :meth:`host` and the device, if they are not the same."""

    def event(self) -> Event:
        return _Done()

    def tensor(self, values: Sequence[Any]) -> Tensor:
        """A new int64 tensor that the kernels read."""
        return torch.tensor(values, dtype=torch.int64)

    def read(self, *tensors: Tensor) -> Callable[[], list[NDArray[Any]]]:
        """Start to bring tensors to the host -> what waits for them; the host may do other things before."""
        return lambda: [tensor.numpy() for tensor in tensors]


class _Done:
    """The host's own work is always done."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...
