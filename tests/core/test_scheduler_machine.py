"""The scheduler under random workloads on tiny pools: each request gives what it gives alone."""

from __future__ import annotations

from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from octavo.errors import ContextLengthExceeded, QueueFull

EOS = 49
REQUEST = st.tuples(
    st.integers(0, 1),  # which of two texts the prompt starts with
    st.integers(0, 25),  # how much of it
    st.lists(st.integers(0, 3), max_size=3),  # and what follows
    st.integers(1, 20),  # max_tokens
    st.sampled_from([None, None, None, "a"]),  # salt
)


class SchedulerMachine(RuleBasedStateMachine):
    def __init__(self, make_bench):
        super().__init__()
        self.make_bench = make_bench

    @initialize(
        num_blocks=st.integers(4, 40),
        block_size=st.integers(1, 5),
        max_num_seqs=st.integers(1, 8),
        budget=st.integers(1, 10) | st.integers(1, 40),
        chunked=st.sampled_from([True, True, False]),
        caching=st.sampled_from([True, True, False]),
        groups=st.integers(1, 2),
        max_queue=st.integers(1, 12),
    )
    def start(self, num_blocks, block_size, max_num_seqs, budget, chunked, caching, groups, max_queue):
        self.bench = self.make_bench(
            num_blocks=num_blocks,
            block_size=block_size,
            groups=groups,
            eos=[EOS],
            max_model_len=max(2, 60 if chunked else budget),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max(2, budget),
            max_queue=max_queue,
            enable_chunked_prefill=chunked,
            enable_prefix_caching=caching,
        )
        self.scheduler = self.bench.scheduler
        self.wanted: dict[str, tuple[list[int], int]] = {}
        self.aborted: set[str] = set()
        self.lost: set[str] = set()

    @rule(requests=st.lists(REQUEST, min_size=1, max_size=5))
    def add(self, requests):
        for stem, length, tail, max_tokens, salt in requests:
            self.add_one([stem] + [(stem * 7 + i) % 50 for i in range(length)] + tail, max_tokens, salt)

    def add_one(self, prompt, max_tokens, salt):
        name = f"r{len(self.wanted)}"
        need = len(prompt) + max_tokens
        pool = self.scheduler.kv.pool.num_blocks // len(self.scheduler.kv.groups)
        capacity = pool * self.bench.settings.block_size
        fits = need <= self.bench.settings.max_model_len and need - 1 <= capacity
        try:
            self.bench.add(name, prompt, max_tokens, salt=salt)
        except ContextLengthExceeded as error:
            assert not fits and str(need) in error.message
        except QueueFull as error:
            assert len(self.scheduler.waiting) >= self.bench.settings.max_queue and error.retry_after_s >= 1
        else:
            assert fits
            self.wanted[name] = (prompt, max_tokens)

    @rule(steps=st.integers(1, 6))
    def step(self, steps):
        oldest = self.scheduler.running[:1]
        for _ in range(steps):
            before = oldest[0].num_computed_tokens if oldest else 0
            had = self.scheduler.has_requests
            assert self.bench.step() == had, "with requests there is always something to compute"
            if oldest and not oldest[0].finished:
                assert oldest[0].num_computed_tokens > before, "the oldest always progresses"

    @precondition(lambda self: self.wanted)
    @rule(data=st.data())
    def abort(self, data):
        name = data.draw(st.sampled_from(sorted(self.wanted)))
        if self.scheduler.abort(name):
            self.aborted.add(name)

    @precondition(lambda self: self.wanted)
    @rule(data=st.data())
    def abort_in_mid_step(self, data):
        name = data.draw(st.sampled_from(sorted(self.wanted)))
        plan = self.scheduler.schedule()
        if self.scheduler.abort(name):
            self.aborted.add(name)
        if plan is not None:
            for output in self.scheduler.update(plan, self.bench.executor.execute(plan)):
                assert output.request_id != name or name not in self.aborted
                self.bench.outputs[output.request_id].append(output)

    @precondition(lambda self: self.scheduler.has_requests)
    @rule(data=st.data())
    def a_row_fails(self, data):
        name = data.draw(st.sampled_from(sorted(self.scheduler._requests)))
        self.bench.executor.faulty.add(name)

    @rule()
    def a_step_breaks_off(self):
        self.scheduler.schedule()
        self.lost |= {output.request_id for output in self.scheduler.lose_step()}

    @rule()
    def reset_prefix_cache(self):
        self.scheduler.reset_prefix_cache()

    @invariant()
    def every_block_has_the_owners_that_tables_name(self):
        pool = self.scheduler.kv.pool
        held = [0] * pool.num_blocks
        for request in (*self.scheduler.running, *self.scheduler.waiting):
            for table in request.block_tables:
                assert len(set(table)) == len(table)
                for block in table:
                    held[block] += 1
        assert [block.ref_count for block in pool.blocks] == held
        assert pool.num_free == held.count(0)
        assert not any(table for request in self.scheduler.waiting for table in request.block_tables)

    @invariant()
    def limits_hold_and_order_is_that_of_arrival(self):
        assert len(self.scheduler.running) <= self.bench.settings.max_num_seqs
        assert all(r.num_tokens - r.num_computed_tokens <= 1 for r in self.scheduler.running[:-1])
        order = [int(r.request_id[1:]) for r in (*self.scheduler.running, *self.scheduler.waiting)]
        assert order == sorted(order)
        for plan in self.bench.executor.plans[-1:]:
            assert plan.num_tokens <= self.bench.settings.max_num_batched_tokens
            if not self.bench.settings.enable_chunked_prefill:
                assert all(row.samples for row in plan.rows)

    def teardown(self):
        if not hasattr(self, "bench"):
            return
        self.bench.run()
        executor = self.bench.executor
        for name, (prompt, max_tokens) in self.wanted.items():
            alone = executor.alone(prompt, max_tokens, [EOS])
            made, endings = self.bench.tokens(name), [o.finish_reason for o in self.bench.outputs[name]]
            if name in self.aborted | self.lost:
                assert alone[: len(made)] == made and not any(endings)
            elif endings[-1] == "error":
                assert name in executor.faulty and alone[: len(made)] == made
            else:
                assert made == alone, f"{name}: not the same as alone"
                assert endings[-1] == ("stop" if made[-1] == EOS else "length")
                assert not any(endings[:-1])
        stats = self.scheduler.stats()
        event(f"preempted {stats.preemptions > 0}, hit {stats.prefix_cache_hits > 0}")
        assert stats.running == stats.waiting == stats.waiting_tokens == stats.kv_usage == 0
        assert self.scheduler.kv.pool.num_free == self.scheduler.kv.pool.num_blocks


def test_random_workloads_give_each_request_what_it_gives_alone(bench):
    run_state_machine_as_test(
        lambda: SchedulerMachine(bench),
        settings=settings(max_examples=150, stateful_step_count=40, deadline=None),
    )
