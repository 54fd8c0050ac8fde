"""The block pool: nothing lost, nothing owned twice, cached blocks found until evicted in order of use."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from octavo.core.block_content import Content
from octavo.core.block_pool import Block, BlockPool, FreeList


class PoolMachine(RuleBasedStateMachine):
    """Random owners take, share, name and give back blocks; a plain model says what must be true."""

    @initialize(num_blocks=st.integers(4, 40), num_groups=st.integers(1, 2))
    def start(self, num_blocks, num_groups):
        self.pool = BlockPool(num_blocks, num_groups)
        self.num_groups = num_groups
        self.owners: list[list[int]] = []  # each a list of blocks held once
        self.contents: dict[int, tuple[int, bytes]] = {}  # block -> what the model knows it is named
        self.order: list[int] = []  # cached blocks, the next to be evicted first
        self.next_name = 0

    def find(self, group, name):
        return self.pool.find(group, Content(name, None))

    @rule(share=st.floats(0, 1))
    def allocate(self, share):
        count = int(share * self.pool.num_free)
        nameless = self.pool.num_free - len(self.order)
        taken = self.pool.allocate(count)
        assert len(set(taken)) == count
        assert not any(block in owner for block in taken for owner in self.owners)
        evicted = self.order[: max(0, count - nameless)]
        assert evicted == [block for block in taken if block in self.order], "least recently used goes first"
        for block in evicted:
            self.order.remove(block)
            del self.contents[block]
        if taken:
            self.owners.append(taken)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def register(self, data):
        owner = data.draw(st.sampled_from(self.owners))
        block = data.draw(st.sampled_from(owner))
        group = data.draw(st.integers(0, self.num_groups - 1))
        known = [name for _, name in self.contents.values()]
        name = data.draw(st.sampled_from([*known, b"new"])) if known else b"new"
        if name == b"new":
            self.next_name += 1
            name = str(self.next_name).encode()
        self.pool.register(block, group, Content(name, None))
        if block not in self.contents and (group, name) not in self.contents.values():
            self.contents[block] = (group, name)

    @precondition(lambda self: self.contents)
    @rule(data=st.data())
    def share_by_name(self, data):
        block_id = data.draw(st.sampled_from(sorted(self.contents)))
        found = self.find(*self.contents[block_id])
        assert found is not None and found.id == block_id
        self.pool.touch(found)
        if block_id in self.order:
            self.order.remove(block_id)
        self.owners.append([block_id])

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def release(self, data):
        owner = self.owners.pop(data.draw(st.integers(0, len(self.owners) - 1)))
        self.pool.release(reversed(owner))
        for block in reversed(owner):
            if block in self.contents and not any(block in other for other in self.owners):
                self.order.append(block)

    @precondition(lambda self: self.contents)
    @rule(data=st.data())
    def forget(self, data):
        _, name = data.draw(st.sampled_from(sorted(self.contents.values())))
        self.pool.forget(Content(name, None))
        for block in [block for block, (_, known) in self.contents.items() if known == name]:
            del self.contents[block]
            if block in self.order:
                self.order.remove(block)

    @rule()
    def reset(self):
        self.pool.reset_names()
        self.contents.clear()
        self.order.clear()

    @invariant()
    def counts_and_free_list_agree_with_the_owners(self):
        held: dict[int, int] = {}
        for owner in self.owners:
            for block in owner:
                held[block] = held.get(block, 0) + 1
        assert [block.ref_count for block in self.pool.blocks] == [
            held.get(i, 0) for i in range(self.pool.num_blocks)
        ]
        free = [block.id for block in self.pool._free]
        assert sorted(free) == [i for i in range(self.pool.num_blocks) if i not in held]
        assert self.pool.num_free == len(free)
        assert self.pool.num_cached == len(self.order)
        assert [block for block in free if block in self.contents] == self.order
        assert free[: len(free) - len(self.order)] == [b for b in free if b not in self.contents], (
            "blocks of no use to anyone go before cached ones"
        )
        assert self.pool.usage == pytest.approx(len(held) / self.pool.num_blocks)
        for block, (group, name) in self.contents.items():
            found = self.find(group, name)
            assert found is not None and found.id == block


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPoolMachine = PoolMachine.TestCase


def test_the_tail_of_a_sequence_is_evicted_before_its_head():
    pool = BlockPool(3)
    table = pool.allocate(3)
    for index, block in enumerate(table):
        pool.register(block, 0, Content(bytes([index]), None))
    pool.release(reversed(table))
    pool.allocate(2)
    assert (
        pool.find(0, Content(b"\x00", None)) is not None
        and pool.find(0, Content(b"\x01", None)) is None
        and pool.find(0, Content(b"\x02", None)) is None
    )


def test_a_hit_saves_a_block_from_eviction():
    pool = BlockPool(2)
    old, new = pool.allocate(2)
    for block, name in ((old, b"old"), (new, b"new")):
        pool.register(block, 0, Content(name, None))
        pool.release([block])
    found = pool.find(0, Content(b"old", None))
    pool.touch(found)
    pool.release([found.id])
    pool.allocate(1)
    assert pool.find(0, Content(b"old", None)) is found and pool.find(0, Content(b"new", None)) is None


def test_a_second_free_of_a_block_is_caught():
    pool = BlockPool(2)
    taken = pool.allocate(1)
    pool.release(taken)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.release(taken)


def test_removing_from_the_middle_keeps_the_order_of_the_rest():
    free, blocks = FreeList(), [Block(i) for i in range(4)]
    for block in blocks:
        free.append(block)
    free.remove(blocks[1])
    assert [block.id for block in free] == [0, 2, 3] and len(free) == 3
