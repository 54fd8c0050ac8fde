"""Keys and values in 8 bits: near those of bfloat16, in half the memory, and the same tokens in every mix."""

from __future__ import annotations

import copy
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DynamicCache

from octavo.core.sampling_params import SamplingParams
from octavo.errors import ConfigError, ModelLoadError
from octavo.worker.loading import pick_cache_dtype

TEXT = [  # the start of a licence, in SmolLM2's tokens
    504, 16571, 4791, 282, 260, 3279, 30, 4882, 28, 5119, 6252, 216, 34, 84, 3073, 338, 750, 3279, 29, 9562,
    13963, 1517, 355, 3252, 804, 411, 451, 1517, 1251, 325, 11457, 42, 585, 260, 3279, 1072, 441, 3577, 357,
]  # fmt: skip
PROMPTS = [TEXT, TEXT[:16], TEXT * 3, TEXT[:25]]
SETTINGS: dict[str, Any] = {
    "dtype": "auto", "max_model_len": 512, "kv_cache_memory_bytes": "32Mi", "max_num_batched_tokens": 512,
}  # fmt: skip
PLAIN = {"enable_prefix_caching": False, "async_scheduling": False}
LAYERS, KV_HEADS, DIM, BLOCK = 30, 3, 64, 16  # of SmolLM2 135M

in_8_bits = pytest.mark.parametrize("kind", ["fp8", "int8"])


def sampling(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 12, "ignore_eos": True, "temperature": 0.0, "seed": 5, **fields})


@in_8_bits
def test_tokens_do_not_depend_on_how_the_work_is_done(kind, smollm2_gguf, engine_of, tokens) -> None:
    """Chunks, neighbours, prefixes found again, samples of one prompt that copy its last block, guesses."""
    engine = engine_of(smollm2_gguf, **SETTINGS, kv_cache_dtype=kind)
    params = [sampling(), sampling(temperature=0.8), sampling(), sampling(temperature=0.8)]
    plain = tokens(engine.generate(PROMPTS, params, **PLAIN))
    alone = [tokens(engine.generate([PROMPTS[i]], [params[i]], **PLAIN))[0] for i in (0, 1)]
    assert alone == plain[:2]
    assert tokens(engine.generate(PROMPTS, params, max_num_batched_tokens=5)) == plain
    assert tokens(engine.again(PROMPTS, params)) == plain
    ngram = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
    assert tokens(engine.generate(PROMPTS, params, speculative_config=ngram)) == plain
    several = sampling(temperature=1.0, n=3)
    together = tokens(engine.samples(TEXT, several))
    assert together == [tokens([engine.sample(TEXT, several, index)])[0] for index in range(3)]


@in_8_bits
@pytest.mark.parametrize("means", ["recompute", "swap"])
def test_preempted_sequences_go_on_as_they_were(kind, means, smollm2_gguf, engine_of, tokens) -> None:
    """Three sequences that grow to 14 blocks in the end, in a pool of 9."""
    engine = engine_of(smollm2_gguf, **SETTINGS, kv_cache_dtype=kind)
    prompts, params = [TEXT, TEXT[:16], TEXT[:25]], [sampling(max_tokens=40)] * 3
    whole = tokens(engine.generate(prompts, params, **PLAIN))
    pool = {"kv_cache_memory_bytes": 9 * engine.executor.info.block_bytes, "max_model_len": "auto"}
    small = engine_of(smollm2_gguf, **SETTINGS | pool, swap_space=0.1, kv_cache_dtype=kind)
    assert tokens(small.generate(prompts, params, preemption_mode=means)) == whole
    assert small.stats.preemptions > 0


