"""What this process may use of the machine: cores and memory, cgroup limits included."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import weakref
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from octavo.errors import ConfigError
from octavo_kernels import Ops
from octavo_kernels.cpu.library import usable_cpus

_ROOT = Path("/")


def set_threads(ops: Ops, ranks: int = 1) -> int:
    """Give the kernels ``OMP_NUM_THREADS`` threads, or one for each usable CPU -> how many. Ranks here share
    them, and have one each at least.

    Kernels with threads of their own leave torch one, or two pools would fight over the cores.
    """
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    threads = int(wanted) if wanted.isdigit() and int(wanted) > 0 else usable_cpus()
    threads = max(1, threads // ranks)
    torch.set_num_threads(1)
    ops.set_num_threads(threads)
    return threads


def engines_here() -> int:
    """Engines that share this memory, ours included: ``OCTAVO_ENGINES_HERE`` of `octavo up`, else one."""
    told = os.environ.get("OCTAVO_ENGINES_HERE", "")
    return max(1, int(told)) if told.isdigit() else 1


def free_memory(root: Path = _ROOT) -> int:
    """Bytes that can still be allocated: the machine's available memory, and what each cgroup limit leaves.

    Page cache that the kernel can drop counts as free in both.
    """
    available = _meminfo(root)["MemAvailable"]
    for group in _cgroups(root):
        limit = _read(group / "memory.max") or _read(group / "memory.limit_in_bytes")
        if limit.isdigit():
            available = min(available, int(limit) - _used(group))
    return max(0, available)


def give_memory_back() -> None:
    """Return to the system what nothing here uses any more, cycles and frozen objects included."""
    frozen = gc.get_freeze_count() > 0
    gc.unfreeze()
    gc.collect()
    if frozen:
        gc.freeze()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    with contextlib.suppress(AttributeError):  # a C library other than glibc keeps less to itself
        ctypes.CDLL(None).malloc_trim(0)


def page_lock(memory: Tensor) -> None:
    """Keep host memory in its place as long as ``memory`` lives: a GPU then copies it beside other work.

    torch's own page-locked memory comes in powers of two, up to twice as much as was asked for. Raises
    ``ConfigError`` where the system gives no more of it.
    """
    runtime, start = torch.cuda.cudart(), memory.data_ptr()
    try:
        torch.cuda.check_error(runtime.cudaHostRegister(start, memory.nbytes, 0))
    except RuntimeError as error:
        raise ConfigError(
            f"{memory.nbytes} bytes of host memory cannot be locked for copies to the GPU ({error}): lower "
            "--swap-space or --kv-offloading-gib, or give the process more memory"
        ) from error
    weakref.finalize(memory, runtime.cudaHostUnregister, start).atexit = False


def _cgroups(root: Path) -> Iterator[Path]:
    """This process's memory cgroup (version 2 or 1) and those above it: the tightest limit counts."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        top = root / "sys/fs/cgroup" / controllers
        group = top / path.lstrip("/")
        while group.is_relative_to(top):
            yield group
            group = group.parent


def _meminfo(root: Path) -> dict[str, int]:
    """/proc/meminfo in bytes."""
    lines = (line.split() for line in _read(root / "proc/meminfo").splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines}


def _used(group: Path) -> int:
    """Bytes charged to a cgroup, without the page cache."""
    charged = _read(group / "memory.current") or _read(group / "memory.usage_in_bytes")
    stat = dict(line.split() for line in _read(group / "memory.stat").splitlines())
    prefix = "total_" if "total_inactive_file" in stat else ""
    cache = sum(int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("inactive", "active"))
    return max(0, int(charged or 0) - cache)


def _read(path: Path) -> str:
    """A pseudo-file's text; empty where this kernel does not have it."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
