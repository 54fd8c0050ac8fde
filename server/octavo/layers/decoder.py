"""One layer of a decoder, in the two forms that the architectures here use."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from octavo.layers.attention import Attention
from octavo.layers.batch import ForwardBatch
from octavo.layers.linear import GatedMLP
from octavo.layers.norm import RMSNorm


class DecoderLayer(Protocol):
    """Takes what the block before left in ``y``, leaves its own addition to the residual stream there."""

    def __call__(self, batch: ForwardBatch, cache: Tensor) -> None: ...


class PreNormLayer:
    """Norm before attention and before the MLP (Llama, Qwen)."""

    def __init__(self, attention: Attention, mlp: GatedMLP, before: RMSNorm, between: RMSNorm) -> None:
        self._attention, self._mlp = attention, mlp
        self._before, self._between = before, between

    def __call__(self, batch: ForwardBatch, cache: Tensor) -> None:
        a = batch.activations
        self._before.add_and_norm(a)
        self._attention(batch, cache)
        self._between.add_and_norm(a)
        self._mlp(a)


class SandwichLayer:
    """Norms before and after attention and the MLP, all four inside the residual branch (Gemma)."""

    def __init__(
        self,
        attention: Attention,
        mlp: GatedMLP,
        before_attention: RMSNorm,
        after_attention: RMSNorm,
        before_mlp: RMSNorm,
        after_mlp: RMSNorm,
    ) -> None:
        self._attention, self._mlp = attention, mlp
        self._before_attention, self._after_attention = before_attention, after_attention
        self._before_mlp, self._after_mlp = before_mlp, after_mlp

    def __call__(self, batch: ForwardBatch, cache: Tensor) -> None:
        a = batch.activations
        self._before_attention.add_and_norm(a)
        self._attention(batch, cache)
        self._after_attention.in_place(a.y)
        self._before_mlp.add_and_norm(a)
        self._mlp(a)
        self._after_mlp.in_place(a.y)
