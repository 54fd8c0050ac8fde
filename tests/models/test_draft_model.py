"""A draft model's proposals: its own next tokens, kept right whatever the target accepts."""

import itertools
import random

import pytest

from octavo.core.plan import Row, SampleSpec, StepPlan
from octavo.core.sampling_params import SamplingParams
from octavo.core.speculation import SpeculationControl
from octavo.errors import ConfigError

POOL = {"kv_cache_memory_bytes": 4 << 20, "max_num_batched_tokens": 256}


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(199) for _ in range(length)]


@pytest.fixture
def pair(make_tiny, engine_of):
    """``pair("llama", "qwen3")``: an engine of the first whose draft model is the second."""

    def build(target: str, draft: str):
        speculation = {"model": str(make_tiny(draft).path), "num_speculative_tokens": 4}
        return engine_of(make_tiny(target).path, speculative_config=speculation, **POOL)

    return build


def speculate(engine, ids: list[int], steps: int, temperature: float = 0.0, chunk: int = 7, k: int = 4):
    """Run a sequence of its own on the executor -> (tokens, proposals of each step, accepted in all)."""
    tables, tokens, start = engine.tables(len(ids) + steps * (k + 1) + k), list(ids), 0
    drafts: list[int] = []
    proposals, accepted = [], 0
    while len(proposals) < steps:
        end = min(len(tokens), start + chunk)
        samples = [SampleSpec(temperature, 0, 1.0, 3, 0, end)] if end == len(tokens) else []
        row = Row("a", tokens[start:end], start, tables, samples, drafts if samples else [], propose=k)
        (result,) = engine.executor.execute(StepPlan(0, [row])).rows
        start = end + max(0, len(result.token_ids) - 1)
        tokens += result.token_ids
        if samples:
            accepted += len(result.token_ids) - 1
            drafts = result.drafts
            proposals.append((len(tokens), drafts))
    return tokens, proposals, accepted


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_model_that_drafts_for_itself_is_always_right(temperature, pair) -> None:
    tokens, _, accepted = speculate(pair("llama", "llama"), prompt(20), 6, temperature)
    assert accepted == 5 * 4
    assert len(tokens) == 20 + 1 + 5 * 5


@pytest.mark.parametrize("target", ["llama", "gemma3"])
def test_proposals_are_the_draft_models_own_continuations(target, make_tiny, pair) -> None:
    """However many drafts the target refused before: what they left in the cache is computed over."""
    tokens, proposals, _ = speculate(pair(target, "qwen3"), prompt(20), 8)
    reference = make_tiny("qwen3").reference
    assert len(proposals) == 8 and all(len(drafts) == 4 for _, drafts in proposals)
    for known, drafts in proposals:
        reference.check_greedy(tokens[:known], drafts)


def test_tokens_are_those_without_drafts(pair, make_tiny) -> None:
    tokens, _, _ = speculate(pair("llama", "qwen3"), prompt(20, seed=1), 8)
    make_tiny("llama").reference.check_greedy(tokens[:20], tokens[20:])


def test_where_the_blocks_end_there_are_fewer_proposals(pair) -> None:
    """16 places: the prompt's 13, the drawn token and two proposals; the third is not computed."""
    engine = pair("llama", "qwen3")
    row = Row("a", prompt(13), 0, [[0]], [SampleSpec(0.0, 0, 1.0, 0, 0, 13)], propose=4)
    assert len(engine.executor.execute(StepPlan(0, [row])).rows[0].drafts) == 3
    full = Row("a", prompt(16), 0, [[0]], [SampleSpec(0.0, 0, 1.0, 0, 0, 16)], propose=4)
    assert engine.executor.execute(StepPlan(0, [full])).rows[0].drafts == []


def test_rows_that_ask_for_none_get_none(pair) -> None:
    engine = pair("llama", "qwen3")
    spec = SampleSpec(1.0, 0, 1.0, 0, 0, 13)
    rows = [
        Row("a", prompt(13), 0, [[0, 1]], [spec]),
        Row("b", prompt(13), 0, [[2, 3]], [spec], propose=2),
        Row("c", prompt(13), 0, [[4, 5]], [spec, spec], propose=2),
        Row("d", prompt(13), 0, [[6, 7]], propose=2),
    ]
    assert [len(row.drafts) for row in engine.executor.execute(StepPlan(0, rows)).rows] == [0, 2, 0, 0]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("pattern", ["on", "on and off"])
def test_the_engine_uses_all_proposals_of_a_perfect_draft(
    pattern, asynchronous, pair, tokens, monkeypatch
) -> None:
    """Also when the draft model has been left out of some steps, in the middle of blocks, with neighbours."""
    choices = itertools.cycle([True] * 5 + [False] * 7 * (pattern != "on"))
    monkeypatch.setattr(SpeculationControl, "worthwhile", lambda self, rows: next(choices))
    engine = pair("llama", "llama")
    batch = [prompt(20), prompt(37, seed=2), prompt(5, seed=3)]
    params = [
        SamplingParams(temperature=temperature, seed=4, max_tokens=60, ignore_eos=True)
        for temperature in (0.0, 1.0, 0.7)
    ]
    plain = engine.generate(batch, params, speculative_config=None, async_scheduling=False)
    without = engine.stats.steps
    made = engine.generate(batch, params, async_scheduling=asynchronous)
    assert tokens(made) == tokens(plain)
    speculation = engine.core._scheduler.speculation
    assert speculation.num_accepted == speculation.num_draft_tokens > 0
    assert engine.stats.steps < without / (3 if pattern == "on" else 1.3)


def test_tokens_do_not_depend_on_a_draft_model(pair, tokens) -> None:
    """Whatever it proposes: with rules, several samples, a warm cache, and preemption by either means."""
    engine = pair("gemma3", "qwen3")
    batch = [prompt(40), prompt(33, seed=5), prompt(18, seed=6)]
    params = [
        SamplingParams(seed=4, max_tokens=30, ignore_eos=True, **fields)
        for fields in (
            {"temperature": 0.0, "frequency_penalty": 1.0},
            {"temperature": 1.0, "top_k": 20},
            {"temperature": 0.0, "logprobs": 2},
        )
    ]
    plain = tokens(engine.generate(batch, params, speculative_config=None))
    assert tokens(engine.generate(batch, params)) == plain
    assert tokens(engine.again(batch, params)) == plain
    several = SamplingParams(seed=4, max_tokens=20, ignore_eos=True, temperature=1.0, n=3)
    samples = tokens(engine.samples(batch[0], several))
    assert samples == [tokens([engine.sample(batch[0], several, index)])[0] for index in range(3)]


def test_both_models_share_the_pool(pair, make_tiny, engine_of) -> None:
    alone = engine_of(make_tiny("llama").path, **POOL).executor.info
    both = pair("llama", "llama").executor.info
    assert both.block_bytes == 2 * alone.block_bytes
    assert both.num_blocks == alone.num_blocks // 2


def test_a_draft_model_of_another_vocabulary_is_refused(make_tiny, engine_of) -> None:
    other = make_tiny("llama_small_vocabulary").path
    with pytest.raises(ConfigError, match="vocabulary has 150 tokens, the model's 199"):
        engine_of(
            make_tiny("llama").path,
            speculative_config={"model": str(other), "num_speculative_tokens": 2},
            **POOL,
        )
