"""A KV cache with a simulated memory, in which every slot holds the true prefix up to its token."""

from __future__ import annotations

import msgspec

from octavo.core.block_hash import BlockHasher
from octavo.core.kv_cache import KVCache
from octavo.core.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, digest
from octavo.core.kv_layout import KVSpec
from octavo.core.outputs import EngineRequest
from octavo.core.plan import NO_BLOCK, Transfer, TransferDone
from octavo.core.request import Request
from octavo.core.sampling_params import SamplingParams


class CollidingHasher(BlockHasher):
    """Names of one byte: sequences that differ often have the same."""

    def __init__(self, block_size) -> None:
        super().__init__("xxhash", block_size)
        whole = self._hash
        self._hash = lambda data: bytes([whole(data)[0] % 8])


FULL, STATE = KVSpec(), KVSpec("state")


def window(size):
    return KVSpec("sliding_window", size)


class KVBench:
    """Plans steps by hand and runs them. ``planned`` rows run with ``run``; until then they are in flight."""

    def __init__(
        self, groups=(FULL,), num_blocks=40, block_size=4, hasher=None, caching=True, **settings
    ) -> None:
        self.hasher = hasher or BlockHasher("xxhash", block_size)
        self.kv = KVCache(num_blocks, block_size, self.hasher if caching else None, groups, **settings)
        self.size = block_size
        self.memory: list[dict[int, object]] = [{} for _ in range(num_blocks)]
        self.host_memory: list[dict[int, object]] = [{} for _ in range(self.kv.host.pool.num_blocks)]
        self.moving: dict[int, Transfer] = {}  # started and not reported done
        self.planned: list[tuple] = []
        self.names = 0

    def sequence(self, tokens, salt=None, adapter=None, features=(), **sampling) -> Request:
        self.names += 1
        params = SamplingParams(seed=0, max_tokens=1000, **sampling)
        request = EngineRequest(
            request_id=f"r{self.names}",
            prompt_token_ids=tokens,
            sampling=params,
            cache_salt=salt,
            features=tuple(features),
            adapter=adapter,
        )
        return Request(request, arrival=0.0, max_model_len=10_000, num_groups=len(self.kv.groups))

    def truth(self, request, position):
        """What a slot for ``position`` must hold: all that decides its K/V."""
        asked = request.request
        seen = [(f.identifier, f.offset) for f in asked.features if f.offset <= position]
        return (asked.cache_salt, asked.adapter, *seen, *request.token_ids[: position + 1])

    def admit(self, request, upto=None, reserve=0) -> int | None:
        """Tokens found in the cache, or None where it was not admitted."""
        self.kv.name_blocks(request)
        hit = self.kv.find_prefix(request)
        if not self.kv.admit(request, hit, reserve, upto or request.num_tokens):
            return None
        return hit.num_tokens

    def plan(self, request, upto=None) -> bool:
        """A row up to ``upto``; False where there are no blocks for it."""
        upto = upto or request.num_tokens
        if not self.kv.grow(request, upto):
            return False
        start, request.num_computed_tokens = request.num_computed_tokens, upto
        truth = [self.truth(request, position) for position in range(upto)]
        self.planned.append((request.request_id, start, upto, [*request.block_tables], truth))
        self.kv.register(request)
        return True

    def take(self) -> tuple:
        """What is planned: copies, transfers and rows of one step."""
        rows, self.planned = self.planned, []
        return self.kv.take_copies(), self.kv.take_transfers(), rows

    def run(self) -> None:
        """Run the planned rows as one step."""
        self.execute(*self.take())

    def execute(self, copies, transfers, rows) -> None:
        """Copies, then all writes, then all reads. Transfers start, and go on until ``finish``."""
        self.moving |= {transfer.id: transfer for transfer in transfers}
        loading = {device for t in self.moving.values() if t.load for device, _ in t.blocks}
        busy = {device for t in self.moving.values() for device, _ in t.blocks}
        for device in loading:
            self.memory[device] = {}
        sources = [dict(self.memory[source]) for source, _ in copies]  # as if all at once
        for (source, block), held in zip(copies, sources, strict=True):
            assert source not in loading and block not in busy
            self.memory[block] = held
        for name, start, end, tables, _ in rows:
            used = {block for table in tables for block in table}
            assert not used & loading, f"{name} is planned while its blocks are loaded"
            written = {
                table[0] if spec.kind == "state" else table[position // self.size]
                for spec, table in zip(self.kv.groups, tables, strict=True)
                for position in range(start, end)
            }
            assert not written & busy, f"{name} writes into a block that is being saved"
        for name, start, end, tables, truth in rows:
            for group, (spec, table) in enumerate(zip(self.kv.groups, tables, strict=True)):
                if spec.kind == "state":
                    if start:
                        assert self.memory[table[0]] == {0: (group, truth[start - 1])}, f"{name}: wrong state"
                    self.memory[table[0]] = {0: (group, truth[end - 1])}
                    continue
                for position in range(start, end):
                    block = self.memory[table[position // self.size]]
                    block[position % self.size] = (group, truth[position])
        for name, start, end, tables, truth in rows:
            for group, (spec, table) in enumerate(zip(self.kv.groups, tables, strict=True)):
                for position in range(spec.first_kept(start), end if spec.kind != "state" else 0):
                    block = table[position // self.size]
                    assert block != NO_BLOCK, f"{name}: position {position} of group {group} is not kept"
                    held = self.memory[block].get(position % self.size)
                    assert held == (group, truth[position]), f"{name} reads another prefix in group {group}"

    def lose(self, group, content) -> None:
        """Evict one block of one group."""
        block = self.kv.pool.find(group, content)
        self.kv.pool._unname(block)

    def finish(self, transfer_id=None) -> None:
        """One transfer, or all, ends: only now data arrives, so that a block used too early shows."""
        for number in [transfer_id] if transfer_id else list(self.moving):
            transfer = self.moving.pop(number)
            for device, host in transfer.blocks:
                if transfer.load:
                    self.memory[device] = dict(self.host_memory[host])
                else:
                    self.host_memory[host] = dict(self.memory[device])
            self.kv.transfer_done(TransferDone(number, 0.001))

    def settle(self) -> None:
        """Steps without rows until nothing is left to move."""
        self.run()
        while self.moving:
            self.finish()
            self.run()

    def compute(self, request, upto=None) -> None:
        assert self.plan(request, upto)
        self.run()

    def computed(self, tokens, chunk=None, **fields) -> Request:
        """A sequence that was admitted and computed, ``chunk`` tokens a step."""
        request = self.sequence(tokens, **fields)
        start = self.admit(request, chunk)
        assert start is not None
        while request.num_computed_tokens < request.num_tokens:
            self.compute(request, min(request.num_tokens, request.num_computed_tokens + (chunk or 10_000)))
        return request

    def cached(self, tokens, **fields) -> int:
        """How many tokens of a sequence the cache holds now."""
        request = self.sequence(tokens, **fields)
        self.kv.name_blocks(request)
        return self.kv.find_prefix(request).num_tokens


class Replica:
    """What a router learns: applies events in order, after a trip over the wire."""

    def __init__(self) -> None:
        self.blocks: dict[tuple, bytes | None] = {}  # (medium, group, name) -> name of the block before
        self.tokens: dict[bytes, list[int]] = {}

    def apply(self, events) -> None:
        wire = msgspec.msgpack.encode(events)
        for event in msgspec.msgpack.decode(wire, type=list[BlockStored | BlockRemoved | AllBlocksCleared]):
            if isinstance(event, AllBlocksCleared):
                self.blocks.clear()
                continue
            for index, name in enumerate(event.block_hashes):
                key = (event.medium, event.group_idx, name)
                if isinstance(event, BlockRemoved):
                    del self.blocks[key]
                    continue
                assert key not in self.blocks, "stored twice"
                parent = event.block_hashes[index - 1] if index else event.parent_block_hash
                self.blocks[key] = parent
                start = index * event.block_size
                self.tokens[name] = event.token_ids[start : start + event.block_size]

    def digest(self) -> str:
        return digest(self.blocks)
