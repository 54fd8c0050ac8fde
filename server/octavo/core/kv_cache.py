"""Block tables of sequences, and the prefix cache: which blocks a sequence has, needs, and may share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from octavo.core.block_hash import BlockHasher
from octavo.core.block_pool import Block, BlockPool
from octavo.core.request import Request
from octavo.errors import ConfigError


class KVSpec(msgspec.Struct, frozen=True):
    """One group of layers whose K/V is kept by one rule and found through one block table.

    ``full`` keeps every token of a sequence.
    """

    kind: Literal["full"] = "full"


class PrefixHit(msgspec.Struct, frozen=True):
    """The longest prefix of a sequence that the cache holds: per group its blocks, in order."""

    blocks: list[list[Block]]
    num_tokens: int


_NO_HIT = PrefixHit([], 0)


class KVCache:
    """The blocks of all sequences: ``groups`` share one pool of equal blocks, each with its own block tables.

    ``hasher`` is None where the prefix cache is off.
    """

    def __init__(
        self, num_blocks: int, block_size: int, hasher: BlockHasher | None, groups: Sequence[KVSpec]
    ) -> None:
        if num_blocks < 1 or not groups:
            raise ConfigError(
                f"the KV cache has {num_blocks} blocks in {len(groups)} groups: at least 1 each"
            )
        self.block_size = block_size
        self.groups = tuple(groups)
        self.pool = BlockPool(num_blocks, len(groups))
        self._hasher = hasher

    def name_blocks(self, request: Request) -> None:
        """Bring ``request.block_hashes`` up to its tokens."""
        if self._hasher is None:
            return
        names = request.block_hashes
        done = len(names) * self.block_size
        if len(request.token_ids) - done >= self.block_size:
            rest = request.token_ids[done:]
            names += self._hasher.hash_blocks(rest, request.request.cache_salt, names[-1] if names else None)

    def find_prefix(self, request: Request) -> PrefixHit:
        """The longest cached prefix, in whole blocks, that leaves at least the last token to compute."""
        limit = (request.num_tokens - 1) // self.block_size
        found: list[list[Block]] = []
        for group in range(len(self.groups)):
            blocks = self._chain(group, request.block_hashes, limit)
            if not blocks:
                return _NO_HIT
            found.append(blocks)
            limit = len(blocks)
        return PrefixHit([blocks[:limit] for blocks in found], limit * self.block_size)

    def _chain(self, group: int, names: list[bytes], limit: int) -> list[Block]:
        blocks = []
        for name in names[:limit]:
            block = self.pool.find(group, name)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def admit(self, request: Request, hit: PrefixHit, reserve: int) -> bool:
        """Give a sequence that holds nothing its hit and new blocks for the rest of its tokens.

        Does nothing and returns False where that would leave fewer than ``reserve`` blocks free.
        """
        total = -(-request.num_tokens // self.block_size)
        new = (total - hit.num_tokens // self.block_size) * len(self.groups)
        revived = sum(block.ref_count == 0 for blocks in hit.blocks for block in blocks)
        if new + revived + reserve > self.pool.num_free:
            return False
        for blocks in hit.blocks:
            for block in blocks:
                self.pool.touch(block)
        for group, table in enumerate(request.block_tables):
            held = [block.id for block in hit.blocks[group]] if hit.blocks else []
            table += held + self.pool.allocate(total - len(held))
        request.num_computed_tokens = hit.num_tokens
        request.num_registered = hit.num_tokens // self.block_size
        return True

    def grow(self, request: Request) -> bool:
        """Give a running sequence blocks for all its tokens; False, and nothing done, if too few are free."""
        missing = -(-len(request.token_ids) // self.block_size) - len(request.block_tables[0])
        if missing <= 0:
            return True
        if missing * len(self.groups) > self.pool.num_free:
            return False
        for table in request.block_tables:
            table += self.pool.allocate(missing)
        return True

    def register(self, request: Request) -> None:
        """Make the full blocks that ``num_computed_tokens`` has reached findable."""
        full = request.num_computed_tokens // self.block_size
        if self._hasher is None or full <= request.num_registered:
            return
        self.name_blocks(request)
        for index in range(request.num_registered, full):
            for group, table in enumerate(request.block_tables):
                self.pool.register(table[index], group, request.block_hashes[index])
        request.num_registered = full

    def free(self, request: Request, *, trusted: bool = True) -> None:
        """Take back all blocks, tail first; not ``trusted`` (a faulty row): their contents are forgotten."""
        tables, request.block_tables = request.block_tables, [[] for _ in self.groups]
        for table in tables:
            if not trusted:
                self.pool.forget(table)
            self.pool.release(reversed(table))
        request.num_computed_tokens = request.num_registered = 0
