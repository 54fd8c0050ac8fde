"""What the architectures share: embed, run the layers, norm, project to the vocabulary."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from octavo.layers.attention import Attention, AttentionSettings
from octavo.layers.batch import ActivationShape, ForwardBatch
from octavo.layers.decoder import DecoderLayer
from octavo.layers.embedding import Embedding, LogitsHead, vocabulary_table
from octavo.layers.linear import GatedMLP
from octavo.layers.norm import RMSNorm
from octavo.layers.rotary import RotaryTables
from octavo.layers.weights import Weights
from octavo.models.config import ModelConfig
from octavo_kernels import Ops

ROPE_FACTORS = "rope_freqs.weight"  # in GGUF files of Llama 3: what divides each rotary frequency


@dataclasses.dataclass(frozen=True)
class Builder:
    """Builds the parts of a layer from the kernels, the parameters, the config and the rotary tables."""

    ops: Ops
    weights: Weights
    config: ModelConfig
    shape: ActivationShape
    rotary: RotaryTables

    def norm(self, name: str, offset: float = 0.0) -> RMSNorm:
        """A norm over the residual stream's width."""
        return RMSNorm(self.ops, self.weights, name, self.shape.hidden, self.config.rms_norm_eps, offset)

    def attention(self, name: str, settings: AttentionSettings) -> Attention:
        return Attention(self.ops, self.weights, name, self.shape, settings)

    def mlp(self, name: str) -> GatedMLP:
        return GatedMLP(self.ops, self.weights, name, self.shape, self.config.activation)

    def attention_settings(self, index: int) -> AttentionSettings:
        """The settings of layer ``index`` that the config decides."""
        config = self.config
        return AttentionSettings(
            scale=config.query_scale,
            rotary=self.rotary.get(config.rope_of_layers[index]),
            window=config.windows[index],
            softcap=config.attn_softcap,
            bias=config.attention_bias,
        )


class CausalLM:
    """A decoder-only model. An architecture says how its layers are built, and its constants.

    Loads every parameter on construction (``ModelLoadError`` names what is missing or unexpected); rotary
    tables reach ``max_positions``.
    """

    norm_offset = 0.0  # what the architecture adds to the stored weights of its norms

    def __init__(self, config: ModelConfig, weights: Weights, ops: Ops, max_positions: int) -> None:
        self.config = config
        whole = ActivationShape(
            hidden=config.hidden_size,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            intermediate=config.intermediate_size,
        )
        self.shape = whole.share(weights.world)
        vocabulary = (config.vocab_size, config.hidden_size)
        factors = None
        if weights.has(ROPE_FACTORS):
            factors = weights.exact(ROPE_FACTORS, (config.head_dim // 2,))
        rotary = RotaryTables(config.head_dim, max_positions, weights.device, factors)
        build = Builder(ops, weights, config, whole, rotary)
        scale, tied = self.embedding_scale(config), config.tie_word_embeddings
        self._embedding = Embedding(ops, weights, "model.embed_tokens", vocabulary, scale)
        self._layers = [self.build_layer(build, index) for index in range(config.num_layers)]
        self._norm = build.norm("model.norm", self.norm_offset)
        table = self._embedding.table
        if tied:
            weights.ignore("lm_head.weight")
        else:
            table = vocabulary_table(ops, weights, "lm_head", vocabulary)
        self._head = LogitsHead(ops, table, config.vocab_size, config.final_softcap, weights.communicator)
        weights.finish()

    @staticmethod
    def embedding_scale(config: ModelConfig) -> float:
        """What embeddings are multiplied by."""
        return 1.0

    def build_layer(self, build: Builder, index: int) -> DecoderLayer:
        raise TypeError(f"{type(self).__name__} does not say how its layers are built")

    def embed(self, batch: ForwardBatch) -> None:
        """Set the residual stream to the embeddings of the T tokens."""
        self._embedding(batch)

    def run_layers(self, batches: Sequence[ForwardBatch], caches: Sequence[tuple[int, Tensor]]) -> None:
        """Run T tokens through all layers, writing their keys and values; hidden states come out in ``x``.

        ``batches`` is one step as each KV group sees it; ``caches`` names each layer's group, and its pages.
        Only the kernels' operations work here, on the batch's buffers, so that they can be recorded.
        """
        for layer, (group, pages) in zip(self._layers, caches, strict=True):
            layer(batches[group], pages)
        self._norm.add_and_norm(batches[0].activations)

    def logits(self, hidden: Tensor, rows: Tensor | None) -> Tensor:
        """Float32 logits [S, vocabulary] of the given rows of ``hidden`` (None: of all). All ranks call this,
        but only on the first are they whole.
        """
        return self._head(hidden if rows is None else torch.index_select(hidden, 0, rows))
