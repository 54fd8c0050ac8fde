"""Groups of layers in one pool: windows slide, states leave snapshots, what is shared is copied first."""

from __future__ import annotations

import pytest
from core.kv_bench import FULL, STATE, CollidingHasher, KVBench, window

from octavo.core.kv_layout import KVSpec
from octavo.core.plan import NO_BLOCK

TEXT = list(range(40))


def test_blocks_that_slid_out_of_a_window_are_free_and_still_found():
    b = KVBench([window(8)], num_blocks=5)
    request = b.computed(TEXT, chunk=4)
    assert request.block_tables[0][:7] == [NO_BLOCK] * 7
    assert len(set(request.block_tables[0][7:])) == 3  # 7 tokens before position 36, and its own block
    assert b.kv.pool.usage == pytest.approx(3 / 5) and b.kv.pool.num_cached == 2
    assert b.cached([*TEXT[:32], 99]) == 32 and b.cached([*TEXT[:20], 99]) == 0


def test_a_window_group_needs_a_window_and_a_chunk_of_blocks_at_most():
    b = KVBench([FULL, window(8), STATE], num_blocks=100, max_chunk=6)
    assert b.kv.blocks_needed(4) == 1 + 1 + 2
    assert b.kv.blocks_needed(400) == 100 + 4 + 2  # 13 tokens in one step, from amid a block
    tight = KVBench([window(7)], num_blocks=b.kv.blocks_needed(400) - 102, max_chunk=6)
    for chunk in range(1, 7):
        tight.kv.free(tight.computed(TEXT, chunk=chunk))
        tight.kv.reset_prefix_cache()


@pytest.mark.parametrize(
    ("spec", "found"),
    [
        (FULL, 0),
        (window(4), 36),
        (window(5), 36),
        (window(6), 36),
        (window(29), 36),
        (window(33), 0),
        (STATE, 36),
    ],
)
def test_a_hit_needs_what_the_group_looks_back_to_and_no_more(spec: KVSpec, found):
    """The second block is gone: only a group that has no need of it goes on from the end."""
    b = KVBench([spec], num_blocks=40)
    b.kv.free(b.computed(TEXT, chunk=4))
    second = b.sequence(TEXT)
    b.kv.name_blocks(second)
    b.kv.pool.forget(second.contents[1])
    expected = found or 4
    assert b.admit(second) == expected
    b.compute(second)


def test_a_hit_is_valid_for_every_group():
    b = KVBench([FULL, window(8)], num_blocks=40)
    b.kv.free(b.computed(TEXT))
    again = b.sequence(TEXT)
    assert b.admit(again) == 36
    assert again.block_tables[1][:7] == [NO_BLOCK] * 7
    b.compute(again)
    for index in (5, 6):  # the window group loses two blocks: it can go on from 20 or from 36
        b.lose(1, again.contents[index])
    assert b.cached(TEXT[:33]) == 20 and b.cached(TEXT) == 36


def test_the_last_token_is_never_taken_from_the_cache_and_prompt_logprobs_take_none():
    b = KVBench()
    b.kv.free(b.computed(TEXT))
    assert [b.cached(TEXT[:length]) for length in (3, 4, 5, 16, 17)] == [0, 0, 4, 12, 16]
    assert b.cached(TEXT, prompt_logprobs=1) == 0


def test_a_state_is_kept_where_a_step_ends_at_the_end_of_a_block():
    b = KVBench([STATE], num_blocks=10)
    request = b.computed(TEXT[:22], chunk=6)  # steps end at 6, 12, 18 and 22
    assert len(request.block_tables[0]) == 1 and b.kv.pool.num_cached == 1
    assert b.cached(TEXT) == 12 and b.cached(TEXT[:12]) == 0
    second = b.sequence(TEXT)
    assert b.admit(second) == 12
    b.compute(second)
    assert b.cached(TEXT[:13]) == 12, "the snapshot itself was not written into"


def test_a_state_is_not_found_by_a_row_of_the_step_that_computes_it():
    b = KVBench([STATE])
    first, second = b.sequence(TEXT[:8]), b.sequence(TEXT[:9])
    b.admit(first)
    b.plan(first)
    assert b.admit(second) == 0
    b.plan(second)
    b.run()
    b.kv.free(first)
    assert b.cached(TEXT) == 8


@pytest.mark.parametrize("spec", [FULL, window(8), STATE])
def test_samples_of_one_prompt_share_it_and_the_last_owner_writes_in_place(spec):
    b = KVBench([spec], num_blocks=12)
    parent = b.computed(TEXT[:10])
    held = b.kv.pool.num_blocks - b.kv.pool.num_free
    children = [b.sequence(TEXT[:10]) for _ in range(3)]
    for number, child in enumerate(children):
        b.kv.fork(parent, child)
        child.token_ids.append(100 + number)
    parent.token_ids.append(200)
    assert b.kv.pool.num_blocks - b.kv.pool.num_free == held, "a fork takes no block"
    last = parent.block_tables[0][-1]
    for request in (*children, parent):
        assert b.plan(request)
    assert parent.block_tables[0][-1] == last, "the last owner writes in place"
    assert len({request.block_tables[0][-1] for request in (parent, *children)}) == 4
    b.run()
    assert b.kv.pool.num_blocks - b.kv.pool.num_free == held + 3
    for request in (parent, *children):
        b.kv.free(request)
    assert b.kv.pool.usage == 0


