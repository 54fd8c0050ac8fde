"""C++ attention over the block table equals the reference: prefill and decode rows, any heads and pages."""

from dataclasses import dataclass

import torch
from attention_cases import scattered_batch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo_kernels import AttentionBatch

# float32: softmax in blocks sums in another order. bfloat16: scores are exact products summed in float32;
# probabilities and results are rounded to 8 bits, and a result is a mean of values of size up to 4.
TOLERANCE = {torch.float32: {"rtol": 1e-5, "atol": 1e-5}, torch.bfloat16: {"rtol": 2**-6, "atol": 2**-6}}


@dataclass
class Case:
    dtype: torch.dtype
    kv_heads: int
    share: int
    dim: int
    block_size: int
    rows: list[tuple[int, int]]
    """(queries, context) of each sequence."""
    window: int | None
    softcap: float | None
    seed: int


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
    return Case(
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16])),
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


def fill(ops, batch, num_blocks, keys_values, dtype, filler=0.0):
    kv_heads, dim = keys_values[0][0].shape[1:]
    shape = ops.kv_cache_shape(num_blocks, batch.block_size, kv_heads, dim)
    cache = torch.full(shape, filler, dtype=dtype)
    for row, (k, v) in enumerate(keys_values):
        ops.write_kv(k, v, cache, slots_of(batch, row))
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
    options = {"scale": case.dim**-0.5, "window": case.window, "softcap": case.softcap}
    result = cpu.paged_attention(q, fill(cpu, batch, blocks, keys_values, case.dtype), batch, **options)
    wide = [(k.float(), v.float()) for k, v in keys_values]
    cache = fill(reference, batch, blocks, wide, torch.float32)
    expected = reference.paged_attention(q.float(), cache, batch, **options).to(case.dtype)
    torch.testing.assert_close(result, expected, **TOLERANCE[case.dtype])


@settings(max_examples=30, deadline=None)
@given(
    context=st.integers(1, 400),
    tail=st.integers(1, 60),
    others=st.lists(st.integers(1, 300), max_size=9),
    window=st.one_of(st.none(), st.integers(1, 200)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_a_row_does_not_depend_on_its_chunk_or_its_batch(cpu, context, tail, others, window, dtype):
    tail = min(tail, context)
    rows = [(tail, context), *((1, other) for other in others)]
    case = Case(dtype, 2, 3, 64, 16, rows, window, None, 0)
    q, keys_values = random_sequences(case)
    batch, blocks = scattered_batch(rows, 16)
    cache = fill(cpu, batch, blocks, keys_values, dtype)
    together = cpu.paged_attention(q, cache, batch, 0.125, window)[tail - 1]
    alone = AttentionBatch(
        torch.tensor([0, 1], dtype=torch.int32), batch.seq_lens[:1], batch.block_tables[:1], 16, 1
    )
    assert torch.equal(together, cpu.paged_attention(q[tail - 1 : tail], cache, alone, 0.125, window)[0])


def test_what_lies_behind_the_end_of_a_sequence_does_not_matter(cpu):
    for dtype in (torch.float32, torch.bfloat16):
        rows = [(1, 37), (20, 41), (1, 3)]
        case = Case(dtype, 1, 5, 64, 16, rows, None, None, 0)
        q, keys_values = random_sequences(case)
        batch, blocks = scattered_batch(rows, 16)
        clean = fill(cpu, batch, blocks, keys_values, dtype)
        dirty = fill(cpu, batch, blocks, keys_values, dtype, filler=float("nan"))
        expected = cpu.paged_attention(q, clean, batch, 0.125)
        assert torch.equal(cpu.paged_attention(q, dirty, batch, 0.125), expected)


def test_copied_blocks_read_like_their_sources_and_negative_slots_are_skipped(cpu):
    k, v = torch.randn(16, 1, 32), torch.randn(16, 1, 32)
    cache = torch.zeros(cpu.kv_cache_shape(3, 16, 1, 32))
    cpu.write_kv(k, v, cache, torch.arange(16))
    before = cache.clone()
    cpu.write_kv(k, v, cache, torch.full((16,), -1))
    assert torch.equal(cache, before)
    cpu.copy_blocks(cache, torch.tensor([0]), torch.tensor([2]))
    q = torch.randn(1, 2, 32)
    results = []
    for block in (0, 2):
        batch = AttentionBatch(
            torch.tensor([0, 1], dtype=torch.int32),
            torch.tensor([16], dtype=torch.int32),
            torch.tensor([[block]], dtype=torch.int32),
            16,
            1,
        )
        results.append(cpu.paged_attention(q, cache, batch, 0.2))
    assert torch.equal(results[0], results[1]) and results[0].abs().sum() > 0
