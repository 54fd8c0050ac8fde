"""Events of the prefix cache: vLLM's wire form, in order, and enough to know all that can be found."""

from __future__ import annotations

import hashlib

import msgspec
from core.kv_bench import FULL, STATE, KVBench, Replica, window

from octavo.core.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, digest
from octavo.core.outputs import Feature

TEXT = list(range(40))


def test_blocks_of_one_sequence_that_follow_each_other_are_one_event_in_vllms_form():
    b = KVBench(events=True)
    request = b.computed(TEXT[:10], adapter="x", salt="s")
    (event,) = b.kv.take_events()
    request.token_ids += TEXT[10:13]
    b.compute(request)
    (later,) = b.kv.take_events()
    names = b.hasher.hash_blocks(TEXT[:12], "s", adapter="x")
    assert b.kv.take_events() == []
    wire = msgspec.msgpack.decode(msgspec.msgpack.encode(event))
    assert wire == [
        "BlockStored", names[:2], None, TEXT[:8], 4, None, "GPU", "x", [["x", "s"], ["x"]], 0
    ]  # fmt: skip
    assert (later.parent_block_hash, later.block_hashes, later.token_ids) == (names[1], names[2:], TEXT[8:12])


def test_features_are_told_with_the_blocks_that_they_cover():
    b = KVBench(events=True)
    b.computed(TEXT[:13], features=[Feature("img", 5, 2)])
    (event,) = b.kv.take_events()
    assert event.extra_keys == [None, (("img", 5),), None]


def test_groups_and_media_have_events_of_their_own():
    b = KVBench([FULL, window(6), STATE], events=True, num_host_blocks=40, offload=True)
    b.kv.free(b.computed(TEXT[:9], chunk=4))
    b.settle()
    stored = {(event.medium, event.group_idx): event for event in b.kv.take_events()}
    assert set(stored) == {(medium, group) for medium in ("GPU", "CPU") for group in (0, 1, 2)}
    assert stored["CPU", 0].lora_name is None and stored["CPU", 0].token_ids


def test_eviction_removes_and_a_reset_clears():
    b = KVBench(events=True, num_blocks=10)
    b.kv.free(b.computed(TEXT))
    first = b.kv.take_events()[0].block_hashes
    b.kv.free(b.computed([7] * 16))
    removed, stored = b.kv.take_events()
    assert isinstance(removed, BlockRemoved) and isinstance(stored, BlockStored)
    assert removed.block_hashes == first[:5:-1] and (removed.medium, removed.group_idx) == ("GPU", 0)
    b.kv.reset_prefix_cache()
    assert b.kv.take_events() == [AllBlocksCleared()] and b.kv.snapshot().blocks == []
    assert msgspec.msgpack.encode(AllBlocksCleared()) == b"\x91\xb0AllBlocksCleared"


def test_the_snapshot_is_what_the_events_have_told_and_its_digest_knows_no_order():
    b = KVBench([FULL, window(6)], num_blocks=24, events=True, num_host_blocks=9, offload=True)
    replica = Replica()
    for number in range(6):
        b.kv.free(b.computed([*TEXT[: 5 * number], *[number] * 10], chunk=4))
        b.settle()
        replica.apply(b.kv.take_events())
    snapshot = b.kv.snapshot()
    assert {(block.medium, block.group_idx, block.name): block.parent for block in snapshot.blocks} == (
        replica.blocks
    )
    keys = list(replica.blocks)
    assert snapshot.digest == digest(keys) == digest(reversed(keys)) != digest(keys[1:])
    chain = hashlib.sha256(b"GPU\0" + (1).to_bytes(4, "big") + b"name").hexdigest()
    assert digest([("GPU", 1, b"name")]) == chain and digest([]) == "0" * 64


def test_nothing_is_recorded_where_nobody_listens():
    b = KVBench()
    b.kv.free(b.computed(TEXT))
    assert b.kv.take_events() == []
    assert len(b.kv.snapshot().blocks) == 10, "a snapshot can be had all the same"
