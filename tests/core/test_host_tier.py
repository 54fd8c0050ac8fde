"""Blocks in host memory: swapped sequences come back as they were, evicted prefixes are found again."""

from __future__ import annotations

import pytest
from core.kv_bench import FULL, STATE, KVBench, window

from octavo.core.host_tier import MAX_SAVING
from octavo.core.plan import TransferDone

TEXT = list(range(40))


def forked(b, count, length=10):
    """A group of sequences with one prompt, each with a token of its own computed."""
    parent = b.computed(TEXT[:length])
    group = [parent, *(b.sequence(TEXT[:length]) for _ in range(count - 1))]
    for child in group[1:]:
        b.kv.fork(parent, child)
    for number, request in enumerate(group):
        request.token_ids.append(100 + number)
        b.plan(request)
    b.run()
    return group


@pytest.mark.parametrize("groups", [[FULL], [window(6)], [STATE], [FULL, window(6), STATE]])
def test_a_group_is_swapped_as_one_and_what_it_shares_stays_shared(groups):
    b = KVBench(groups, num_blocks=40, num_host_blocks=40)
    group = forked(b, 3)
    b.kv.reset_prefix_cache()  # nothing of it is to be found by name
    held = b.kv.pool.num_blocks - b.kv.pool.num_free
    assert b.kv.swap_out(group)
    b.run()
    (transfer,) = b.moving.values()
    assert len(transfer.blocks) == held, "a shared block moves once"
    assert {request.transfer for request in group} == {transfer.id}
    assert b.kv.pool.usage > 0 and not b.kv.swap_in(group), "they are still being saved"
    b.finish()
    assert b.kv.pool.usage == 0 and b.kv.host.blocks_saved == held
    assert b.kv.swap_in(group)
    b.run()
    b.finish()
    assert b.kv.pool.num_blocks - b.kv.pool.num_free == held == b.kv.host.blocks_loaded
    assert b.kv.host.pool.num_free == 40
    for request in group:
        request.token_ids.append(7)
        b.plan(request)
    b.run()


def test_what_is_still_in_the_pool_is_not_loaded_again():
    b = KVBench(num_host_blocks=20)
    request = b.computed(TEXT)
    request.token_ids.append(7)
    b.compute(request)
    b.kv.swap_out([request])
    b.run()
    b.finish()
    assert b.kv.pool.num_cached == 10
    assert b.kv.swap_in([request])
    b.run()
    (transfer,) = b.moving.values()
    assert len(transfer.blocks) == 1, "only the last block, which has no name"
    b.finish()
    request.token_ids.append(8)
    b.compute(request)


def test_what_the_host_tier_holds_already_is_not_saved_again():
    b = KVBench(num_host_blocks=20)
    first, second = b.computed(TEXT[:16]), b.computed(TEXT[:17])
    b.kv.swap_out([first])
    b.run()
    b.finish()
    b.kv.swap_out([second])
    b.run()
    (transfer,) = b.moving.values()
    assert len(transfer.blocks) == 1


def test_a_full_host_tier_refuses_a_swap_and_nothing_changes():
    b = KVBench(num_host_blocks=5)
    request = b.computed(TEXT)
    table = request.block_tables
    assert not b.kv.swap_out([request])
    assert request.block_tables == table and request.transfer is None and b.kv.host.pool.num_free == 5


def test_a_swapped_sequence_takes_the_place_of_cached_blocks():
    b = KVBench(num_blocks=80, num_host_blocks=10, offload=True)
    b.kv.free(b.computed(TEXT))
    b.settle()
    assert b.kv.host.pool.num_cached == 10
    request = b.computed([7] * 32)
    assert b.kv.swap_out([request])
    assert b.kv.host.pool.num_cached == 2
    b.kv.free(b.computed([5] * 40))
    b.settle()
    assert b.kv.host.pool.num_cached == 2 and len(request.host_tables[0]) == 8


@pytest.mark.parametrize("groups", [[FULL], [window(6)], [STATE], [FULL, window(6), STATE]])
def test_evicted_blocks_are_found_in_the_host_tier_and_loaded(groups):
    b = KVBench(groups, num_blocks=12 * len(groups), num_host_blocks=300, offload=True)
    b.kv.free(b.computed(TEXT, chunk=4))
    b.settle()
    for number in range(4):
        b.kv.free(b.computed([50 + number] * 40, chunk=4))
        b.settle()
    request = b.sequence(TEXT)
    b.kv.name_blocks(request)
    hit = b.kv.find_prefix(request)
    assert hit.num_tokens == hit.num_host_tokens == 36
    assert b.kv.admit(request, hit, 0, 40) and request.transfer is not None
    b.run()
    b.finish()
    assert request.transfer is None
    b.compute(request)
    assert b.kv.host_hit_tokens == 36 and b.kv.host.blocks_loaded == hit.host_blocks
    b.kv.free(request)
    assert b.kv.find_prefix(request).num_host_tokens == 0, "now it is in the pool as well"


