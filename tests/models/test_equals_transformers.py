"""Logits and greedy tokens equal transformers' in float32, however the work is cut into steps."""

import random

import pytest
import torch

from octavo.core.plan import Row, SampleSpec, StepPlan
from octavo.core.sampling_params import SamplingParams

NAMES = (
    "llama", "llama_tied", "llama_bias", "llama_rope3", "llama_linear", "qwen3", "qwen3_tied", "gemma3",
    "gemma3_softcap",
)  # fmt: skip
FAMILIES = ("llama_tied", "qwen3", "gemma3")
POOL = 4 << 20  # bytes: ample for these models
VOCABULARY = 199


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCABULARY) for _ in range(length)] for length in lengths]


@pytest.fixture
def engine(make_tiny, engine_of):
    return lambda name, **settings: engine_of(
        make_tiny(name).path, **{"kv_cache_memory_bytes": POOL, "max_num_batched_tokens": 256, **settings}
    )


@pytest.mark.parametrize("name", NAMES)
def test_logits_of_every_position(name, make_tiny, engine) -> None:
    (prompt,) = prompts(100)
    torch.testing.assert_close(
        engine(name).logits(prompt), make_tiny(name).reference.logits(prompt), rtol=0, atol=5e-5
    )


@pytest.mark.parametrize("name", NAMES)
def test_mixed_lengths_in_one_batch(name, make_tiny, engine, tokens) -> None:
    """Lengths around block borders, beyond the sliding window, beyond the token budget."""
    batch = prompts(1, 5, 15, 16, 17, 40, 100, 300)
    for prompt, made in zip(batch, tokens(engine(name).generate(batch, 20)), strict=True):
        make_tiny(name).reference.check_greedy(prompt, made)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_chunk_size_from_1_to_64(name, make_tiny, engine, tokens) -> None:
    batch = prompts(70, 9, 33, seed=1)
    expected = tokens(engine(name).generate(batch, 6))
    for prompt, made in zip(batch, expected, strict=True):
        make_tiny(name).reference.check_greedy(prompt, made)
    for size in range(1, 65):
        made = tokens(engine(name).generate(batch, 6, max_num_batched_tokens=size))
        assert made == expected, f"chunks of {size}"


def bytes_of_16_tokens(engine) -> int:
    """A block of each group."""
    info = engine.executor.info
    return len(info.kv["groups"]) * info.block_bytes


@pytest.mark.parametrize("name", FAMILIES)
def test_preempted(name, make_tiny, engine_of, tokens) -> None:
    """A pool of a dozen blocks or so for six sequences that grow to five each."""
    tiny = make_tiny(name)
    block = bytes_of_16_tokens(engine_of(tiny.path))
    small = engine_of(tiny.path, kv_cache_memory_bytes=12 * block, max_model_len="auto")
    batch = prompts(30, 41, 17, 38, 25, 33, seed=2)
    made = tokens(small.generate(batch, 40))
    assert small.stats.preemptions > 0
    for prompt, each in zip(batch, made, strict=True):
        assert len(each) == 40
        tiny.reference.check_greedy(prompt, each)


@pytest.mark.parametrize("name", FAMILIES)
def test_an_evicted_prefix_comes_back_from_host_memory(name, make_tiny, engine_of, tokens) -> None:
    tiny = make_tiny(name)
    block = bytes_of_16_tokens(engine_of(tiny.path))
    small = engine_of(tiny.path, kv_cache_memory_bytes=24 * block, max_model_len=160, kv_offloading_gib=0.01)
    kept, *others = prompts(100, 120, 110, 130, 125, seed=18)
    for offload in (0.01, 0.0):
        first = small.generate([kept], 8, kv_offloading_gib=offload)
        for other in others:
            small.again([other], 16)
        again = small.again([kept], 8)
        assert tokens(again) == tokens(first)
        assert (again[0][0].num_cached_tokens > 0) == (offload > 0)


def test_blocks_that_slid_out_of_a_window_serve_others(make_tiny, engine_of, tokens) -> None:
    """Two sequences of 200 tokens in 48 blocks: with all tokens of all four layers kept they take 104."""
    tiny = make_tiny("gemma3")
    block = engine_of(tiny.path).executor.info.block_bytes
    small = engine_of(
        tiny.path, kv_cache_memory_bytes=48 * block, max_model_len=256, max_num_batched_tokens=32
    )
    assert small.executor.info.num_blocks == 48
    batch = prompts(60, 45, seed=16)
    made = tokens(small.generate(batch, 145, enable_prefix_caching=False))
    assert small.stats.preemptions == 0
    for prompt, each in zip(batch, made, strict=True):
        tiny.reference.check_greedy(prompt, each)
    small.generate(prompts(16, seed=17), 224)
    full, sliding = 240 // 16, 3 * (24 // 16 + 1 + 1)
    assert small.peak_usage <= (full + sliding) / 48


