"""How many engines a service gets for its load."""

from __future__ import annotations

import dataclasses

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo_operator.autoscaler import Decision, Load, Pod, Wanted, decide
from octavo_operator.resource import Autoscaling
from octavo_operator.scaling import deletion_cost

SPEC = Autoscaling(
    min_replicas=1, max_replicas=10, waiting_requests=4, kv_cache_usage_percent=80, stabilization_s=300
)


def pod(
    waiting: int = 0, running: int = 0, kv: float = 0.0, *, ready: bool = True, ending: bool = False
) -> Pod:
    load = Load(waiting=waiting, running=running, kv_usage=kv, concurrency=8)
    return Pod(name="p", ready=ready, ending=ending, load=load if ready else None)


def unknown() -> Pod:
    return Pod(name="u", ready=True, ending=False, load=None)


def starting() -> Pod:
    return Pod(name="s", ready=False, ending=False, load=None)


def settled(pods: list[Pod], current: int, spec: Autoscaling = SPEC) -> Decision:
    """The decision once the same load has lasted for the whole window."""
    first = decide(pods, current, spec, (), 0.0)
    return decide(pods, current, spec, first.history, spec.stabilization_s + 1.0)


def test_a_queue_asks_for_the_replicas_that_would_take_it() -> None:
    decision = decide([pod(waiting=28, running=8)], 1, SPEC, (), 0.0)
    assert decision.replicas == 3  # 36 requests, 8 + 4 a replica
    assert decision.reason == "36 requests, 12 a replica"


def test_full_caches_ask_for_replicas_too() -> None:
    decision = decide([pod(running=2, kv=0.9), pod(running=2, kv=0.9)], 2, SPEC, (), 0.0)
    assert decision.replicas == 3
    assert "KV caches 180 % in sum" in decision.reason


def test_starting_pods_count_as_capacity_so_a_queue_asks_only_once() -> None:
    """Case 40."""
    busy = pod(waiting=28, running=8, kv=0.99)
    assert decide([busy], 1, SPEC, (), 0.0).replicas == 3
    assert decide([busy, starting(), starting()], 3, SPEC, (), 5.0).replicas == 3


def test_a_pod_that_does_not_answer_hides_no_queue() -> None:
    """Case 40."""
    for silent in (unknown(), starting()):
        decision = decide([pod(waiting=40), silent], 2, SPEC, (), 0.0)
        assert decision.replicas == 4


def test_a_pod_that_does_not_answer_is_not_idle() -> None:
    assert settled([pod(), unknown()], 2).replicas == 2 - 1  # one full, one idle: one would do
    assert settled([unknown(), unknown(), pod()], 3).replicas == 2
    assert settled([unknown(), unknown()], 2).replicas == 2


def test_with_no_answer_at_all_nothing_changes() -> None:
    decision = settled([unknown(), unknown(), unknown()], 3)
    assert decision.replicas == 3 and "no engine could be asked" in decision.reason
    assert settled([starting()], 5).replicas == 5


def test_new_bounds_count_at_once_without_any_load() -> None:
    """Case 41."""
    raised = dataclasses.replace(SPEC, min_replicas=3)
    lowered = dataclasses.replace(SPEC, max_replicas=1)
    first = decide([pod()], 1, SPEC, (), 0.0)
    up = decide([pod()], 1, raised, first.history, 5.0)
    assert (up.replicas, up.reason) == (3, "0 requests, 12 a replica; minReplicas is 3")
    down = decide([pod()] * 3, 3, lowered, up.history, 10.0)
    assert down.replicas == 1 and "maxReplicas is 1" in down.reason


def test_ending_pods_are_neither_capacity_nor_load() -> None:
    """Case 50."""
    ending = [pod(running=8, kv=0.5, ending=True)] * 9
    assert settled([pod(running=6), *ending], 1).replicas == 1
    assert settled([pod(running=8, waiting=16), *ending], 1).replicas == 2


def test_it_rises_at_once_and_falls_to_the_highest_of_the_window() -> None:
    history: tuple[Wanted, ...] = ()
    seen = []
    for now, waiting in ((0, 0), (10, 100), (20, 30), (200, 0), (305, 0), (315, 0), (325, 0)):
        current = seen[-1] if seen else 1
        decision = decide(
            [pod(waiting=waiting)] + [pod()] * (current - 1), current, SPEC, history, float(now)
        )
        history = decision.history
        seen.append(decision.replicas)
    assert seen == [1, 9, 9, 9, 9, 3, 1]


