"""The shared library of the C++ kernels: finding it, its C interface, and the memory of packed weights."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import mmap
import os
from collections.abc import Callable
from ctypes import c_char_p, c_float, c_int, c_long, c_void_p
from pathlib import Path
from typing import Any

from octavo_kernels.ops import KernelsUnavailable

LIBRARY = Path(__file__).with_name("libkernels.so")
INTERFACE = 8
"""Of the C functions below; the library has the same number (octavo_interface)."""
INSTRUCTION_SETS = ("amx", "avx512", "avx2")

_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "interface": (c_int, []),
    "start": (c_char_p, [c_char_p]),
    "set_threads": (None, [c_int]),
    "packed_bytes": (c_long, [c_void_p]),
    "pack": (None, [c_void_p] * 3),
    "pack_quantised": (None, [c_void_p] * 3),
    "lookup": (None, [c_void_p, c_void_p, c_long, c_void_p, c_long]),
    "matmul": (None, [c_void_p, c_long, c_long, c_void_p, c_void_p, c_int, c_void_p, c_long, c_int]),
    "rms_norm": (None, [c_void_p, c_long, c_long, c_void_p, c_void_p, *[c_long] * 5, c_float, c_int]),
    "add_rms_norm": (
        None,
        [c_void_p, c_long, c_void_p, c_long, c_void_p, c_void_p, c_long, c_long, c_long, c_float, c_int],
    ),
    "rotary": (
        None,
        [c_void_p, *[c_long] * 3, c_void_p, *[c_long] * 4, c_void_p, c_void_p, c_void_p, c_long, c_int],
    ),
    "write_kv": (
        None,
        [
            c_void_p,
            c_long,
            c_long,
            c_void_p,
            *[c_long] * 5,
            c_void_p,
            c_long,
            c_long,
            c_void_p,
            c_float,
            c_float,
            c_int,
            c_int,
        ],
    ),
    "attention": (
        None,
        [
            *[c_void_p, c_long, c_long] * 3,
            *[c_void_p] * 3,
            *[c_long] * 5,
            *[c_float, c_float, c_long, c_float, c_int, c_int],
        ],
    ),
    "sample": (None, [c_void_p, *[c_long] * 3, c_void_p, c_void_p]),
    "all_reduce": (None, [c_void_p, c_void_p, *[c_long] * 3, c_int]),
    "gather": (None, [c_void_p, c_void_p, c_long, c_long, c_void_p, c_long, c_long]),
    "start_recording": (None, []),
    "end_recording": (c_void_p, []),
    "replay": (None, [c_void_p, c_long, c_long]),
    "forget": (None, [c_void_p]),
    "read": (ctypes.c_uint64, [c_void_p, c_long]),
    "multiply": (c_long, [c_int, c_long]),
}


class Weight(ctypes.Structure):
    """octavo::Weight: a packed weight."""

    _fields_ = [
        ("data", c_void_p),
        ("n", c_long),
        ("k", c_long),
        ("dtype", c_int),
        ("paired", c_int),
        ("bits", c_int),
        ("zero", c_int),
        ("minima", c_int),
    ]


class Quants(ctypes.Structure):
    """octavo::Quants: a quantised matrix that is to be packed."""

    _fields_ = [("values", c_void_p), ("scales", c_void_p), ("minima", c_void_p)]


class Ranks(ctypes.Structure):
    """octavo::Ranks: the ranks of a communicator, as one of them sees them."""

    _fields_ = [
        ("broken", c_void_p),
        ("arrived", c_void_p),
        ("slots", c_void_p),
        ("slot_bytes", c_long),
        ("stage", c_long),
        ("rank", c_int),
        ("world", c_int),
    ]


class Library:
    """The functions of the C interface.

    ``brief`` functions keep Python's lock, for calls shorter than a hand-over of it; ``long`` ones release it
    for the other threads of the process.
    """

    def __init__(self, path: Path, isa: str | None) -> None:
        try:
            self.brief = _Functions(ctypes.PyDLL(str(path)))
            self.long = _Functions(ctypes.CDLL(str(path)))
        except (OSError, AttributeError) as error:
            raise KernelsUnavailable(f"the C++ kernels cannot be loaded: {error}") from error
        if self.brief.interface() != INTERFACE:
            raise KernelsUnavailable(f"{path} was built from other sources: reinstall octavo")
        name = self.brief.start(isa.encode() if isa else None)
        if name is None:
            raise KernelsUnavailable(f"this CPU cannot run the C++ kernels for {isa or 'AVX2 or better'}")
        self.isa: str = name.decode()


class _Functions:
    def __init__(self, handle: ctypes.CDLL) -> None:
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(handle, f"octavo_{name}")
            function.restype, function.argtypes = result, arguments
            setattr(self, name, function)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        raise AttributeError(name)


@functools.cache
def open_library() -> Library:
    """The library, opened once a process.

    OCTAVO_KERNELS_ISA picks the instruction set; without it the best that the CPU has is taken.

    Raises ValueError for a set that is not known, KernelsUnavailable where the library was not built or this
    CPU does not support the set.
    """
    isa = os.environ.get("OCTAVO_KERNELS_ISA") or None
    if isa is not None and isa not in INSTRUCTION_SETS:
        raise ValueError(f"OCTAVO_KERNELS_ISA={isa}: not one of {', '.join(INSTRUCTION_SETS)}")
    if not LIBRARY.exists():
        raise KernelsUnavailable(
            f"the C++ kernels are not built (no {LIBRARY}): install a C++ compiler and reinstall octavo"
        )
    return Library(LIBRARY, isa)


def usable_cpus() -> int:
    """CPUs this process may use: its affinity, cut by the CPU quota of its cgroup."""
    cpus = len(os.sched_getaffinity(0))
    for quota in _cgroup_quotas():
        cpus = min(cpus, max(1, math.ceil(quota)))
    return cpus


def _cgroup_quotas() -> list[float]:
    """CPU quotas (in CPUs) of this process's cgroup and those around it, as far as they are visible."""
    root = Path("/sys/fs/cgroup")
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    quotas = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        version2 = controllers == ""
        if not version2 and "cpu" not in controllers.split(","):
            continue
        folder = (root if version2 else root / controllers) / path.lstrip("/")
        for place in (folder, *folder.parents):
            if not place.is_relative_to(root):
                break
            quota = _read_quota(place, version2)
            if quota is not None:
                quotas.append(quota)
    return quotas


