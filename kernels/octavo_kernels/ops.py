"""The operations a model is built from, and the two values that pass between a model and its backend.

Shapes use M or T for tokens, N and K for a weight's rows and columns, H and Hkv for query and KV heads, D for
the head dimension, B for sequences. Tensors may be strided views, but their last dimension is contiguous.
Activations and weights (but for quantised ones) of one model share one dtype. ``out`` has the result's shape
and dtype.

So does the KV cache, unless it has 8 bits. One of float8_e4m3fn (``FP8``) holds what is written over
``kv_scale``, (of keys, of values), up to 448, NaN for what is not finite, and is read times it. One of int8
holds the integers to which :func:`quantise_int8` rounds a token's keys of one head, or its values, and behind
those of a page their scales: so whoever copies blocks copies these with them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from octavo_kernels.quantised import QuantisedWeight

FP8 = torch.float8_e4m3fn
"""The 8-bit float of caches: 4 bits of exponent, 3 of mantissa."""
SCALE_BYTES = 4
"""Of the float32 scale that an int8 cache keeps for a token's keys, and for its values, in each head."""


class KernelsUnavailable(RuntimeError):
    """A backend that was asked for by name cannot run on this machine; the message says why."""


@dataclass(slots=True)
class PackedWeight:
    """A weight in the layout of the backend that packed it; only that backend can read ``data``."""

    shape: tuple[int, int]
    """Logical [N, K]; for a gate/up pair N is its intermediate size, so a product has N columns."""
    dtype: torch.dtype
    """Of the activations it multiplies."""
    data: Any
    paired: bool = False
    """True for a gate/up pair (``pack_gate_up``)."""

    def __post_init__(self) -> None:
        self.shape = (int(self.shape[0]), int(self.shape[1]))


@dataclass(slots=True)
class AttentionBatch:
    """Which queries belong to which sequence, and where the keys and values of each lie.

    Query i of sequence b is row ``query_start[b] + i`` and sits at position ``seq_lens[b] - query_len + i``.
    """

    query_start: Tensor
    """int32 [B + 1], on the CPU for the CPU backends; starts with 0 and ends with T."""
    seq_lens: Tensor
    """int32 [B]: tokens of context, these queries included. Where graphs serve numbers of sequences of their
    own, 0 is a sequence of padding: its one query gets zeros."""
    block_tables: Tensor
    """int32 [B, max_blocks]: position p lies in entry p // block_size; entries past seq_lens are not read."""
    block_size: int
    max_query_len: int


class DrawSettings(NamedTuple):
    """How a token is drawn from a row of logits: a row of :meth:`Ops.sample`'s ``draws``."""

    temperature: float
    """0: the largest logit is taken, and nothing below is looked at. Else from 1e-6 on."""
    top_k: float
    """How many tokens are kept at most; 0: any number."""
    top_p: float
    """The share of their mass that the tokens kept hold; 1: all."""
    min_p: float
    """The least probability of a token kept, over that of the first."""
    number: float
    """The random number in [0, 1)."""


Replay: TypeAlias = Callable[[int, int], None]
"""Runs what was recorded, for so many tokens (rows) and sequences in the same buffers."""


