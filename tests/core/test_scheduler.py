"""What the scheduler promises, one case at a time."""

from __future__ import annotations

import pytest

from octavo.core.outputs import EngineRequest, Feature
from octavo.core.plan import RowResult, StepResult
from octavo.core.sampling_params import SamplingParams
from octavo.errors import ConfigError, ContextLengthExceeded, InvalidRequest, QueueFull


def rows(plan):
    return {row.request_id: (row.start, len(row.token_ids)) for row in plan.rows}


def test_a_request_above_the_pool_is_refused_with_need_and_capacity_and_nothing_waits_behind_it(bench):
    b = bench(num_blocks=50, block_size=16, max_model_len=4000)
    with pytest.raises(
        ContextLengthExceeded, match=r"needs 1008 tokens \(1000 .* 8 .*length is 800 with .*\(50 blocks of 16"
    ):
        b.add("big", [1] * 1000)
    for i in range(5):
        b.add(f"short{i}", [i, 2, 3])
    b.run()
    assert all(b.reason(f"short{i}") == "length" for i in range(5))


def test_a_prompt_one_token_over_the_models_length_is_refused(bench):
    b = bench(num_blocks=500, block_size=16, max_model_len=1000)
    with pytest.raises(ContextLengthExceeded, match=r"needs 1001 tokens.*length is 1000"):
        b.add("over", [1] * 1000, max_tokens=1)
    b.add("just", [1] * 999, max_tokens=1)
    b.run()
    assert len(b.tokens("just")) == 1


def test_a_request_that_fills_the_whole_pool_runs_to_its_end(bench):
    b = bench(num_blocks=4, block_size=4)
    b.add("all", [1] * 10, max_tokens=7)  # the 17th token is drawn, never stored
    b.run()
    assert len(b.tokens("all")) == 7
    with pytest.raises(ContextLengthExceeded, match="needs 18 tokens"):
        b.add("more", [1] * 10, max_tokens=8)


def test_the_answer_is_cached_too(bench):
    """Turn two of a conversation hits 144 of its 150 known tokens, not the prompt's 96 alone."""
    b = bench(num_blocks=40, block_size=16)
    prompt = [i % 50 for i in range(100)]
    b.add("turn1", prompt, max_tokens=50)
    b.run()
    b.add("turn2", [*prompt, *b.tokens("turn1"), *([7] * 50)])
    b.run()
    assert b.cached("turn2") == 144
    assert b.tokens("turn2") == b.executor.alone([*prompt, *b.tokens("turn1"), *([7] * 50)], 8)


@pytest.mark.parametrize(("shared", "hit"), [(15, 0), (16, 16), (31, 16), (32, 32), (47, 32)])
def test_a_hit_is_the_shared_prefix_in_whole_blocks(bench, shared, hit):
    b = bench(block_size=16)
    b.add("one", [*range(shared), *([40] * (50 - shared))], max_tokens=1)
    b.run()
    b.add("two", [*range(shared), *([41] * (50 - shared))], max_tokens=1)
    b.run()
    assert b.cached("two") == hit


def test_the_last_token_of_a_prompt_is_always_computed(bench):
    b = bench(block_size=4)
    for name in ("one", "two"):
        b.add(name, [1, 2, 3, 4, 5, 6, 7, 8], max_tokens=3)
        b.run()
    assert b.cached("two") == 4 and b.tokens("one") == b.tokens("two")


def test_another_salt_and_another_beginning_miss(bench):
    b = bench(block_size=4)
    b.add("a", [1] * 20, salt="tenant-a")
    b.run()
    for name, prompt, salt in (
        ("b", [1] * 20, "tenant-b"),
        ("none", [1] * 20, None),
        ("x", [2] + [1] * 19, "tenant-a"),
    ):
        b.add(name, prompt, salt=salt)
        b.run()
        assert b.cached(name) == 0
    b.add("again", [1] * 20, salt="tenant-a")
    b.run()
    assert b.cached("again") == 16


def test_equal_prefixes_that_arrive_together_are_computed_once(bench):
    b = bench(block_size=4, max_num_batched_tokens=100)
    for i in range(4):
        b.add(f"r{i}", [*([9] * 20), i])
    plan = b.scheduler.schedule()
    assert rows(plan) == {"r0": (0, 21), "r1": (20, 1), "r2": (20, 1), "r3": (20, 1)}
    b.scheduler.update(plan, b.executor.execute(plan))
    assert b.scheduler.kv.pool.usage == (5 + 4) / 40


def test_prefix_caching_off_shares_nothing(bench):
    b = bench(block_size=4, enable_prefix_caching=False)
    for name in ("one", "two"):
        b.add(name, [1] * 20)
        b.run()
    assert b.cached("two") == 0 and b.scheduler.stats().prefix_cache_queries == 0
    assert b.scheduler.stats().cached_blocks == 0


