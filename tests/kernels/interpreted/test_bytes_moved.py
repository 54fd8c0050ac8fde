"""What the kernels move is within 10 % of the least that any could.

Counted in the interpreter: of each load and store, the sectors of 32 bytes that its active lanes touch, each
once (a GPU moves no less than a sector, and joins the lanes of one instruction). What a program reads again
in another instruction, or another program reads too, is counted again. A norm's weight is counted apart:
every program reads it, after the first one from the GPU's cache.
"""

import numpy as np
import pytest
import torch
from attention_cases import Case, random_inputs
from triton.runtime.interpreter import interpreter_builder

from octavo_kernels.ops import FP8, SCALE_BYTES

SECTOR = 32
BRAIN = torch.bfloat16


class Traffic:
    """Bytes moved while it is entered, but for those of the tensors ``apart``."""

    def __init__(self, *apart):
        self.apart = [(t.data_ptr(), t.data_ptr() + t.numel() * t.itemsize) for t in apart]
        self.bytes = 0

    def __enter__(self):
        builder = type(interpreter_builder)
        self.load, self.store = builder.create_masked_load, builder.create_masked_store

        def load(this, pointers, mask, *rest):
            self.count(pointers.data, mask.data)
            return self.load(this, pointers, mask, *rest)

        def store(this, pointers, value, mask, *rest):
            self.count(pointers.data, mask.data)
            return self.store(this, pointers, value, mask, *rest)

        builder.create_masked_load, builder.create_masked_store = load, store
        return self

    def __exit__(self, *error):
        builder = type(interpreter_builder)
        builder.create_masked_load, builder.create_masked_store = self.load, self.store

    def count(self, pointers, mask):
        touched = np.broadcast_to(pointers, np.broadcast_shapes(pointers.shape, mask.shape))[
            np.broadcast_to(mask, np.broadcast_shapes(pointers.shape, mask.shape))
        ]
        for start, end in self.apart:
            touched = touched[(touched < start) | (touched >= end)]
        self.bytes += np.unique(touched // SECTOR).size * SECTOR


def size(*tensors):
    return sum(t.numel() * t.itemsize for t in tensors)


@pytest.mark.parametrize(
    ("stored", "kv_heads", "group", "dim", "block", "rows", "window"),
    [
        (BRAIN, 3, 3, 64, 16, (700,), None),
        (torch.int8, 3, 3, 64, 16, (700,), None),
        (BRAIN, 2, 4, 128, 16, (2500, 130), None),
        (torch.int8, 2, 4, 128, 16, (2500, 130), None),
        (FP8, 1, 4, 256, 32, (1000, 300), None),
        (BRAIN, 2, 4, 128, 16, (1500, 1030), 512),
        (FP8, 1, 8, 128, 128, (9000,), None),
    ],
)
def test_decode_reads_the_context_once(ops, stored, kv_heads, group, dim, block, rows, window):
    """At least: the window's keys and values, queries, results, entries of tables, and lengths."""
    decodes = tuple((1, context) for context in rows)
    case = Case(BRAIN, kv_heads, group, dim, block, decodes, window, stored=stored)
    q, cache, batch = random_inputs(case, 0)
    with Traffic() as traffic:
        out = ops.paged_attention(q, cache, batch, **case.options)
    seen = sum(min(context, window or context) for context in rows)
    held = dim * cache.itemsize + (SCALE_BYTES if stored == torch.int8 else 0)
    least = seen * kv_heads * 2 * held + size(q, out, batch.seq_lens) + seen // block * 4
    assert least <= traffic.bytes <= 1.1 * least


@pytest.mark.parametrize("stored", [BRAIN, FP8, torch.int8], ids=["bf16", "fp8", "int8"])
@pytest.mark.parametrize(("kv_heads", "dim", "block"), [(3, 64, 16), (8, 128, 32), (1, 256, 8)])
def test_written_keys_and_values_move_once(ops, kv_heads, dim, block, stored):
    tokens = 40
    k, v = torch.randn(2, tokens, kv_heads, dim).to(BRAIN)
    cache = torch.zeros(ops.kv_cache_shape(8, block, kv_heads, dim, stored)).to(stored)
    slots = torch.randperm(8 * block)[:tokens]
    with Traffic(slots) as traffic:
        ops.write_kv(k, v, cache, slots)
    least = size(k, v) + size(k, v) * cache.itemsize // 2
    if stored == torch.int8:  # and each scale, of which neighbours are other tokens'
        least += 2 * tokens * kv_heads * SECTOR
    assert traffic.bytes == least


@pytest.mark.parametrize(("tokens", "heads", "dim"), [(9, 1, 576), (5, 1, 4096), (7, 8, 128), (3, 5, 64)])
def test_norms_move_each_element_once(ops, tokens, heads, dim):
    x = torch.randn(tokens, heads, dim).to(BRAIN)
    weight = torch.ones(dim, dtype=BRAIN)
    with Traffic(weight) as traffic:
        out = ops.rms_norm(x, weight, 1e-5)
    assert size(x, out) <= traffic.bytes <= 1.1 * size(x, out)
    flat, residual = x.view(-1, dim), torch.randn(tokens * heads, dim).to(BRAIN)
    with Traffic(weight) as traffic:
        out = ops.add_rms_norm(flat, residual, weight, 1e-5)
    least = size(flat, residual, residual, out)
    assert least <= traffic.bytes <= 1.1 * least


@pytest.mark.parametrize("dim", [1536, 14336])
def test_a_gated_activation_reads_the_pair_and_writes_half(ops, dim):
    x = torch.randn(3, 8).to(BRAIN)
    packed = ops.pack_gate_up(torch.randn(dim, 8), torch.randn(dim, 8), BRAIN)
    with Traffic() as traffic:
        out = ops.gate_up(x, packed)
    assert 3 * size(out) <= traffic.bytes <= 1.1 * 3 * size(out)


def test_rotary_moves_queries_and_keys_there_and_back(ops):
    q, k = torch.randn(6, 32, 128).to(BRAIN), torch.randn(6, 8, 128).to(BRAIN)
    cos, sin = torch.rand(2, 64, 64)
    with Traffic() as traffic:
        ops.rotary(q, k, cos, sin, torch.arange(6))
    least = 2 * size(q, k) + 6 * 2 * 64 * 4
    assert least <= traffic.bytes <= 1.1 * least
