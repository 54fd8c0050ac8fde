"""Gemma 3, text: sandwich norms, q and k norms, scaled embeddings, five sliding layers to each full one.

The config gives each layer its window and its rotary base (local layers 10,000). Stored norm weights lack a
+1 in safetensors, and hold it already in GGUF.
"""

from __future__ import annotations

import dataclasses

from octavo.layers.decoder import DecoderLayer, SandwichLayer
from octavo.models.base import Builder, CausalLM
from octavo.models.config import ModelConfig


class Gemma3ForCausalLM(CausalLM):
    norm_offset = 1.0

    @staticmethod
    def embedding_scale(config: ModelConfig) -> float:
        return float(config.hidden_size**0.5)

    def build_layer(self, build: Builder, index: int) -> DecoderLayer:
        name, offset = f"model.layers.{index}.", self.norm_offset
        settings = dataclasses.replace(
            build.attention_settings(index),
            qk_norm_eps=build.config.rms_norm_eps,
            qk_norm_offset=offset,
        )
        return SandwichLayer(
            build.attention(f"{name}self_attn.", settings),
            build.mlp(f"{name}mlp."),
            before_attention=build.norm(f"{name}input_layernorm", offset),
            after_attention=build.norm(f"{name}post_attention_layernorm", offset),
            before_mlp=build.norm(f"{name}pre_feedforward_layernorm", offset),
            after_mlp=build.norm(f"{name}post_feedforward_layernorm", offset),
        )
