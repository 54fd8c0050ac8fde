"""Blocks in host memory: sequences that were swapped out, and cached blocks that the pool may evict.

One pool of host blocks serves both. A swapped sequence holds its blocks; cached ones are free, so they give
way to it, the least recently used first. Blocks move by transfers, which run beside the steps: until one is
reported done it holds both of its ends, whatever becomes of the sequences that wait for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import msgspec

from octavo.core.block_content import Content
from octavo.core.block_pool import Block, BlockPool, tail_first
from octavo.core.plan import NO_BLOCK, Transfer, TransferDone
from octavo.core.request import Request

MAX_SAVING = 64  # blocks on their way out at once, lest what is cached is long held and not free
SAVING_SHARE = 8  # nor one block in so many of a small pool


class Move(msgspec.Struct):
    """One block of a transfer. ``content``: the name under which its new place is found once it is there."""

    device: int
    host: int
    group: int
    content: Content | None


class _UnderWay(msgspec.Struct):
    load: bool
    moves: list[Move]
    requests: Sequence[Request]


class HostTier:
    """The blocks of ``host`` beside those of ``device``. With ``offload`` cached blocks are saved in time.

    ``blocks_saved`` and ``blocks_loaded`` count since the start.
    """

    def __init__(self, device: BlockPool, host: BlockPool, *, offload: bool) -> None:
        self._device, self.pool = device, host
        self._offload = offload and host.num_blocks > 0
        self._max_saving = min(MAX_SAVING, max(1, device.num_blocks // SAVING_SHARE))
        self._to_save: deque[Block] = deque()
        self._saving = 0  # blocks
        self._new: list[Transfer] = []
        self._under_way: dict[int, _UnderWay] = {}
        self._last_id = 0
        self.blocks_saved = self.blocks_loaded = 0

    @property
    def num_transfers(self) -> int:
        """Those that were not reported done."""
        return len(self._under_way)

    # Sequences

    def swap(self, requests: Sequence[Request], *, load: bool, reserve: int = 0) -> bool:
        """Bring all blocks of a group to the other side, each once, and start the transfer.

        A block of which the other side has a copy by name is held there and not moved. Does nothing and
        returns False if fewer than ``reserve`` blocks would be left free there.
        """
        here, there = (self.pool, self._device) if load else (self._device, self.pool)
        tables = [request.host_tables if load else request.block_tables for request in requests]
        groups = {
            block: group
            for its in tables
            for group, table in enumerate(its)
            for block in table
            if block != NO_BLOCK
        }
        known: dict[int, Block] = {}
        for block, group in groups.items():
            content = here.blocks[block].content
            if content is not None and (twin := there.find(group, content)) is not None:
                known[block] = twin
        moved = [block for block in groups if block not in known]
        revived = sum(twin.ref_count == 0 for twin in known.values())
        if len(moved) + revived + reserve > there.num_free:
            return False
        for twin in known.values():
            there.touch(twin)
        place = dict(zip(moved, there.allocate(len(moved)), strict=True))  # held by the transfer
        place |= {block: twin.id for block, twin in known.items()}
        for block in moved:
            here.touch(here.blocks[block])
        moves = [
            Move(
                device=place[block] if load else block,
                host=block if load else place[block],
                group=groups[block],
                content=here.blocks[block].content,
            )
            for block in reversed(moved)  # the tail is let go first
        ]
        transfer = self.start(load, moves, requests) if moved else None
        for request, its in zip(requests, tables, strict=True):
            new = [[place.get(block, NO_BLOCK) for block in table] for table in its]
            for block in tail_first(new):
                there.touch(there.blocks[block])
            empty: list[list[int]] = [[] for _ in its]
            request.block_tables, request.host_tables = (new, []) if load else (empty, new)
            request.transfer = transfer
            self.release(here, tail_first(its))
        self.release(there, [twin.id for twin in known.values()])
        return True

    def start(self, load: bool, moves: list[Move], requests: Sequence[Request]) -> int:
        """A transfer whose blocks are held for it; ``requests`` wait for its end. Returns its id."""
        self._last_id += 1
        pairs = [(move.device, move.host) for move in moves]
        self._new.append(Transfer(self._last_id, load, pairs))
        self._under_way[self._last_id] = _UnderWay(load, moves, requests)
        return self._last_id

    # Cached blocks

    def release(self, pool: BlockPool, block_ids: Sequence[int]) -> None:
        """Give up a reference to each; blocks of the device that are only cached now are to be saved."""
        pool.release(block_ids)
        if not self._offload or pool is not self._device:
            return
        for block in (pool.blocks[block_id] for block_id in block_ids):
            if not block.queued and self._is_lacking(block):
                block.queued = True
                self._to_save.append(block)

    def _is_lacking(self, block: Block) -> bool:
        """Whether a block is only cached, and not here."""
        content = block.content
        return (
            block.ref_count == 0 and content is not None and not self.pool.is_taken(block.group, content.name)
        )

    def _save_cached(self) -> None:
        moves: list[Move] = []
        while self._to_save and self._saving + len(moves) < self._max_saving and self.pool.num_free:
            block = self._to_save.popleft()
            block.queued = False
            if self._is_lacking(block):
                self._device.touch(block)
                moves.append(Move(block.id, self.pool.allocate(1)[0], block.group, block.content))
        if moves:
            self._saving += len(moves)
            self.start(False, moves, ())

    # Transfers

    def take_transfers(self) -> list[Transfer]:
        """What is to start with the step now planned; some cached blocks to save among it."""
        self._save_cached()
        new, self._new = self._new, []
        return new

    def done(self, done: TransferDone) -> None:
        """A transfer has ended: its blocks can be found, and who waited for it need not wait."""
        ended, _ = self._end(done.id)
        for move in ended.moves:
            if move.content is not None and ended.load:
                self._device.register(move.device, move.group, move.content)
            elif move.content is not None:
                self.pool.register(move.host, move.group, move.content)
        if ended.load:
            self.blocks_loaded += len(ended.moves)
        else:
            self.blocks_saved += len(ended.moves)
        self._let_go(ended)

    def lost(self, transfer_id: int) -> list[Request]:
        """A transfer broke off. Returns the sequences that waited for it; what they held is of no use."""
        ended, waited = self._end(transfer_id)
        self._let_go(ended)
        return waited

    def _end(self, transfer_id: int) -> tuple[_UnderWay, list[Request]]:
        ended = self._under_way.pop(transfer_id, None)
        if ended is None:
            raise RuntimeError(f"transfer {transfer_id} is not under way: {sorted(self._under_way)} are")
        waited = [request for request in ended.requests if request.transfer == transfer_id]
        for request in waited:
            request.transfer = None
        if not ended.requests:
            self._saving -= len(ended.moves)
        return ended, waited

    def _let_go(self, ended: _UnderWay) -> None:
        self.pool.release(move.host for move in ended.moves)
        self.release(self._device, [move.device for move in ended.moves])

    def forget(self, names: set[bytes] | None = None) -> None:
        """Let no transfer under way bring back one of these names; None: any."""
        for under_way in self._under_way.values():
            for move in under_way.moves:
                if move.content is not None and (names is None or move.content.name in names):
                    move.content = None