def quantise_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., D] -> integers int8 [..., D] and their scales float32 [...], which make the largest 127.

    A row with a number that is not finite has a scale that is not.
    """
    wide = x.float()
    scales = wide.abs().amax(-1) * (1.0 / 127.0)
    inverse = torch.where(scales >= torch.finfo(torch.float32).tiny, 1.0 / scales, 0.0)
    return (wide * inverse[..., None]).round().nan_to_num().to(torch.int8), scales


def as_bytes(cache: Tensor) -> Tensor:
    """A cache, as bytes if it is of FP8, which torch does not assign by index: for whoever copies blocks."""
    return cache.view(torch.uint8) if cache.dtype == FP8 else cache


class Ops(Protocol):
    """What a backend offers. One instance serves one process; calls come from one thread at a time."""

    name: str
    isa: str
    """The instruction set in use: "amx", "avx512", "avx2", or "torch" for the reference."""
    dtypes: frozenset[torch.dtype]
    """Compute dtypes the backend takes; weights of any float dtype are converted when packed."""

    replays_any_size: bool
    """Whether what :meth:`record` noted serves any numbers of rows and sequences in the same buffers; else,
    as a GPU's graph, those of its own recording only."""

    def set_num_threads(self, n: int) -> None:
        """Use n threads in all (the caller's included)."""

    def record(self, forward: Callable[[], None]) -> Replay | None:
        """Note the operations that ``forward`` calls, to run them often; None where the backend does not
        record. Recording runs none of them, or on a GPU, where kernels are compiled when they first run, all
        of them once.

        They must be operations on rows of buffers that stay where they are, with results in place or to
        ``out``: not :meth:`lookup`, :meth:`copy_blocks` or :meth:`sample`. A replay reads and writes these
        buffers from their starts, whatever number of rows was recorded. The caller keeps the buffers alive.
        """

    def pack(self, weight: Tensor | QuantisedWeight, dtype: torch.dtype) -> PackedWeight:
        """Copy weight [N, K] (float32, bfloat16 or float16) into the backend's layout as ``dtype``.

        A quantised weight keeps its integers. It multiplies activations of ``dtype`` as
        :func:`octavo_kernels.quantised.quantise_activations` rounds them.
        """

    def matmul(
        self,
        x: Tensor,
        w: PackedWeight,
        out: Tensor | None = None,
        bias: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> Tensor:
        """x [M, K] times w transposed (+ bias [N]) -> [M, N], of x.dtype or of ``out_dtype`` (float32)."""

    def lookup(self, w: PackedWeight, rows: Tensor, out: Tensor) -> Tensor:
        """The rows (int64 [T]) of a weight that :meth:`pack` packed, as they were before -> out [T, K].

        Rows of a quantised weight come dequantised.
        """

    def pack_gate_up(
        self, gate: Tensor | QuantisedWeight, up: Tensor | QuantisedWeight, dtype: torch.dtype
    ) -> PackedWeight:
        """Pack gate and up, both [I, K] and of one kind, for :meth:`gate_up`."""

    def gate_up(
        self, x: Tensor, w: PackedWeight, activation: str = "silu", out: Tensor | None = None
    ) -> Tensor:
        """act(x gate^T) * (x up^T): x [M, K] -> [M, I]; activation is "silu" or "gelu_tanh"."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in float32 inside.

        x is [T, D] or, for per-head norms, [T, H, D]; weight [D] in x.dtype. ``out`` may be x itself.
        """

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor | None = None
    ) -> Tensor:
        """residual += x in place (both [T, D]), then the norm of the new residual."""

    def rotary(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> None:
        """Rotate q [T, H, D] and k [T, Hkv, D] in place, NeoX halves (d with d + D/2).

        cos and sin are float32 [P, D/2]; positions int64 [T].
        """

    def kv_cache_shape(
        self,
        num_blocks: int,
        block_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype | None = None,
    ) -> tuple[int, ...]:
        """Shape of one layer's cache of ``dtype``, K and V together, blocks first: for ``torch.zeros``.

        Without ``dtype`` that of any but int8, whose scales take room.
        """

    def copy_blocks(self, cache: Tensor, src: Tensor, dst: Tensor) -> None:
        """Copy whole blocks src[i] -> dst[i] (int64 [n]); no block is both a source and a destination."""

    def write_kv(
        self, k: Tensor, v: Tensor, cache: Tensor, slots: Tensor, kv_scale: tuple[float, float] = (1.0, 1.0)
    ) -> None:
        """Write k, v [T, Hkv, D] to slots int64 [T] (block * block_size + offset); negative: skipped."""

    def paged_attention(
        self,
        q: Tensor,
        cache: Tensor,
        batch: AttentionBatch,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        out: Tensor | None = None,
        kv_scale: tuple[float, float] = (1.0, 1.0),
    ) -> Tensor:
        """Causal attention of q [T, H, D] over the cached context -> [T, H, D].

        A query at position p sees positions j with p - window < j <= p. With ``softcap``, scores become
        ``softcap * tanh(scores / softcap)`` before the mask. kv_heads is read from the cache.
        """

    def sample(self, logits: Tensor, draws: Tensor | None = None) -> Tensor:
        """One token for each row of float32 logits [S, V] -> int64 [S], by ``draws`` (float64 [S, 5] on the
        CPU, rows of :class:`DrawSettings`; None: all greedy).

        -1 for a row with NaN, +infinity or nothing but -infinity. Of equal logits the lower token counts as
        the larger. A token weighs exp((logit - largest) / temperature). Kept are those that weigh at least
        min_p, of these the top_k largest, of these the fewest largest that hold top_p of their weight (at
        least one). Drawn is the first kept one, in the order of the vocabulary, at which the sum of the kept
        weights exceeds ``number`` times all of it. So a row's token depends on that row alone. Backends may
        differ by roundings only: where the number or a cut is within float32's precision of a boundary.
        """
