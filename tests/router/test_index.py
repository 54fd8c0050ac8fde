"""The prefix index: what it believes, forgets, and learns from what comes back."""

from __future__ import annotations

import hashlib
import tracemalloc

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from octavo_router.index import ENTRY_BYTES, PrefixIndex


def chain(*parts: int) -> list[bytes]:
    """Chained hashes: equal prefixes of parts give equal prefixes of hashes."""
    names, parent = [], b"root"
    for part in parts:
        parent = hashlib.sha256(parent + bytes([part])).digest()
        names.append(parent)
    return names


def test_a_prompt_that_was_sent_is_matched_up_to_where_it_differs() -> None:
    index = PrefixIndex()
    index.add("a", chain(1, 2, 3, 4))
    assert index.match(chain(1, 2, 9), "a") == 2
    assert index.match(chain(1, 2, 3, 4, 5), "a") == 4
    assert index.match(chain(9, 2, 3), "a") == 0
    assert index.match(chain(1, 2), "b") == 0


def test_the_end_of_a_prefix_is_forgotten_before_its_beginning() -> None:
    index = PrefixIndex(budget_bytes=4 * ENTRY_BYTES)
    index.add("a", chain(1, 2, 3))
    index.add("a", chain(7, 8, 9)[:2])
    assert index.match(chain(1, 2, 3), "a") == 2
    assert index.match(chain(7, 8), "a") == 2


def test_an_endpoint_is_never_believed_to_hold_more_blocks_than_its_cache_has() -> None:
    index = PrefixIndex()
    index.set_capacity("a", 3)
    index.add("a", chain(*range(10)))
    assert index.blocks_of("a") == 3
    index.set_capacity("a", 2)
    assert index.match(chain(*range(10)), "a") == 2


def test_removing_an_endpoint_leaves_the_others() -> None:
    index = PrefixIndex()
    index.add("a", chain(1, 2))
    index.add("b", chain(1, 2, 3))
    index.remove_endpoint("a")
    assert (index.match(chain(1, 2), "a"), index.match(chain(1, 2, 3), "b"), len(index)) == (0, 3, 3)


def test_blocks_missing_twice_are_removed_for_that_endpoint_only() -> None:
    index = PrefixIndex()
    blocks = chain(1, 2, 3, 4)
    index.add("a", blocks)
    index.add("b", blocks)
    index.correct("a", blocks, predicted=4, actual=1)
    assert index.match(blocks, "a") == 4  # the request that missed them has computed them
    index.correct("a", blocks, predicted=4, actual=1)
    assert (index.match(blocks, "a"), index.match(blocks, "b")) == (1, 4)


def test_a_hit_restores_trust_after_a_miss() -> None:
    index = PrefixIndex()
    blocks = chain(1, 2, 3)
    index.add("a", blocks)
    index.correct("a", blocks, predicted=3, actual=0)
    index.correct("a", blocks, predicted=3, actual=3)
    index.correct("a", blocks, predicted=3, actual=0)
    assert index.match(blocks, "a") == 3


def test_blocks_found_though_not_expected_are_learnt() -> None:
    index = PrefixIndex()
    index.correct("a", chain(1, 2, 3), predicted=0, actual=2)
    assert index.match(chain(1, 2, 3), "a") == 2


def test_memory_really_stays_within_the_budget() -> None:
    budget = 2 * 2**20
    tracemalloc.start()
    try:
        index = PrefixIndex(budget_bytes=budget)
        before = tracemalloc.get_traced_memory()[0]
        for number in range(2000):
            parent = str(number).encode()
            hashes = []
            for _ in range(16):
                parent = hashlib.sha256(parent).digest()
                hashes.append(parent)
            index.add(f"endpoint-{number % 5}", hashes)
        used = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert index.size_bytes <= budget
    assert len(index) > budget // ENTRY_BYTES * 0.9  # it uses what it is given
    assert used <= budget


class IndexMachine(RuleBasedStateMachine):
    """Whatever happens, counts and bounds hold, and only what was sent or found is ever believed."""

    names = st.sampled_from(["a", "b", "c"])
    prompts = st.lists(st.integers(0, 2), min_size=0, max_size=8)

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(budget_bytes=20 * ENTRY_BYTES)
        self.sent: dict[str, set[bytes]] = {n: set() for n in "abc"}
        self.capacity: dict[str, int] = {}

    @rule(name=names, prompt=prompts)
    def add(self, name: str, prompt: list[int]) -> None:
        hashes = chain(*prompt)
        self.index.add(name, hashes)
        self.sent[name] |= set(hashes)
        if len(hashes) <= 20 // 3:  # within an equal share of the budget nobody's newest blocks are forgotten
            assert self.index.match(hashes, name) == min(len(hashes), self.capacity.get(name, 20))

    @rule(name=names, prompt=prompts, actual=st.integers(0, 8))
    def correct(self, name: str, prompt: list[int], actual: int) -> None:
        hashes = chain(*prompt)
        actual = min(actual, len(hashes))
        self.index.correct(name, hashes, self.index.match(hashes, name), actual)
        self.sent[name] |= set(hashes[:actual])

    @rule(name=names)
    def remove(self, name: str) -> None:
        self.index.remove_endpoint(name)
        self.sent[name].clear()
        self.capacity.pop(name, None)
        assert self.index.blocks_of(name) == 0

    @rule(name=names, blocks=st.integers(1, 12))
    def limit(self, name: str, blocks: int) -> None:
        self.index.set_capacity(name, blocks)
        self.capacity[name] = blocks

    @invariant()
    def bounded_and_counted(self) -> None:
        assert len(self.index) == sum(self.index.blocks_of(n) for n in "abc") <= 20
        assert self.index.size_bytes <= self.index.budget_bytes
        for name, limit in self.capacity.items():
            assert self.index.blocks_of(name) <= limit
        for name in "abc":
            for part in range(3):
                if self.index.match(chain(part), name):
                    assert chain(part)[0] in self.sent[name]


IndexMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)
TestIndexMachine = IndexMachine.TestCase
