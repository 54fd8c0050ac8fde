"""Self-attention over the paged cache."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from octavo.layers.batch import ActivationShape, ForwardBatch
from octavo.layers.linear import COLUMNS, ROWS, Linear
from octavo.layers.norm import RMSNorm
from octavo.layers.weights import Outputs, Weights
from octavo_kernels import Ops
from octavo_kernels.ops import FP8


@dataclasses.dataclass(frozen=True)
class AttentionSettings:
    """What differs between layers and architectures. ``rotary`` is (cos, sin) float32 [positions, D/2]."""

    scale: float
    rotary: tuple[Tensor, Tensor]
    window: int | None = None
    softcap: float | None = None
    bias: bool = False
    qk_norm_eps: float | None = None
    qk_norm_offset: float = 0.0


class Attention:
    """o(attention(rotate(norm(q)), rotate(norm(k)), v)); reads ``x``, leaves the result in ``y``.

    The keys and values of the whole batch are written before any row attends, so that rows of one step may
    read blocks which other rows of it fill.
    """

    def __init__(
        self, ops: Ops, weights: Weights, name: str, shape: ActivationShape, settings: AttentionSettings
    ) -> None:
        self._rotary, self._write, self._attend = ops.rotary, ops.write_kv, ops.paged_attention
        self._settings = settings
        self._kv_scale = kv_scale(weights, name)
        self._cos, self._sin = settings.rotary
        queries, keys = shape.heads * shape.head_dim, Outputs(shape.kv_heads * shape.head_dim, shape.kv_heads)
        parts = {f"{name}q_proj": Outputs(queries), f"{name}k_proj": keys, f"{name}v_proj": keys}
        self._qkv = Linear(ops, weights, parts, shape.hidden, COLUMNS, settings.bias)
        self._o = Linear(ops, weights, {f"{name}o_proj": Outputs(shape.hidden)}, queries, ROWS, settings.bias)
        self._q_norm = self._k_norm = None
        if settings.qk_norm_eps is not None:
            size, eps, offset = shape.head_dim, settings.qk_norm_eps, settings.qk_norm_offset
            self._q_norm = RMSNorm(ops, weights, f"{name}q_norm", size, eps, offset)
            self._k_norm = RMSNorm(ops, weights, f"{name}k_norm", size, eps, offset)

    def __call__(self, batch: ForwardBatch, cache: Tensor) -> None:
        a, settings = batch.activations, self._settings
        self._qkv(a.x, a.qkv)
        if self._q_norm is not None and self._k_norm is not None:
            self._q_norm.in_place(a.q)
            self._k_norm.in_place(a.k)
        self._rotary(a.q, a.k, self._cos, self._sin, batch.positions)
        self._write(a.k, a.v, cache, batch.slots, self._kv_scale)
        self._attend(
            a.q,
            cache,
            batch.attention,
            settings.scale,
            settings.window,
            settings.softcap,
            a.attended,
            self._kv_scale,
        )
        self._o(a.attended_flat, a.y)


def kv_scale(weights: Weights, name: str) -> tuple[float, float]:
    """What keys, and values, are divided by where they are kept in FP8: 1.0 if the checkpoint does not say.

    It may say so under any of the names that compressed-tensors has had for it.
    """

    def scale(part: str) -> float:
        names = [f"{name}{part}{end}" for end in ("_scale", f"_proj.{part}_scale", "_proj.output_scale")]
        weights.ignore(*names)
        found = [each for each in names if weights.has(each)]
        return weights.scale(found[0]) if found and weights.cache_dtype == FP8 else 1.0

    return scale("k"), scale("v")
