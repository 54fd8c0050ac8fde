"""Tokens of real models do not depend on how the work is done: chunks, neighbours, the prefix cache,
preemption, asynchronous planning, speculation. Each way is held against one plain run, and that in float32
against transformers. In bfloat16 too the tokens are equal, and not nearly: a row's sums have one order.
"""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from octavo.core.sampling_params import SamplingParams

LICENCE = [  # the start of a licence, in SmolLM2's tokens
    504, 16571, 4791, 282, 260, 3279, 30, 4882, 28, 5119, 6252, 216, 34, 84, 3073, 338, 750, 3279, 29, 9562,
    13963, 1517, 355, 3252, 804, 411, 451, 1517, 1251, 325, 11457, 42, 585, 260, 3279, 1072, 441, 3577, 357,
]  # fmt: skip
LENGTH = 10  # of each answer
GREEDY = {"temperature": 0.0}
SEEDED = {"temperature": 0.8, "top_p": 0.9, "seed": 5}
PENALISED = {"temperature": 0.7, "seed": 6, "repetition_penalty": 1.2, "frequency_penalty": 0.5}
BIASED = {"temperature": 0.0, "logit_bias": {300: 4.0}, "min_tokens": 5}


def sampling(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": LENGTH, "ignore_eos": True, "seed": 0, **fields})


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, prompts with their sampling, and the tokens of a plain run."""

    build: Callable[..., Any]
    reference: Any
    prompts: list[list[int]]
    params: list[SamplingParams]
    plain: list[list[int]]

    def small(self, **settings: Any) -> Any:
        """An engine with 9 blocks of each KV group."""
        info = self.build(**settings).executor.info
        pool = 9 * len(info.kv["groups"]) * info.block_bytes
        return self.build(kv_cache_memory_bytes=pool, max_model_len="auto", swap_space=0.25, **settings)


PLAIN = {"enable_prefix_caching": False, "async_scheduling": False, "max_num_batched_tokens": 512}


IN_FLOAT32 = pytest.mark.parametrize("case", ["smollm2", "gemma3"], indirect=True)


@pytest.fixture(scope="module", params=["smollm2", "gemma3", "smollm2 bfloat16", "gemma3 bfloat16"])
def case(request, engine_of, gguf_reference, tokens) -> Case:
    name, _, dtype = request.param.partition(" ")
    path = request.getfixturevalue(f"{name}_gguf")
    if name == "smollm2":
        prompts = [LICENCE, LICENCE[:16], LICENCE * 3, LICENCE[:25]]
    else:
        rng = random.Random(3)
        text = [2, *(rng.randrange(1000, 20_000) for _ in range(40))]
        prompts = [text, text[:16], text * 3, text[:25]]

    def build(**settings: Any):
        usual = {"max_model_len": 512, "kv_cache_memory_bytes": "64Mi", "max_num_batched_tokens": 512}
        return engine_of(path, **{**usual, "dtype": dtype or "float32", **settings})

    params = [sampling(**fields) for fields in (GREEDY, SEEDED, PENALISED, BIASED)]
    engine = build()
    plain = tokens(engine.generate(prompts, params, **PLAIN))
    return Case(build, gguf_reference(path), prompts, params, plain)


@IN_FLOAT32
def test_the_plain_run_is_transformers(case) -> None:
    case.reference.check_greedy(case.prompts[0], case.plain[0])


@pytest.mark.parametrize("chunk", [5, 61])
def test_chunks(case, chunk, tokens) -> None:
    made = case.build().generate(case.prompts, case.params, max_num_batched_tokens=chunk)
    assert tokens(made) == case.plain


def test_alone_and_beside_neighbours_with_other_options(case, tokens) -> None:
    engine = case.build()
    for prompt, params, expected in zip(case.prompts, case.params, case.plain, strict=True):
        assert tokens(engine.generate([prompt], [params])) == [expected]
    others = [*case.prompts[::-1], *case.prompts]
    made = tokens(engine.generate(others, [*case.params[::-1], *case.params]))
    assert made == [*case.plain[::-1], *case.plain]


def test_prefix_cache_cold_and_warm(case, tokens) -> None:
    engine = case.build()
    assert tokens(engine.generate(case.prompts, case.params)) == case.plain
    warm = engine.again(case.prompts, case.params)
    assert tokens(warm) == case.plain
    assert [outputs[0].num_cached_tokens >= 16 for outputs in warm] == [len(p) > 16 for p in case.prompts]


@pytest.mark.parametrize(("means", "asynchronous"), [("recompute", False), ("swap", True)])
def test_preempted_amid_long_outputs(case, means, asynchronous, tokens) -> None:
    """Three sequences that grow to 14 blocks in the end, in a pool of 9."""
    prompts = [case.prompts[0], case.prompts[1], case.prompts[3]]
    params = [sampling(max_tokens=40, **fields) for fields in (GREEDY, SEEDED, PENALISED)]
    whole = tokens(case.build().generate(prompts, params, **PLAIN))
    small = case.small()
    made = small.generate(prompts, params, preemption_mode=means, async_scheduling=asynchronous)
    assert small.stats.preemptions > 0
    assert tokens(made) == whole


def test_asynchronous_planning(case, tokens) -> None:
    assert tokens(case.build().generate(case.prompts, case.params, async_scheduling=True)) == case.plain


@pytest.mark.parametrize("asynchronous", [False, True])
def test_speculation_by_prompt_lookup(case, asynchronous, tokens) -> None:
    ngram = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
    settings = {"speculative_config": ngram, "async_scheduling": asynchronous}
    assert tokens(case.build().generate(case.prompts, case.params, **settings)) == case.plain


def test_samples_of_a_prompt_are_those_made_alone(case, tokens) -> None:
    engine, params = case.build(), sampling(temperature=1.0, seed=11, n=4)
    together = tokens(engine.samples(case.prompts[0], params))
    alone = [tokens([engine.sample(case.prompts[0], params, index)])[0] for index in range(4)]
    assert together == alone
    assert len(set(map(tuple, together))) == 4
    mixed = engine.samples(case.prompts[0], params, beside=[case.prompts[1]])
    assert tokens(mixed)[:4] == together


@IN_FLOAT32
@pytest.mark.parametrize(("penalty", "early"), [(1.0, False), (0.5, True), (2.0, False)])
def test_beams_are_transformers(case, penalty, early, tokens) -> None:
    engine, prompt = case.build(), case.prompts[3]
    params = sampling(
        temperature=0.0, n=3, use_beam_search=True, length_penalty=penalty, early_stopping=early,
        ignore_eos=False, max_tokens=8,
    )  # fmt: skip
    with torch.inference_mode():
        expected = case.reference.model.generate(
            torch.tensor([prompt]), num_beams=3, num_return_sequences=3, max_new_tokens=8, do_sample=False,
            length_penalty=penalty, early_stopping=early, pad_token_id=0,
            eos_token_id=list(engine.executor.info.eos_token_ids),
        )  # fmt: skip
    assert tokens(engine.samples(prompt, params)) == [row[len(prompt) :].tolist() for row in expected]


@pytest.fixture(scope="module")
def draft(smollm2_gguf, gguf_reference, tmp_path_factory) -> str:
    """SmolLM2 cut down to its first 10 layers."""
    whole = gguf_reference(smollm2_gguf).model
    config = copy.deepcopy(whole.config)
    config.num_hidden_layers = 10
    del config.quantization_config
    model = type(whole)(config)
    model.load_state_dict(whole.state_dict(), strict=False)
    path = tmp_path_factory.mktemp("draft")
    model.save_pretrained(path)
    return str(path)


@pytest.mark.parametrize("case", ["smollm2"], indirect=True)
def test_speculation_by_a_draft_model(case, draft, tokens) -> None:
    """Alone, in chunks, preempted by either means, asynchronously."""
    config = {"model": draft, "num_speculative_tokens": 3}
    engine = case.build(speculative_config=config)
    assert tokens(engine.generate(case.prompts, case.params, async_scheduling=False)) == case.plain
    assert tokens(engine.generate(case.prompts, case.params, max_num_batched_tokens=19)) == case.plain
    assert tokens(engine.again(case.prompts, case.params)) == case.plain
    short = case.prompts[:2], [sampling(max_tokens=60, **fields) for fields in (GREEDY, SEEDED)]
    long = tokens(case.build().generate(*short, **PLAIN))
    small = case.small(speculative_config=config)
    for means in ("recompute", "swap"):
        assert tokens(small.generate(*short, preemption_mode=means)) == long
        assert small.stats.preemptions > 0
