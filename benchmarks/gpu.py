"""Speed of the Triton kernels beside what this GPU can do, measured in one run: about three minutes.

    python benchmarks/gpu.py [--rounds N]

First the limits: a copy of 1 GiB (bytes read and written a second) and a square bfloat16 product of torch's.
Then each kernel, at shapes of an 8B model (32 query and 8 KV heads of 128, hidden 4096, inner 14336) in
bfloat16: its time, and the least bytes or operations that it could do with as a share of the limit. Times
are medians of GPU events; between runs a buffer larger than the GPU's cache is overwritten, so that inputs
come from memory. A kernel that fails, hangs or breaks the GPU's context says so in its line; the others are
measured in a new process. The exit status is then 1.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import TypeAlias

import torch

from octavo_kernels import AttentionBatch, KernelsUnavailable, Ops, load
from octavo_kernels.ops import FP8

HIDDEN, INNER, HEADS, KV_HEADS, DIM, BLOCK = 4096, 14336, 32, 8, 128, 16
DEVICE = "cuda"
DTYPE = torch.bfloat16
SCALE = DIM**-0.5
ATTENTION = (
    (1, 1024, 1, None, DTYPE, 0),
    (1, 32768, 1, None, DTYPE, 0),
    (1, 1024, 64, None, DTYPE, 0),
    (1, 1024, 256, None, DTYPE, 32768),
    (1, 4096, 64, None, DTYPE, 0),
    (1, 4096, 64, None, FP8, 0),
    (1, 4096, 64, None, torch.int8, 0),
    (1, 4096, 64, 1024, DTYPE, 0),
    (512, 512, 8, None, DTYPE, 0),
    (4096, 4096, 1, None, DTYPE, 0),
    (512, 16384, 4, None, DTYPE, 0),
    (4096, 4096, 1, 1024, DTYPE, 0),
)
"""Queries of a sequence, its context, sequences, window, what the cache holds, and the longest context that
the tables have room for, where that is not the same.
"""
TOKENS = (64, 8192)
COPIED = 1 << 30
SQUARE = 8192
FLUSHED = 512 << 20
"""Bytes; larger than any GPU's last cache."""
FLUSHES = 4
"""In a row: meanwhile the host starts all that is timed, so that no launch is waited for."""
PATIENCE_S = 120.0
"""For one line; kernels are compiled in it."""


