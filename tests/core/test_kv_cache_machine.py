"""The KV cache under random sequences, forks, swaps, steps in flight: what is read is always right."""

from __future__ import annotations

from collections import Counter

from core.kv_bench import FULL, STATE, CollidingHasher, KVBench, Replica, window
from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from octavo.core.plan import NO_BLOCK

GROUPS = st.lists(
    st.one_of(st.just(FULL), st.just(STATE), st.integers(1, 12).map(window)), min_size=1, max_size=3
)
PROMPTS = st.lists(
    st.tuples(
        st.sampled_from([0, 0, 0, 1]),  # which of two texts it starts with
        st.sampled_from([30, 20]) | st.integers(1, 30),  # how much of it
        st.lists(st.integers(0, 2), max_size=2),  # and what follows
        st.sampled_from([None] * 6 + ["a"]),  # salt
    ),
    min_size=1,
    max_size=3,
)
PICK = st.integers(0, 20)  # one of whatever there is
ARGUMENTS = {
    "arrive": {"prompts": PROMPTS},
    "step": {
        "counts": st.lists(st.integers(0, 12), min_size=1, max_size=4),
        "admit": st.integers(0, 3),
        "steps": st.integers(1, 8),
        "beside": st.booleans(),
    },
    "pass_by": {"prompts": PROMPTS, "moves": st.integers(0, 3)},
    "draw_tokens": {"pick": PICK, "tokens": st.lists(st.integers(0, 2), min_size=1, max_size=4)},
    "fork": {"pick": PICK, "token": st.integers(0, 2), "count": st.integers(1, 3)},
    "swap_out": {"pick": PICK},
    "swap_in": {"pick": PICK, "reserve": st.integers(0, 2)},
    "transfers_end": {"pick": PICK, "count": st.integers(1, 5)},
    "a_transfer_is_lost": {"pick": PICK},
    "end": {"pick": PICK, "count": st.integers(1, 5), "trusted": st.sampled_from([True, True, True, False])},
    "preempt": {"pick": PICK},
    "reset": {"really": st.sampled_from([False, False, False, True])},
}


