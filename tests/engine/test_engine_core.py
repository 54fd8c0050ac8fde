"""The engine without a process: all-or-nothing admission, aborts, admin calls, what it tells of itself."""

from __future__ import annotations

import signal
import threading
from types import SimpleNamespace

import pytest

from octavo.config import EngineConfig
from octavo.core.block_hash import BlockHasher
from octavo.core.plan import RowResult, StepResult
from octavo.engine.core import EngineCore, wall_clock
from octavo.errors import ConfigError, ContextLengthExceeded, InvalidRequest, QueueFull


class Executor:
    def __init__(self, num_blocks=20, kinds=("full",), max_model_len=300):
        self.info = SimpleNamespace(
            max_model_len=max_model_len,
            vocab_size=100,
            num_blocks=num_blocks,
            block_bytes=1 << 16,
            num_host_blocks=0,
            eos_token_ids=[99],
            kv={"dtype": "bfloat16", "groups": [{"kind": kind} for kind in kinds]},
        )

    def check(self):
        pass

    def execute(self, plan):
        return StepResult(
            plan.step, [RowResult(row.request_id, [7] if row.samples else []) for row in plan.rows]
        )


@pytest.fixture
def core():
    """An engine that has finished its step when ``step`` returns."""
    return lambda executor=None, foretell=None, async_scheduling=False, **settings: EngineCore(
        EngineConfig(model="x", async_scheduling=async_scheduling, **settings),
        executor or Executor(),
        foretell=foretell,
    )


def test_requests_added_together_are_taken_all_or_none(core, request_of):
    engine = core(max_queue=1, max_num_seqs=1)
    with pytest.raises(ContextLengthExceeded):
        engine.add([request_of("a"), request_of("b", prompt=[1] * 400)])
    assert not engine.has_work and engine.step() == []
    engine.add([request_of("a"), request_of("b")])
    with pytest.raises(QueueFull):
        engine.add([request_of(name) for name in "cd"])
    assert engine.stats().waiting == 2


def test_an_aborted_request_gives_its_last_output_with_the_next_step(core, request_of):
    engine = core()
    engine.add([request_of("a"), request_of("b")])
    engine.step()
    engine.abort(["a", "unknown"])
    assert engine.stats().running == 1
    outputs = engine.step()
    assert [(o.request_id, o.finish_reason, o.token_ids) for o in outputs] == [
        ("a", "abort", []),
        ("b", None, [7]),
    ]


