"""Finding the backend: by name, or the best that this machine can run."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

import torch

from octavo_kernels.ops import KernelsUnavailable, Ops
from octavo_kernels.reference import ReferenceOps

log = logging.getLogger(__name__)


def _cpu() -> Ops:
    from octavo_kernels.cpu.backend import CpuOps

    return CpuOps()


def _triton() -> Ops:
    try:
        from octavo_kernels.triton.backend import TritonOps
    except ImportError as error:
        raise KernelsUnavailable(f"the triton kernels need octavo[gpu] installed: {error}") from error
    return TritonOps()


BACKENDS: dict[str, Callable[[], Ops]] = {"reference": ReferenceOps, "cpu": _cpu, "triton": _triton}
ONLY_ON: dict[str, str] = {"cpu": "cpu", "triton": "cuda"}
"""The one device type of a backend that takes raw pointers to its memory; ROCm's is called cuda too."""
AUTO: dict[str, tuple[str, ...]] = {"cpu": ("cpu",), "cuda": ("triton",)}
"""What ``auto`` tries before the reference, per device type."""


def load(name: str = "auto", device: str | torch.device = "cpu", dtype: torch.dtype | None = None) -> Ops:
    """The backend called ``name``; for "auto" the fastest that runs on ``device`` and computes in ``dtype``.

    The environment variable OCTAVO_KERNELS overrides "auto". Falling back to the reference on a device that
    has a faster backend logs one warning with the reason.

    Raises ValueError for a name that is not known, KernelsUnavailable where the named backend cannot run.
    """
    if name == "auto":
        name = os.environ.get("OCTAVO_KERNELS") or "auto"
    if name != "auto":
        if name not in BACKENDS:
            raise ValueError(f"kernels {name!r}: not one of auto, {', '.join(sorted(BACKENDS))}")
        if (device_type := torch.device(device).type) != ONLY_ON.get(name, device_type):
            raise KernelsUnavailable(f"the {name} kernels run on {ONLY_ON[name]}, not on {device_type}")
        ops = BACKENDS[name]()
        if dtype is not None and dtype not in ops.dtypes:
            raise KernelsUnavailable(f"the {name} kernels compute in {_names(ops)}, not {_name(dtype)}")
        return ops
    for candidate in AUTO.get(torch.device(device).type, ()):
        try:
            return load(candidate, device, dtype)
        except KernelsUnavailable as why:
            log.warning("serving with the slow reference kernels: %s", why)
    return ReferenceOps()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _names(ops: Ops) -> str:
    return " and ".join(sorted(map(_name, ops.dtypes)))
