"""A model's own definition, served by the Triton kernels: chunked prompts and decodes of a whole engine."""

import pytest
import tokenizers
import torch
import transformers

import octavo_kernels
from octavo import LLM, SamplingParams

SIZES = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
    "bos_token_id": 0, "eos_token_id": 5, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
SLIDING = {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]}
MODELS = {
    "llama": transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)),
    "gemma3": transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**SIZES, **SLIDING)),
}
PROMPTS = [[7 + 13 * i % 80 for i in range(45)], [9, 8, 7], [11 * i % 90 for i in range(20)]]


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_are_the_references(ops, reference, name, tmp_path, monkeypatch):
    torch.manual_seed(3)
    network = MODELS[name].float().eval()
    with torch.no_grad():
        network.lm_head.weight.normal_()  # far from uniform: scores do not tie
    network.save_pretrained(tmp_path)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())[: SIZES["vocab_size"]]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({p: i for i, p in enumerate(alphabet)}, []))
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    results = []
    for backend in (ops, reference):
        monkeypatch.setattr(octavo_kernels, "load", lambda *place, backend=backend: backend)
        llm = LLM(
            model=tmp_path,
            dtype="float32",
            kv_cache_memory_bytes="1Mi",
            max_model_len=128,
            max_num_batched_tokens=32,
        )
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        outputs = llm.generate(
            prompts, SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), use_tqdm=False
        )
        results.append([output.outputs[0].token_ids for output in outputs])
    assert results[0] == results[1]