class KVCacheMachine(RuleBasedStateMachine):
    """``KVBench`` checks every read of every row; this draws what happens and checks who holds what."""

    @initialize(
        groups=GROUPS,
        num_blocks=st.integers(8, 30),
        block_size=st.integers(1, 4),
        max_chunk=st.integers(1, 12),
        caching=st.sampled_from([True, True, True, False]),
        host=st.sampled_from([0, 3, 20, 20, 100]),
        offload=st.sampled_from([True, True, False]),
        verify=st.booleans(),
    )
    def start(self, groups, num_blocks, block_size, max_chunk, caching, host, offload, verify):
        self.b = KVBench(
            groups,
            num_blocks,
            block_size,
            max_chunk=max_chunk,
            caching=caching,
            num_host_blocks=host,
            offload=offload,
            verify=verify,
            events=True,
            hasher=CollidingHasher(block_size) if verify else None,  # which only verifying makes up for
        )
        self.replica = Replica()
        self.kv, self.chunk = self.b.kv, max_chunk
        self.waiting: list = []
        self.running: list = []
        self.swapped: list[list] = []
        self.family: dict[str, int] = {}  # sequences forked from each other are swapped together
        self.in_flight: tuple | None = None
        self.hits = self.host_hits = self.swaps = self.lost = 0

    def one_running(self, pick):
        return self.running[pick % len(self.running)] if self.running else None

    @rule(
        what=st.sampled_from(
            [
                *["arrive", "step", "step", "end", "transfers_end"] * 4,
                *["pass_by"] * 3,
                *["draw_tokens", "fork", "swap_out", "swap_in"] * 2,
                *["a_transfer_is_lost", "preempt", "reset"],
            ]
        ),
        data=st.data(),
    )
    def happen(self, what, data):
        """One rule for all: a machine draws which of its rules a run has, and here each needs the others."""
        arguments = {name: data.draw(values, name) for name, values in ARGUMENTS[what].items()}
        getattr(self, what)(**arguments)

    # Steps

    def arrive(self, prompts):
        for stem, length, tail, salt in prompts:
            tokens = [(stem * 7 + i) % 50 for i in range(length)] + tail
            if self.kv.blocks_needed(len(tokens)) <= self.kv.pool.num_blocks:
                self.waiting.append(self.b.sequence(tokens, salt))

    def step(self, counts, admit, steps, beside):
        """Some sequences go on, some are admitted; the step before may still run while this is planned."""
        for _ in range(steps):
            for index, request in enumerate(list(self.running)):
                left = request.num_tokens - request.num_computed_tokens
                if left and request.transfer is None:
                    self.plan(request, min(left, self.chunk, counts[index % len(counts)]))
            while self.waiting and len(self.b.planned) < admit and self.admit(self.waiting[0], max(counts)):
                self.waiting.pop(0)
            planned = self.b.take()
            self.finish_step()
            if beside:
                self.in_flight = planned
            else:
                self.b.execute(*planned)

    def pass_by(self, prompts, moves):
        """Sequences that come, are computed one by one and end, and leave what they held in the caches."""
        self.finish_step()
        self.arrive(prompts)
        while self.waiting and self.admit(self.waiting[0], self.chunk):
            request = self.waiting.pop(0)
            while request.transfer is None and request.num_computed_tokens < request.num_tokens:
                before = request.num_computed_tokens
                self.b.run()
                for _ in range(min(moves, len(self.b.moving))):
                    self.b.finish(min(self.b.moving))
                self.plan(request, min(self.chunk, request.num_tokens - before))
                if request.num_computed_tokens == before:
                    break
            self.b.run()
            self.take_off(request)
            self.kv.free(request)

    def admit(self, request, count):
        self.kv.name_blocks(request)
        hit = self.kv.find_prefix(request)
        chunk = max(1, min(request.num_tokens - hit.num_tokens, self.chunk, count))
        free = self.kv.pool.num_free
        if not self.kv.admit(request, hit, 0, hit.num_tokens + chunk):
            assert free == self.kv.pool.num_free and not any(request.block_tables)
            return False
        self.hits += hit.num_tokens > 0
        self.host_hits += hit.num_host_tokens > 0
        assert (request.transfer is not None) == (hit.host_blocks > 0)
        self.running.append(request)
        if request.transfer is None:
            self.plan(request, chunk)
        return True

    def plan(self, request, count):
        if count and not self.b.plan(request, request.num_computed_tokens + count):
            alone = [other for other in self.running if any(other.block_tables)] == [request]
            assert not alone or self.kv.host.num_transfers, "what blocks_needed says is enough"

    def finish_step(self):
        if self.in_flight:
            self.b.execute(*self.in_flight)
            self.in_flight = None

    def draw_tokens(self, pick, tokens):
        request = self.one_running(pick)
        if request and self.kv.blocks_needed(request.num_tokens + len(tokens)) <= self.kv.pool.num_blocks:
            request.token_ids += tokens
            if pick % 2:
                self.kv.name_blocks(request)

    def fork(self, pick, token, count):
        parent = self.one_running(pick)
        for _ in range(count if parent and parent.transfer is None else 0):
            tokens = [*parent.token_ids[: parent.num_computed_tokens], token]
            child = self.b.sequence(tokens, parent.request.cache_salt)
            self.kv.fork(parent, child)
            self.running.append(child)
            self.family[child.request_id] = self.family_of(parent)

    def family_of(self, request):
        return self.family.setdefault(request.request_id, len(self.family))

    # Transfers

    def swap_out(self, pick):
        members = [r for r in self.running if self.family_of(r) == self.family_of(self.one_running(pick))]
        if not members:
            return
        free = self.kv.host.pool.num_free
        blocks = {b for r in members for table in r.block_tables for b in table if b != NO_BLOCK}
        loading = any(request.transfer is not None for request in members)
        if self.kv.swap_out(members):
            assert not loading and not any(table for r in members for table in r.block_tables)
            assert self.kv.host.pool.num_free >= free - len(blocks), "what is shared is kept once"
            self.running = [request for request in self.running if request not in members]
            self.swapped.append(members)
            self.swaps += 1
        else:
            assert loading or free < len(blocks)

    def swap_in(self, pick, reserve):
        if not self.swapped:
            return
        members = self.swapped[pick % len(self.swapped)]
        saving = any(request.transfer is not None for request in members)
        if self.kv.swap_in(members, reserve):
            assert not saving and self.kv.pool.num_free >= reserve
            assert not any(request.host_tables for request in members)
            self.swapped.remove(members)
            self.running += members

    def transfers_end(self, pick, count):
        for _ in range(min(count, len(self.b.moving))):
            self.b.finish(sorted(self.b.moving)[pick % len(self.b.moving)])

    def a_transfer_is_lost(self, pick):
        if self.b.moving:
            number = sorted(self.b.moving)[pick % len(self.b.moving)]
            del self.b.moving[number]
            for request in self.kv.transfer_lost(number):
                self.take_off(request)
                self.waiting.append(request)
            self.lost += 1

    # Ends

    def take_off(self, request):
        if request in self.running:
            self.running.remove(request)
        for members in self.swapped:
            if request in members:
                members.remove(request)
        self.swapped = [members for members in self.swapped if members]

    def everyone(self):
        return [*self.running, *(request for members in self.swapped for request in members)]

    def end(self, pick, count, trusted):
        for _ in range(min(count, len(self.everyone()))):
            request = self.everyone()[pick % len(self.everyone())]
            self.take_off(request)
            self.kv.free(request, trusted=trusted)

    def preempt(self, pick):
        if request := self.one_running(pick):
            self.running.remove(request)
            self.kv.free(request)
            self.waiting.insert(0, request)

    def reset(self, really):
        if really:
            self.kv.reset_prefix_cache()
            assert self.kv.pool.num_cached == self.kv.host.pool.num_cached == 0

    # What holds at any time

    @invariant()
    def every_block_has_the_owners_that_tables_and_transfers_name(self):
        pool, host = self.kv.pool, self.kv.host.pool
        moves = [move for under_way in self.kv.host._under_way.values() for move in under_way.moves]
        held = Counter(self.kv._copies.values()) + Counter(move.device for move in moves)
        kept = Counter(move.host for move in moves)
        for request in self.everyone():
            for tables, count in ((request.block_tables, held), (request.host_tables, kept)):
                for table in tables:
                    blocks = [block for block in table if block != NO_BLOCK]
                    assert len(set(blocks)) == len(blocks)
                    count.update(blocks)
        for tier, count in ((pool, held), (host, kept)):
            assert [block.ref_count for block in tier.blocks] == [count[i] for i in range(tier.num_blocks)]
            assert tier.num_free == tier.num_blocks - len(count)
        assert pool.usage == len(held) / pool.num_blocks
        assert not any(table for request in self.waiting for table in request.block_tables)

    @invariant()
    def who_applies_all_events_knows_what_can_be_found(self):
        self.replica.apply(self.kv.take_events())
        snapshot = self.kv.snapshot()
        found = {(b.medium, b.group_idx, b.name): b.parent for b in snapshot.blocks}
        assert self.replica.blocks == found and len(found) == len(snapshot.blocks)
        assert self.replica.digest() == snapshot.digest

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
        for request in self.everyone():
            self.kv.free(request)
        self.b.settle()
        for what in ("hits", "host_hits", "swaps", "lost"):
            event(what, payload=min(1, getattr(self, what)))
        assert self.kv.pool.usage == 0 and self.kv.host.num_transfers == 0
        assert self.kv.host.pool.num_free == self.kv.host.pool.num_blocks


KVCacheMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
TestKVCacheMachine = KVCacheMachine.TestCase
