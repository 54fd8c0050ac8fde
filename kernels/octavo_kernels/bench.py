"""Speed of the C++ kernels beside this machine's limits and torch, measured in one run.

    python -m octavo_kernels.bench [--threads N] [--rounds N] [--layers N] [--only PART]

The shapes are SmolLM2-135M's in bfloat16. A round passes over all layers' matrices and the head, 270 MB,
so they come from memory. In each round a plain read of as many bytes, multiplications in registers (the
peak of a product), ours and torch's take turns, and medians are compared: on a shared machine times move,
their ratios less so. A bar is the fraction of the limit that binds: reading memory for few rows, the peak
for many. ``paging`` sets attention over scattered blocks of 16 tokens against the same kernel over the same
blocks in order, and over one block a sequence, contiguous memory; and against torch over contiguous memory.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from octavo_kernels import AttentionBatch, DrawSettings, KernelsUnavailable, Ops, PackedWeight, load
from octavo_kernels.cpu.library import open_library, usable_cpus
from octavo_kernels.memory import aligned_zeros

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, VOCAB = 576, 9, 3, 64, 1536, 49152
QKV = (HEADS + 2 * KV_HEADS) * HEAD_DIM
SCALE = HEAD_DIM**-0.5
BLOCK_SIZE = 16
DTYPE = torch.bfloat16
HEAD_ROWS = 32
"""A prefill computes logits of one row a sequence, so the head sees at most so many."""

DRAWS = {
    "greedy": DrawSettings(0.0, 0, 1.0, 0.0, 0.0),
    "all": DrawSettings(1.0, 0, 1.0, 0.0, 0.4),
    "top-p 0.9": DrawSettings(1.0, 0, 0.9, 0.0, 0.4),
    "top-k 50": DrawSettings(1.0, 50, 1.0, 0.0, 0.4),
    "both": DrawSettings(1.0, 50, 0.9, 0.0, 0.4),
}

Layer = tuple[PackedWeight, PackedWeight, PackedWeight, PackedWeight]


def turns(rounds: int, *runs: Callable[[], object]) -> list[list[float]]:
    """The times in seconds of each of the runs, taken in turns after a warm-up."""
    times: list[list[float]] = [[] for _ in runs]
    for round_number in range(rounds + 1):
        for taken, run in zip(times, runs, strict=True):
            start = time.perf_counter()
            run()
            if round_number:
                taken.append(time.perf_counter() - start)
    return times


def medians(rounds: int, *runs: Callable[[], object]) -> list[float]:
    """The median time of each of the runs."""
    return [statistics.median(taken) for taken in turns(rounds, *runs)]


def reader(size: int) -> Callable[[], object]:
    """Reads ``size`` bytes of memory with every thread."""
    memory = np.ones(size, np.uint8)  # numpy asks for huge pages, as the weights and caches have them
    read = open_library().long.read
    return lambda: read(memory.ctypes.data, memory.nbytes)


class Limits:
    """What this machine reads from memory and multiplies at most, taken in turns with what it is set against.

    The peak is that of bfloat16 in registers, on every thread, for about 10 ms.
    """

    def __init__(self) -> None:
        multiply = open_library().long.multiply
        bfloat16, steps = 1, 1000
        start = time.perf_counter()
        operations = multiply(bfloat16, steps)
        steps = round(steps * 0.01 / (time.perf_counter() - start))
        self._multiply, self._operations = partial(multiply, bfloat16, steps), operations * steps // 1000

    def medians(
        self, rounds: int, size: int, operations: float, *runs: Callable[[], object]
    ) -> tuple[list[float], str]:
        """The median time of each of the runs, and of the first, which reads ``size`` bytes and does so many
        ``operations``, the limit that it comes nearest to, drawn and in figures.
        """
        read, multiplied, *times = medians(rounds, reader(size), self._multiply, *runs)
        peak = self._operations / multiplied
        fractions = {
            f"read limit ({size / read / 1e9:.1f} GB/s)": read / times[0],
            f"peak ({peak / 1e12:.2f} TFLOP/s)": operations / times[0] / peak,
        }
        name, fraction = max(fractions.items(), key=lambda item: item[1])
        return times, f"{'█' * round(20 * fraction):·<20} {fraction:4.0%} of the {name}"


def random(n: int, k: int) -> Tensor:
    return (torch.randn(n, k) * k**-0.5).to(DTYPE)


class Model:
    """The matrices of a model, packed for ours and plain for torch."""

    def __init__(self, ops: Ops, layers: int) -> None:
        self.plain: list[list[Tensor]] = []
        self.packed: list[Layer] = []
        for _ in range(layers):
            qkv, o, down = random(QKV, HIDDEN), random(HIDDEN, HIDDEN), random(HIDDEN, INTERMEDIATE)
            gate, up = random(INTERMEDIATE, HIDDEN), random(INTERMEDIATE, HIDDEN)
            self.plain.append([qkv, o, torch.cat([gate, up]), down])
            pair = ops.pack_gate_up(gate, up, DTYPE)
            self.packed.append((ops.pack(qkv, DTYPE), ops.pack(o, DTYPE), pair, ops.pack(down, DTYPE)))
        self.plain_head = random(VOCAB, HIDDEN)
        self.head = ops.pack(self.plain_head, DTYPE)
        self.parameters = sum(w.numel() for layer in self.plain for w in layer) + self.plain_head.numel()

    def ours(self, ops: Ops, x: Tensor, wide: Tensor) -> None:
        for qkv, o, pair, down in self.packed:
            ops.matmul(x, qkv)
            ops.matmul(x, o)
            ops.gate_up(x, pair)
            ops.matmul(wide, down)
        ops.matmul(x[:HEAD_ROWS], self.head)

    def torchs(self, x: Tensor, wide: Tensor) -> None:
        for qkv, o, pair, down in self.plain:
            F.linear(x, qkv)
            F.linear(x, o)
            gate, up = F.linear(x, pair).chunk(2, dim=-1)
            F.silu(gate) * up
            F.linear(wide, down)
        F.linear(x[:HEAD_ROWS], self.plain_head)


def products(ops: Ops, layers: int, rounds: int) -> None:
    model = Model(ops, layers)
    size = model.parameters * 2
    head = model.plain_head.numel()
    limits = Limits()
    print(f"products: matrices of {layers} layers and the head, {size / 1e6:.0f} MB")
    for m in (1, 2, 4, 8, 16, 32, 64, 256, 512):
        x, wide = torch.randn(m, HIDDEN).to(DTYPE), torch.randn(m, INTERMEDIATE).to(DTYPE)
        needed = 2 * (m * (model.parameters - head) + min(m, HEAD_ROWS) * head)
        runs = partial(model.ours, ops, x, wide), partial(model.torchs, x, wide)
        (ours, torchs), reached = limits.medians(rounds, size, needed, *runs)
        print(f"  M {m:4}: {ours * 1e3:8.2f} ms; torch's time is {torchs / ours:5.2f} of it; {reached}")


def decode_batch(
    queries: int,
    context: int,
    sequences: int,
    block_size: int = BLOCK_SIZE,
    order: Callable[[int], Tensor] = torch.randperm,
    shared: int = 0,
) -> AttentionBatch:
    """Sequences of one length, their blocks scattered; the first ``shared`` tokens are in the same ones."""
    blocks = -(-context // block_size) * sequences
    tables = order(blocks).int().view(sequences, -1)
    tables[:, : shared // block_size] = tables[0, : shared // block_size].clone()
    return AttentionBatch(
        query_start=torch.arange(sequences + 1, dtype=torch.int32) * queries,
        seq_lens=torch.full((sequences,), context, dtype=torch.int32),
        block_tables=tables,
        block_size=block_size,
        max_query_len=queries,
    )


def caches_for(ops: Ops, batch: AttentionBatch, layers: int) -> list[Tensor]:
    """In one piece of memory, large and aligned as an engine's."""
    shape = (layers, *ops.kv_cache_shape(batch.block_tables.numel(), batch.block_size, KV_HEADS, HEAD_DIM))
    return [layer.copy_(torch.randn(shape[1:])) for layer in aligned_zeros(shape, DTYPE)]