@pytest.mark.parametrize("kind", ["auto", "fp8", "int8"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_request_with_a_token_that_breaks_the_model_fails_alone(
    kind, bad, make_tiny, engine_of, tokens, tmp_path
) -> None:
    """Wherever the token stands, and again: what the request left in the cache is not found."""
    model = copy.deepcopy(make_tiny("llama").reference.model)
    with torch.no_grad():
        model.get_input_embeddings().weight[5] = bad
    model.save_pretrained(tmp_path)
    engine = engine_of(tmp_path, dtype="bfloat16", max_model_len=256, kv_cache_dtype=kind)
    common = list(range(20, 52))
    good = tokens(engine.generate([[*common, 1, 2], [7]], 6))
    engine.generate([], 6)
    for _ in range(2):
        (*broken, last) = engine.again([[*common, 5, 4], [5, 4], [7]], 6)
        assert [outputs[-1].finish_reason for outputs in broken] == ["error", "error"]
        assert tokens([*engine.again([[*common, 1, 2]], 6), last]) == good


@pytest.mark.parametrize(("kind", "token"), [("auto", 2 * DIM), ("fp8", DIM), ("int8", DIM + 4)])
def test_a_block_takes_what_the_formula_says(kind, token, smollm2_gguf, engine_of) -> None:
    executor = engine_of(smollm2_gguf, **SETTINGS, kv_cache_dtype=kind).executor
    size = executor.info.block_bytes
    assert size == 2 * LAYERS * KV_HEADS * BLOCK * token
    held = sum(pages.numel() * pages.itemsize for pages in executor.runner.pages.tensors)
    assert held == (executor.info.num_blocks + 1) * size
    assert executor.info.kv["dtype"] == ("bfloat16" if kind == "auto" else kind)


@pytest.mark.parametrize(("dtype", "kind"), [("bfloat16", "fp8"), ("bfloat16", "int8"), ("float32", "int8")])
def test_logits_are_near_those_of_a_wider_cache(dtype, kind, smollm2_gguf, engine_of) -> None:
    """Each row's mean is taken off: no probability depends on it."""
    settings = SETTINGS | {"dtype": dtype}
    exact, short = (
        logits - logits.mean(dim=-1, keepdim=True)
        for logits in (
            engine_of(smollm2_gguf, **settings, kv_cache_dtype=each).logits(TEXT * 3)
            for each in ("auto", kind)
        )
    )
    bound = 0.1 if kind == "fp8" else 0.05
    assert 0 < (short - exact).square().mean() < bound**2 * exact.square().mean()


def test_floats_that_are_not_the_models_are_refused() -> None:
    for wanted in ("auto", "bfloat16"):
        assert pick_cache_dtype(wanted, torch.bfloat16) == torch.bfloat16
    assert pick_cache_dtype("fp8_e4m3", torch.float32) == pick_cache_dtype("fp8", torch.bfloat16)
    assert pick_cache_dtype("int8", torch.bfloat16) == torch.int8
    message = (
        "kv-cache-dtype is 'float32', .* bfloat16: choose auto, bfloat16, fp8 or int8, or --dtype float32"
    )
    with pytest.raises(ConfigError, match=message):
        pick_cache_dtype("float32", torch.bfloat16)


SCALES = [(0.37, 0.003), (0.004, 2.7), (0.11, 0.06)]  # (of keys, of values) of each layer; some cut
SCALE_NAMES = [
    ("self_attn.k_scale", "self_attn.v_scale"),
    ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale"),
    ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale"),
]


class RoundedCache(DynamicCache):
    """Transformers' cache, with each layer's keys and values as FP8 holds them over their scales."""

    def __init__(self, scales: list[tuple[float, float]]) -> None:
        super().__init__()
        self.scales = scales

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int, **_: Any) -> Any:
        rounded = [
            (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
            for x, scale in zip((keys, values), self.scales[layer], strict=True)
        ]
        return super().update(*rounded, layer)


def with_scales(source: Path, target: Path, names: tuple[str, str], scales: list[Any]) -> Path:
    """A copy of a model as llm-compressor saves one whose cache alone was calibrated."""
    shutil.copytree(source, target)
    tensors = load_file(target / "model.safetensors")
    for layer, pair in enumerate(scales):
        for name, scale in zip(names, pair, strict=True):
            tensors[f"model.layers.{layer}.{name}"] = torch.tensor([scale]).flatten()
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    config["quantization_config"] = {
        "quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": scheme,
    }  # fmt: skip
    (target / "config.json").write_text(json.dumps(config))
    return target


@pytest.mark.parametrize(("names", "eager"), [(SCALE_NAMES[0], True), *((n, False) for n in SCALE_NAMES)])
def test_scales_of_the_checkpoint_are_those_of_an_fp8_cache(
    names, eager, make_tiny, engine_of, tmp_path
) -> None:
    tiny = make_tiny("llama")
    path = with_scales(tiny.path, tmp_path / "model", names, SCALES)
    engine = engine_of(path, kv_cache_dtype="fp8", max_model_len=256, enforce_eager=eager)
    ids = [token % 199 for token in TEXT]
    found = engine.logits(ids)
    with torch.inference_mode():
        expected, unscaled = (
            tiny.reference.model(torch.tensor([ids]), None, None, RoundedCache(scales)).logits[0]
            for scales in (SCALES, [(1.0, 1.0)] * 3)
        )
    assert (found - expected).abs().max() < 0.01 * (unscaled - expected).abs().max()


@pytest.mark.parametrize("kind", ["auto", "int8"])
def test_another_cache_ignores_the_checkpoints_scales(kind, make_tiny, engine_of, tmp_path) -> None:
    tiny = make_tiny("llama")
    path = with_scales(tiny.path, tmp_path / "model", SCALE_NAMES[0], SCALES)
    settings = {"kv_cache_dtype": kind, "max_model_len": 256}
    ids = [token % 199 for token in TEXT]
    assert torch.equal(engine_of(path, **settings).logits(ids), engine_of(tiny.path, **settings).logits(ids))


@pytest.mark.parametrize("scale", [[0.5, 0.25], 0.0, math.nan, -1.0])
def test_a_scale_that_is_not_one_number_above_0_is_refused(scale, make_tiny, engine_of, tmp_path) -> None:
    path = with_scales(make_tiny("llama").path, tmp_path / "model", SCALE_NAMES[0], [(scale, 1.0)])
    with pytest.raises(ModelLoadError, match=r"layers\.0\.self_attn\.k_scale of shape .* one number above 0"):
        engine_of(path, kv_cache_dtype="fp8", max_model_len=256)
