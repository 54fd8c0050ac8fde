"""The compute kernels of Octavo behind one interface (:class:`octavo_kernels.ops.Ops`).

``load()`` picks a backend: ``cpu`` (C++: AMX, AVX-512 or AVX2, whichever the machine has), ``triton`` (NVIDIA
and AMD GPUs) or ``reference`` (plain torch, the truth every other backend is tested against).
"""

from octavo_kernels.ops import AttentionBatch, DrawSettings, KernelsUnavailable, Ops, PackedWeight, Replay
from octavo_kernels.quantised import QuantisedWeight
from octavo_kernels.registry import load

__all__ = [
    "AttentionBatch",
    "DrawSettings",
    "KernelsUnavailable",
    "Ops",
    "PackedWeight",
    "QuantisedWeight",
    "Replay",
    "load",
]