def test_few_blocks_are_on_their_way_out_at_once():
    b = KVBench(num_blocks=1000, block_size=1, num_host_blocks=1000, offload=True)
    b.kv.free(b.computed([i % 50 for i in range(900)]))
    b.run()
    assert sum(len(t.blocks) for t in b.moving.values()) == MAX_SAVING
    assert b.kv.pool.usage == pytest.approx(MAX_SAVING / 1000), "those are held until they are saved"
    b.run()
    assert len(b.moving) == 1
    b.settle()
    assert b.kv.host.blocks_saved == 900 and b.kv.pool.usage == 0


def test_without_offloading_cached_blocks_stay_where_they_are():
    b = KVBench(num_host_blocks=20)
    b.kv.free(b.computed(TEXT))
    b.settle()
    assert b.kv.host.blocks_saved == 0


def test_a_sequence_may_end_while_its_blocks_move():
    b = KVBench(num_host_blocks=20)
    request = b.computed(TEXT)
    b.kv.swap_out([request])
    b.run()
    b.kv.free(request)
    assert b.kv.pool.usage > 0 and b.kv.host.pool.usage > 0 and request.transfer is None
    b.finish()
    assert b.kv.pool.usage == b.kv.host.pool.usage == 0
    assert b.kv.host.pool.num_cached == b.kv.pool.num_cached == 10


def test_a_lost_transfer_leaves_nothing_behind():
    b = KVBench(num_host_blocks=20)
    request = b.computed(TEXT)
    b.kv.swap_out([request])
    b.run()
    (number,) = b.moving
    assert b.kv.transfer_lost(number) == [request]
    assert (request.transfer, request.num_computed_tokens, request.host_tables) == (None, 0, [])
    assert b.kv.host.pool.num_cached == 0 and b.kv.host.pool.num_free == 20 and b.kv.pool.usage == 0
    with pytest.raises(RuntimeError, match=f"transfer {number} is not under way"):
        b.kv.transfer_done(TransferDone(number, 0.1))


def test_a_reset_forgets_what_is_on_its_way():
    b = KVBench(num_host_blocks=20, offload=True)
    b.kv.free(b.computed(TEXT))
    b.run()
    b.kv.reset_prefix_cache()
    b.settle()
    assert b.kv.host.pool.num_cached == b.kv.pool.num_cached == 0 and b.cached(TEXT) == 0


def test_a_faulty_row_is_not_brought_back_by_a_transfer():
    b = KVBench(num_host_blocks=20, offload=True)
    request = b.computed(TEXT)
    twin = b.computed([*TEXT, 9])
    b.kv.swap_out([request])
    b.run()
    b.kv.free(twin, trusted=False)
    b.kv.free(request)
    b.settle()
    assert b.cached(TEXT) == 0 and b.kv.host.pool.num_cached == 0


def test_copies_that_are_due_are_not_saved_in_place_of_their_source():
    b = KVBench(num_host_blocks=20)
    parent = b.computed(TEXT[:5])
    group = [parent, b.sequence(TEXT[:5]), b.sequence(TEXT[:5])]
    for number, request in enumerate(group):
        if request is not parent:
            b.kv.fork(parent, request)
        request.token_ids.append(50 + number)
    assert b.kv.grow(group[0], 6) and b.kv.grow(group[1], 6)
    assert b.kv.swap_out(group) and b.kv.take_copies() == []
    b.run()
    assert [len(transfer.blocks) for transfer in b.moving.values()] == [2]
    b.finish()
    assert b.kv.swap_in(group)
    b.run()
    b.finish()
    for request in group:
        b.plan(request)
    b.run()
    for request in group:
        request.token_ids.append(7)
        b.compute(request)


def test_the_tail_of_a_swapped_sequence_is_evicted_before_its_head():
    b = KVBench(num_blocks=12, num_host_blocks=20)
    request = b.computed(TEXT)
    b.kv.swap_out([request])
    b.run()
    b.finish()
    b.kv.free(request)
    b.kv.host.pool.reset_names()
    b.computed([9] * 20)
    assert b.cached(TEXT) == 28