@pytest.mark.parametrize("name", FAMILIES)
def test_prefix_cache_off_on_and_warm(name, engine, tokens) -> None:
    shared = prompts(90, seed=3)[0]
    batch = [shared + tail for tail in prompts(5, 20, 1, seed=4)] + [shared[:64], shared]
    off = tokens(engine(name).generate(batch, 12, enable_prefix_caching=False))
    cold = engine(name).generate(batch, 12)
    warm = engine(name).again(batch, 12)
    assert tokens(cold) == off
    assert tokens(warm) == off
    assert [outputs[0].num_cached_tokens for outputs in warm] == [80, 96, 80, 48, 80]


def test_the_answer_is_cached_as_well_as_the_prompt(engine, tokens) -> None:
    """Case 7: a second turn hits prompt and answer, and goes on as if it had not."""
    (prompt, more) = prompts(100, 50, seed=5)
    tiny = engine("llama")
    (answer,) = tokens(tiny.generate([prompt], 50))
    (second,) = tiny.again([prompt + answer + more], 5)
    assert second[0].num_cached_tokens == 144
    fresh = tiny.generate([prompt + answer + more], 5, enable_prefix_caching=False)
    assert tokens([second]) == tokens(fresh)


def test_a_seeded_request_is_the_same_with_and_without_neighbours(engine, tokens) -> None:
    """Case 1, with neighbours that differ in every setting."""
    (prompt,) = prompts(20, seed=6)
    seeded = SamplingParams(seed=42, temperature=0.8, max_tokens=16, ignore_eos=True)
    alone = tokens(engine("llama").generate([prompt], [seeded]))[0]
    assert len(set(alone)) > 4
    for run in range(5):
        other = SamplingParams(
            seed=1000 + run,
            temperature=0.8,
            top_p=0.9,
            top_k=run,
            max_tokens=9 + run,
            ignore_eos=True,
            logprobs=2,
        )
        both = tokens(engine("llama").generate([prompt, prompt], [seeded, other]))
        assert both[0] == alone
        assert tokens(engine("llama").generate([prompt, prompt], [other, seeded]))[1] == alone


def test_seeded_draws_do_not_depend_on_chunks_or_preemption(make_tiny, engine, tokens) -> None:
    batch = prompts(30, 41, 17, seed=7)
    params = [SamplingParams(seed=i, temperature=1.0, max_tokens=20, ignore_eos=True) for i in range(3)]
    whole = tokens(engine("qwen3").generate(batch, params))
    assert tokens(engine("qwen3").generate(batch, params, max_num_batched_tokens=7)) == whole


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 7}, {"max_num_seqs": 2}], ids=str)
def test_asynchronous_scheduling_changes_no_token(name, settings, engine, tokens) -> None:
    batch = prompts(30, 41, 17, 1, seed=8)
    params = [
        SamplingParams(seed=i, temperature=t, max_tokens=9 + i, stop_token_ids=(i,))
        for i, t in enumerate((0, 1, 1, 0))
    ]
    made = [
        [
            (tokens([outputs]), outputs[-1].finish_reason)
            for outputs in engine(name).generate(batch, params, async_scheduling=on, **settings)
        ]
        for on in (False, True)
    ]
    assert made[0] == made[1]


def test_logprobs_are_transformers(make_tiny, engine) -> None:
    (prompt,) = prompts(30, seed=8)
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=3, seed=0)
    (outputs,) = engine("gemma3").generate([prompt], [params])
    made = [token for output in outputs for token in output.token_ids]
    truth = torch.log_softmax(make_tiny("gemma3").reference.logits(prompt + made[:-1], last=5), -1)
    given = [entry for output in outputs for entry in output.logprobs or []]
    for row, entry, token in zip(truth, given, made, strict=True):
        assert entry.rank == 1
        assert entry.logprob == pytest.approx(float(row[token]), abs=1e-4)
        assert [value for _, value in entry.top] == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)


def test_a_nan_row_fails_alone_and_leaves_nothing_behind(make_tiny, engine_of, tokens, monkeypatch) -> None:
    """Its neighbours' tokens do not change, nor do those of requests that get its blocks later."""
    tiny = make_tiny("llama")
    block = engine_of(tiny.path).executor.info.block_bytes
    fragile = engine_of(tiny.path, kv_cache_memory_bytes=20 * block, max_model_len="auto")
    poison = 198
    batch = [[t % poison for t in p] for p in prompts(20, 50, 50, seed=9)]
    before = tokens(fragile.generate(batch, 20))
    embedding = fragile.executor.runner.model._embedding
    lookup = embedding._lookup

    def poisoned(table, rows, out):
        lookup(table, rows, out)[rows == poison] = float("nan")

    monkeypatch.setattr(embedding, "_lookup", poisoned)
    outputs = fragile.generate([*batch, [1, 2, poison, 3]], 20)
    assert tokens(outputs[:3]) == before
    assert outputs[3][-1].finish_reason == "error"
    assert "finite" in (outputs[3][-1].error or "")
    assert tokens(fragile.again(batch, 20)) == before
    assert tokens(fragile.again(batch, 20)) == before


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_half_precision_stays_close(dtype, name, make_tiny, engine) -> None:
    (prompt,) = prompts(60, seed=10)
    truth = make_tiny(name).reference.logits(prompt)
    error = (engine(name, dtype=dtype).logits(prompt) - truth).square().mean().sqrt()
    assert error < (0.03 if dtype == "bfloat16" else 0.004) * truth.std()


