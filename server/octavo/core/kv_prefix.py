"""Which prefix of a sequence the cache holds so that every group of layers can go on from its end."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from octavo.core.block_content import Content
from octavo.core.block_pool import Block, BlockPool
from octavo.core.kv_layout import KVSpec


class PrefixHit(msgspec.Struct, frozen=True):
    """A cached prefix of ``num_tokens``; good until the cache changes.

    ``blocks`` are per group those of block 0, 1, ... of the sequence, None where the group needs none; of a
    state group only the one that holds the state at the end. ``num_host_tokens`` of the tokens are there only
    by blocks of the host tier; ``host_blocks`` are all that are to be loaded from it.
    """

    blocks: list[list[Block | None]]
    num_tokens: int
    num_host_tokens: int = 0
    host_blocks: int = 0


NO_HIT = PrefixHit([], 0)


class PrefixSearch:
    """Looks for prefixes in ``device``, and beyond what that holds in ``host`` too."""

    def __init__(self, groups: Sequence[KVSpec], block_size: int, device: BlockPool, host: BlockPool) -> None:
        self._groups, self._size = groups, block_size
        self._device = (device,)
        self._both = (device, host) if host.num_blocks else self._device

    def longest(self, contents: Sequence[Content], limit: int) -> PrefixHit:
        """The longest prefix of at most ``limit`` blocks that is valid for every group."""
        near = self._end(contents, limit, self._device)
        end = self._end(contents, limit, self._both) if len(self._both) > 1 else near
        if end == 0:
            return NO_HIT
        blocks = [self._blocks(group, contents, end) for group in range(len(self._groups))]
        loads = sum(block is not None and block.host for held in blocks for block in held)
        return PrefixHit(blocks, end * self._size, (end - near) * self._size, loads)

    def _end(self, contents: Sequence[Content], end: int, pools: Sequence[BlockPool]) -> int:
        before = -1
        while end != before:  # a group that can not go on from there may be able to from further back
            before = end
            for group in range(len(self._groups)):
                end = self._end_of(group, contents, end, pools)
        return end

    def _end_of(self, group: int, contents: Sequence[Content], limit: int, pools: Sequence[BlockPool]) -> int:
        if self._groups[group].kind == "full":  # the usual case in few words
            return next((i for i in range(limit) if not _find(group, contents[i], pools)), limit)
        end = start = limit
        while start > self._first(group, end):
            start -= 1
            if _find(group, contents[start], pools) is None:
                end = start
        return end

    def _first(self, group: int, end: int) -> int:
        """The first block that a group needs to go on behind block ``end - 1``."""
        return self._groups[group].first_kept(end * self._size) // self._size

    def _blocks(self, group: int, contents: Sequence[Content], end: int) -> list[Block | None]:
        first = self._first(group, end)
        unused: list[Block | None] = [] if self._groups[group].kind == "state" else [None] * first
        return unused + [_find(group, content, self._both) for content in contents[first:end]]


def _find(group: int, content: Content, pools: Sequence[BlockPool]) -> Block | None:
    for pool in pools:
        if (block := pool.find(group, content)) is not None:
            return block
    return None
