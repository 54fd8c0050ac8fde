"""Triton's writes to the cache equal the reference's, bit for bit, in every dtype of it."""

import pytest
import torch
import triton
import triton.language as tl

from octavo_kernels import AttentionBatch
from octavo_kernels.ops import FP8
from octavo_kernels.triton.kv_cache import from_e4m3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stored", [None, FP8, torch.int8], ids=["as it is", "fp8", "int8"])
@pytest.mark.parametrize(("heads", "dim", "block"), [(1, 64, 16), (3, 24, 8), (8, 128, 32), (20, 80, 24)])
def test_written_slots_equal_the_reference_and_others_stay(ops, reference, dtype, stored, heads, dim, block):
    torch.manual_seed(heads)
    wide = (torch.randn(9, 2 * heads + 1, dim) * 20).to(dtype)
    k, v = wide[:, :heads], wide[:, heads : 2 * heads]
    slots = torch.randperm(4 * block)[:9]
    slots[[2, 5]] = -1
    stored = stored or dtype
    scale = {"kv_scale": (0.3, 2.0)} if stored == FP8 else {}
    caches = []
    for backend in (ops, reference):
        cache = torch.full(backend.kv_cache_shape(4, block, heads, dim, stored), 7.0).to(stored)
        backend.write_kv(k, v, cache, slots, **scale)
        caches.append(cache.view(torch.uint8))
    assert torch.equal(*caches)


def test_eight_bit_floats_are_torchs_for_every_size_of_number(ops, reference):
    """All magnitudes about the format's: subnormal, ties, the largest, and what is larger; no others."""
    halves = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
    k = halves.view(32, 32, 64)
    caches = []
    for backend in (ops, reference):
        cache = torch.zeros(backend.kv_cache_shape(1, len(k), 32, 64)).to(FP8)
        backend.write_kv(k, -k, cache, torch.arange(len(k)))
        caches.append(cache)
    torch.testing.assert_close(*(cache.float() for cache in caches), rtol=0, atol=0, equal_nan=True)
    keys = caches[0].float()[0, :, 0].transpose(0, 1)
    assert torch.equal(keys.isnan(), ~k.isfinite()) and keys.nan_to_num().abs().max() == 448


@triton.jit
def read_kernel(source, target, HARDWARE: tl.constexpr):
    place = tl.arange(0, 256)
    tl.store(target + place, from_e4m3(tl.load(source + place), HARDWARE))


@pytest.mark.parametrize("hardware", [True, False])
def test_every_eight_bit_float_is_read_exactly(hardware):
    numbers = torch.arange(256).to(torch.uint8)
    if hardware:
        numbers[[127, 255]] = 0  # the interpreter, other than hardware, has no NaN there
    result = torch.empty(256, dtype=torch.float16)
    read_kernel[(1,)](numbers, result, HARDWARE=hardware)
    expected = numbers.view(FP8).to(torch.float16)
    torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)


def test_offsets_pass_2_to_the_31(ops):
    """A pool of 2^31 elements and 128 more: the last block is written, copied to block 0, and attended to."""
    block = 2 * 8 * 64
    blocks = 2**31 // block + 1
    cache = torch.empty(ops.kv_cache_shape(blocks, 8, 1, 64), dtype=FP8)
    last = blocks - 1
    k, v = torch.randn(8, 1, 64).to(torch.bfloat16), torch.ones(8, 1, 64, dtype=torch.bfloat16)
    ops.write_kv(k, v, cache, last * 8 + torch.arange(8))
    assert torch.equal(cache[last, 0, 0], k[:, 0].to(FP8))
    batch = AttentionBatch(
        torch.tensor([0, 1], dtype=torch.int32),
        torch.tensor([8], dtype=torch.int32),
        torch.tensor([[last]], dtype=torch.int32),
        8,
        1,
    )
    q = torch.randn(1, 2, 64).to(torch.bfloat16)
    assert (ops.paged_attention(q, cache, batch, 0.1) == 1).all()


def test_copied_blocks_are_their_sources(ops):
    for dtype in (torch.bfloat16, FP8, torch.int8):
        cache = (torch.randn(ops.kv_cache_shape(4, 8, 2, 16, dtype)) * 9).to(dtype)
        ops.copy_blocks(cache, torch.tensor([0, 3]), torch.tensor([2, 1]))
        assert torch.equal(cache[0].float(), cache[2].float())
        assert torch.equal(cache[3].float(), cache[1].float())
