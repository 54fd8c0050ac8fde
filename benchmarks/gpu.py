"""Speed of the Triton kernels beside what this GPU can do, measured in one run: about five minutes at most.

    python benchmarks/gpu.py [--rounds N]

First the limits: a copy of 1 GiB (bytes read and written a second) and a square bfloat16 product of torch's.
Then each kernel, at shapes of an 8B model (32 query and 8 KV heads of 128, hidden 4096, inner 14336) in
bfloat16: its time, and the least bytes or operations that it could do with as a share of the limit. Times
are medians of GPU events; between runs a buffer larger than the GPU's cache is overwritten, so that inputs
come from memory.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from octavo_kernels import AttentionBatch, KernelsUnavailable, Ops, load
from octavo_kernels.ops import FP8

HIDDEN, INNER, HEADS, KV_HEADS, DIM, BLOCK = 4096, 14336, 32, 8, 128, 16
DTYPE = torch.bfloat16
SCALE = DIM**-0.5
COPIED = 1 << 30
SQUARE = 8192
FLUSHED = 512 << 20
"""Bytes; larger than any GPU's last cache."""


class Clock:
    """Times work on the GPU."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        self._flush = torch.empty(FLUSHED, dtype=torch.uint8, device="cuda")

    def seconds(self, run: Callable[[], object]) -> float:
        """Median of ``rounds`` runs after a warm-up, which compiles."""
        for _ in range(3):
            run()
        spans = []
        for _ in range(self.rounds):
            self._flush.zero_()
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            run()
            ended.record()
            spans.append((began, ended))
        torch.cuda.synchronize()
        return statistics.median(began.elapsed_time(ended) for began, ended in spans) / 1e3


@dataclass
class Work:
    """A kernel at a shape, with the least that it has to do: bytes to move, or operations of products."""

    name: str
    run: Callable[[], object]
    bytes: float = 0
    operations: float = 0


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(DTYPE)


def batch_of(queries: int, context: int, sequences: int) -> AttentionBatch:
    """Equal sequences, their blocks scattered."""
    blocks = -(-context // BLOCK) * sequences
    return AttentionBatch(
        query_start=torch.arange(sequences + 1, dtype=torch.int32, device="cuda") * queries,
        seq_lens=torch.full((sequences,), context, dtype=torch.int32, device="cuda"),
        block_tables=torch.randperm(blocks, device="cuda").int().view(sequences, -1),
        block_size=BLOCK,
        max_query_len=queries,
    )


def attention(ops: Ops) -> Iterator[Work]:
    for queries, context, sequences, window, dtype in (
        (1, 1024, 1, None, DTYPE),
        (1, 32768, 1, None, DTYPE),
        (1, 1024, 64, None, DTYPE),
        (1, 4096, 64, None, DTYPE),
        (1, 4096, 64, None, FP8),
        (1, 4096, 64, 1024, DTYPE),
        (512, 512, 8, None, DTYPE),
        (4096, 4096, 1, None, DTYPE),
        (512, 16384, 4, None, DTYPE),
        (4096, 4096, 1, 1024, DTYPE),
    ):
        batch = batch_of(queries, context, sequences)
        shape = ops.kv_cache_shape(batch.block_tables.numel(), BLOCK, KV_HEADS, DIM)
        cache = torch.randn(shape, device="cuda").to(dtype)
        q = random(queries * sequences, HEADS, DIM)
        run = partial(ops.paged_attention, q, cache, batch, SCALE, window, None, torch.empty_like(q))
        kind = "fp8 cache, " if dtype == FP8 else ""
        kind += f"window {window}, " if window else ""
        name = f"attention, {kind}{sequences} x {queries} queries, context {context}"
        span = min(context, window or context)
        if queries == 1:
            moved = sequences * span * KV_HEADS * 2 * DIM * cache.itemsize + 2 * q.numel() * q.itemsize
            yield Work(name, run, bytes=moved)
        else:
            pairs = sum(min(context - queries + i + 1, span) for i in range(queries)) * sequences
            yield Work(name, run, operations=4 * pairs * HEADS * DIM)


def elementwise(ops: Ops) -> Iterator[Work]:
    cos, sin = torch.rand(2, 8192, DIM // 2, device="cuda")
    weight = random(HIDDEN)
    pair = ops.pack_gate_up(random(INNER, 64), random(INNER, 64), DTYPE)
    for tokens in (64, 8192):
        x, y, residual = random(tokens, HIDDEN), random(tokens, HIDDEN), random(tokens, HIDDEN)
        size = x.numel() * x.itemsize
        yield Work(f"norm, {tokens} tokens", partial(ops.rms_norm, x, weight, 1e-5, y), bytes=2 * size)
        run = partial(ops.add_rms_norm, x, residual, weight, 1e-5, y)
        yield Work(f"add and norm, {tokens} tokens", run, bytes=4 * size)
        q, k, v = random(tokens, HEADS, DIM), random(tokens, KV_HEADS, DIM), random(tokens, KV_HEADS, DIM)
        heads = (q.numel() + k.numel()) * q.itemsize
        positions = torch.arange(tokens, device="cuda")
        run = partial(ops.rotary, q, k, cos, sin, positions)
        yield Work(f"rotary, {tokens} tokens", run, bytes=2 * heads + tokens * DIM * 4)
        cache = torch.zeros(
            ops.kv_cache_shape(tokens // BLOCK, BLOCK, KV_HEADS, DIM), dtype=DTYPE, device="cuda"
        )
        slots = torch.randperm(tokens, device="cuda")
        run = partial(ops.write_kv, k, v, cache, slots)
        yield Work(f"KV write, {tokens} tokens", run, bytes=4 * k.numel() * k.itemsize)
        narrow, out = random(tokens, 64), random(tokens, INNER)
        # The product writes gate and up, the activation reads them and writes its result; and the weights.
        moved = 5 * out.numel() * out.itemsize + 2 * INNER * 64 * out.itemsize
        run = partial(ops.gate_up, narrow, pair, "silu", out)
        yield Work(f"SiLU x up after a product over 64, {tokens} tokens", run, bytes=moved)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=50)
    options = parser.parse_args()
    try:
        ops = load("triton", "cuda")
    except KernelsUnavailable as why:
        raise SystemExit(str(why)) from why
    clock = Clock(options.rounds)
    source, target = torch.empty(2, COPIED, dtype=torch.uint8, device="cuda")
    bandwidth = 2 * COPIED / clock.seconds(lambda: target.copy_(source))
    a, b = random(SQUARE, SQUARE), random(SQUARE, SQUARE)
    peak = 2 * SQUARE**3 / clock.seconds(lambda: a @ b)
    print(f"{torch.cuda.get_device_name()} ({ops.isa}), torch {torch.__version__}")
    print(f"copy {bandwidth / 1e9:.0f} GB/s, product {peak / 1e12:.0f} TFLOP/s\n")
    print(f"{'':60} {'us':>9} {'GB/s':>7} {'TFLOP/s':>8} {'of limit':>9}")
    for works in (attention(ops), elementwise(ops)):
        for work in works:
            seconds = clock.seconds(work.run)
            moved, done = work.bytes / seconds, work.operations / seconds
            rates = f"{moved / 1e9:7.0f} {'':8}" if moved else f"{'':7} {done / 1e12:8.0f}"
            print(f"{work.name:60} {seconds * 1e6:9.1f} {rates} {moved / bandwidth + done / peak:9.0%}")


if __name__ == "__main__":
    main()
