"""Qwen3: Llama's layer with a norm over each head of the queries and the keys."""

from __future__ import annotations

import dataclasses

from octavo.layers.decoder import DecoderLayer, PreNormLayer
from octavo.models.base import Builder, CausalLM


class Qwen3ForCausalLM(CausalLM):
    def build_layer(self, build: Builder, index: int) -> DecoderLayer:
        name = f"model.layers.{index}."
        settings = dataclasses.replace(build.attention_settings(index), qk_norm_eps=build.config.rms_norm_eps)
        return PreNormLayer(
            build.attention(f"{name}self_attn.", settings),
            build.mlp(f"{name}mlp."),
            before=build.norm(f"{name}input_layernorm"),
            between=build.norm(f"{name}post_attention_layernorm"),
        )
