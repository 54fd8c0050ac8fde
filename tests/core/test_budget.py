"""How a step's tokens are shared out: what each prompt is sure to get, whatever is ahead of it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from octavo.core.budget import StepBudget


@given(
    total=st.integers(1, 300),
    decodes=st.integers(0, 50),
    needs=st.lists(st.integers(2, 400), min_size=1, max_size=12),
    threshold=st.integers(0, 100),
)
def test_a_prompt_gets_its_need_or_an_equal_share_less_what_short_ones_before_it_take(
    total, decodes, needs, threshold
):
    budget = StepBudget(total, decodes, len(needs), threshold, chunked=True)
    served = sum(budget.decode() for _ in range(decodes))
    left, short = total - served, 0
    assert served == min(decodes, total - 1)
    for place, need in enumerate(needs):
        got = budget.prefill(need)
        assert got <= need and got >= min(need, max(0, left // len(needs) - short))
        assert got > 0 or place > 0, "the first always gets something"
        short += got if need <= threshold else 0
    assert budget.left >= 0


def test_a_very_long_prompt_leaves_room_for_the_ones_behind_it():
    budget = StepBudget(2048, 100, 3, 512, chunked=True)
    assert all(budget.decode() for _ in range(100))
    assert [budget.prefill(100_000), budget.prefill(300), budget.prefill(90_000)] == [649, 300, 999]
    assert budget.left == 0


def test_what_is_left_over_goes_to_who_still_wants_some():
    budget = StepBudget(100, 0, 2, 10, chunked=True)
    assert budget.prefill(1000) == 50 and budget.prefill(5) == 5
    assert budget.rest(1000) == 45 and budget.left == 0


def test_without_chunks_a_prompt_gets_all_or_nothing():
    budget = StepBudget(100, 20, 2, 10, chunked=False)
    assert budget.prefill(90) == 0 and budget.prefill(80) == 80