def test_a_prefix_cut_off_in_mid_prefill_gives_only_what_was_computed(bench):
    b = bench(block_size=4, max_num_batched_tokens=10)
    b.add("cut", [1] * 30)
    b.step()
    b.abort("cut")
    b.add("next", [1] * 30)
    b.run()
    assert b.cached("next") == 8 and b.tokens("next") == b.executor.alone([1] * 30, 8)


def test_a_faulty_row_ends_alone_and_leaves_nothing_in_the_cache(bench):
    b = bench(block_size=4)
    b.add("bad", [1] * 20)
    b.add("good", [2] * 20)
    b.executor.faulty.add("bad")
    b.run()
    assert b.reason("bad") == "error" and b.outputs["bad"][-1].error == "logits are NaN"
    assert b.tokens("good") == b.executor.alone([2] * 20, 8)
    b.add("again", [1] * 20)
    b.run()
    assert b.cached("again") == 0


def test_resetting_the_cache_forgets_what_is_cached_and_what_is_running(bench):
    b = bench(block_size=4)
    b.add("done", [1] * 20, max_tokens=1)
    b.run()
    b.add("running", [2] * 20)
    b.step()
    b.scheduler.reset_prefix_cache()
    assert b.scheduler.stats().cached_blocks == 0
    b.add("one", [1] * 20)
    b.add("two", [2] * 20)
    b.run()
    assert b.cached("one") == b.cached("two") == 0
    assert b.tokens("running") == b.tokens("two") == b.executor.alone([2] * 20, 8)