def test_after_a_restart_nothing_falls_before_a_whole_window_was_seen() -> None:
    first = decide([pod()] * 4, 4, SPEC, (), 1000.0)
    soon = decide([pod()] * 4, 4, SPEC, first.history, 1290.0)
    late = decide([pod()] * 4, 4, SPEC, soon.history, 1301.0)
    assert [first.replicas, soon.replicas, late.replicas] == [4, 4, 1]


def test_a_window_of_zero_falls_at_once() -> None:
    spec = dataclasses.replace(SPEC, stabilization_s=0)
    assert decide([pod()] * 4, 4, spec, (), 0.0).replicas == 1


def test_the_signals_tell_what_was_seen() -> None:
    signals = decide([pod(3, 2, 0.5), pod(1, 1, 0.3), unknown(), starting()], 4, SPEC, (), 0.0).signals
    assert dataclasses.astuple(signals) == (4, 3, 40, 2, 1, 1)


def test_the_idlest_pod_costs_least_and_a_silent_one_most() -> None:
    costs = [
        deletion_cost(p) for p in (starting(), pod(), pod(kv=0.5), pod(running=1), pod(running=3), unknown())
    ]
    assert costs == sorted(costs) and len(set(costs[1:])) == len(costs) - 1


loads = st.builds(
    Load,
    waiting=st.integers(0, 50),
    running=st.integers(0, 8),
    kv_usage=st.floats(0, 1),
    concurrency=st.just(8),
)
# The machine may be busy with other tests; how fast inputs are drawn says nothing of the operator.
patient = settings(suppress_health_check=[HealthCheck.too_slow], deadline=None, max_examples=60)
pods = st.lists(
    st.builds(Pod, name=st.just("p"), ready=st.booleans(), ending=st.booleans(), load=st.none() | loads).map(
        lambda p: p if p.ready and not p.ending else dataclasses.replace(p, load=None)
    ),
    max_size=8,
)


@patient
@given(pods, st.integers(0, 20), st.integers(1, 5), st.integers(0, 5))
def test_the_decision_keeps_the_bounds(pods: list[Pod], current: int, low: int, extra: int) -> None:
    spec = dataclasses.replace(SPEC, min_replicas=low, max_replicas=low + extra)
    assert low <= decide(pods, current, spec, (), 0.0).replicas <= low + extra


@patient
@given(pods, st.integers(1, 10))
def test_more_load_never_means_fewer_replicas(pods: list[Pod], current: int) -> None:
    heavier = [
        dataclasses.replace(p, load=dataclasses.replace(p.load, waiting=p.load.waiting + 20)) if p.load else p
        for p in pods
    ]
    assert settled(heavier, current).replicas >= settled(pods, current).replicas


@patient
@given(pods, st.integers(1, 10))
def test_losing_sight_of_a_pod_never_lowers_the_number_below_what_is_known_to_be_needed(
    pods: list[Pod], current: int
) -> None:
    blind = [dataclasses.replace(p, load=None) for p in pods]
    assert settled(blind, current).replicas == current


@patient
@given(pods, st.integers(1, 10), st.integers(1, 6))
def test_pods_that_start_do_not_raise_the_number(pods: list[Pod], current: int, more: int) -> None:
    added = [*pods, *([starting()] * more)]
    assert settled(added, current).replicas == settled(pods, current).replicas


@patient
@given(st.lists(st.tuples(st.integers(1, 60), st.integers(0, 100)), min_size=1, max_size=30))
def test_nothing_falls_faster_than_the_window_allows(steps: list[tuple[int, int]]) -> None:
    now, current, history = 0.0, 1, ()
    wanted: list[tuple[float, int]] = []
    for pause, waiting in steps:
        now += pause
        decision = decide([pod(waiting=waiting)] + [pod()] * (current - 1), current, SPEC, history, now)
        needed = min(max(-(-waiting // 12), 1), 10)
        wanted.append((now, needed))
        highest = max(w for t, w in wanted if t > now - 300)
        assert decision.replicas >= min(highest, 10)
        current, history = decision.replicas, decision.history
