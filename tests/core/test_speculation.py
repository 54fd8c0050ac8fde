"""Drafts are dropped where they lose, by what was accepted and by what steps took, and tried again."""

from __future__ import annotations

from octavo.core.speculation import PROBE_RUN, PROBE_STEPS, SpeculationControl


def taken(control, steps, *, with_drafts, without, rows=4):
    """How many of so many steps carried drafts; tokens a second of either way as given."""
    carried = 0
    for _ in range(steps):
        drafted = control.worthwhile(rows)
        carried += drafted
        control.measure(rows, drafted, with_drafts if drafted else without, 1.0)
    return carried


def test_the_faster_way_is_taken_and_the_other_tried_now_and_then():
    control = SpeculationControl()
    taken(control, 20, with_drafts=20, without=10)
    assert taken(control, 10 * PROBE_STEPS, with_drafts=20, without=10) == 10 * (PROBE_STEPS - PROBE_RUN)
    control = SpeculationControl()
    taken(control, 20, with_drafts=10, without=20)
    assert taken(control, 10 * PROBE_STEPS, with_drafts=10, without=20) == 10 * PROBE_RUN


def test_drafts_come_back_when_they_win_again():
    control = SpeculationControl()
    taken(control, 20, with_drafts=5, without=10)
    assert taken(control, 100 * PROBE_STEPS, with_drafts=50, without=10) > 50 * PROBE_STEPS


def test_a_large_batch_is_judged_apart_from_a_small_one():
    control = SpeculationControl()
    taken(control, 20, with_drafts=20, without=10, rows=2)
    taken(control, 20, with_drafts=100, without=200, rows=100)
    assert control.worthwhile(2) and not control.worthwhile(100)


class Liar:
    def propose(self, token_ids, limit):
        return [(token_ids[-1] + 1) % 50] * limit


def test_a_sequence_whose_drafts_are_all_wrong_soon_gets_none_but_a_probe(bench):
    b = bench(num_blocks=200, make_proposer=Liar, num_speculative_tokens=3)
    b.add("r", [1, 2, 3], max_tokens=300)
    b.scheduler.speculation.control.worthwhile = lambda rows: True
    b.run()
    assert b.tokens("r") == b.executor.alone([1, 2, 3], 300)
    drafts = [len(row.drafts) for plan in b.executor.plans for row in plan.rows]
    assert drafts[1] == 3 and 0 < sum(map(bool, drafts[100:])) <= 10 and max(drafts[100:]) == 1
    stats = b.scheduler.stats()
    assert stats.draft_tokens == sum(drafts) and stats.drafts == sum(map(bool, drafts))


class Oracle:
    def __init__(self, model):
        self.model = model

    def propose(self, token_ids, limit):
        return self.model.alone(token_ids, limit)


def test_right_drafts_are_accepted_counted_by_place_and_save_steps(bench):
    b = bench(num_blocks=200)
    model = b.executor
    b = bench(num_blocks=200, make_proposer=lambda: Oracle(model), num_speculative_tokens=3)
    b.scheduler.speculation.control.worthwhile = lambda rows: True
    b.add("r", [1, 2, 3], max_tokens=41)
    b.run()
    assert b.tokens("r") == model.alone([1, 2, 3], 41)
    stats = b.scheduler.stats()
    assert stats.steps == 11 and stats.accepted_by_position == (10, 10, 10)
    assert stats.accepted_draft_tokens == stats.draft_tokens == 30
