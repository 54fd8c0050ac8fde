"""A recorded step does what its operations do one by one, for any number of rows."""

import contextlib
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo_kernels import AttentionBatch

HEADS, KV_HEADS, DIM, HIDDEN, INNER = 4, 2, 16, 48, 80
MOST, BLOCK = 24, 8


class Layer:
    """Buffers for up to ``most`` rows, and one layer's operations on the first of them."""

    def __init__(self, ops, dtype, most=MOST):
        self.ops = ops
        torch.manual_seed(0)

        def values(*shape):
            return torch.randn(shape).to(dtype)

        self.qkv = ops.pack(values((HEADS + 2 * KV_HEADS) * DIM, HIDDEN), dtype)
        self.o = ops.pack(values(HIDDEN, HEADS * DIM), dtype)
        self.pair = ops.pack_gate_up(values(INNER, HIDDEN), values(INNER, HIDDEN), dtype)
        self.down = ops.pack(values(HIDDEN, INNER), dtype)
        self.norm, self.head_norm = values(HIDDEN), values(DIM)
        angles = torch.rand(most, DIM // 2)
        self.cos, self.sin = angles.cos(), angles.sin()
        self.input = values(most, HIDDEN)
        self.residual, self.x, self.y = (torch.zeros(most, HIDDEN, dtype=dtype) for _ in range(3))
        self.heads = torch.zeros(most, HEADS + 2 * KV_HEADS, DIM, dtype=dtype)
        self.attended = torch.zeros(most, HEADS, DIM, dtype=dtype)
        self.inner = torch.zeros(most, INNER, dtype=dtype)
        shape = ops.kv_cache_shape(most, BLOCK, KV_HEADS, DIM)
        self.cache = torch.zeros(shape, dtype=dtype)
        self.positions, self.slots = torch.zeros(2, most, dtype=torch.int64)
        self.starts, self.lengths = torch.zeros(2, most + 1, dtype=torch.int32)
        self.tables = torch.zeros(most, most, dtype=torch.int32)

    def prompts(self, lengths):
        """Set the inputs to prompts of these lengths, each in blocks of its own -> rows, sequences."""
        first = block = 0
        for i, length in enumerate(lengths):
            rows = slice(first, first + length)
            self.positions[rows] = torch.arange(length)
            blocks = -(-length // BLOCK)
            self.tables[i, :blocks] = torch.arange(block, block + blocks)
            self.slots[rows] = block * BLOCK + torch.arange(length)
            self.lengths[i], self.starts[i + 1] = length, first + length
            first, block = first + length, block + blocks
        self.residual.copy_(self.input)
        self.y.zero_()
        return first, len(lengths)

    def run(self, rows, sequences):
        ops, x, y, residual = self.ops, self.x[:rows], self.y[:rows], self.residual[:rows]
        ops.add_rms_norm(y, residual, self.norm, 1e-5, x)
        ops.matmul(x, self.qkv, self.heads[:rows].view(rows, -1))
        q, k, v = self.heads[:rows].split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        ops.rms_norm(q, self.head_norm, 1e-5, q)
        ops.rotary(q, k, self.cos, self.sin, self.positions[:rows])
        ops.write_kv(k, v, self.cache, self.slots[:rows])
        starts, lengths = self.starts[: sequences + 1], self.lengths[:sequences]
        batch = AttentionBatch(starts, lengths, self.tables[:sequences], BLOCK, rows)
        ops.paged_attention(q, self.cache, batch, 0.25, out=self.attended[:rows])
        ops.matmul(self.attended[:rows].view(rows, -1), self.o, y)
        ops.add_rms_norm(y, residual, self.norm, 1e-5, x)
        ops.gate_up(x, self.pair, "silu", self.inner[:rows])
        ops.matmul(self.inner[:rows], self.down, y)


@settings(max_examples=20, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=6).filter(lambda lengths: sum(lengths) <= MOST),
    recorded_rows=st.integers(1, MOST),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_a_replay_equals_the_calls_for_any_rows(cpu, lengths, recorded_rows, dtype):
    check_replay(Layer(cpu, dtype), lengths, recorded_rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [(500,), (150, 1, 320), (1, 1100)])
def test_a_replay_equals_the_calls_for_long_prompts(cpu, lengths, dtype):
    check_replay(Layer(cpu, dtype, sum(lengths)), lengths, recorded_rows=1)


def check_replay(layer, lengths, recorded_rows):
    replay = layer.ops.record(lambda: layer.run(recorded_rows, 1))
    assert not layer.x.any() and not layer.cache.any()  # recording runs nothing
    layer.run(*layer.prompts(lengths))
    expected = [t.clone() for t in (layer.y, layer.residual, layer.cache)]
    for t in (layer.x, layer.cache, layer.heads):
        t.zero_()
    replay(*layer.prompts(lengths))
    for result, wanted in zip((layer.y, layer.residual, layer.cache), expected, strict=True):
        assert torch.equal(result, wanted)


@pytest.mark.parametrize("windows", [(None, None, 200, None), (200, None, None, 200)])
def test_layers_of_several_kinds_share_what_is_planned_for_their_kind_alone(cpu, windows):
    """Blocks that begin several contexts, in tables of two groups of layers, and in two steps."""
    length, sequences, size = 300, 5, 16
    blocks = -(-length // size)
    k, v, q = torch.randn(3, sequences * blocks * size, 1, 32)
    cache = torch.zeros(cpu.kv_cache_shape(sequences * blocks, size, 1, 32))
    cpu.write_kv(k, v, cache, torch.arange(len(k)))
    starts = torch.arange(sequences + 1, dtype=torch.int32)
    lengths = torch.full((sequences,), length, dtype=torch.int32)
    groups = torch.zeros(2, sequences, blocks, dtype=torch.int32)
    results = torch.zeros(len(windows), sequences, 3, 32)

    def layers():
        for i, window in enumerate(windows):
            batch = AttentionBatch(starts, lengths, groups[i // 2], size, 1)
            cpu.paged_attention(q[: 3 * sequences].view(-1, 3, 32), cache, batch, 0.2, window, out=results[i])

    replay = cpu.record(layers)
    for shared in (17, 9):
        groups[:] = torch.arange(sequences * blocks).view(sequences, blocks)
        groups[0, :, :shared] = groups[0, 0, :shared]
        groups[1, 1:4, :8] = groups[1, 2, :8]
        layers()
        expected = results.clone()
        replay(sequences, sequences)
        assert torch.equal(results, expected)


def test_a_result_without_a_place_is_not_recorded_and_leaves_the_kernels_usable(cpu):
    x, w = torch.ones(2, 8), cpu.pack(torch.ones(4, 8), torch.float32)
    with pytest.raises(ValueError, match="needs a place"):
        cpu.record(lambda: cpu.matmul(x, w))
    assert (cpu.matmul(x, w) == 8).all()


def test_the_reference_records_nothing(reference):
    calls = []
    assert reference.record(lambda: calls.append(1)) is None and not calls


class Graph:
    """Stands in for torch's CUDA graphs."""

    pools: ClassVar = []  # that each capture was given
    replayed: ClassVar = []

    def pool(self):
        return id(self)

    def replay(self):
        self.replayed.append(id(self))


@contextlib.contextmanager
def capture(graph, pool):
    Graph.pools.append(pool)
    yield


def test_gpu_graphs_that_live_at_once_share_their_memory(monkeypatch):
    """The memory of graphs that are gone may be gone with them."""
    TritonOps = pytest.importorskip("octavo_kernels.triton.backend").TritonOps
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(Graph, "pools", [])
    ops, calls = TritonOps("sm_90"), []
    assert not ops.replays_any_size
    replays = [ops.record(lambda: calls.append(1)) for _ in range(3)]
    assert len(calls) == 6  # compiled by a first run, then captured
    first, *others = Graph.pools
    assert first is None and None not in others
    replays[0](1, 1)
    replays[1](1, 1)
    assert len(calls) == 6 and len(set(Graph.replayed)) == 2
    replays.clear()
    ops.record(lambda: None)
    assert Graph.pools[-1] is None
