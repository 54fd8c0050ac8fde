"""Tiny random models that transformers makes, with a tokenizer beside, and prompts for them."""

from __future__ import annotations

from pathlib import Path

import tokenizers
import torch
import transformers

SIZES = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
    "bos_token_id": 0, "eos_token_id": 5, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
SLIDING = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]}
MODELS = {
    "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig(**SIZES)),
    "gemma3": (transformers.Gemma3ForCausalLM, transformers.Gemma3TextConfig(**SIZES, **SLIDING)),
}
PROMPTS = [[7 + 13 * i % 80 for i in range(45)], [9, 8, 7], [11 * i % 90 for i in range(20)]]


def save_model(name: str, folder: Path) -> None:
    """One of MODELS, in float32, as a folder that the engine loads."""
    make, config = MODELS[name]
    torch.manual_seed(3)
    network = make(config).float().eval()
    with torch.no_grad():
        network.lm_head.weight.normal_()  # far from uniform: scores do not tie
    network.save_pretrained(folder)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())[: SIZES["vocab_size"]]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({p: i for i, p in enumerate(alphabet)}, []))
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