def test_an_interrupted_step_ends_its_requests_and_leaves_nothing_of_it_to_find(core, request_of):
    executor = Executor()
    engine = core(executor, max_num_seqs=2)
    prompt = [5] * 64
    engine.add([request_of("a", prompt=prompt), request_of("b"), request_of("waits")])
    run, executor.execute = executor.execute, lambda plan: (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    executor.execute = run
    first = engine.step()
    assert [(o.request_id, o.finish_reason) for o in first] == [
        ("a", "error"),
        ("b", "error"),
        ("waits", None),
    ]
    engine.add([request_of("again", prompt=prompt)])
    (again,) = [o for o in engine.step() if o.request_id == "again"]
    assert again.token_ids == [7] and again.num_cached_tokens == 0
    while engine.has_work:
        engine.step()
    assert engine.stats().kv_usage == 0


def test_with_asynchronous_scheduling_a_step_runs_while_the_caller_goes_on(core, request_of):
    executor = Executor()
    engine = core(executor, async_scheduling=True)
    may_end, run = threading.Event(), executor.execute
    executor.execute = lambda plan: may_end.wait(10) and run(plan)
    engine.add([request_of("a", max_tokens=2)])
    assert engine.step() == [], "the first has only begun"
    engine.add([request_of("b", max_tokens=1)])
    engine.abort(["unknown"])
    may_end.set()
    assert [(o.request_id, o.token_ids) for o in engine.step()] == [("a", [7])]
    assert [o.request_id for o in engine.step()] == ["a", "b"], "b came in with the next step"
    assert not engine.has_work and not engine.wait()


def test_a_request_aborted_while_its_step_runs_ends_at_once_and_gives_nothing_more(core, request_of):
    engine = core(async_scheduling=True)
    engine.add([request_of("a", prompt=[1] * 64), request_of("b")])
    engine.step()
    engine.abort(["a"])
    assert engine.stats().running == 1
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    assert [o.finish_reason for o in outputs if o.request_id == "a"] == ["abort"]
    assert [token for o in outputs if o.request_id == "b" for token in o.token_ids] == [7] * 5
    assert engine.stats().kv_usage == 0


def test_a_step_that_fails_on_its_thread_is_raised_to_the_caller_and_the_engine_goes_on(core, request_of):
    executor = Executor()
    engine = core(executor, async_scheduling=True)
    run, executor.execute = executor.execute, lambda plan: (_ for _ in ()).throw(ValueError("broken"))
    engine.add([request_of("a")])
    engine.step()
    with pytest.raises(ValueError, match="broken"):
        engine.step()
    executor.execute = run
    assert [(o.request_id, o.finish_reason) for o in engine.step()] == [("a", "error")]
    engine.add([request_of("b", max_tokens=1)])
    while engine.has_work:
        last = engine.step()
    assert [o.token_ids for o in last] == [[7]] and engine.stats().kv_usage == 0


@pytest.fixture
def interruptible():
    """The keyboard's signal raises, though a shell that began the tests in its background has it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_while_a_step_runs_on_its_thread_loses_nothing(core, request_of, interruptible):
    """The keyboard interrupts the one who waits, not the step."""
    executor = Executor()
    engine = core(executor, async_scheduling=True)
    waits, interrupted, run = threading.Event(), threading.Event(), executor.execute

    def interrupt(plan):
        executor.execute = run
        waits.wait(10)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        interrupted.wait(10)
        return run(plan)

    executor.execute = interrupt
    engine.add([request_of("a", max_tokens=2)])
    engine.step()
    with pytest.raises(KeyboardInterrupt):
        waits.set()
        engine.step()
    interrupted.set()
    tokens = []
    while engine.has_work:
        tokens += [token for o in engine.step() for token in o.token_ids]
    assert tokens == [7, 7]


def test_what_it_says_of_its_cache_is_what_a_router_needs(core):
    engine = core(prefix_caching_hash_algo="xxhash", block_size=8)
    assert engine.kv == {
        "hash": "xxhash",
        "root": BlockHasher("xxhash", 8).root.hex(),
        "block_size": 8,
        "num_blocks": 20,
        "dtype": "bfloat16",
        "groups": [{"kind": "full"}],
        "events": None,
    }


def test_without_a_prefix_cache_it_publishes_no_hash_scheme(core):
    kv = core(enable_prefix_caching=False).kv
    assert kv["hash"] is None and kv["root"] is None and kv["block_size"] == 16


def test_a_kv_rule_that_the_scheduler_has_not_is_refused(core):
    with pytest.raises(ConfigError, match="'state'"):
        core(Executor(kinds=("full", "state")))


def test_a_long_step_is_foretold_and_a_short_one_is_not(core, request_of):
    told = []
    engine = core(foretell=told.append)
    engine.add([request_of("a", prompt=[1] * 50)])
    engine.step()
    assert told == [60.0], "nothing was measured yet"
    while engine.has_work:
        engine.step()
    engine.add([request_of("b", prompt=[2] * 50)])
    while engine.has_work:
        engine.step()
    assert told == [60.0]


def test_the_longest_output_after_a_prompt_is_bound_by_model_and_pool(core, request_of):
    assert core().max_tokens_after(100) == 200
    engine = core(Executor(num_blocks=10))
    assert engine.max_tokens_after(100) == 61
    engine.check([request_of("a", prompt=[1] * 100, max_tokens=61)])
    with pytest.raises(ContextLengthExceeded):
        engine.check([request_of("a", prompt=[1] * 100, max_tokens=62)])


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_pitfall_is_told_in_the_log_once(core, request_of, caplog, async_scheduling):
    """Two that grow into a pool for one: each step of the second's costs a preemption."""
    engine = core(Executor(num_blocks=6), max_num_seqs=8, async_scheduling=async_scheduling)
    for turn in range(30):
        engine.add([request_of(f"{turn}-{i}", prompt=[turn, i] * 8, max_tokens=60) for i in range(6)])
        while engine.has_work:
            engine.step()
    assert [record.levelname for record in caplog.records if "steps preempted" in record.message] == [
        "WARNING"
    ]


def test_an_unknown_admin_method_is_refused(core):
    with pytest.raises(InvalidRequest, match=r"'x'.*reset_prefix_cache"):
        core().admin("x")


def test_the_clock_never_goes_back():
    clock = wall_clock()
    looks = [clock() for _ in range(100)]
    assert looks == sorted(looks)
