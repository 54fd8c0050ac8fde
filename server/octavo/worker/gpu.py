"""A GPU as the worker sees it, what of its memory the KV cache can have, and which decode steps are captured.

Everything of CUDA that the worker calls is in ``Gpu`` (graphs are the kernels': ``Ops.record``), so that a
test can stand in for it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.core.plan import Row, SampleSpec, StepPlan
from octavo.errors import ConfigError
from octavo.worker.device import Device, Event
from octavo.worker.host import give_memory_back
from octavo.worker.runner import ModelRunner

log = logging.getLogger(__name__)

MOST_CAPTURED = 512  # rows of a decode step, as in vLLM: a larger one keeps the GPU busy without a graph
NO_MEMORY = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED")  # as torch, CUDA and Triton say it; as cuBLAS
BFLOAT16_CAPABILITY = (8, 0)  # the least of NVIDIA's that computes in bfloat16


class Gpu(Device):
    """torch's current GPU. Steps run in its default stream; host memory is page-locked, so that copies run
    beside the host's work.
    """

    torch_device = torch.device("cuda")
    collectives = "nccl"

    def __init__(self) -> None:
        self.free_at_start = self.free()

    @property
    def description(self) -> str:
        """The model's name, and on NVIDIA its compute capability."""
        name = torch.cuda.get_device_name()
        if torch.version.hip is not None:
            return name
        return f"{name} (compute capability {'.'.join(map(str, torch.cuda.get_device_capability()))})"

    @property
    def computes_bfloat16(self) -> bool:
        """Whether in hardware."""
        return torch.version.hip is not None or torch.cuda.get_device_capability() >= BFLOAT16_CAPABILITY

    def host(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)

    def mirror(self, host: Tensor) -> Tensor:
        return torch.zeros(host.shape, dtype=host.dtype, device=self.torch_device)

    def copy(self, target: Tensor, source: Tensor) -> None:
        target.copy_(source, non_blocking=True)

    def event(self) -> Event:
        return torch.cuda.Event()

    def tensor(self, values: Sequence[Any]) -> Tensor:
        # torch keeps the page-locked memory that is let go of here until the copy from it is done.
        return torch.tensor(values, dtype=torch.int64, pin_memory=True).to(
            self.torch_device, non_blocking=True
        )

    def read(self, *tensors: Tensor) -> Callable[[], list[NDArray[Any]]]:
        targets = [self.host(tensor.shape, tensor.dtype) for tensor in tensors]
        for target, tensor in zip(targets, tensors, strict=True):
            self.copy(target, tensor)
        copied = self.event()
        copied.record()

        def wait() -> list[NDArray[Any]]:
            copied.synchronize()
            return [target.numpy() for target in targets]

        return wait

    def total(self) -> int:
        """Bytes of memory it has."""
        return torch.cuda.mem_get_info()[1]

    def free(self) -> int:
        """Bytes that nobody holds, once all work is done and torch has given back what it does not use."""
        torch.cuda.synchronize()
        give_memory_back()
        return torch.cuda.mem_get_info()[0]

    def allocated(self) -> int:
        """Bytes of this process's tensors."""
        return torch.cuda.memory_allocated()

    def peak(self) -> int:
        """The most that ``allocated`` has been since ``reset_peak``."""
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats()


def find_gpu(rank: int = 0, world: int = 1) -> Gpu:
    """The GPU of this process: the ``rank``-th of those it sees, of which ``world`` are needed. Raises
    ``ConfigError``, in torch's own words, where there is none to use.
    """
    try:
        torch.cuda.init()
        if (seen := torch.cuda.device_count()) < world:
            raise ConfigError(
                f"tensor-parallel-size is {world}, but {seen} GPUs can be used here: lower it, or give the "
                "process more GPUs"
            )
        torch.cuda.set_device(rank)
        return Gpu()
    except (RuntimeError, AssertionError) as error:
        found = str(error).split("\n")[0].rstrip(".")
        raise ConfigError(
            f"device is 'cuda', but torch {torch.__version__} can use no GPU here: {found}. Give the process "
            "a GPU (in a cluster, a node that has one), or choose --device cpu"
        ) from error


@dataclasses.dataclass(frozen=True)
class MemoryUse:
    """Bytes that a model takes beside its KV cache.

    ``weights``: with the buffers that stay, and what CUDA keeps for the kernels; ``activations``: what comes
    and goes in the largest steps, at its peak; ``graphs``: of captured steps.
    """

    weights: int
    activations: int
    graphs: int


def memory_use(
    gpu: Gpu, runner: ModelRunner, cache_bytes: int, plans: Sequence[StepPlan], sizes: Sequence[int]
) -> MemoryUse:
    """Measured on a runner with a small cache of ``cache_bytes``: it runs ``plans``, the largest steps, and
    captures two of the decode ``sizes``.

    The second graph is smaller than the first, whose memory it shares: it stands for all but the first.
    """
    gpu.reset_peak()
    before = gpu.allocated()
    for plan in plans:
        runner.run(plan)
    activations = gpu.peak() - before
    free = [gpu.free()]
    for size in sorted(sizes, reverse=True)[:2]:
        runner.capture([size])
        free.append(gpu.free())
    taken = [earlier - later for earlier, later in itertools.pairwise(free)]
    graphs = sum(taken) + sum(taken[1:]) * (len(sizes) - 2)
    use = MemoryUse(gpu.free_at_start - free[0] - cache_bytes, activations, graphs)
    mib = [size / 2**20 for size in (use.weights, use.activations, use.graphs)]
    log.info("GPU memory: weights and buffers %.0f MiB, activations %.0f MiB, graphs %.0f MiB", *mib)
    return use


def largest_step(rows: int, max_tokens: int, max_length: int, block_size: int, num_groups: int) -> StepPlan:
    """So many rows, and as many tokens as a step and a request may have, drawn from as takes most.

    The rows share their blocks. Each leaves a request room for the token drawn.
    """
    share = max(1, min(max_tokens // rows, max_length - 1))
    tables = [list(range(-(-share // block_size)))] * num_groups
    draw = SampleSpec(1.0, 0, 0.9, 0, 0, share)
    return StepPlan(0, [Row(str(i), [0] * share, 0, tables, [draw], propose=1) for i in range(rows)])


def capture_sizes(max_num_seqs: int) -> list[int]:
    """Rows of the decode steps that are captured, ascending: vLLM's sizes, and the largest that can come."""
    largest = min(max_num_seqs, MOST_CAPTURED)
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, MOST_CAPTURED, 16)]
    return [size for size in sizes if size < largest] + [largest]


@contextlib.contextmanager
def out_of_memory_refused(doing: str) -> Iterator[None]:
    """A GPU's memory that runs out is the settings' fault: ``ConfigError``, with what can be done."""
    try:
        yield
    except RuntimeError as error:
        first: BaseException | None = error  # what ends a capture may hide what broke it
        while first is not None and not any(words in str(first) for words in NO_MEMORY):
            first = first.__context__
        if first is None:
            raise
        raise ConfigError(
            f"GPU memory ran out while {doing}: {str(first).splitlines()[0]} Lower --gpu-memory-utilization, "
            "--max-num-seqs or --max-num-batched-tokens, give --enforce-eager, or take a larger GPU"
        ) from error