def test_a_long_prompt_is_cut_so_that_a_running_stream_keeps_its_pace(bench):
    b = bench(num_blocks=100, block_size=4, max_num_batched_tokens=16)
    b.add("stream", [1, 2], max_tokens=20)
    b.step()
    b.add("long", [3] * 100, max_tokens=1)
    for start in range(0, 90, 15):
        plan = b.scheduler.schedule()
        assert rows(plan) == {"stream": (2 + start // 15, 1), "long": (start, 15)}
        assert [not row.samples for row in plan.rows] == [False, True]
        b.scheduler.update(plan, b.executor.execute(plan))
    b.run()
    assert b.tokens("long") == b.executor.alone([3] * 100, 1)


def test_without_chunked_prefill_a_prompt_waits_until_it_fits_one_step(bench):
    b = bench(num_blocks=100, max_model_len=20, max_num_batched_tokens=20, enable_chunked_prefill=False)
    b.add("a", [1] * 12)
    b.add("b", [2] * 12)
    b.step()
    assert rows(b.executor.plans[0]) == {"a": (0, 12)}
    b.step()
    assert rows(b.executor.plans[1]) == {"a": (12, 1), "b": (0, 12)}
    b.run()
    with pytest.raises(ConfigError, match="max-num-batched-tokens is 16, below max-model-len 20"):
        bench(max_model_len=20, max_num_batched_tokens=16, enable_chunked_prefill=False)


def test_no_more_sequences_run_at_once_than_allowed(bench):
    b = bench(max_num_seqs=2)
    for i in range(5):
        b.add(f"r{i}", [i])
    b.step()
    stats = b.scheduler.stats()
    assert (stats.running, stats.waiting, stats.waiting_tokens) == (2, 3, 3)
    b.run()


def test_the_latest_to_arrive_is_preempted_and_gives_the_same_tokens(bench):
    b = bench(num_blocks=8, block_size=2, enable_prefix_caching=False)
    b.add("old", [1] * 4, max_tokens=10)
    b.add("new", [2] * 4, max_tokens=10)
    b.run()
    assert b.scheduler.stats().preemptions > 0
    assert not any(output.times and output.times.finished == 0 for output in b.outputs["old"][1:])
    assert b.tokens("old") == b.executor.alone([1] * 4, 10)
    assert b.tokens("new") == b.executor.alone([2] * 4, 10)
    done = {name: b.outputs[name][-1].times.finished for name in ("old", "new")}
    assert done["old"] < done["new"]
    times = [b.outputs[name][-1].times.preemptions for name in ("old", "new")]
    assert sum(times) == b.scheduler.stats().preemptions and times[0] == 0


def test_a_preempted_sequence_finds_its_own_blocks_again(bench):
    b = bench(num_blocks=12, block_size=2)
    b.add("old", [1] * 8, max_tokens=10)
    b.add("new", [2] * 8, max_tokens=6)
    b.run()
    resumed = [
        row for plan in b.executor.plans for row in plan.rows if row.request_id == "new" and row.start > 0
    ]
    assert b.scheduler.stats().preemptions == 1
    assert any(len(row.token_ids) > 1 for row in resumed), "it came back and began in the middle"
    assert b.cached("new") == 0, "what it found of its own is no hit of its prompt"


def test_a_full_queue_says_when_to_come_back(bench):
    b = bench(max_num_seqs=1, max_queue=2)
    for i in range(3):  # one can run, two may wait
        b.add(f"r{i}", [i])
    with pytest.raises(QueueFull, match=r"3 requests wait \(max-queue 2\)") as caught:
        b.add("r3", [3])
    assert caught.value.retry_after_s == 1
    b.abort("r1")
    b.add("r3", [3])
    b.run()
    assert b.tokens("r3") == b.executor.alone([3], 8)


def test_abort_frees_blocks_at_once_whatever_the_state(bench):
    b = bench(num_blocks=20, block_size=4, max_num_batched_tokens=8, max_num_seqs=2)
    for name in ("decoding", "prefilling", "waiting"):
        b.add(name, [1 + len(name)] * (3 if name == "decoding" else 30))
    b.step()
    b.step()
    assert [group.lead.request_id for group in b.scheduler.running] == ["decoding", "prefilling"]
    for name in ("prefilling", "waiting", "decoding"):
        b.abort(name)
        assert b.reason(name) == "abort"
    assert b.scheduler.abort("nobody") is None
    stats = b.scheduler.stats()
    assert stats.kv_usage == 0 and stats.running == stats.waiting == stats.waiting_tokens == 0
    assert not b.scheduler.has_requests and b.scheduler.schedule() is None


def scripted(b, name, tokens):
    """Run one request whose tokens are given."""
    for token in tokens:
        plan = b.scheduler.schedule()
        if plan is None:
            return
        result = StepResult(plan.step, [RowResult(name, [token])])
        b.outputs[name] += b.scheduler.update(plan, result)


@pytest.mark.parametrize(
    ("sampling", "made", "reason", "stop_reason"),
    [
        ({}, [5, 49], "stop", None),
        ({"ignore_eos": True}, [5, 49, 7, 8, 9], "length", None),
        ({"stop_token_ids": [7]}, [5, 49], "stop", None),
        ({"stop_token_ids": [5]}, [5], "stop", 5),
        ({"stop_token_ids": [49], "ignore_eos": True}, [5, 49], "stop", 49),
        ({"stop_token_ids": [49]}, [5, 49], "stop", None),
        ({"max_tokens": 1}, [5], "length", None),
    ],
)
def test_a_sequence_ends_at_eos_at_a_stop_token_or_at_its_limit(bench, sampling, made, reason, stop_reason):
    b = bench(eos=[49])
    b.add("r", [1, 2], **{"max_tokens": 5, **sampling})
    scripted(b, "r", [5, 49, 7, 8, 9, 10])
    last = b.outputs["r"][-1]
    assert b.tokens("r") == made and (last.finish_reason, last.stop_reason) == (reason, stop_reason)


def test_several_tokens_of_one_step_are_cut_where_the_sequence_ends(bench):
    b = bench(eos=[49])
    b.add("r", [1, 2], max_tokens=10)
    plan = b.scheduler.schedule()
    (output,) = b.scheduler.update(plan, StepResult(plan.step, [RowResult("r", [5, 49, 6])]))
    assert output.token_ids == [5, 49] and output.finish_reason == "stop"


def test_a_sequence_goes_on_from_tokens_made_elsewhere(bench):
    b = bench()
    whole = b.executor.alone([1, 2, 3], 8)
    b.add("r", [1, 2, 3, *whole[:5]], max_tokens=8, prior=5)
    b.run()
    assert b.tokens("r") == whole[5:]
    assert [row.samples[0].position for plan in b.executor.plans for row in plan.rows] == [8, 9, 10]
    with pytest.raises(InvalidRequest, match="8 tokens exist already"):
        b.add("full", [1, 2, 3, *whole], max_tokens=8, prior=8)


@pytest.mark.parametrize(
    ("change", "param", "text"),
    [
        ({"prompt_token_ids": []}, "prompt", "empty"),
        ({"prompt_token_ids": [3, -1]}, "prompt", "token id -1: ids are 0 to 49"),
        ({"prompt_token_ids": [50]}, "prompt", "token id 50"),
        ({"num_prior_output_tokens": 2}, "num_prior_output_tokens", "0 to 1"),
        ({"sampling": {"stop_token_ids": (60,)}}, "stop_token_ids", "stop_token_ids holds 60"),
        ({"sampling": {"max_tokens": None}}, "max_tokens", "max_tokens is not set"),
        ({"sampling": {"seed": None}}, "seed", "seed is not set"),
        ({"cache_salt": "\ud800"}, "cache_salt", "not valid Unicode"),
        ({"adapter": "\ud800"}, "adapter", "not valid Unicode"),
        ({"features": [Feature("\ud800", 0, 1)]}, "features", "not valid Unicode"),
        ({"features": [Feature("img", 1, 2)]}, "features", "covers 2 tokens from 1 on"),
        ({"features": [Feature("img", -1, 2)]}, "features", "within the prompt's 2"),
    ],
)
def test_a_malformed_request_is_refused_by_field_and_value(bench, change, param, text):
    b = bench()
    sampling = SamplingParams(**{"seed": 0, "max_tokens": 4, **change.pop("sampling", {})})
    request = EngineRequest(**{"request_id": "r", "prompt_token_ids": [1, 2], "sampling": sampling, **change})
    with pytest.raises(InvalidRequest, match=text) as caught:
        b.scheduler.add([request])
    assert caught.value.param == param and not b.scheduler.has_requests


def test_a_request_id_in_use_is_refused(bench):
    b = bench()
    b.add("r", [1])
    with pytest.raises(InvalidRequest, match="'r' is in use"):
        b.add("r", [2])
    b.run()
    b.add("r", [2])


def test_a_result_that_is_not_the_plans_is_a_fault(bench):
    b = bench()
    b.add("r", [1])
    plan = b.scheduler.schedule()
    with pytest.raises(RuntimeError, match="not updated"):
        b.scheduler.schedule()
    with pytest.raises(RuntimeError, match="result 7"):
        b.scheduler.update(plan, StepResult(7, []))
    with pytest.raises(RuntimeError, match="came back as"):
        b.scheduler.update(plan, StepResult(plan.step, [RowResult("x", [1])]))


def test_times_tell_arrival_start_first_token_and_end_in_order(bench):
    b = bench()
    b.add("r", [1], max_tokens=3)
    b.run()
    first, middle, last = b.outputs["r"]
    assert first.times.finished == 0 and middle.times is None
    times = last.times
    assert 0 < times.arrival < times.scheduled < times.first_token < times.finished
    assert first.times.first_token == times.first_token


def test_totals_and_the_prefill_rate_are_counted(bench):
    b = bench(block_size=4)
    b.add("one", [1] * 20, max_tokens=2)
    b.run()
    b.add("two", [1] * 20, max_tokens=2)
    b.run()
    stats = b.scheduler.stats()
    assert (stats.prompt_tokens, stats.generation_tokens) == (40, 4)
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (40, 16)
    assert stats.steps == 4 and stats.cached_blocks == 5
    assert stats.prefill_tokens_per_s == pytest.approx(
        (20 + 4) / 0.002, rel=1e-3
    )  # the clock moves 1 ms a step


def test_equal_hashes_of_other_tokens_are_told_apart_where_hits_are_verified(bench):
    """The hash is broken: there are sixteen names for all blocks."""
    b = bench(block_size=4, prefix_caching_verify=True)
    b.scheduler.hasher._hash = lambda data: bytes([sum(data) % 16])
    for number in range(12):
        b.add(str(number), [number] * 9)
        b.run()
        b.add(f"{number} again", [number] * 9)
        b.run()
    assert b.scheduler.stats().prefix_cache_collisions > 0
    assert any(b.cached(f"{number} again") == 8 for number in range(12))
    for number in range(12):
        assert b.tokens(str(number)) == b.executor.alone([number] * 9, 8)


@pytest.mark.parametrize("prepares", [False, True])
def test_a_prompt_under_way_counts_as_waiting_tokens_also_when_its_next_chunk_was_decided_early(
    bench, prepares
):
    engine = bench(num_blocks=60, max_num_batched_tokens=10)
    engine.add("long", range(50), max_tokens=1)
    seen = []
    while engine.scheduler.has_requests:
        plan = engine.scheduler.schedule()
        seen.append(engine.scheduler.stats().waiting_tokens)
        if prepares:
            engine.scheduler.prepare()
        engine.take(engine.scheduler.update(plan, engine.executor.execute(plan)))
    assert seen == [39, 29, 19, 9, 0]


def test_a_row_decided_early_keeps_its_seat_when_its_request_ends(bench):
    b = bench(max_num_seqs=1, max_num_batched_tokens=8)
    b.add("a", range(10))
    b.add("b", [9] * 4)

    def meanwhile():
        b.scheduler.prepare()
        b.abort("a")

    b.step(meanwhile)
    b.run()
    assert [len(plan.rows) for plan in b.executor.plans[:3]] == [1, 1, 1]
    assert b.reason("b") == "length"