def attend(ops: Ops, q: Tensor, caches: list[Tensor], batch: AttentionBatch, out: Tensor) -> None:
    for cache in caches:
        ops.paged_attention(q, cache, batch, SCALE, out=out)


def attend_torch(q: Tensor, caches: list[Tensor], mask: Tensor) -> None:
    """Over contiguous keys and values, already gathered: kinder to torch than an engine could be."""
    for kv in caches:
        F.scaled_dot_product_attention(q, kv[0], kv[1], attn_mask=mask, enable_gqa=True)


def scores(queries: int, context: int) -> float:
    """Floating-point operations of causal attention of one sequence and layer."""
    return 2 * 2 * queries * (context - (queries - 1) / 2) * HEADS * HEAD_DIM


def attention(ops: Ops, layers: int, rounds: int) -> None:
    limits = Limits()
    print(f"attention of {layers} layers")
    for queries, context, sequences, shared in (
        (1, 256, 1, 0),
        (1, 2048, 1, 0),
        (1, 4096, 1, 0),
        (1, 512, 8, 0),
        (1, 4096, 8, 0),
        (1, 512, 32, 0),
        (1, 816, 48, 768),
        (512, 512, 1, 0),
        (512, 2048, 1, 0),
    ):
        batch = decode_batch(queries, context, sequences, shared=shared)
        caches = caches_for(ops, batch, layers)
        q = torch.randn(sequences * queries, HEADS, HEAD_DIM).to(DTYPE)
        dense = [torch.randn(2, sequences, KV_HEADS, context, HEAD_DIM).to(DTYPE) for _ in range(layers)]
        mask = torch.ones(queries, context, dtype=torch.bool).tril(context - queries)
        size = layers * 2 * (context * sequences - shared * (sequences - 1)) * KV_HEADS * HEAD_DIM * 2
        needed = scores(queries, context) * sequences * layers
        (ours, torchs), reached = limits.medians(
            rounds,
            size,
            needed,
            partial(attend, ops, q, caches, batch, torch.empty_like(q)),
            partial(attend_torch, q.view(sequences, queries, HEADS, HEAD_DIM).transpose(1, 2), dense, mask),
        )
        print(
            f"  {sequences:2} x {queries:3} queries, context {context:4}"
            + (f" ({shared} shared)" if shared else "")
            + f": {ours * 1e3:8.2f} ms; torch's time is {torchs / ours:5.2f} of it; {reached}"
        )


