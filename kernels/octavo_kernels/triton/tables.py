"""Tile sizes of the attention kernels by architecture: plain data, so that a server's start searches nothing.

They were chosen from what the compilers report, not from measurements: a tile's keys and values, times the
stages that are on their way at once, fit shared memory; results, scores and queries stay in registers without
spilling. ``tests/kernels/test_triton_compiled.py`` holds both on every architecture here, and
``benchmarks/gpu.py`` prints what a change of a row is worth.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

Kind = Literal["decode", "mixed"]

SPLITS = 32
"""Parts of a context at most, in decode: with 4 KV heads and one sequence 128 programs, about one for each
processor of a large GPU. A power of two."""
SHORTEST_SPLIT = 256
"""Tokens of a part, at least: enough that a processor reads for longer than its start takes."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """How one attention kernel cuts its work.

    ``rows``: queries times heads of a KV head, at least (products need 16); ``tokens``: of the context;
    ``warps`` and ``stages`` are Triton's. A load of the cache waits for one of the block table, so
    that on NVIDIA's 5 stages keep two tiles on their way, 3 one (in a loop without masks, two).
    """

    rows: int
    tokens: int
    warps: int
    stages: int


Table: TypeAlias = dict[tuple[Kind, int], Tiles]
"""(kind, largest head dimension) -> tiles."""


def _table(decode: dict[int, Tiles], mixed: dict[int, Tiles]) -> Table:
    rows: Table = {("decode", dim): row for dim, row in decode.items()}
    return rows | {("mixed", dim): row for dim, row in mixed.items()}


HALF: dict[str, Table] = {
    # 164 KiB of shared memory, filled by asynchronous copies: pipelines of small tiles.
    "sm_80": _table(
        decode={64: Tiles(16, 128, 4, 5), 128: Tiles(16, 64, 4, 5), 256: Tiles(16, 32, 4, 5)},
        mixed={64: Tiles(128, 64, 8, 3), 128: Tiles(128, 64, 8, 2), 256: Tiles(64, 32, 8, 2)},
    ),
    # 228 KiB, and products of 64 rows by a group of 4 warps: wider tiles.
    "sm_90": _table(
        decode={64: Tiles(16, 128, 4, 5), 128: Tiles(16, 64, 4, 5), 256: Tiles(16, 32, 4, 5)},
        mixed={64: Tiles(128, 64, 4, 3), 128: Tiles(128, 64, 8, 3), 256: Tiles(128, 64, 8, 2)},
    ),
    # 228 KiB. Results pass between their own memory and registers, which costs some of the latter.
    "sm_100": _table(
        decode={64: Tiles(16, 128, 4, 5), 128: Tiles(16, 64, 4, 5), 256: Tiles(16, 32, 4, 5)},
        mixed={64: Tiles(128, 64, 4, 3), 128: Tiles(128, 64, 8, 3), 256: Tiles(128, 32, 8, 2)},
    ),
    # Waves of 64 lanes with 512 registers each, 64 KiB of shared memory: loads wait in registers.
    "gfx942": _table(
        decode={64: Tiles(16, 64, 4, 2), 128: Tiles(16, 64, 4, 2), 256: Tiles(16, 32, 4, 2)},
        mixed={64: Tiles(128, 64, 4, 2), 128: Tiles(128, 64, 4, 2), 256: Tiles(64, 32, 4, 2)},
    ),
}
"""bfloat16 and float16, by architecture."""

HALF_OVER_FP8: dict[str, Table] = {
    # Widening takes registers, the more without a conversion in hardware (sm_80, gfx942).
    "sm_80": _table(decode={}, mixed={128: Tiles(128, 32, 8, 2)}),
    "sm_90": _table(decode={}, mixed={64: Tiles(128, 64, 8, 3)}),
    "gfx942": _table(decode={}, mixed={128: Tiles(128, 32, 4, 2)}),
}
"""The same over an 8-bit cache, where that needs other tiles."""

ANY = _table(
    decode={64: Tiles(16, 64, 4, 2), 128: Tiles(16, 32, 4, 2), 256: Tiles(16, 32, 4, 1)},
    mixed={64: Tiles(64, 32, 4, 2), 128: Tiles(64, 32, 8, 2), 256: Tiles(32, 32, 8, 1)},
)
"""For an architecture without a table: fits 64 KiB of shared memory, the least of any GPU in question."""

OVER_INT8 = _table(
    decode={64: Tiles(16, 64, 4, 2), 128: Tiles(16, 32, 4, 2), 256: Tiles(16, 32, 4, 1)},
    mixed={64: Tiles(64, 32, 4, 2), 128: Tiles(32, 32, 4, 2), 256: Tiles(32, 16, 4, 1)},
)
"""Over an int8 cache, whose numbers and scales take registers that larger tiles need; on any architecture."""

FLOAT32 = _table(
    decode={64: Tiles(16, 32, 4, 2), 128: Tiles(16, 16, 4, 1), 256: Tiles(16, 16, 4, 1)},
    mixed={64: Tiles(32, 32, 4, 1), 128: Tiles(16, 16, 4, 1), 256: Tiles(16, 16, 4, 1)},
)
"""float32 is for checking, on any architecture: products of it in full precision use no tensor cores."""


def is_tuned(arch: str) -> bool:
    """Whether ``arch`` has tiles of its own; others share those for any."""
    return arch in HALF


def tiles(arch: str, kind: Kind, head_dim: int, dtype: torch.dtype, cache: torch.dtype) -> Tiles:
    """The tiles of a kernel: the row of the least head dimension that holds ``head_dim``.

    ``dtype`` is that of queries, ``cache`` that of keys and values. Raises ValueError past the table's end.
    """
    if dtype == torch.float32:
        table = FLOAT32
    elif cache == torch.int8:
        table = OVER_INT8
    else:
        table = HALF.get(arch, ANY) | (HALF_OVER_FP8.get(arch, {}) if cache != dtype else {})
    largest = sorted(dim for each, dim in table if each == kind)
    for dim in largest:
        if head_dim <= dim:
            return table[kind, dim]
    raise ValueError(f"head dimension {head_dim}: the triton kernels take {largest[-1]} at most")


def shortest_split(group: int, itemsize: int) -> int:
    """Tokens of a part of the context, at least, for ``group`` heads on a KV head and so wide a cache.

    A part leaves a float32 result of each head, which is read again: 2 x 4 x group bytes for each dimension,
    beside 2 x itemsize x tokens that it reads of the cache. This keeps them to a sixteenth.
    """
    least = 16 * 4 * group // itemsize
    return max(SHORTEST_SPLIT, -(-least // 128) * 128)