class Clock:
    """Times work on the GPU."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        self._flush = torch.empty(FLUSHED, dtype=torch.uint8, device=DEVICE)

    def seconds(self, run: Callable[[], object]) -> float:
        """Median of ``rounds`` runs after a warm-up, which compiles."""
        for _ in range(3):
            run()
        spans = []
        for _ in range(self.rounds):
            for _ in range(FLUSHES):
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
    """What is timed, with the least that it has to do: bytes to move, or operations of products."""

    run: Callable[[], object]
    bytes: float = 0
    operations: float = 0


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(DTYPE)


def copy(ops: Ops) -> Work:
    source, target = torch.empty(2, COPIED, dtype=torch.uint8, device=DEVICE)
    return Work(lambda: target.copy_(source), bytes=2 * COPIED)


def product(ops: Ops) -> Work:
    a, b = random(SQUARE, SQUARE), random(SQUARE, SQUARE)
    return Work(lambda: a @ b, operations=2 * SQUARE**3)


def batch_of(queries: int, context: int, sequences: int) -> AttentionBatch:
    """Equal sequences, their blocks scattered."""
    blocks = -(-context // BLOCK) * sequences
    return AttentionBatch(
        query_start=torch.arange(sequences + 1, dtype=torch.int32, device=DEVICE) * queries,
        seq_lens=torch.full((sequences,), context, dtype=torch.int32, device=DEVICE),
        block_tables=torch.randperm(blocks, device=DEVICE).int().view(sequences, -1),
        block_size=BLOCK,
        max_query_len=queries,
    )


def attention(
    ops: Ops, queries: int, context: int, sequences: int, window: int | None, dtype: torch.dtype, room: int
) -> Work:
    batch = batch_of(queries, context, sequences)
    if room > context:  # tables of the longest request that may come, not of those that are here
        tables = torch.zeros(sequences, room // BLOCK, dtype=torch.int32, device=DEVICE)
        tables[:, : batch.block_tables.shape[1]] = batch.block_tables
        batch.block_tables = tables
    shape = ops.kv_cache_shape(-(-context // BLOCK) * sequences, BLOCK, KV_HEADS, DIM, dtype)
    cache = torch.randn(shape, device=DEVICE).to(dtype)
    q = random(queries * sequences, HEADS, DIM)
    run = partial(ops.paged_attention, q, cache, batch, SCALE, window, None, torch.empty_like(q))
    span = min(context, window or context)
    if queries == 1:
        held = shape[-1] * cache.itemsize  # of one token in one head; in int8 with its scale
        return Work(run, bytes=sequences * span * KV_HEADS * 2 * held + 2 * q.numel() * q.itemsize)
    pairs = sum(min(context - queries + i + 1, span) for i in range(queries)) * sequences
    return Work(run, operations=4 * pairs * HEADS * DIM)


def norm(ops: Ops, tokens: int) -> Work:
    x, y, weight = random(tokens, HIDDEN), random(tokens, HIDDEN), random(HIDDEN)
    return Work(partial(ops.rms_norm, x, weight, 1e-5, y), bytes=2 * x.numel() * x.itemsize)


def add_and_norm(ops: Ops, tokens: int) -> Work:
    x, y, residual = random(tokens, HIDDEN), random(tokens, HIDDEN), random(tokens, HIDDEN)
    run = partial(ops.add_rms_norm, x, residual, random(HIDDEN), 1e-5, y)
    return Work(run, bytes=4 * x.numel() * x.itemsize)


def rotary(ops: Ops, tokens: int) -> Work:
    q, k = random(tokens, HEADS, DIM), random(tokens, KV_HEADS, DIM)
    cos, sin = torch.rand(2, 8192, DIM // 2, device=DEVICE)
    run = partial(ops.rotary, q, k, cos, sin, torch.arange(tokens, device=DEVICE))
    return Work(run, bytes=2 * (q.numel() + k.numel()) * q.itemsize + tokens * DIM * 4)


def kv_write(ops: Ops, tokens: int) -> Work:
    k, v = random(tokens, KV_HEADS, DIM), random(tokens, KV_HEADS, DIM)
    shape = ops.kv_cache_shape(tokens // BLOCK, BLOCK, KV_HEADS, DIM)
    cache = torch.zeros(shape, dtype=DTYPE, device=DEVICE)
    run = partial(ops.write_kv, k, v, cache, torch.randperm(tokens, device=DEVICE))
    return Work(run, bytes=4 * k.numel() * k.itemsize)


def gate_up(ops: Ops, tokens: int) -> Work:
    pair = ops.pack_gate_up(random(INNER, 64), random(INNER, 64), DTYPE)
    narrow, out = random(tokens, 64), random(tokens, INNER)
    # The product writes gate and up, the activation reads them and writes its result; and the weights.
    moved = 5 * out.numel() * out.itemsize + 2 * INNER * 64 * out.itemsize
    return Work(partial(ops.gate_up, narrow, pair, "silu", out), bytes=moved)


def parts() -> dict[str, Callable[[Ops], Work]]:
    """Every line of the table, by name; the limits come first."""
    found: dict[str, Callable[[Ops], Work]] = {"copy": copy, "product": product}
    for queries, context, sequences, window, dtype, room in ATTENTION:
        kind = {FP8: "fp8 cache, ", torch.int8: "int8 cache, "}.get(dtype, "")
        kind += f"window {window}, " if window else ""
        name = f"attention, {kind}{sequences} x {queries} queries, context {context}"
        name += f" of {room}" if room else ""
        found[name] = partial(
            attention,
            queries=queries,
            context=context,
            sequences=sequences,
            window=window,
            dtype=dtype,
            room=room,
        )
    for tokens in TOKENS:
        for kernel in (norm, add_and_norm, rotary, kv_write, gate_up):
            name = f"{kernel.__name__.replace('_', ' ')}, {tokens} tokens"
            found[name] = partial(kernel, tokens=tokens)
    return found


Found: TypeAlias = "tuple[float, float, float] | str"
"""Seconds, bytes, operations; or why there are none."""
Measure: TypeAlias = "Callable[[int, Connection], None]"
"""Runs in a process of its own: sends what it finds of each part from a first one on."""


def measure(first: int, results: Connection, rounds: int) -> None:
    """As far as the GPU's context lasts."""
    ops, clock = load("triton", "cuda"), Clock(rounds)
    for make in list(parts().values())[first:]:
        try:
            work = make(ops)
            results.send((clock.seconds(work.run), work.bytes, work.operations))
            del work
        except Exception as error:  # whatever it is, it is this part's alone
            results.send(f"{type(error).__name__}: {error}".splitlines()[0])
            try:
                torch.cuda.synchronize()
            except RuntimeError:
                os._exit(0)  # the context is lost, and to clean up would fail as well
        torch.cuda.empty_cache()


def each(measure: Measure, count: int, patience_s: float = PATIENCE_S) -> Iterator[Found]:
    """What ``measure`` sends of each of ``count`` parts. Of one that breaks its process, or takes longer than
    ``patience_s``, what became of it; a new process goes on after it.
    """
    context, done = multiprocessing.get_context("spawn"), 0
    while done < count:
        ours, theirs = context.Pipe(duplex=False)
        process, began, why = context.Process(target=measure, args=(done, theirs)), done, ""
        process.start()
        theirs.close()
        try:
            while done < count and not why:
                if ours.poll(patience_s):
                    yield ours.recv()
                    done += 1
                else:
                    why = f"took longer than {patience_s:.0f} s"
                    process.kill()
        except EOFError:
            process.join()
            if process.exitcode or done == began:
                why = f"its process ended with status {process.exitcode}"
        process.join()
        if why:
            yield why
            done += 1


def line(name: str, found: Found, bandwidth: float, peak: float) -> str:
    """Of the table. A limit that is not known is 0."""
    if isinstance(found, str):
        return f"{name:62} {found}"
    seconds, moved, done = found
    limit, rate = (bandwidth, moved / seconds) if moved else (peak, done / seconds)
    rates = f"{rate / 1e9:7.0f} {'':8}" if moved else f"{'':7} {rate / 1e12:8.0f}"
    share = f"{rate / limit:9.0%}" if limit else f"{'?':>9}"
    return f"{name:62} {seconds * 1e6:9.1f} {rates} {share}"


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
    print(f"{torch.cuda.get_device_name()} ({ops.isa}), torch {torch.__version__}\n")
    print(f"{'':62} {'us':>9} {'GB/s':>7} {'TFLOP/s':>8} {'of limit':>9}")
    names, bandwidth, peak, failed = list(parts()), 0.0, 0.0, 0
    for name, found in zip(names, each(partial(measure, rounds=options.rounds), len(names)), strict=True):
        if isinstance(found, str):
            failed += 1
        elif name == "copy":
            bandwidth = found[1] / found[0]
        elif name == "product":
            peak = found[2] / found[0]
        print(line(name, found, bandwidth, peak), flush=True)
    if failed:
        raise SystemExit(f"{failed} of {len(names)} could not be measured")


if __name__ == "__main__":
    main()
