"""Block tables of sequences, and the prefix cache: which blocks a sequence has, needs, and may share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from octavo.core.block_hash import BlockHasher
from octavo.core.block_pool import Block, BlockPool, Content
from octavo.core.kv_layout import KVSpec, blocks_needed
from octavo.core.plan import NO_BLOCK
from octavo.core.request import Request
from octavo.errors import ConfigError


class PrefixHit(msgspec.Struct, frozen=True):
    """The longest cached prefix of a sequence that every group can go on from; good until the pool changes.

    ``blocks`` are per group those of block 0, 1, ... of the sequence, None where the group needs none; of a
    state group only the one that holds the state at the hit's end.
    """

    blocks: list[list[Block | None]]
    num_tokens: int


_NO_HIT = PrefixHit([], 0)


class KVCache:
    """The blocks of all sequences: ``groups`` share one pool of equal blocks, each with its own block tables.

    ``hasher`` is None where the prefix cache is off. ``max_chunk`` is the most tokens one step computes of a
    sequence.

    A sequence writes only into blocks that it alone holds and that have no name; ``grow`` and ``admit``
    replace others, and ``take_copies`` tells what has to be copied before the step is run. A block table only
    ever gets longer: where an entry changes the request gets a new list, so a planned row may keep the old.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        hasher: BlockHasher | None,
        groups: Sequence[KVSpec],
        *,
        max_chunk: int = 2048,
    ) -> None:
        if num_blocks < 1 or not groups:
            raise ConfigError(
                f"the KV cache has {num_blocks} blocks in {len(groups)} groups: at least 1 each"
            )
        self.block_size = block_size
        self.groups = tuple(groups)
        self.pool = BlockPool(num_blocks, len(groups))
        self._hasher = hasher
        self._max_chunk = max_chunk
        self._sliding = [g for g, spec in enumerate(self.groups) if spec.window is not None]
        self._states = [g for g, spec in enumerate(self.groups) if spec.kind == "state"]
        self._tables = [g for g, spec in enumerate(self.groups) if spec.kind != "state"]
        self._copies: dict[int, int] = {}  # destination -> source, which is held until the step is planned
        self._sources: dict[int, int] = {}  # source -> how often it is held so

    def blocks_needed(self, num_tokens: int) -> int:
        """Blocks that one sequence holds at most, over all groups, while it computes so many tokens."""
        return blocks_needed(self.groups, num_tokens, self.block_size, self._max_chunk)

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    # The prefix cache

    def name_blocks(self, request: Request) -> None:
        """Bring ``request.contents`` up to its tokens."""
        if self._hasher is None:
            return
        contents = request.contents
        done = len(contents) * self.block_size
        if len(request.token_ids) - done < self.block_size:
            return
        last = contents[-1] if contents else None
        names = self._hasher.hash_blocks(
            request.token_ids[done:],
            request.request.cache_salt,
            last.name if last else None,
            adapter=request.request.adapter,
        )
        for name in names:
            last = Content(name, last)
            contents.append(last)

    def find_prefix(self, request: Request) -> PrefixHit:
        """The longest cached prefix, in whole blocks, that leaves at least the last token to compute.

        None for a request with ``prompt_logprobs``: those come of computing the whole prompt.
        """
        if self._hasher is None or request.request.sampling.prompt_logprobs is not None:
            return _NO_HIT
        contents = request.contents
        end = min(len(contents), (request.num_tokens - 1) // self.block_size)
        before = -1
        while end != before:  # a group that can not go on from there may be able to from further back
            before = end
            for group in range(len(self.groups)):
                end = self._longest(group, contents, end)
        if end == 0:
            return _NO_HIT
        blocks = [self._needed(group, contents, end) for group in range(len(self.groups))]
        return PrefixHit(blocks, end * self.block_size)

    def _longest(self, group: int, contents: list[Content], limit: int) -> int:
        """The longest prefix of at most ``limit`` blocks that this group can go on from, in blocks."""
        spec = self.groups[group]
        if spec.kind == "full":
            for index in range(limit):
                if self._find(group, contents[index]) is None:
                    return index
            return limit
        end = start = limit
        while start > self._first_block(spec, end * self.block_size):
            start -= 1
            if self._find(group, contents[start]) is None:
                end = start
        return end

    def _find(self, group: int, content: Content) -> Block | None:
        return self.pool.find(group, content.name)

    def _first_block(self, spec: KVSpec, position: int) -> int:
        return spec.first_kept(position) // self.block_size

    def _needed(self, group: int, contents: list[Content], end: int) -> list[Block | None]:
        spec = self.groups[group]
        first = self._first_block(spec, end * self.block_size)
        unused: list[Block | None] = [] if spec.kind == "state" else [None] * first
        return unused + [self._find(group, content) for content in contents[first:end]]

    def register(self, request: Request) -> None:
        """Make the full blocks that ``num_computed_tokens`` has reached findable.

        To be called once the step that computes them is certain to run. A state is found from the next step
        on: its copies are made before a step computes anything.
        """
        full, rest = divmod(request.num_computed_tokens, self.block_size)
        if self._hasher is None:
            return
        request.snapshot_due = bool(self._states) and rest == 0 and full > 0
        if full <= request.num_registered:
            return
        self.name_blocks(request)
        for index in range(request.num_registered, full):
            for group in self._tables:
                block = request.block_tables[group][index]
                if block != NO_BLOCK:
                    self.pool.register(block, group, request.contents[index])
        request.num_registered = full

    def _name_snapshot(self, request: Request) -> None:
        if request.snapshot_due:
            request.snapshot_due = False
            for group in self._states:
                content = request.contents[request.num_registered - 1]
                self.pool.register(request.block_tables[group][0], group, content)

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix; sequences keep their blocks."""
        self.pool.reset_names()

    # Sequences

    def admit(self, request: Request, hit: PrefixHit, reserve: int, upto: int) -> bool:
        """Give a sequence that holds nothing its hit, and blocks for the positions below ``upto``.

        Does nothing and returns False where that would leave fewer than ``reserve`` blocks free.
        """
        end, total = hit.num_tokens // self.block_size, self._blocks(upto)
        found = [block for blocks in hit.blocks for block in blocks if block is not None]
        revived = sum(block.ref_count == 0 for block in found)
        new = len(self._states) + len(self._tables) * max(0, total - end)
        if new + revived + reserve > self.pool.num_free:
            return False
        for block in found:
            self.pool.touch(block)
        for table, blocks in zip(request.block_tables, hit.blocks, strict=bool(hit.blocks)):
            table += [NO_BLOCK if block is None else block.id for block in blocks]
        request.num_computed_tokens, request.num_registered = hit.num_tokens, end
        return self.grow(request, upto)

    def grow(self, request: Request, upto: int) -> bool:
        """Give a sequence blocks to write into for positions from ``num_computed_tokens`` up to ``upto``.

        Blocks that slid out of a window are given up in any case. False, and nothing else done, if too few
        blocks are free.
        """
        self._slide(request)
        if request.snapshot_due:
            self._name_snapshot(request)
        total, first = self._blocks(upto), request.num_computed_tokens // self.block_size
        new = 0
        shared: list[tuple[int, int]] = []
        for group in self._tables:
            table = request.block_tables[group]
            held = len(table)
            if held < total:
                new += total - held
            for index in range(first, min(held, total)):
                if not self._is_own(table[index]):
                    shared.append((group, index))
        for group in self._states:
            table = request.block_tables[group]
            if not table:
                new += 1
            elif not self._is_own(table[0]):
                shared.append((group, 0))
        if not new and not shared:
            return True
        if new + len(shared) > self.pool.num_free:
            return False
        for group, index in shared:
            table = request.block_tables[group].copy()
            table[index] = self._copy(table[index])
            request.block_tables[group] = table
        for group in self._tables:
            table = request.block_tables[group]
            if len(table) < total:
                table += self.pool.allocate(total - len(table))
        for group in self._states:
            if not request.block_tables[group]:
                request.block_tables[group] += self.pool.allocate(1)
        return True

    def _slide(self, request: Request) -> None:
        for group in self._sliding:
            table = request.block_tables[group]
            index = self._first_block(self.groups[group], request.num_computed_tokens) - 1
            if not 0 <= index < len(table) or table[index] == NO_BLOCK:
                continue
            request.block_tables[group] = table = table.copy()
            while index >= 0 and table[index] != NO_BLOCK:
                self._release([table[index]])
                table[index] = NO_BLOCK
                index -= 1

    def _is_own(self, block_id: int) -> bool:
        """Whether its one holder may write into it."""
        block = self.pool.blocks[block_id]
        return block.content is None and block.ref_count - self._sources.get(block_id, 0) == 1

    def _copy(self, source: int) -> int:
        """A block of one's own in place of ``source``, to be filled from it before the next step."""
        (block_id,) = self.pool.allocate(1)
        if (origin := self._copies.get(source)) is not None:  # itself not filled yet
            self.pool.touch(self.pool.blocks[origin])
            self._release([source])
            source = origin
        self._copies[block_id] = source  # takes over the reference of the table
        self._sources[source] = self._sources.get(source, 0) + 1
        return block_id

    def take_copies(self) -> list[tuple[int, int]]:
        """The (source, destination) blocks to copy before anything else in the step now planned.

        No block is both: sources are held until here, so that nothing else is put there before.
        """
        if not self._copies:
            return []
        pairs = [(source, block_id) for block_id, source in self._copies.items()]
        self._copies.clear()
        self._sources.clear()
        self._release([source for source, _ in pairs])
        return pairs

    def fork(self, parent: Request, child: Request) -> None:
        """Let ``child``, which holds nothing, share all blocks of ``parent`` and go on from where that is.

        Their tokens are equal up to the parent's ``num_computed_tokens``.
        """
        self._name_snapshot(parent)
        for mine, theirs in zip(child.block_tables, parent.block_tables, strict=True):
            assert not mine, f"{child.request_id} holds blocks already"
            mine += theirs
            for block_id in theirs:
                if block_id != NO_BLOCK:
                    self.pool.touch(self.pool.blocks[block_id])
        child.num_computed_tokens = parent.num_computed_tokens
        child.num_registered = parent.num_registered
        child.contents = parent.contents[: parent.num_computed_tokens // self.block_size]

    def free(self, request: Request, *, trusted: bool = True) -> None:
        """Take back all blocks, tail first; not ``trusted`` (a faulty row): their contents are forgotten."""
        if trusted:
            self._name_snapshot(request)
        tables, request.block_tables = request.block_tables, [[] for _ in self.groups]
        held = tail_first(tables)
        if not trusted:
            self.pool.forget(held)
        self._release(held)
        request.num_computed_tokens = request.num_registered = 0
        request.snapshot_due = False

    def _release(self, block_ids: Iterable[int]) -> None:
        """Give up one reference to each, in this order; a copy that nobody waits for any more is not made."""
        self.pool.release(block_ids)
        if self._copies:
            for block_id in block_ids:
                if self.pool.blocks[block_id].ref_count == 0 and block_id in self._copies:
                    source = self._copies.pop(block_id)
                    self._sources[source] -= 1
                    self._release([source])


def tail_first(tables: Sequence[Sequence[int]]) -> list[int]:
    """The blocks of a sequence from its last to its first, all groups of one place together."""
    length = max(map(len, tables), default=0)
    return [
        table[index]
        for index in range(length - 1, -1, -1)
        for table in tables
        if index < len(table) and table[index] != NO_BLOCK
    ]
