"""The warnings of an engine that is used against its grain: when each comes, what it says, and only once."""

from __future__ import annotations

import random

import pytest

from octavo.core.outputs import EngineStats
from octavo.engine.pitfalls import Pitfalls


@pytest.fixture
def pitfalls():
    return Pitfalls(block_size=16, prefix_caching=True)


def watch(pitfalls, steps, **per_step):
    """Look after each of so many steps; ``per_step`` maps a stat to its value after a step."""
    said = []
    for step in range(1, steps + 1):
        said += pitfalls.look(EngineStats(steps=step, **{name: of(step) for name, of in per_step.items()}))
    return said


def test_preemptions_in_more_than_one_step_of_a_hundred_are_told_once(pitfalls):
    (warning,) = watch(pitfalls, 3000, preemptions=lambda step: step // 50)
    assert warning.startswith("10 of the last 500 steps") and "kv-cache-memory-bytes" in warning


def test_preemptions_in_one_step_of_a_hundred_are_not(pitfalls):
    assert watch(pitfalls, 3000, preemptions=lambda step: step // 100) == []


def test_many_preemptions_in_one_step_count_as_one(pitfalls):
    assert watch(pitfalls, 3000, preemptions=lambda step: 100 * (step // 500)) == []


def test_steps_may_be_looked_at_several_at_a_time(pitfalls):
    looks = [EngineStats(steps=step, preemptions=step // 50) for step in range(0, 1000, 16)]
    assert len([warning for stats in looks for warning in pitfalls.look(stats)]) == 1


def test_a_full_cache_while_requests_wait_is_told_once(pitfalls):
    (warning,) = watch(pitfalls, 3000, waiting=lambda step: 7, kv_usage=lambda step: 0.97)
    assert "97% full and 7 requests wait" in warning and "max-num-seqs" in warning


@pytest.mark.parametrize(("waiting", "usage"), [(0, 1.0), (100, 0.5)])
def test_a_full_cache_without_a_queue_and_a_queue_without_a_full_cache_are_no_pitfall(
    pitfalls, waiting, usage
):
    assert watch(pitfalls, 3000, waiting=lambda step: waiting, kv_usage=lambda step: usage) == []


def test_a_full_cache_for_a_moment_is_no_pitfall(pitfalls):
    assert watch(pitfalls, 3000, waiting=lambda step: 1, kv_usage=lambda step: float(step % 500 < 100)) == []


def prompts_of(front, shared, tail, count=100):
    """``count`` prompts: fresh tokens in front, the same in the middle, fresh ones at the end."""
    random_tokens = random.Random(7)
    middle = random_tokens.sample(range(1000, 2000), shared)
    for _ in range(count):
        yield [*random_tokens.sample(range(900), front), *middle, *random_tokens.sample(range(900), tail)]


def feed(pitfalls, prompts, hits=0):
    said = []
    for number, prompt in enumerate(prompts, 1):
        pitfalls.saw(prompt)
        said += pitfalls.look(EngineStats(steps=number, prefix_cache_hits=number * hits))
    return said


@pytest.mark.parametrize("front", [1, 8, 15, 16])
def test_prompts_that_differ_at_the_front_and_then_repeat_are_told_once(pitfalls, front):
    (warning,) = feed(pitfalls, prompts_of(front=front, shared=200, tail=30))
    assert "first 16 tokens" in warning and "not at the front" in warning


@pytest.mark.parametrize(
    ("front", "shared", "tail"), [(0, 200, 30), (100, 20, 100), (8, 10, 2)], ids=["hits", "other", "short"]
)
def test_prompts_that_share_their_front_or_nothing_or_are_short_are_no_pitfall(pitfalls, front, shared, tail):
    assert feed(pitfalls, prompts_of(front, shared, tail)) == []


def test_prompts_that_hit_all_the_same_are_no_pitfall(pitfalls):
    """Two interleaved conversations: neighbours differ at the front, each hits its own past."""
    assert feed(pitfalls, prompts_of(front=8, shared=200, tail=30), hits=160) == []


def test_without_a_prefix_cache_nothing_is_said_of_prompts():
    off = Pitfalls(block_size=16, prefix_caching=False)
    assert feed(off, prompts_of(front=8, shared=200, tail=30)) == []
