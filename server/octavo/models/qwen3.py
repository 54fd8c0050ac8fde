"""Qwen3: Llama's layer with a norm over each head of the queries and the keys."""

from __future__ import annotations

import dataclasses

from octavo.layers.attention import Attention
from octavo.layers.decoder import DecoderLayer, PreNormLayer
from octavo.layers.linear import GatedMLP
from octavo.models.base import Builder, CausalLM


class Qwen3ForCausalLM(CausalLM):
    def build_layer(self, build: Builder, index: int) -> DecoderLayer:
        name = f"model.layers.{index}."
        settings = dataclasses.replace(build.attention_settings(index), qk_norm_eps=build.config.rms_norm_eps)
        return PreNormLayer(
            Attention(build.ops, build.weights, f"{name}self_attn.", settings),
            GatedMLP(build.ops, build.weights, f"{name}mlp.", build.config.activation),
            before=build.norm(f"{name}input_layernorm"),
            between=build.norm(f"{name}post_attention_layernorm"),
        )
