"""C++ attention over the block table equals the reference: prefill and decode rows, any heads and pages."""

import math
from dataclasses import dataclass

import pytest
import torch
from attention_cases import scattered_batch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from octavo_kernels import AttentionBatch
from octavo_kernels.ops import FP8, quantise_int8

# float32: softmax in blocks sums in another order. bfloat16: scores are exact products summed in float32;
# probabilities and results are rounded to 8 bits, and a result is a mean of values of size up to 4. What an
# 8-bit cache holds is read exactly.
TOLERANCE = {torch.float32: {"rtol": 1e-5, "atol": 1e-5}, torch.bfloat16: {"rtol": 2**-6, "atol": 2**-6}}


@dataclass
class Case:
    dtype: torch.dtype
    stored: torch.dtype
    """Of the cache."""
    kv_heads: int
    share: int
    dim: int
    block_size: int
    rows: list[tuple[int, int]]
    """(queries, context) of each sequence."""
    window: int | None
    softcap: float | None
    seed: int

    @property
    def scales(self):
        return {"kv_scale": (0.5, 2.0)} if self.stored == FP8 else {}


DTYPES = [(dtype, stored) for dtype in (torch.float32, torch.bfloat16) for stored in (dtype, FP8, torch.int8)]


@st.composite
def cases(draw):
    rows = draw(
        st.lists(
            st.tuples(
                st.one_of(st.just(1), st.integers(1, 60)), st.one_of(st.integers(0, 40), st.integers(0, 400))
            ),
            min_size=1,
            max_size=5,
        )
    )
    dtype, stored = draw(st.sampled_from(DTYPES))
    return Case(
        dtype=dtype,
        stored=stored,
        kv_heads=draw(st.integers(1, 3)),
        share=draw(st.sampled_from([1, 2, 3, 4, 5, 8])),
        dim=draw(st.sampled_from([16, 24, 64, 80, 128, 256])),
        block_size=draw(st.sampled_from([1, 4, 8, 16, 16, 16, 24, 32, 64])),
        rows=[(queries, queries + before) for queries, before in rows],
        window=draw(st.one_of(st.none(), st.integers(1, 300))),
        softcap=draw(st.one_of(st.none(), st.sampled_from([1.0, 30.0]))),
        seed=draw(st.integers(0, 999)),
    )


