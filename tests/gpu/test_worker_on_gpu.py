"""The engine on a GPU: the tokens of the CPU, with graphs and without."""

import gc

import pytest
import torch
from tiny_models import MODELS, PROMPTS, save_model

from octavo import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.8, top_k=20, seed=5, max_tokens=24, ignore_eos=True)


@pytest.fixture(autouse=True)
def _needs_a_gpu(ops):
    yield
    gc.collect()
    torch.cuda.empty_cache()


def tokens(path, params, **settings):
    pool = {"dtype": "float32", "max_model_len": 128, "max_num_batched_tokens": 32, "max_num_seqs": 4}
    llm = LLM(model=path, **{**pool, **settings})
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_tokens_are_those_of_the_cpu(name, params, tmp_path):
    save_model(name, tmp_path)
    wanted = tokens(tmp_path, params, device="cpu", kv_cache_memory_bytes="1Mi")
    for settings in ({}, {"enforce_eager": True}, {"async_scheduling": False}):
        assert tokens(tmp_path, params, device="cuda", gpu_memory_utilization=0.5, **settings) == wanted


def test_a_draft_model_on_a_gpu_changes_no_token(tmp_path):
    for name in ("target", "draft"):
        save_model("llama", tmp_path / name)
    speculation = {"model": str(tmp_path / "draft"), "num_speculative_tokens": 3}
    wanted = tokens(tmp_path / "target", GREEDY, device="cpu", kv_cache_memory_bytes="1Mi")
    settings = {"kv_cache_memory_bytes": "4Mi", "speculative_config": speculation}
    assert tokens(tmp_path / "target", GREEDY, device="cuda", **settings) == wanted
