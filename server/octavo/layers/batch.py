"""What one forward pass works on: the step's inputs, and the persistent buffers that activations live in."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from octavo_kernels import AttentionBatch


@dataclasses.dataclass(frozen=True, slots=True)
class ActivationShape:
    """Widths of the activations of one model, per token."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int

    def share(self, world: int) -> ActivationShape:
        """What one of ``world`` ranks holds: its heads and its part of the MLP, the stream whole. Of fewer KV
        heads than ranks each has one.
        """
        return ActivationShape(
            self.hidden,
            self.heads // world,
            max(1, self.kv_heads // world),
            self.head_dim,
            self.intermediate // world,
        )


class ActivationViews:
    """The buffers cut to T tokens. ``q``, ``k``, ``v`` are views of one ``qkv`` product."""

    __slots__ = ("attended", "attended_flat", "k", "mlp", "q", "qkv", "residual", "v", "x", "y")

    def __init__(self, buffers: ActivationBuffers, tokens: int) -> None:
        shape = buffers.shape
        self.residual = buffers.residual[:tokens]
        self.x = buffers.x[:tokens]
        self.y = buffers.y[:tokens]
        self.mlp = buffers.mlp[:tokens]
        self.qkv = buffers.qkv[:tokens]
        heads = self.qkv.view(tokens, shape.heads + 2 * shape.kv_heads, shape.head_dim)
        self.q, self.k, self.v = torch.split(heads, [shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
        self.attended_flat = buffers.attended[:tokens]
        self.attended = self.attended_flat.view(tokens, shape.heads, shape.head_dim)


class ActivationBuffers:
    """One buffer per kind of activation, shared by all layers and all steps: they run one after another.

    ``residual``: the stream; ``x``: a normed input; ``y``: what a block adds to the stream. Views for each
    number of tokens are made once and kept, so that a decode step makes no tensors of its own.
    """

    def __init__(
        self, shape: ActivationShape, max_tokens: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        def buffer(width: int) -> Tensor:
            return torch.zeros(max_tokens, width, dtype=dtype, device=device)

        self.shape = shape
        self.max_tokens = max_tokens
        self.residual, self.x, self.y = buffer(shape.hidden), buffer(shape.hidden), buffer(shape.hidden)
        self.qkv = buffer((shape.heads + 2 * shape.kv_heads) * shape.head_dim)
        self.attended = buffer(shape.heads * shape.head_dim)
        self.mlp = buffer(shape.intermediate)
        self._views: dict[int, ActivationViews] = {}

    def views(self, tokens: int) -> ActivationViews:
        """The buffers' first ``tokens`` rows."""
        views = self._views.get(tokens)
        if views is None:
            views = self._views[tokens] = ActivationViews(self, tokens)
        return views


@dataclasses.dataclass(slots=True)
class ForwardBatch:
    """The flat token batch of one step: T tokens of B sequences.

    ``token_ids``, ``positions`` and ``slots`` are int64 [T]; a slot is block * block_size + offset.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    attention: AttentionBatch
    activations: ActivationViews
