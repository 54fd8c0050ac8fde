"""Triton's attention over the block table equals the reference: prompts and decodes, any heads and blocks."""

import dataclasses

import pytest
import torch
from attention_cases import Case, assert_equals_reference, random_case, random_inputs, scattered_batch

HALF, BRAIN = torch.float16, torch.bfloat16


@pytest.mark.parametrize("seed", range(14))
def test_mixed_batches_equal_the_reference(ops, seed):
    assert_equals_reference(ops, random_case(seed, decode=False), seed)


@pytest.mark.parametrize("seed", range(16))
def test_decode_batches_equal_the_reference(ops, seed):
    assert_equals_reference(ops, random_case(seed, decode=True, longest=700), seed)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("block_size", [8, 16, 32, 64, 128])
def test_every_block_size_and_head_dimension_of_the_models_here_is_served(ops, block_size, dim):
    case = Case(BRAIN, 1, 4, dim, block_size, ((1, 150),))
    assert_equals_reference(ops, case, 0)
    assert_equals_reference(ops, dataclasses.replace(case, rows=((3, 150), (1, 9)), window=40), 0)


@pytest.mark.parametrize("rows", [((1, 9000),), ((1, 2600), (1, 3), (1, 256), (1, 257))])
def test_a_long_context_in_as_many_parts_as_there_are_equals_the_reference(ops, rows):
    assert_equals_reference(ops, Case(torch.float32, 1, 2, 16, 64, rows), 1)
    assert_equals_reference(ops, Case(torch.float32, 1, 2, 16, 64, rows, window=2000), 1)


def test_a_result_does_not_depend_on_the_batch_around_it(ops):
    rows = ((1, 900), (1, 30), (1, 2000))
    case = Case(HALF, 2, 3, 64, 16, rows)
    q, cache, batch = random_inputs(case, 3)
    together = ops.paged_attention(q, cache, batch, **case.options)
    assert torch.equal(together, ops.paged_attention(q, cache, batch, **case.options))
    for i in range(len(rows)):
        alone = dataclasses.replace(
            batch,
            query_start=torch.tensor([0, 1], dtype=torch.int32),
            seq_lens=batch.seq_lens[i : i + 1],
            block_tables=batch.block_tables[i : i + 1],
        )
        assert torch.equal(
            together[i : i + 1], ops.paged_attention(q[i : i + 1], cache, alone, **case.options)
        )


def test_rows_without_a_context_pad_a_decode_batch(ops):
    for rows in (((1, 40), (1, 8)), ((1, 600), (1, 8))):
        case = Case(torch.float32, 1, 2, 16, 8, rows)
        q, cache, batch = random_inputs(case, 0)
        expected = ops.paged_attention(q, cache, batch, **case.options)
        batch.seq_lens[1] = 0
        out = torch.full_like(q, 7.0)
        ops.paged_attention(q, cache, batch, **case.options, out=out)
        assert torch.equal(out[0], expected[0]) and not out[1].any()


def test_a_sequence_without_queries_is_passed_over(ops, reference):
    case = Case(torch.float32, 1, 2, 16, 8, ((5, 20), (3, 12), (4, 4)))
    q, cache, batch = random_inputs(case, 0)
    batch.query_start = torch.tensor([0, 5, 5, 9], dtype=torch.int32)
    expected = reference.paged_attention(q[:9], cache, batch, **case.options)
    torch.testing.assert_close(ops.paged_attention(q[:9], cache, batch, **case.options), expected)


def test_a_window_reads_only_what_it_sees(ops):
    """Blocks before the window are no blocks at all: their entries point outside the cache."""
    for queries in (1, 3):
        case = Case(torch.float32, 1, 2, 16, 8, ((queries, 800),), window=50)
        q, cache, batch = random_inputs(case, 0)
        expected = ops.paged_attention(q, cache, batch, **case.options)
        batch.block_tables[0, : (800 - queries + 1 - 50) // 8] = 2**30
        assert torch.equal(ops.paged_attention(q, cache, batch, **case.options), expected)


def test_a_head_too_wide_is_refused(ops):
    batch, blocks = scattered_batch(((1, 4),), 8)
    with pytest.raises(ValueError, match="head dimension 320: the triton kernels take 256 at most"):
        ops.paged_attention(torch.zeros(1, 1, 320), torch.zeros(blocks, 1, 2, 8, 320), batch, 0.1)
