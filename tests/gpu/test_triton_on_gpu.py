"""The Triton kernels, run on a GPU, do what the reference does; they are graphs' material, and
deterministic."""

import pytest
import torch
from attention_cases import Case, assert_equals_reference, random_case, random_inputs

from octavo_kernels import AttentionBatch, DrawSettings, load
from octavo_kernels.ops import FP8

BRAIN = torch.bfloat16
ROUNDED = {"rtol": 2**-7, "atol": 1e-5}


def test_auto_chooses_these_kernels(ops):
    assert load("auto", "cuda", BRAIN).name == "triton"


@pytest.mark.parametrize("decode", [False, True], ids=["mixed", "decode"])
@pytest.mark.parametrize("seed", range(40))
def test_attention_equals_the_reference(ops, seed, decode):
    assert_equals_reference(ops, random_case(seed, decode=decode, longest=3000), seed, "cuda")


@pytest.mark.parametrize("window", [None, 700])
def test_results_are_the_same_in_every_run_and_in_every_batch(ops, window):
    rows = ((1, 20000), (1, 30), (1, 2000))
    case = Case(BRAIN, 2, 4, 128, 16, rows, window)
    q, cache, batch = random_inputs(case, 0, "cuda")
    together = ops.paged_attention(q, cache, batch, **case.options)
    for _ in range(20):
        assert torch.equal(together, ops.paged_attention(q, cache, batch, **case.options))
    starts = torch.tensor([0, 1], dtype=torch.int32, device="cuda")
    alone = AttentionBatch(starts, batch.seq_lens[:1], batch.block_tables[:1], 16, 1)
    assert torch.equal(together[:1], ops.paged_attention(q[:1], cache, alone, **case.options))


def test_a_captured_step_serves_other_contents(ops):
    """What the buffers hold may change between replays: lengths, tables and numbers."""
    case = Case(BRAIN, 2, 4, 64, 16, ((1, 900), (1, 300)))
    q, cache, batch = random_inputs(case, 0, "cuda")
    out = torch.zeros_like(q)
    replay = ops.record(lambda: ops.paged_attention(q, cache, batch, **case.options, out=out))
    q.normal_()
    batch.seq_lens[0] = 257
    replay(2, 2)
    torch.testing.assert_close(out, ops.paged_attention(q, cache, batch, **case.options), rtol=0, atol=0)


def test_offsets_pass_2_to_the_31(ops):
    blocks = 2**31 // (2 * 8 * 64) + 1
    cache = torch.empty(ops.kv_cache_shape(blocks, 8, 1, 64), dtype=BRAIN, device="cuda")
    last = blocks - 1
    k, v = torch.randn(8, 1, 64, device="cuda").to(BRAIN), torch.ones(8, 1, 64, device="cuda").to(BRAIN)
    ops.write_kv(k, v, cache, last * 8 + torch.arange(8, device="cuda"))
    assert torch.equal(cache[last, 0, 0], k[:, 0])
    starts, lengths, tables = (
        torch.tensor(values, dtype=torch.int32, device="cuda") for values in ([0, 1], [8], [[last]])
    )
    batch = AttentionBatch(starts, lengths, tables, 8, 1)
    q = torch.randn(1, 2, 64, device="cuda").to(BRAIN)
    assert (ops.paged_attention(q, cache, batch, 0.1) == 1).all()


@pytest.mark.parametrize("dtype", [torch.float32, BRAIN, torch.float16])
def test_elementwise_operations_equal_the_reference(ops, reference, dtype):
    torch.manual_seed(0)
    x, residual = torch.randn(2, 37, 4096, device="cuda").to(dtype)
    weight = torch.randn(4096, device="cuda").to(dtype)
    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), **ROUNDED)
    sums = residual.clone()
    expected = reference.add_rms_norm(x, sums, weight, 1e-5)
    torch.testing.assert_close(ops.add_rms_norm(x, residual, weight, 1e-5), expected, **ROUNDED)
    assert torch.equal(residual, sums)
    q, k = torch.randn(37, 32, 128, device="cuda").to(dtype), torch.randn(37, 8, 128, device="cuda").to(dtype)
    angles, positions = torch.rand(90, 64, device="cuda") * 6, torch.randint(0, 90, (37,), device="cuda")
    wanted = [q.clone(), k.clone()]
    reference.rotary(*wanted, angles.cos(), angles.sin(), positions)
    ops.rotary(q, k, angles.cos(), angles.sin(), positions)
    for result, expected in zip((q, k), wanted, strict=True):
        torch.testing.assert_close(result, expected, **ROUNDED)
    packed = ops.pack_gate_up(*torch.randn(2, 1500, 4096, device="cuda") / 64, dtype)
    for activation in ("silu", "gelu_tanh"):
        expected = reference.gate_up(x, packed, activation)
        torch.testing.assert_close(ops.gate_up(x, packed, activation), expected, **ROUNDED)


@pytest.mark.parametrize("cache_dtype", [BRAIN, FP8, torch.int8])
def test_written_slots_equal_the_reference_bit_for_bit(ops, reference, cache_dtype):
    k, v = torch.randn(2, 50, 8, 128, device="cuda").to(BRAIN) * 20
    slots = torch.randperm(8 * 16, device="cuda")[:50]
    slots[3] = -1
    scale = {"kv_scale": (0.3, 2.0)} if cache_dtype == FP8 else {}
    caches = []
    for backend in (ops, reference):
        cache = torch.zeros(backend.kv_cache_shape(8, 16, 8, 128, cache_dtype), device="cuda").to(cache_dtype)
        backend.write_kv(k, v, cache, slots, **scale)
        caches.append(cache.view(torch.uint8))
    assert torch.equal(*caches)


def test_logits_are_summed_in_float32_and_not_rounded(ops):
    x, w = torch.randn(5, 512, device="cuda").to(BRAIN), torch.randn(900, 512, device="cuda").to(BRAIN)
    exact = (x.double() @ w.double().T).float()
    result = ops.matmul(x, ops.pack(w, BRAIN), out_dtype=torch.float32)
    torch.testing.assert_close(result, exact, rtol=1e-4, atol=1e-3)


def test_draws_are_the_references_and_wait_for_nothing(ops, reference):
    logits = torch.randn(70, 3000, generator=torch.Generator().manual_seed(0)) * 3
    settings = [
        DrawSettings(i % 3 * 0.4, i % 5 * 7, 1 - i % 2 * 0.2, i % 4 * 0.01, (i * 0.37) % 1) for i in range(70)
    ]
    draws, placed = torch.tensor(settings, dtype=torch.float64), logits.cuda()
    ops.sample(placed, draws)  # what loads kernels may wait
    torch.cuda.set_sync_debug_mode("error")
    try:
        tokens = ops.sample(placed, draws)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(tokens.cpu(), reference.sample(logits, draws))
