"""Random batches for paged attention, and whether a backend's result is the reference's: for every device."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo_kernels import AttentionBatch, load
from octavo_kernels.ops import FP8, quantise_int8
from octavo_kernels.reference import int8_pages

# float32: softmax in tiles sums in another order, and a softcap's tanh is made of exp. Half precision: the
# probabilities are rounded for the product (cut off, by the interpreter), and so is the result: two steps of
# the dtype's last place, for a mean of values of size up to 4. An 8-bit cache is read exactly by both.
TOLERANCE = {
    torch.float32: {"rtol": 2e-5, "atol": 2e-5},
    torch.bfloat16: {"rtol": 2**-6, "atol": 2**-6},
    torch.float16: {"rtol": 2**-9, "atol": 2**-9},
}


@dataclass(frozen=True)
class Case:
    """``rows`` are (queries, context) of each sequence; ``stored`` is the cache's dtype, if not ``dtype``."""

    dtype: torch.dtype
    kv_heads: int
    group: int
    dim: int
    block_size: int
    rows: tuple[tuple[int, int], ...]
    window: int | None = None
    softcap: float | None = None
    stored: torch.dtype | None = None

    @property
    def options(self) -> dict[str, object]:
        """Arguments of ``paged_attention`` after the batch."""
        scales = {"kv_scale": (0.5, 2.0)} if self.stored == FP8 else {}
        return {"scale": self.dim**-0.5, "window": self.window, "softcap": self.softcap, **scales}


def random_case(seed: int, *, decode: bool, longest: int = 400) -> Case:
    """The same for the same seed; ``decode``: one query a sequence."""
    pick = random.Random(seed)
    rows = []
    for _ in range(pick.randint(1, 4)):
        queries = 1 if decode else pick.choice([1, 1, pick.randint(2, 60)])
        rows.append((queries, queries + pick.choice([0, pick.randint(0, 40), pick.randint(0, longest)])))
    return Case(
        dtype=pick.choice([torch.float32, torch.bfloat16, torch.float16]),
        kv_heads=pick.randint(1, 3),
        group=pick.choice([1, 2, 3, 4, 7, 8, 20]),
        dim=pick.choice([16, 24, 64, 64, 80, 128, 256]),
        block_size=pick.choice([8, 16, 16, 24, 32, 64, 128]),
        rows=tuple(rows),
        window=pick.choice([None, None, pick.randint(1, 300)]),
        softcap=pick.choice([None, None, 30.0]),
        stored=pick.choice([None, None, FP8, torch.int8]),
    )


def scattered_batch(
    rows: tuple[tuple[int, int], ...], block_size: int, device: str = "cpu"
) -> tuple[AttentionBatch, int]:
    """A batch with the blocks of its sequences shuffled over a cache, and the number of blocks in it."""
    blocks = [-(-context // block_size) for _, context in rows]
    order = torch.randperm(sum(blocks) + 2).int()
    tables = torch.zeros(len(rows), max(blocks), dtype=torch.int32)
    taken = 0
    for row, count in enumerate(blocks):
        tables[row, :count] = order[taken : taken + count]
        taken += count
    starts = torch.tensor([0, *(queries for queries, _ in rows)]).cumsum(0).int()
    lengths = torch.tensor([context for _, context in rows], dtype=torch.int32)
    batch = AttentionBatch(
        starts.to(device),
        lengths.to(device),
        tables.to(device),
        block_size,
        max(queries for queries, _ in rows),
    )
    return batch, len(order)


def random_inputs(case: Case, seed: int, device: str = "cpu") -> tuple[Tensor, Tensor, AttentionBatch]:
    """q as a view of wider rows, a filled cache, and the batch. What no sequence holds is not a number."""
    torch.manual_seed(seed)
    batch, blocks = scattered_batch(case.rows, case.block_size, device)
    tokens, heads = sum(queries for queries, _ in case.rows), case.kv_heads * case.group
    q = torch.randn(tokens, heads + 2, case.dim).to(case.dtype).to(device)[:, 1 : heads + 1]
    shape = (blocks, case.kv_heads, 2, case.block_size, case.dim)
    held = torch.randn(shape)
    end = torch.full((blocks,), 0)
    for row, (_, context) in enumerate(case.rows):
        for i in range(-(-context // case.block_size)):
            end[batch.block_tables[row, i].item()] = min(case.block_size, context - i * case.block_size)
    held[(torch.arange(case.block_size) >= end[:, None])[:, None, None].expand(shape[:4])] = float("nan")
    return q, _cache_of(held, case.stored or case.dtype).to(device), batch


def _cache_of(held: Tensor, dtype: torch.dtype) -> Tensor:
    """A cache of these numbers [blocks, Hkv, 2, block_size, D]."""
    if dtype != torch.int8:
        return held.to(dtype)
    *pages, dim = held.shape
    cache = torch.empty(
        load("reference").kv_cache_shape(pages[0], pages[3], pages[1], dim, dtype), dtype=dtype
    )
    for place, values in zip(int8_pages(cache, dim), quantise_int8(held), strict=True):
        place.copy_(values)
    return cache


def assert_equals_reference(ops: object, case: Case, seed: int, device: str = "cpu") -> Tensor:
    """Attention of ``ops`` is that of the reference in float32 on the same numbers -> its result."""
    q, cache, batch = random_inputs(case, seed, device)
    result = ops.paged_attention(q, cache, batch, **case.options)
    exact = cache.float() if case.stored is None else cache
    expected = load("reference").paged_attention(q.float(), exact, batch, **case.options).to(case.dtype)
    torch.testing.assert_close(result, expected, **TOLERANCE[case.dtype])
    return result