def rotation(runs: list[Callable[[], object]]) -> Callable[[], object]:
    """One of the runs a call, from the first to the last and again."""
    turn = itertools.cycle(runs)
    return lambda: next(turn)()


def paging(ops: Ops, layers: int, rounds: int) -> None:
    print(f"attention over scattered blocks of {BLOCK_SIZE} tokens: time over others', median (and least)")
    for queries, context, sequences in (
        (1, 512, 1),
        (1, 2048, 1),
        (1, 8192, 1),
        (1, 512, 32),
        (1, 2048, 8),
        (512, 512, 1),
        (128, 4096, 1),
    ):
        count = layers if queries == 1 else min(layers, 4)
        q = torch.randn(sequences * queries, HEADS, HEAD_DIM).to(DTYPE)
        runs = []
        for size, order in (
            (BLOCK_SIZE, torch.randperm),
            (BLOCK_SIZE, torch.arange),
            (context, torch.arange),
        ):
            batch = decode_batch(queries, context, sequences, size, order)
            out = torch.empty_like(q)
            caches = caches_for(ops, batch, count)
            runs.append(rotation([partial(attend, ops, q, [cache], batch, out) for cache in caches]))
        torch_q = q.view(sequences, queries, HEADS, HEAD_DIM).transpose(1, 2)
        dense = torch.randn(count, 2, sequences, KV_HEADS, context, HEAD_DIM).to(DTYPE)
        mask = torch.ones(queries, context, dtype=torch.bool).tril(context - queries)
        torchs = rotation([partial(attend_torch, torch_q, [kv], mask) for kv in dense])
        # Torch apart: whichever of ours came after it would find the caches that it leaves.
        ours, *others = [*turns(rounds * count, *runs), *turns(rounds, torchs)]
        least, median = min(ours), statistics.median(ours)
        ratios = [f"{median / statistics.median(taken):.3f} ({least / min(taken):.3f})" for taken in others]
        print(
            f"  {sequences:2} x {queries:3} queries, context {context:4}: {least * 1e6:6.0f} us at best;"
            f" to blocks in order {ratios[0]}, contiguous {ratios[1]}, torch {ratios[2]}"
        )