def _read_quota(place: Path, version2: bool) -> float | None:
    try:
        if version2:
            quota, period = (place / "cpu.max").read_text().split()
        else:
            quota = (place / "cpu.cfs_quota_us").read_text().strip()
            period = (place / "cpu.cfs_period_us").read_text().strip()
    except (OSError, ValueError):
        return None
    return int(quota) / int(period) if quota not in ("max", "-1") else None


class Arena:
    """Memory of packed weights: large mappings of huge pages, each given back with its last weight."""

    CHUNK = 64 << 20
    HUGE_PAGE = 2 << 20
    ALIGNMENT = 64

    def __init__(self) -> None:
        self._mapping: mmap.mmap | None = None
        self._next = self._end = 0

    def take(self, size: int) -> tuple[int, mmap.mmap]:
        """Address of ``size`` zeroed bytes, and the mapping to hold on to for as long as they are used."""
        size = -(-size // self.ALIGNMENT) * self.ALIGNMENT
        if self._mapping is None or self._next + size > self._end:
            length = max(size, self.CHUNK)
            private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # shared memory has no huge pages by default
            self._mapping = mmap.mmap(-1, length + self.HUGE_PAGE, flags=private)
            with contextlib.suppress(OSError):  # a kernel without huge pages: small ones serve, more slowly
                self._mapping.madvise(mmap.MADV_HUGEPAGE)
            start = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))
            self._next = -(-start // self.HUGE_PAGE) * self.HUGE_PAGE
            self._end = self._next + length
        address = self._next
        self._next += size
        return address, self._mapping