def test_a_state_that_others_share_is_not_overwritten_by_the_one_it_came_from():
    b = KVBench([FULL, STATE])
    parent = b.computed(TEXT[:10])
    child = b.sequence(TEXT[:10])
    b.kv.fork(parent, child)
    for request, token in ((parent, 1), (child, 2)):
        request.token_ids.append(token)
        b.compute(request)


def test_a_state_is_kept_also_where_there_was_room_for_more_than_was_computed():
    b = KVBench([STATE])
    request = b.sequence(TEXT[:20])
    b.admit(request, 12)
    b.kv.grow(request, 12)
    b.compute(request, 8)
    b.compute(request, 10)
    assert b.cached(TEXT) == 8
    follower = b.sequence(TEXT[:9])
    assert b.admit(follower) == 8
    b.compute(follower)


def test_a_planned_row_keeps_its_block_table_while_the_next_step_is_prepared():
    b = KVBench([FULL, window(5)], num_blocks=20)
    parent = b.computed(TEXT[:10])
    child = b.sequence(TEXT[:10])
    b.kv.fork(parent, child)
    for request in (parent, child):
        request.token_ids += range(50, 60)
        b.plan(request, 13)
    first = b.take()
    for request in (parent, child):
        b.plan(request, 20)
    b.execute(*first)
    b.run()


def test_a_copy_is_not_made_for_a_sequence_that_ended_before_the_step():
    b = KVBench()
    parent = b.computed(TEXT[:6])
    child = b.sequence(TEXT[:6])
    b.kv.fork(parent, child)
    child.token_ids.append(7)
    b.kv.grow(child, 7)
    b.kv.free(child)
    assert b.kv.take_copies() == []
    assert b.kv.pool.num_free == b.kv.pool.num_blocks - 2


def test_a_fork_of_a_sequence_whose_copy_is_due_is_filled_from_where_that_is():
    b = KVBench()
    parent = b.computed(TEXT[:6])
    child, grandchild = b.sequence(TEXT[:6]), b.sequence(TEXT[:6])
    b.kv.fork(parent, child)
    child.token_ids.append(7)
    b.kv.grow(child, 7)
    b.kv.fork(child, grandchild)
    grandchild.token_ids.append(8)
    for request in (child, grandchild):
        b.plan(request)
    assert {source for source, _ in b.kv._copies.items()}.isdisjoint(b.kv._copies.values())
    b.run()
    for request in (parent, child, grandchild):
        b.kv.free(request)
    assert b.kv.pool.usage == 0


def test_no_blocks_no_growth_and_nothing_changed():
    b = KVBench([FULL, window(4)], num_blocks=8)
    request = b.computed(TEXT[:8], chunk=4)
    request.token_ids += TEXT
    assert not b.kv.grow(request, 30) and request.block_tables[1][0] == NO_BLOCK
    before = [list(table) for table in request.block_tables], b.kv.pool.num_free
    assert not b.kv.grow(request, 30)
    assert before == (request.block_tables, b.kv.pool.num_free)
    other = b.sequence(TEXT[20:])
    assert b.admit(other, reserve=5) is None and other.block_tables == [[], []]


def test_the_adapter_and_the_salt_keep_prefixes_apart():
    b = KVBench()
    b.kv.free(b.computed(TEXT, adapter="x"))
    b.kv.free(b.computed(TEXT, salt="y"))
    assert b.cached(TEXT) == b.cached(TEXT, salt="x") == b.cached(TEXT, adapter="y") == 0
    assert b.cached(TEXT, adapter="x") == b.cached(TEXT, salt="y") == 36


def test_what_a_faulty_row_held_is_forgotten():
    b = KVBench([FULL, window(4), STATE])
    b.kv.free(b.computed(TEXT[:16], chunk=4), trusted=False)
    assert b.cached(TEXT) == 0 and b.kv.pool.usage == 0


@pytest.mark.parametrize("verify", [False, True])
def test_an_equal_name_of_something_else_is_a_miss_where_hits_are_verified(verify):
    hasher = CollidingHasher(4)
    first = [0] * 8
    names = hasher.hash_blocks(first)
    other = next([n] * 4 + [0] * 4 for n in range(1, 99) if hasher.hash_blocks([n] * 4 + [0] * 4) == names)
    b = KVBench(hasher=hasher, verify=verify)
    b.kv.free(b.computed(first))
    assert b.cached([*other, 1]) == (0 if verify else 8), "and without it the wrong blocks would be read"
    assert (b.kv.collisions > 0) == verify
    assert b.cached([*first, 1]) == 8
    if verify:
        b.kv.free(b.computed(other))
        assert b.cached([*other, 1]) == 0, "the name is taken"
        b.kv.pool.forget(b.computed(first).contents[0])
        b.kv.free(b.computed(other))
        assert b.cached([*other, 1]) == 4, "the second block of that name follows another first one"
        assert b.cached([*first, 1]) == 0