class Step:
    """A whole step of the model, as an engine runs it: recorded once, then replayed in one call."""

    def __init__(self, ops: Ops, model: Model, batch: AttentionBatch) -> None:
        self.ops, self.model, self.batch = ops, model, batch
        self.sequences, tokens = batch.seq_lens.numel(), int(batch.query_start[-1])
        queries, context = tokens // self.sequences, int(batch.seq_lens[0])
        self.caches = caches_for(ops, batch, len(model.packed))
        positions = torch.arange(context - queries, context)
        self.positions = positions.repeat(self.sequences)
        blocks = batch.block_tables[:, positions // BLOCK_SIZE].long()
        self.slots = (blocks * BLOCK_SIZE + positions % BLOCK_SIZE).flatten()
        angles = torch.rand(context, HEAD_DIM // 2)
        self.cos, self.sin = angles.cos(), angles.sin()
        self.norm = torch.ones(HIDDEN, dtype=DTYPE)
        self.h, self.x, self.y = (torch.zeros(tokens, HIDDEN, dtype=DTYPE) for _ in range(3))
        self.qkv = torch.empty(tokens, QKV, dtype=DTYPE)
        self.wide = torch.empty(tokens, INTERMEDIATE, dtype=DTYPE)
        self.logits = torch.empty(self.sequences, VOCAB)
        self.last = batch.query_start[1:].long() - 1
        self.replay = ops.record(self.layers)

    def layers(self) -> None:
        ops, x = self.ops, self.x
        q, k, v = self.qkv.view(len(x), -1, HEAD_DIM).split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        y = self.y.view(len(x), HEADS, HEAD_DIM)
        ops.rms_norm(self.h, self.norm, 1e-5, out=x)
        for (qkv, o, pair, down), cache in zip(self.model.packed, self.caches, strict=True):
            ops.matmul(x, qkv, out=self.qkv)
            ops.rotary(q, k, self.cos, self.sin, self.positions)
            ops.write_kv(k, v, cache, self.slots)
            ops.paged_attention(q, cache, self.batch, SCALE, out=y)
            ops.matmul(self.y, o, out=x)
            ops.add_rms_norm(x, self.h, self.norm, 1e-5, out=x)
            ops.gate_up(x, pair, out=self.wide)
            ops.matmul(self.wide, down, out=x)
            ops.add_rms_norm(x, self.h, self.norm, 1e-5, out=x)

    def __call__(self) -> None:
        self.h.zero_()
        self.replay(len(self.x), self.sequences)
        self.ops.matmul(self.x[self.last], self.model.head, out=self.logits)


def step(ops: Ops, layers: int, rounds: int) -> None:
    model, limits = Model(ops, layers), Limits()
    head = model.plain_head.numel()
    print("a whole step, every operation")
    for queries, context, sequences in ((1, 256, 1), (1, 256, 8), (1, 256, 32), (512, 512, 1)):
        run = Step(ops, model, decode_batch(queries, context, sequences))
        size = model.parameters * 2 + 2 * context * sequences * KV_HEADS * HEAD_DIM * 2 * layers
        needed = 2 * (queries * sequences * (model.parameters - head) + sequences * head)
        needed += scores(queries, context) * sequences * layers
        (ours,), reached = limits.medians(rounds, size, needed, run)
        print(
            f"  {sequences:2} x {queries:3} queries, context {context:4}: {ours * 1e3:8.2f} ms,"
            f" {sequences * queries / ours:6.0f} tokens/s; {reached}"
        )


def sampling(ops: Ops, layers: int, rounds: int) -> None:
    """Torch, which sorts the vocabulary where a cut asks for it, draws from one row."""
    reference = load("reference")
    print("sampling, microseconds a row (torch's in brackets)")
    for vocabulary, rows in ((VOCAB, 1), (VOCAB, 32), (VOCAB, 256), (262_144, 1), (262_144, 32)):
        logits = torch.randn(rows, vocabulary) * 3
        times = []
        for name, settings in DRAWS.items():
            draws = torch.tensor([settings] * rows, dtype=torch.float64)
            runs = partial(ops.sample, logits, draws), partial(reference.sample, logits[:1], draws[:1])
            ours, torchs = medians(rounds, *runs)
            times.append(f"{name} {ours / rows * 1e6:.0f} ({torchs * 1e6:.0f})")
        print(f"  vocabulary {vocabulary:6}, {rows:3} rows: {', '.join(times)}")


def positive(text: str) -> int:
    """A number from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=positive, default=usable_cpus())
    parser.add_argument("--rounds", type=positive, default=9)
    parser.add_argument("--layers", type=positive, default=30)
    parts = {part.__name__: part for part in (products, attention, paging, step, sampling)}
    parser.add_argument("--only", choices=parts)
    options = parser.parse_args()
    try:
        ops = load("cpu")
    except (KernelsUnavailable, ValueError) as error:
        raise SystemExit(f"octavo_kernels.bench: {error}") from error
    ops.set_num_threads(options.threads)
    torch.set_num_threads(options.threads)
    print(f"{ops.isa}, {options.threads} threads, torch {torch.__version__}")
    for name, part in parts.items():
        if options.only in (None, name):
            part(ops, options.layers, options.rounds)


if __name__ == "__main__":
    main()
