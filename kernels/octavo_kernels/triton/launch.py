"""Launching attention: which tiles, how many programs, and the memory that partial results pass through."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo_kernels.ops import FP8, AttentionBatch, as_bytes
from octavo_kernels.reference import int8_pages
from octavo_kernels.triton import attention
from octavo_kernels.triton.tables import SPLITS, Kind, Tiles, shortest_split, tiles

INTERPRETER = "interpreter"
"""In place of an architecture: kernels run on CPU tensors (TRITON_INTERPRET=1)."""
_DOT = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_WARP_ELEMENTS = 512
"""Elements a warp holds of a tile, at most: 16 a lane, on AMD 8."""


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Multiplications and additions fuse unless ``options`` say otherwise: no release's default decides."""
    kernel[grid](*arguments, **{"enable_fp_fusion": True, **options})


def warps(elements: int) -> int:
    """Warps of a program that works on so many elements."""
    return min(16, max(1, elements // _WARP_ELEMENTS))


def pieces(cache: Tensor, head_dim: int) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """What kernels take of a cache: its numbers, the scales of int8 (else anything), the numbers' strides.

    The scales' strides are those of the numbers over their size, but for a token's, which is 1.
    """
    if cache.dtype == torch.int8:
        numbers, scales = int8_pages(cache, head_dim)
        return numbers, scales, numbers.stride()[:4]
    numbers = as_bytes(cache)
    return numbers, numbers, numbers.stride()[:4]


class Shape:
    """What a call of attention fixes at compile time: ``constants`` of the kernels, and their tiles."""

    def __init__(
        self, arch: str, q: Tensor, cache: Tensor, block_size: int, window: int, softcap: float
    ) -> None:
        self._arch, self._dtype, self._cache = arch, q.dtype, cache.dtype
        self.kv_heads, self.group, self.dim = cache.shape[1], q.shape[1] // cache.shape[1], q.shape[2]
        self.window, self.tile = window, max(16, triton.next_power_of_2(self.dim))
        # The interpreter multiplies bfloat16 as if its bits were integers; float32 holds it exactly.
        exact = arch == INTERPRETER and q.dtype == torch.bfloat16
        self.constants = {
            "DOT": tl.float32 if exact else _DOT[q.dtype],
            "GROUP": self.group,
            "DIM": self.dim,
            "TILE": self.tile,
            "BLOCK_SIZE": block_size,
            "WINDOW": window,
            "SOFTCAP": softcap,
            "FP8": cache.dtype == FP8,
            "INT8": cache.dtype == torch.int8,
            "FP8_HARDWARE": arch.startswith("sm_") and int(arch.removeprefix("sm_")) >= 89,
        }

    def tiles(self, kind: Kind) -> Tiles:
        """As the table has them; with more rows where one KV head has more query heads."""
        chosen = tiles(self._arch, kind, self.dim, self._dtype, self._cache)
        return replace(chosen, rows=max(chosen.rows, triton.next_power_of_2(self.group)))


def decode(
    shape: Shape, q: Tensor, cache: Tensor, batch: AttentionBatch, scales: tuple[float, float], out: Tensor
) -> None:
    """Attention of one query a sequence. ``scales``: of scores, of results.

    How many parts a context can have follows from the width of the block tables, not from what they hold.
    """
    sequences, heads, dim = q.shape
    numbers, token_scales, strides = pieces(cache, dim)
    cut = shape.tiles("decode")
    longest = batch.block_tables.shape[1] * batch.block_size
    longest = min(longest, shape.window or longest)
    shortest = shortest_split(shape.group, cache.itemsize)
    parts = min(SPLITS, triton.cdiv(longest, shortest))
    partial = stats = out
    if parts > 1:
        partial = torch.empty(sequences, heads, parts, dim, dtype=torch.float32, device=q.device)
        stats = torch.empty(sequences, heads, parts, 2, dtype=torch.float32, device=q.device)
    split = {"TOKENS": cut.tokens, "SPLITS": SPLITS, "SHORTEST": shortest}
    launch(
        attention.decode_kernel,
        (sequences, shape.kv_heads, parts),
        q,
        numbers,
        token_scales,
        out,
        partial,
        stats,
        batch.block_tables,
        batch.seq_lens,
        *scales,
        q.stride(0),
        q.stride(1),
        out.stride(0),
        out.stride(1),
        batch.block_tables.stride(0),
        *strides,
        parts,
        **shape.constants,
        **split,
        ROWS=cut.rows,
        DIRECT=parts == 1,
        num_warps=cut.warps,
        num_stages=cut.stages,
    )
    if parts == 1:
        return
    launch(
        attention.combine_kernel,
        (sequences, heads),
        partial,
        stats,
        out,
        batch.seq_lens,
        scales[1],
        out.stride(0),
        out.stride(1),
        parts,
        DIM=dim,
        TILE=shape.tile,
        WINDOW=shape.window,
        **split,
        num_warps=warps(SPLITS * shape.tile),
    )


def mixed(
    shape: Shape, q: Tensor, cache: Tensor, batch: AttentionBatch, scales: tuple[float, float], out: Tensor
) -> None:
    """Attention of any number of queries a sequence, in one launch. ``scales``: of scores, of results."""
    tokens, sequences = q.shape[0], batch.seq_lens.shape[0]
    numbers, token_scales, strides = pieces(cache, shape.dim)
    cut = shape.tiles("mixed")
    queries = cut.rows // shape.group
    launch(
        attention.mixed_kernel,
        (tokens // queries + sequences, shape.kv_heads),
        q,
        numbers,
        token_scales,
        out,
        batch.block_tables,
        batch.query_start,
        batch.seq_lens,
        sequences,
        *scales,
        q.stride(0),
        q.stride(1),
        out.stride(0),
        out.stride(1),
        batch.block_tables.stride(0),
        *strides,
        **shape.constants,
        ROWS=cut.rows,
        QUERIES=queries,
        TOKENS=cut.tokens,
        num_warps=cut.warps,
        num_stages=cut.stages,
    )
