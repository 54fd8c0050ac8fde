"""The planner of `octavo up`: from any state to what the resource asks, never short of engines."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.errors import ConfigError
from octavo_operator.local.manifest import first_key
from octavo_operator.local.plan import (
    Desired,
    EngineSpec,
    Replica,
    Restart,
    RouterSpec,
    Start,
    Stop,
    changes,
    desired,
    endpoints,
    only_in_a_cluster,
    plan,
)
from octavo_operator.resource import load

OLD = EngineSpec(model="/m.gguf", args=("--max-num-seqs=8",), threads=1)
NEW = dataclasses.replace(OLD, args=("--max-num-seqs=16",))


def wanted(replicas: int, engine: EngineSpec = NEW) -> Desired:
    return Desired(
        name="tiny", model_name="tiny", replicas=replicas, engine=engine, router=RouterSpec(args=())
    )


def replica(name: str, phase: str = "ready", spec: EngineSpec = NEW, retry_at: float = 0.0) -> Replica:
    return Replica(name=name, spec=spec, phase=phase, retry_at=retry_at)


def manifest(spec: str) -> str:
    return (
        "apiVersion: octavo.dev/v1alpha1\nkind: InferenceService\nmetadata: {name: tiny}\n"
        f"spec: {{model: {{uri: 'file:///m.gguf'}}, engine: {{device: cpu, kvCacheMemory: 64Mi}}, {spec}}}\n"
    )


def test_nothing_is_done_when_all_is_as_wanted() -> None:
    assert plan(wanted(2), [replica("a"), replica("b")], 0.0) == []


def test_missing_engines_start_together() -> None:
    assert plan(wanted(3), [replica("a")], 0.0) == [Start(2)]


def test_a_smaller_number_ends_the_youngest_but_rather_one_that_serves_nobody() -> None:
    assert plan(wanted(1), [replica("a"), replica("b"), replica("c")], 0.0) == [Stop("b"), Stop("c")]
    assert plan(wanted(1), [replica("a", "starting"), replica("b")], 0.0) == [Stop("a")]


def test_a_stopping_engine_counts_no_more() -> None:
    assert plan(wanted(1), [replica("a", "stopping")], 0.0) == [Start(1)]


def test_a_crashed_engine_starts_again_when_its_time_has_come() -> None:
    crashed = [replica("a"), replica("b", "backoff", retry_at=5.0)]
    assert plan(wanted(2), crashed, 4.9) == []
    assert plan(wanted(2), crashed, 5.0) == [Restart("b")]


def test_new_settings_replace_one_engine_after_the_other() -> None:
    old = [replica("a", spec=OLD), replica("b", spec=OLD)]
    assert plan(wanted(2), old, 0.0) == [Start(1)]
    assert plan(wanted(2), [*old, replica("c", "starting")], 0.0) == []
    assert plan(wanted(2), [*old, replica("c")], 0.0) == [Stop("a"), Start(1)]
    assert plan(wanted(2), [old[1], replica("c"), replica("d")], 0.0) == [Stop("b")]


def test_settings_that_cannot_start_leave_the_old_engines_serving() -> None:
    state = [replica("a", spec=OLD), replica("b", spec=OLD), replica("c", "backoff", retry_at=1.0)]
    assert plan(wanted(2), state, 0.0) == []
    assert plan(wanted(2), state, 1.0) == [Restart("c")]


def test_going_back_to_the_old_settings_ends_the_failing_engine() -> None:
    state = [replica("a", spec=OLD), replica("b", spec=OLD), replica("c", "backoff")]
    assert plan(wanted(2, OLD), state, 0.0) == [Stop("c")]


PHASES = st.sampled_from(["starting", "ready", "unready", "backoff", "stopping"])
STATES = st.lists(st.tuples(PHASES, st.sampled_from([OLD, NEW])), max_size=6)


@given(STATES, st.integers(0, 5))
def test_from_any_state_the_steps_reach_the_wanted_one_without_a_gap(state: list, count: int) -> None:
    """Time passes between plans: what starts becomes ready, what stops goes."""
    replicas = [replica(str(index), phase, spec) for index, (phase, spec) in enumerate(state)]
    made, goal = len(replicas), wanted(count)
    for _ in range(20):
        actions = plan(goal, replicas, 0.0)
        ready_before = sum(each.phase == "ready" for each in replicas)
        stopped = {action.name for action in actions if isinstance(action, Stop)}
        replicas = [
            dataclasses.replace(each, phase="stopping") if each.name in stopped else each for each in replicas
        ]
        ready_after = sum(each.phase == "ready" for each in replicas)
        assert ready_after >= min(ready_before, count)
        for action in actions:
            if isinstance(action, Start):
                replicas += [replica(str(made + index), "starting") for index in range(action.count)]
                made += action.count
        live = [each for each in replicas if each.phase != "stopping"]
        assert len(live) <= max(count + 1, len(state))
        replicas = [dataclasses.replace(each, phase="ready") for each in live]
    assert [each.spec for each in replicas] == [NEW] * count
    assert plan(goal, replicas, 0.0) == []


def test_engines_share_out_the_cores() -> None:
    threads = [desired(load(manifest(f"replicas: {n}")), "/m", 8).engine.threads for n in (1, 2, 3, 8, 9)]
    assert threads == [8, 4, 2, 1, 1]


def test_engines_share_out_the_memory_unless_told_how_large_their_caches_are() -> None:
    told = manifest("replicas: 3")
    assert desired(load(told), "/m", 8).engine.memory_shares == 1
    assert desired(load(told.replace(", kvCacheMemory: 64Mi", "")), "/m", 8).engine.memory_shares == 3


def test_under_autoscaling_the_minimum_starts_with_the_share_of_the_maximum() -> None:
    service = load(manifest("autoscaling: {minReplicas: 1, maxReplicas: 4}"))
    assert (desired(service, "/m", 8).replicas, desired(service, "/m", 8).engine.threads) == (1, 2)
    three = desired(service, "/m", 8, replicas=3)
    assert three.replicas == 3 and three.engine == desired(service, "/m", 8).engine


def test_the_commands_carry_the_settings_of_the_resource() -> None:
    service = load(manifest("replicas: 2, router: {policy: round-robin}"))
    processes = desired(service, "/m.gguf", 2, api_key_dir="/keys")
    engine = processes.engine.command(18000, 18001)
    assert engine[:2] == ["serve", "/m.gguf"]
    assert {"--served-model-name=tiny", "--device=cpu", "--port=18000", "--private-port=18001"} <= set(engine)
    assert {"--host=127.0.0.1", "--api-key-dir=/keys"} <= set(engine)
    router = processes.router.command(8000, "/state/endpoints.json")
    assert router[0] == "router"
    assert {"--port=8000", "--endpoints-file=/state/endpoints.json", "--policy=round-robin"} <= set(router)
    assert "--api-key-dir=/keys" in router


def test_a_flag_of_the_manifest_wins_over_what_is_usual_on_one_machine() -> None:
    service = load(manifest("replicas: 1").replace("device: cpu", "device: cpu, args: ['--drain-grace-s=9']"))
    command = desired(service, "/m", 1).engine.command(1, 2)
    flags = [flag for flag in command if flag.startswith("--drain-grace-s")]
    assert flags[-1] == "--drain-grace-s=9"


def test_the_routers_file_names_each_ready_engine_with_both_its_ports() -> None:
    assert endpoints([("tiny-engine-0", 18000, 18001)]) == {
        "endpoints": [
            {
                "name": "tiny-engine-0",
                "url": "http://127.0.0.1:18000",
                "private_url": "http://127.0.0.1:18001",
            }
        ]
    }


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        ("replicas: 3", ["replicas 2 -> 3"]),
        ("replicas: 2, router: {policy: least-work}", ["the router's settings changed: it is restarted"]),
        ("replicas: 2, paused: false", []),
    ],
)
def test_an_edit_is_told_by_what_it_changes(edit: str, said: list[str]) -> None:
    old, new = (desired(load(manifest(text)), "/m", 2) for text in ("replicas: 2", edit))
    assert changes(old, new) == said


def test_an_edit_that_changes_the_share_of_the_cores_says_so() -> None:
    old, new = (desired(load(manifest(f"replicas: {n}")), "/m", 8) for n in (2, 4))
    assert changes(old, new)[1].startswith(
        "an engine's share of the machine changed from 4 threads to 2 threads"
    )


def test_what_only_a_cluster_applies_is_said() -> None:
    service = load(manifest("replicas: 1, router: {replicas: 2, resources: {requests: {cpu: 1}}}"))
    lines = " ".join(only_in_a_cluster(service))
    assert "resources are not enforced here" in lines and "router.replicas is 2" in lines
    assert only_in_a_cluster(load(manifest("replicas: 1"))) == []


def test_a_key_is_a_whole_file_as_for_router_and_engine(tmp_path):
    (tmp_path / "b").write_text("later")
    (tmp_path / "a").write_text(" two words\nand a line \n")
    assert first_key(tmp_path) == "two words\nand a line"
    (tmp_path / "a").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="cannot be read"):
        first_key(tmp_path)