def slots_of(batch, row):
    position = torch.arange(int(batch.seq_lens[row]))
    return (
        batch.block_tables[row].long()[position // batch.block_size] * batch.block_size
        + position % batch.block_size
    )


def fill(ops, batch, num_blocks, keys_values, dtype, byte=0, **scales):
    """A cache of ``dtype`` with these keys and values, every other byte of it ``byte``."""
    kv_heads, dim = keys_values[0][0].shape[1:]
    *shape, last = ops.kv_cache_shape(num_blocks, batch.block_size, kv_heads, dim, dtype)
    cache = torch.full((*shape, last * dtype.itemsize), byte, dtype=torch.uint8).view(dtype)
    for row, (k, v) in enumerate(keys_values):
        ops.write_kv(k, v, cache, slots_of(batch, row), **scales)
    return cache


def random_sequences(case):
    torch.manual_seed(case.seed)
    keys_values = []
    for _, context in case.rows:
        kv = torch.randn(context, 2 * case.kv_heads + 1, case.dim).to(case.dtype)  # k and v as strided views
        keys_values.append((kv[:, : case.kv_heads], kv[:, case.kv_heads : 2 * case.kv_heads]))
    heads = case.kv_heads * case.share
    q = torch.randn(sum(q for q, _ in case.rows), heads + 2, case.dim).to(case.dtype)[:, 1 : heads + 1]
    return q, keys_values


@settings(max_examples=60, deadline=None)
@given(case=cases())
def test_attention_equals_the_reference(cpu, reference, case):
    q, keys_values = random_sequences(case)
    batch, blocks = scattered_batch(case.rows, case.block_size)
    options = {"scale": case.dim**-0.5, "window": case.window, "softcap": case.softcap, **case.scales}
    cache = fill(cpu, batch, blocks, keys_values, case.stored, **case.scales)
    result = cpu.paged_attention(q, cache, batch, **options)
    cache = fill(reference, batch, blocks, keys_values, case.stored, **case.scales)
    expected = reference.paged_attention(q.float(), cache, batch, **options).to(case.dtype)
    torch.testing.assert_close(result, expected, **TOLERANCE[case.dtype])


@settings(max_examples=30, deadline=None)
@given(
    context=st.integers(1, 400),
    tail=st.integers(1, 60),
    others=st.lists(st.integers(1, 300), max_size=9),
    window=st.one_of(st.none(), st.integers(1, 200)),
    dtypes=st.sampled_from(DTYPES),
)
def test_a_row_does_not_depend_on_its_chunk_or_its_batch(cpu, context, tail, others, window, dtypes):
    tail = min(tail, context)
    rows = [(tail, context), *((1, other) for other in others)]
    case = Case(*dtypes, 2, 3, 64, 16, rows, window, None, 0)
    q, keys_values = random_sequences(case)
    batch, blocks = scattered_batch(rows, 16)
    cache = fill(cpu, batch, blocks, keys_values, case.stored)
    together = cpu.paged_attention(q, cache, batch, 0.125, window)[tail - 1]
    alone = AttentionBatch(
        torch.tensor([0, 1], dtype=torch.int32), batch.seq_lens[:1], batch.block_tables[:1], 16, 1
    )
    assert torch.equal(together, cpu.paged_attention(q[tail - 1 : tail], cache, alone, 0.125, window)[0])


@dataclass
class Family:
    """Sequences of which some begin with the same blocks as an earlier one."""

    case: Case
    parents: list[tuple[int, int]]
    """Of each sequence: another one (itself: none), and how many of its first tokens are in its blocks."""
    threads: int

    def batch(self):
        """The batch, and the number of blocks in it."""
        batch, blocks = scattered_batch(self.case.rows, self.case.block_size)
        for row, (parent, tokens) in enumerate(self.parents):
            shared = min(tokens, self.case.rows[parent][1], self.case.rows[row][1]) // self.case.block_size
            batch.block_tables[row, :shared] = batch.block_tables[parent, :shared]
        return batch, blocks


@st.composite
def families(draw):
    size = draw(st.integers(2, 20))
    queries = st.sampled_from([0, 1, 1, 1, 2, 5, 40])
    lengths = st.integers(0, 200), st.sampled_from([255, 256, 384, 390])
    rows = [(count := draw(queries), count + draw(st.one_of(*lengths))) for _ in range(size)]
    dtype, stored = draw(st.sampled_from(DTYPES))
    case = Case(
        dtype=dtype,
        stored=stored,
        kv_heads=draw(st.integers(1, 3)),
        share=draw(st.sampled_from([1, 3, 4, 8, 40])),
        dim=draw(st.sampled_from([16, 64, 80])),
        block_size=draw(st.sampled_from([1, 8, 16, 16, 24, 64])),
        rows=rows,
        window=draw(st.sampled_from([None, None, None, 150])),
        softcap=draw(st.sampled_from([None, None, 30.0])),
        seed=draw(st.integers(0, 999)),
    )
    tokens = st.sampled_from([100, 128, 200, 256, 300, 400])
    parents = [(draw(st.integers(max(0, row - 3), row)), draw(tokens)) for row in range(size)]
    return Family(case, parents, draw(st.sampled_from([1, 2, 5])))


NESTED = Family(
    Case(torch.bfloat16, torch.bfloat16, 1, 40, 16, 16, [(1, 385)] * 5, None, None, 0),
    [(0, 0), (0, 384), (1, 384), (0, 128), (3, 256)],
    threads=2,
)
"""A prefix of more sequences than a tile has queries, and two longer ones of some of them."""


@settings(max_examples=80, deadline=None)
@given(family=families())
@example(family=NESTED)
def test_a_row_does_not_depend_on_who_shares_its_prefix(cpu, family):
    case = family.case
    batch, blocks = family.batch()
    q, _ = random_sequences(case)
    k, v = torch.randn(2, blocks * case.block_size, case.kv_heads, case.dim).to(case.dtype)
    cache = torch.zeros(cpu.kv_cache_shape(blocks, case.block_size, case.kv_heads, case.dim, case.stored))
    cache = cache.to(case.stored)
    cpu.write_kv(k, v, cache, torch.arange(len(k)), **case.scales)
    options = {"scale": case.dim**-0.5, "window": case.window, "softcap": case.softcap, **case.scales}
    cpu.set_num_threads(family.threads)
    together = cpu.paged_attention(q, cache, batch, **options)
    cpu.set_num_threads(2)
    for row, (queries, _) in enumerate(case.rows):
        mine = slice(int(batch.query_start[row]), int(batch.query_start[row + 1]))
        starts, one = torch.tensor([0, queries], dtype=torch.int32), slice(row, row + 1)
        alone = AttentionBatch(
            starts, batch.seq_lens[one], batch.block_tables[one], batch.block_size, queries
        )
        assert torch.equal(together[mine], cpu.paged_attention(q[mine], cache, alone, **options))


def test_what_lies_behind_the_end_of_a_sequence_does_not_matter(cpu):
    for dtype, stored in DTYPES:
        rows = [(1, 37), (20, 41), (1, 3)]
        case = Case(dtype, stored, 1, 5, 64, 16, rows, None, None, 0)
        q, keys_values = random_sequences(case)
        batch, blocks = scattered_batch(rows, 16)
        clean = fill(cpu, batch, blocks, keys_values, stored)
        dirty = fill(cpu, batch, blocks, keys_values, stored, byte=0xFF)  # no number, whatever the dtype
        expected = cpu.paged_attention(q, clean, batch, 0.125)
        assert torch.equal(cpu.paged_attention(q, dirty, batch, 0.125), expected)


def alone(blocks, block_size):
    """A batch of one query in each of these blocks, over all tokens of it."""
    count = len(blocks)
    starts, tables = torch.arange(count + 1).int(), torch.tensor(blocks).int()[:, None]
    return AttentionBatch(starts, torch.full((count,), block_size).int(), tables, block_size, 1)


@pytest.mark.parametrize("stored", [torch.float32, FP8, torch.int8])
def test_copied_blocks_read_like_their_sources_and_negative_slots_are_skipped(cpu, reference, stored):
    for ops in (cpu, reference):
        k, v = torch.randn(16, 1, 32), torch.randn(16, 1, 32)
        cache = torch.zeros(ops.kv_cache_shape(3, 16, 1, 32, stored)).to(stored)
        ops.write_kv(k, v, cache, torch.arange(16))
        before = cache.view(torch.uint8).clone()
        ops.write_kv(k, v, cache, torch.full((16,), -1))
        assert torch.equal(cache.view(torch.uint8), before)
        ops.copy_blocks(cache, torch.tensor([0]), torch.tensor([2]))
        results = ops.paged_attention(torch.randn(1, 2, 32).expand(2, 2, 32), cache, alone([0, 2], 16), 0.2)
        assert torch.equal(results[0], results[1]) and results[0].abs().sum() > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_eight_bit_floats_are_torchs_for_every_size_of_number(cpu, dtype):
    """All magnitudes about the format's: subnormal, ties, the largest, and what is larger."""
    halves = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    v = halves[halves.isfinite()].view(-1, 1, 32).to(dtype)
    cache = torch.zeros(cpu.kv_cache_shape(len(v), 1, 1, 32)).to(FP8)
    cpu.write_kv(-v, v, cache, torch.arange(len(v)))
    result = cpu.paged_attention(torch.zeros_like(v), cache, alone(range(len(v)), 1), 0.1)
    assert torch.equal(result.float(), v.float().clamp(-448, 448).to(FP8).float())


@pytest.mark.parametrize(("dtype", "stored"), DTYPES)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("block_size", [16, 8])
def test_what_is_not_finite_is_seen_by_those_alone_who_attend_to_it(
    cpu, reference, dtype, stored, bad, block_size
):
    """Not where it lies behind the end of a sequence, in a page that another one has left."""
    blocks = 32 // block_size
    for ops in (cpu, reference):
        k, v, q = torch.randn(3, 32, 1, 40).to(dtype)
        cache = torch.zeros(ops.kv_cache_shape(blocks, block_size, 1, 40, stored)).to(stored)

        def attended(length, ops=ops, q=q, cache=cache):
            ends, tables = torch.tensor([0, 1]).int(), torch.arange(blocks).int()[None]
            batch = AttentionBatch(ends, torch.tensor([length]).int(), tables, block_size, 1)
            return ops.paged_attention(q[:1], cache, batch, 0.2)

        ops.write_kv(k, v, cache, torch.arange(32))
        before = [attended(length) for length in (20, 21)]
        place = torch.tensor([21])
        for broken in ((k.index_fill(0, place, bad), v), (k, v.index_fill(0, place, bad))):
            ops.write_kv(*broken, cache, torch.arange(32))
            assert all(map(torch.equal, before, (attended(20), attended(21))))
            assert not attended(22).isfinite().any() and not attended(32).isfinite().any()


def test_integers_and_scales_are_the_references(cpu):
    """Of rows of any size, of zeros, and of one large number; one that is not finite is not hidden."""
    v = torch.randn(60, 1, 80) * torch.logspace(-42, 30, 60)[:, None, None]
    v[3], v[4, 0, 7] = 0, 1e4
    v[5, 0, 9], v[6, 0, 70] = float("nan"), float("-inf")
    cache = torch.zeros(cpu.kv_cache_shape(len(v), 1, 1, 80, torch.int8)).to(torch.int8)
    cpu.write_kv(v, v, cache, torch.arange(len(v)))
    result = cpu.paged_attention(torch.zeros(len(v), 2, 80), cache, alone(range(len(v)), 1), 0.1)
    numbers, scales = quantise_int8(v)
    finite = scales.isfinite()[:, 0]
    expected = (numbers * scales[..., None]).expand(-1, 2, 80)
    assert torch.equal(result[finite], expected[finite])
    assert finite.sum() == 58 and not result[~finite].isfinite().any()


def test_a_cache_of_another_float_is_refused(cpu):
    k = torch.randn(1, 1, 32)
    cache = torch.zeros(cpu.kv_cache_shape(1, 16, 1, 32), dtype=torch.bfloat16)
    with pytest.raises(TypeError, match=r"the cache is torch.bfloat16, .* torch.float32"):
        cpu.write_kv(k, k, cache, torch.zeros(1, dtype=torch.int64))
    with pytest.raises(TypeError, match=r"the cache is torch.bfloat16, .* torch.float32"):
        cpu.paged_attention(k, cache, alone([0], 16), 0.1)
