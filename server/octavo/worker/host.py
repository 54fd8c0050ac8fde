"""What this process may use of the machine: cores and memory, cgroup limits included."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")


def usable_cores(root: Path = _ROOT) -> int:
    """Threads worth running:

    ``OMP_NUM_THREADS`` if set, else the cores of the affinity mask and CPU quota.
    """
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    if wanted.isdigit() and int(wanted) > 0:
        return int(wanted)
    cores = len(os.sched_getaffinity(0))
    for group in _cgroups(root):
        quota, _, period = _read(group / "cpu.max").partition(" ")
        if quota.isdigit() and period.isdigit():
            cores = min(cores, math.ceil(int(quota) / int(period)))
    return max(1, cores)


def free_memory(root: Path = _ROOT) -> int:
    """Bytes that can still be allocated: the machine's available memory, and what each cgroup limit leaves.

    Page cache that the kernel can drop counts as free in both.
    """
    available = _meminfo(root)["MemAvailable"]
    for group in _cgroups(root):
        limit = _read(group / "memory.max")
        if limit.isdigit():
            used = int(_read(group / "memory.current") or 0) - _reclaimable(group)
            available = min(available, int(limit) - max(used, 0))
    return max(0, available)


def _cgroups(root: Path) -> Iterator[Path]:
    """This process's cgroup (version 2) and those above it: the tightest limit counts."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        if line.startswith("0::"):
            top = root / "sys/fs/cgroup"
            group = top / line[3:].lstrip("/")
            while group.is_relative_to(top):
                yield group
                group = group.parent


def _meminfo(root: Path) -> dict[str, int]:
    """/proc/meminfo in bytes."""
    lines = (line.split() for line in _read(root / "proc/meminfo").splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines}


def _reclaimable(group: Path) -> int:
    stat = dict(line.split() for line in _read(group / "memory.stat").splitlines())
    return int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0))


def _read(path: Path) -> str:
    """A pseudo-file's text; empty where this kernel does not have it."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