def test_a_copied_block_holds_what_its_source_held(make_tiny, engine) -> None:
    """Copy on write: a sequence goes on over copies of the blocks that another one filled."""
    (prompt,) = prompts(20, seed=11)
    runner = engine("qwen3").executor.runner
    draw = SampleSpec(0.0, 0, 1.0, 0, 0, 20)
    whole = runner.run(StepPlan(0, [Row("a", prompt, 0, [[5, 6]], [draw])])).rows[0]
    runner.run(StepPlan(1, [Row("a", prompt[:19], 0, [[7, 8]])]))
    plan = StepPlan(2, [Row("b", prompt[19:], 19, [[9, 10]], [draw])], copies=[(7, 9), (8, 10)])
    assert runner.run(plan).rows[0].token_ids == whole.token_ids


def test_rows_that_do_not_draw_give_nothing(engine) -> None:
    batch = prompts(9, 4, 3, seed=12)
    draws = [[], [SampleSpec(0.0, 0, 1.0, 0, 0, 4)], []]
    rows = [Row(str(i), ids, 0, [[i]], draws[i]) for i, ids in enumerate(batch)]
    result = engine("llama").executor.execute(StepPlan(7, rows))
    assert result.step == 7
    assert [(row.request_id, len(row.token_ids)) for row in result.rows] == [("0", 0), ("1", 1), ("2", 0)]


def greedy(position: int, **fields) -> SampleSpec:
    return SampleSpec(0.0, 0, 1.0, 0, 0, position, **fields)


def run(engine, *rows: Row):
    return engine.executor.execute(StepPlan(0, list(rows))).rows


def test_several_samples_draw_from_the_same_logits(engine) -> None:
    tiny = engine("llama")
    (prompt,) = prompts(20, seed=13)
    specs = [SampleSpec(1.0, 0, 1.0, 5, sample, 20) for sample in range(4)]
    other = Row("o", prompt[:4], 0, tiny.tables(4, first=8))
    together, _ = run(tiny, Row("a", prompt, 0, tiny.tables(20), specs), other)
    alone = [run(tiny, Row("a", prompt, 0, tiny.tables(20), [spec]))[0].token_ids[0] for spec in specs]
    assert together.token_ids == alone
    assert len(set(alone)) > 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_are_accepted_exactly_as_far_as_they_equal_the_draws(temperature, engine, tokens) -> None:
    """The row's tokens are those that single steps draw, whatever the drafts are."""
    tiny = engine("qwen3")
    (prompt,) = prompts(30, seed=14)
    params = SamplingParams(temperature=temperature, seed=9, max_tokens=6, ignore_eos=True, logprobs=2)
    (outputs,) = tiny.generate([prompt], [params])
    (right,) = tokens([outputs])
    spec = SampleSpec(temperature, 0, 1.0, 9, 0, 31, logprobs=2)
    for wrong in range(6):
        drafts = [token if i != wrong else (token + 1) % VOCABULARY for i, token in enumerate(right[1:])]
        tables = tiny.tables(40)
        run(tiny, Row("a", prompt, 0, tables))
        (row,) = run(tiny, Row("a", right[:1], 30, tables, [spec], drafts=drafts))
        made = row.token_ids[: len(right) - 1]
        assert made == right[1 : 1 + len(made)]
        assert len(row.token_ids) == min(wrong, 5) + 1
        given = [entry for output in outputs[1:] for entry in output.logprobs or []]
        for one, other in zip(row.logprobs or [], given, strict=False):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-5)


def test_scores_of_a_prompt_are_transformers_in_chunks_too(make_tiny, engine, monkeypatch) -> None:
    monkeypatch.setattr("octavo.worker.draws.LOGIT_ROWS", 7)
    tiny, (prompt,) = engine("gemma3"), prompts(50, seed=15)
    truth = torch.log_softmax(make_tiny("gemma3").reference.logits(prompt), -1)
    tables, given = tiny.tables(50), []
    for start, end in ((0, 20), (20, 50)):
        samples = [greedy(50)] if end == 50 else []
        row = Row("a", prompt[start:end], start, tables, samples, history=prompt, prompt_logprobs=3)
        (result,) = run(tiny, row)
        assert len(result.token_ids) == len(samples)
        given += result.prompt_logprobs
    assert len(given) == 49
    for place, entry in enumerate(given):
        row = truth[place]
        assert entry.logprob == pytest.approx(float(row[prompt[place + 1]]), abs=1e-4)
        assert entry.rank == 1 + int((row > row[prompt[place + 1]]).sum())
        assert [value for _, value in entry.top] == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)
