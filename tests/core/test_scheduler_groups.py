"""Groups, priorities, deadlines and the queue's bounds, one case at a time."""

from __future__ import annotations

import pytest

from octavo.errors import ContextLengthExceeded, DeadlineExceeded, InvalidRequest, QueueFull


def test_samples_compute_their_prompt_once_and_copy_its_unfilled_block_only(bench):
    b = bench(num_blocks=40, block_size=4)
    b.add("r", [1] * 10, n=3, max_tokens=6)
    plan = b.scheduler.schedule()
    assert [(row.request_id, len(row.token_ids), len(row.samples)) for row in plan.rows] == [("r/0", 10, 3)]
    b.take(b.scheduler.update(plan, b.executor.execute(plan)))
    b.step()
    assert len(b.executor.plans[-1].copies) == 2, "the last owner writes in place"
    assert b.scheduler.kv.pool.usage == (2 + 3) / 40
    b.run()
    made = [b.tokens(f"r/{i}") for i in range(3)]
    assert made == [b.executor.alone([1] * 10, 6, sample=i) for i in range(3)]
    assert made[0] != made[1] != made[2]
    assert b.scheduler.stats().prompt_tokens == 10


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_when_the_first_sample_is_aborted_amid_the_prompt_the_next_carries_on(bench, steps):
    b = bench(num_blocks=40, max_num_batched_tokens=8, enable_prefix_caching=False)
    b.add("r", [1] * 30, n=3)
    for _ in range(steps):
        b.step()
    b.abort("r/0")
    b.run()
    assert b.reason("r/0") == "abort" and not b.tokens("r/0")
    for i in (1, 2):
        assert b.tokens(f"r/{i}") == b.executor.alone([1] * 30, 8, sample=i)
    computed = sum(len(row.token_ids) for plan in b.executor.plans for row in plan.rows)
    assert computed == 30 + 2 * 7


def test_the_samples_of_a_group_give_way_and_come_back_together(bench):
    b = bench(num_blocks=13, block_size=2, enable_prefix_caching=False)
    b.add("old", [1] * 4, max_tokens=16)
    b.add("new", [2] * 4, max_tokens=8, n=2)
    b.run()
    assert b.scheduler.stats().preemptions > 0
    assert b.tokens("old") == b.executor.alone([1] * 4, 16)
    assert [b.tokens(f"new/{i}") for i in (0, 1)] == [b.executor.alone([2] * 4, 8, sample=i) for i in (0, 1)]


def test_more_samples_than_fit_are_refused_with_need_and_capacity(bench):
    b = bench(num_blocks=10, block_size=4)
    with pytest.raises(ContextLengthExceeded, match=r"3 samples of 16 .* prompt of 8 need 14 blocks.* 10"):
        b.add("r", [1] * 8, max_tokens=16, n=3)  # 2 shared and 4 each
    b.add("r", [1] * 8, max_tokens=16, n=2)
    with pytest.raises(InvalidRequest, match=r"n is 5: this engine runs 4 .*max-num-seqs"):
        bench(max_num_seqs=4).add("r", [1], n=5)


def test_beams_are_those_of_the_search_alone_and_end_in_order(bench):
    b = bench(num_blocks=60, eos=[49])
    b.add("s", [1, 2, 3], n=3, max_tokens=12, use_beam_search=True)
    b.add("beside", [4, 5])
    b.run()
    assert [b.tokens(f"s/{i}") for i in range(3)] == b.executor.beams_alone([1, 2, 3], 12, 3, [49])
    scores = [b.outputs[f"s/{i}"][0].cumulative_logprob / len(b.tokens(f"s/{i}")) for i in range(3)]
    assert scores == sorted(scores, reverse=True)


def test_who_has_a_lower_priority_number_goes_first_under_that_policy(bench):
    b = bench(max_num_seqs=1, scheduling_policy="priority")
    b.add("running", [1], priority=5)
    b.step()
    for name, priority in (("late", 2), ("soon", 1), ("later", 2)):
        b.add(name, [2], priority=priority)
    b.run()
    order = sorted(b.outputs, key=lambda name: b.outputs[name][-1].times.finished)
    assert order == ["running", "soon", "late", "later"]


def test_a_request_past_its_deadline_ends_wherever_it_is(bench):
    b = bench(num_blocks=400, max_num_seqs=1)
    b.add("runs", [1], max_tokens=1000, timeout=0.5)
    b.add("waits", [2], max_tokens=5, timeout=0.4)
    b.add("stays", [3], max_tokens=5)
    b.run()
    for name in ("runs", "waits"):
        assert (b.reason(name), b.outputs[name][-1].stop_reason) == ("abort", "timeout")
    assert not b.tokens("waits") and 10 < len(b.tokens("runs")) < 1000
    assert b.tokens("stays") == b.executor.alone([3], 5)


def test_a_request_that_could_not_start_in_time_is_refused_at_once(bench):
    b = bench(num_blocks=400, max_num_batched_tokens=100)
    b.add("first", [1] * 50)
    b.run()
    for i in range(10):
        b.add(f"r{i}", [i] * 90)
    with pytest.raises(DeadlineExceeded, match="tokens wait before it") as caught:
        b.add("hopeless", [1], timeout=0.01)
    assert caught.value.retry_after_s >= 1 and caught.value.status == 429
    b.add("patient", [1], timeout=100.0)
    with pytest.raises(DeadlineExceeded, match="it is past"):
        b.add("past", [1], timeout=-1.0)


