"""The KV cache under random sequences, forks, steps in flight and resets: what is read is always right."""

from __future__ import annotations

from core.kv_bench import FULL, STATE, KVBench, window
from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from octavo.core.plan import NO_BLOCK

GROUPS = st.lists(
    st.one_of(st.just(FULL), st.just(STATE), st.integers(1, 12).map(window)), min_size=1, max_size=3
)


class KVCacheMachine(RuleBasedStateMachine):
    """``KVBench`` checks every read of every row; this draws what happens and checks who holds what."""

    @initialize(
        groups=GROUPS,
        num_blocks=st.integers(6, 40),
        block_size=st.integers(1, 4),
        max_chunk=st.integers(1, 12),
        caching=st.sampled_from([True, True, True, False]),
    )
    def start(self, groups, num_blocks, block_size, max_chunk, caching):
        self.b = KVBench(groups, num_blocks, block_size, max_chunk=max_chunk, caching=caching)
        self.kv, self.chunk = self.b.kv, max_chunk
        self.waiting: list = []
        self.running: list = []
        self.in_flight: tuple | None = None
        self.hits = 0

    @rule(
        stem=st.integers(0, 1),
        length=st.integers(1, 30),
        tail=st.lists(st.integers(0, 2), max_size=2),
        salt=st.sampled_from([None, None, "a"]),
    )
    def arrive(self, stem, length, tail, salt):
        tokens = [(stem * 7 + i) % 50 for i in range(length)] + tail
        if self.kv.blocks_needed(len(tokens)) <= self.kv.pool.num_blocks:
            self.waiting.append(self.b.sequence(tokens, salt))

    @precondition(lambda self: self.running or self.waiting)
    @rule(data=st.data(), beside=st.booleans())
    def step(self, data, beside):
        """Some sequences go on, some are admitted; the step before may still run while this is planned."""
        for request in data.draw(st.permutations(self.running)):
            left = request.num_tokens - request.num_computed_tokens
            if left:
                self.plan(request, data.draw(st.integers(0, min(left, self.chunk))))
        while self.waiting and data.draw(st.booleans()):
            request = self.waiting[0]
            self.kv.name_blocks(request)
            hit = self.kv.find_prefix(request)
            chunk = min(request.num_tokens - hit.num_tokens, data.draw(st.integers(1, self.chunk)))
            free = self.kv.pool.num_free
            if not self.kv.admit(request, hit, 0, hit.num_tokens + chunk):
                assert free == self.kv.pool.num_free and not any(request.block_tables)
                break
            self.hits += hit.num_tokens > 0
            self.running.append(self.waiting.pop(0))
            self.plan(request, chunk)
        planned, self.b.planned = (self.kv.take_copies(), self.b.planned), []
        self.finish_step()
        if beside:
            self.in_flight = planned
        else:
            self.b.execute(*planned)

    def plan(self, request, count):
        if count and not self.b.plan(request, request.num_computed_tokens + count):
            alone = [other for other in self.running if any(other.block_tables)] == [request]
            assert not alone, "what blocks_needed says is enough"

    def finish_step(self):
        if self.in_flight:
            self.b.execute(*self.in_flight)
            self.in_flight = None

    @precondition(lambda self: self.running)
    @rule(data=st.data(), count=st.integers(1, 4))
    def draw_tokens(self, data, count):
        request = data.draw(st.sampled_from(self.running))
        tokens = data.draw(st.lists(st.integers(0, 2), min_size=count, max_size=count))
        if self.kv.blocks_needed(request.num_tokens + count) <= self.kv.pool.num_blocks:
            request.token_ids += tokens
            if data.draw(st.booleans()):
                self.kv.name_blocks(request)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), token=st.integers(0, 2))
    def fork(self, data, token):
        parent = data.draw(st.sampled_from(self.running))
        child = self.b.sequence(
            [*parent.token_ids[: parent.num_computed_tokens], token], parent.request.cache_salt
        )
        self.kv.fork(parent, child)
        self.running.append(child)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), trusted=st.booleans())
    def end(self, data, trusted):
        request = data.draw(st.sampled_from(self.running))
        self.running.remove(request)
        self.kv.free(request, trusted=trusted)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def preempt(self, data):
        request = data.draw(st.sampled_from(self.running))
        self.running.remove(request)
        self.kv.free(request)
        self.waiting.insert(0, request)

    @rule()
    def reset(self):
        self.kv.reset_prefix_cache()
        assert self.kv.pool.num_cached == 0

    @invariant()
    def every_block_has_the_owners_that_tables_name(self):
        held = [0] * self.kv.pool.num_blocks
        for request in self.running:
            for table in request.block_tables:
                blocks = [block for block in table if block != NO_BLOCK]
                assert len(set(blocks)) == len(blocks)
                for block in blocks:
                    held[block] += 1
        for source in self.kv._copies.values():
            held[source] += 1
        assert [block.ref_count for block in self.kv.pool.blocks] == held
        assert self.kv.pool.num_free == held.count(0)
        assert self.kv.pool.usage == (len(held) - held.count(0)) / len(held)
        assert not any(table for request in self.waiting for table in request.block_tables)

    @invariant()
    def a_sequence_holds_what_it_looks_back_to_and_at_most_what_blocks_needed_says(self):
        for request in self.running:
            holds = sum(block != NO_BLOCK for table in request.block_tables for block in table)
            assert holds <= self.kv.blocks_needed(request.num_tokens)
            for spec, table in zip(self.kv.groups, request.block_tables, strict=True):
                if spec.kind != "state":
                    first = spec.first_kept(request.num_computed_tokens) // self.b.size
                    assert NO_BLOCK not in table[first:]

    def teardown(self):
        if not hasattr(self, "kv"):
            return
        self.finish_step()
        for request in self.running:
            self.kv.free(request)
        event(f"hit {self.hits > 0}")
        assert self.kv.pool.usage == 0 and self.kv.take_copies() == []


KVCacheMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestKVCacheMachine = KVCacheMachine.TestCase
