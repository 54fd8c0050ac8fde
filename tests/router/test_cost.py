"""The pick: least expected time before the first token."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from octavo_router.cost import DECODE_TOKENS, POLICIES, RATE_BAND, TIE_TOKENS, Candidate, Policy, Work, pick

candidate_lists = st.lists(
    st.builds(
        Candidate,
        name=st.text("abcdef", min_size=1, max_size=4),
        cached_tokens=st.integers(0, 4000),
        queued_tokens=st.integers(0, 20000),
        running=st.integers(0, 50),
        rate=st.sampled_from([0.0, 100.0, 5000.0, 90000.0]),
        slots=st.integers(0, 64),
        blocks=st.integers(0, 1000),
        free_blocks=st.integers(0, 1000),
        mean_s=st.floats(0, 60),
    ),
    min_size=1,
    max_size=8,
    unique_by=lambda c: c.name,
)
works = st.builds(
    Work, prompt_tokens=st.integers(0, 4000), key=st.binary(max_size=8), blocks=st.integers(0, 300),
    turn=st.integers(0, 100),
)  # fmt: skip


def work(tokens: int, key: bytes = b"k", turn: int = 0) -> Work:
    return Work(prompt_tokens=tokens, key=key, turn=turn)


def test_the_endpoint_that_holds_the_prefix_is_chosen() -> None:
    choice = pick(work(1000), [Candidate("a"), Candidate("b", cached_tokens=960), Candidate("c")])
    assert (choice.endpoint, choice.why, choice.cached_tokens) == ("b", "prefix", 960)


def test_the_cost_is_seconds_until_the_first_token() -> None:
    busy = Candidate("a", cached_tokens=200, queued_tokens=500, running=3, rate=1000.0)
    assert pick(work(700), [busy]).cost == (700 - 200 + 500 + 3 * DECODE_TOKENS) / 1000.0


def test_a_burst_with_one_shared_prefix_spills_when_waiting_outweighs_computing_it_again() -> None:
    holder, idle = Candidate("a", cached_tokens=1000), Candidate("b")
    assert pick(work(1010), [replace(holder, queued_tokens=900), idle]).endpoint == "a"
    choice = pick(work(1010), [replace(holder, queued_tokens=1100), idle])
    assert (choice.endpoint, choice.why) == ("b", "spill")


def test_one_long_prompt_weighs_more_than_many_short_ones() -> None:
    long, short = Candidate("a", queued_tokens=30_000), Candidate("b", queued_tokens=50, running=5)
    assert pick(work(100), [long, short]).endpoint == "b"


def test_a_full_engine_costs_the_time_until_a_slot_is_free() -> None:
    full = Candidate("a", cached_tokens=500, running=8, slots=8, mean_s=20.0)
    assert pick(work(512), [full, Candidate("b", running=8, slots=64)]).endpoint == "b"


def test_an_engine_without_free_blocks_is_avoided() -> None:
    packed = Candidate("a", cached_tokens=100, blocks=100, free_blocks=2, mean_s=10.0)
    roomy = Candidate("b", blocks=100, free_blocks=90, mean_s=10.0)
    assert pick(Work(1000, b"k", blocks=63), [packed, roomy]).endpoint == "b"


def test_a_few_blocks_that_all_prompts_share_do_not_draw_all_of_them_to_one_endpoint() -> None:
    opening = [Candidate("a", cached_tokens=TIE_TOKENS), Candidate("b"), Candidate("c")]
    chosen = Counter(pick(work(300, str(i).encode()), opening).endpoint for i in range(300))
    assert set(chosen) == {"a", "b", "c"}
    assert max(chosen.values()) < 150


def test_noise_in_measured_rates_does_not_decide() -> None:
    names = {
        pick(work(800, str(i).encode()), [Candidate("a", rate=4000.0), Candidate("b", rate=5500.0)]).endpoint
        for i in range(50)
    }
    assert names == {"a", "b"}


def test_hardware_that_is_really_faster_is_preferred() -> None:
    fast = Candidate("c", rate=3 * RATE_BAND * 1000.0)
    slow = [Candidate("a", rate=1000.0), Candidate("b", rate=1000.0)]
    assert pick(work(2000), [*slow, fast]).endpoint == "c"


def test_an_endpoint_that_leaves_moves_only_its_own_prefixes() -> None:
    three = [Candidate(n) for n in "abc"]
    for number in range(200):
        key = str(number).encode()
        before = pick(work(500, key), three).endpoint
        after = pick(work(500, key), three[:2]).endpoint
        assert before == after or before == "c"


def test_round_robin_takes_turns_and_least_work_ignores_prefixes() -> None:
    three = [Candidate("a", cached_tokens=1000), Candidate("b"), Candidate("c")]
    turns = [pick(work(1000, turn=t), three, "round-robin").endpoint for t in range(6)]
    assert turns == ["a", "b", "c"] * 2
    loaded = [replace(three[0], queued_tokens=10), replace(three[1], queued_tokens=5), three[2]]
    assert pick(work(1000), loaded, "least-work").endpoint == "c"
    assert {pick(work(1000, turn=t), three, "least-work").endpoint for t in range(3)} == {"a", "b", "c"}


@given(works, candidate_lists, st.sampled_from(POLICIES), st.randoms())
def test_the_pick_is_one_of_the_candidates_whatever_their_order(
    asked: Work, candidates: list[Candidate], policy: Policy, random: object
) -> None:
    choice = pick(asked, candidates, policy)
    shuffled = list(candidates)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert pick(asked, shuffled, policy) == choice
    assert choice.endpoint in {c.name for c in candidates}
    assert choice.cost >= 0


@given(works, candidate_lists)
def test_no_endpoint_is_clearly_cheaper_than_the_pick(asked: Work, candidates: list[Candidate]) -> None:
    choice = pick(asked, candidates)
    slowest = min([c.rate for c in candidates if c.rate] or [2000.0])
    alone = [pick(asked, [replace(c, rate=c.rate or 0.0)]) for c in candidates]
    if len({c.rate for c in candidates}) == 1:  # else a lone endpoint is judged at its own rate
        assert all(choice.cost <= other.cost + TIE_TOKENS / slowest + 1e-9 for other in alone)


@given(works, candidate_lists, st.integers(1, 5000))
def test_more_queued_work_never_attracts_a_request(
    asked: Work, candidates: list[Candidate], more: int
) -> None:
    choice = pick(asked, candidates)
    loaded = [
        replace(c, queued_tokens=c.queued_tokens + more) if c.name != choice.endpoint else c
        for c in candidates
    ]
    assert pick(asked, loaded).endpoint == choice.endpoint