def test_the_queue_is_bounded_in_tokens_but_lets_one_long_prompt_in(bench):
    b = bench(num_blocks=400, max_queue_tokens=100)
    b.add("long", [1] * 200)
    with pytest.raises(QueueFull, match=r"200 tokens wait, 10 would join them \(max-queue-tokens 100\)"):
        b.add("next", [2] * 10)
    b.run()
    b.add("next", [2] * 10)


def test_samples_join_a_queue_that_has_a_place_whole(bench):
    b = bench(max_num_seqs=4, max_queue=2)
    for i in range(5):  # four can run, one waits
        b.add(f"r{i}", [i])
    b.add("samples", [7], n=4)
    with pytest.raises(QueueFull):
        b.add("late", [8])
    b.run()
    assert b.tokens("samples/3") == b.executor.alone([7], 8, sample=3)


def test_what_is_planned_early_gives_the_same_tokens(bench):
    made = []
    for early in (False, True):
        b = bench(num_blocks=30, max_num_batched_tokens=9)
        for i in range(4):
            b.add(f"r{i}", [i] * (5 + 7 * i), max_tokens=12)
        b.run(meanwhile=b.scheduler.prepare if early else lambda: None)
        made.append([b.tokens(f"r{i}") for i in range(4)])
    assert made[0] == made[1]


def test_an_aborted_request_whose_row_is_decided_leaves_its_prefix_to_who_counts_on_it(bench):
    b = bench(num_blocks=40, block_size=4, max_num_batched_tokens=16)
    b.add("long", [1] * 40)
    b.add("same", [1] * 40)

    def prepare_and_abort():
        b.scheduler.prepare()
        b.abort("long")

    b.step(prepare_and_abort)
    b.run()
    assert b.tokens("same") == b.executor.alone([1] * 40, 8)
    assert b.scheduler.kv.pool.usage == 0


def test_a_step_that_breaks_off_ends_the_samples_that_took_over_from_an_aborted_one(bench):
    b = bench(num_blocks=40)
    b.add("r", [1] * 10, n=2)
    b.scheduler.schedule()
    b.abort("r/0")
    b.take(b.scheduler.lose_step())
    assert (b.reason("r/0"), b.reason("r/1")) == ("abort", "error")
    assert not b.scheduler.has_requests and b.scheduler.kv.pool.usage == 0


def test_samples_go_on_when_one_is_aborted_that_alone_had_a_row_decided(bench):
    b = bench(max_num_batched_tokens=2)
    b.add("r", [1] * 2, n=2, max_tokens=12)
    b.add("later", [2] * 9)
    b.step()
    b.step()
    b.step(b.scheduler.prepare)  # of the two tokens of a step one is for the other prompt
    assert [row.request.request_id for row in b.scheduler.planner.rows] == ["r/0", "later"]
    b.abort("r/0")
    b.run()
    assert b.tokens("r/1") == b.executor.alone([1] * 2, 12, sample=1)
    assert b.tokens("later") == b.executor.alone([2] * 9, 8)


def test_a_swapped_sequence_whose_blocks_were_never_overwritten_goes_on_at_once(bench):
    b = bench(num_blocks=12, block_size=1, host=12, preemption_mode="swap")
    b.add("old", [1] * 3, max_tokens=3)
    b.step()
    b.add("new", [2] * 7, max_tokens=4)
    b.run()
    assert b.scheduler.stats().preemptions_by_swap == 1 and b.scheduler.kv.host.blocks_loaded == 0
    assert b.tokens("old") == b.executor.alone([1] * 3, 3)
    assert b.tokens("new") == b.executor.alone([2] * 7, 4)


def test_a_sequence_that_gives_up_its_own_blocks_gives_back_no_more_tokens_than_it_had(bench):
    b = bench(num_blocks=36, block_size=1, max_num_batched_tokens=4, enable_prefix_caching=False)
    b.add("decodes", [3] * 2, max_tokens=20)
    b.step()
    b.add("long", [1] * 14, max_tokens=2)
    b.add("last", [2] * 18, max_tokens=2)
    b.run()
    assert b.scheduler.stats().preemptions > 0
    assert max(plan.num_tokens for plan in b.executor.plans) == 4


def test_a_step_that_breaks_off_with_a_copy_of_a_sequence_without_a_row_has_it_computed_again(bench):
    b = bench(num_blocks=4, block_size=4, host=2, offload=True)
    b.executor.transfer_steps = 9
    b.add("before", [2] * 4, max_tokens=1)
    b.step()
    b.add("r", [1] * 6, n=3, max_tokens=2)
    b.step()  # the block of the one before, on its way to the host tier, is not free
    plan = b.scheduler.schedule()
    assert plan.copies and not plan.rows
    b.take(b.scheduler.lose_step())
    b.run()
    for i in range(3):
        assert b.tokens(f"r/{i}") == b.executor.alone([1] * 6, 2, sample=i)
