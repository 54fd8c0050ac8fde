"""Physical KV blocks: who holds them, which are free, and which free ones still hold a findable prefix.

A block is *active* while its reference count is above 0. A free block that has a name is *cached*: it is
found by that name until it is handed out again, in least-recently-used order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from octavo.core.block_content import Content
from octavo.core.kv_events import EventLog
from octavo.core.plan import NO_BLOCK


class Block:
    """One physical block. ``prev`` and ``next`` link it into the free list; None while it is active.

    It has a name, and can be found, while ``content`` is not None. Then nothing is written into it.
    """

    __slots__ = ("content", "group", "host", "id", "next", "prev", "queued", "ref_count")

    def __init__(self, block_id: int, host: bool = False) -> None:
        self.id = block_id
        self.host = host  # it lies in host memory
        self.ref_count = 0
        self.content: Content | None = None
        self.group = 0  # the KV group whose layers wrote it; meaningful while it has a name
        self.queued = False  # to be saved in the host tier
        self.prev: Block | None = None
        self.next: Block | None = None


class FreeList:
    """Doubly linked through the blocks themselves: every operation is O(1) and allocates nothing."""

    def __init__(self) -> None:
        self._ends = ends = Block(-1)  # before the head and behind the tail
        ends.prev = ends.next = ends
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Block]:
        block = self._ends.next
        while block is not None and block is not self._ends:
            yield block
            block = block.next

    def append(self, block: Block) -> None:
        """Put behind the tail: the last to be taken."""
        self._insert(block, self._ends)

    def prepend(self, block: Block) -> None:
        """Put before the head: the next to be taken."""
        assert self._ends.next is not None
        self._insert(block, self._ends.next)

    def _insert(self, block: Block, follower: Block) -> None:
        leader = follower.prev
        assert leader is not None and block.next is None, "a block is on the free list once"
        block.prev, block.next = leader, follower
        leader.next = follower.prev = block
        self._length += 1

    def remove(self, block: Block) -> None:
        """Take a block out from anywhere."""
        assert block.prev is not None and block.next is not None, "only a free block is on the free list"
        block.prev.next, block.next.prev = block.next, block.prev
        block.prev = block.next = None
        self._length -= 1

    def pop(self) -> Block:
        """Take the head, the least recently used. The list must not be empty."""
        block = self._ends.next
        assert block is not None and block is not self._ends, "the free list is empty"
        self.remove(block)
        return block


class BlockPool:
    """``num_blocks`` equal blocks with reference counts, shared by all KV groups.

    With ``verify`` a block is found only where all that its name stands for is equal; ``collisions`` counts
    look-ups of a name that stood for something else. ``log`` is told what becomes findable, and what ceases
    to be.
    """

    def __init__(
        self,
        num_blocks: int,
        num_groups: int = 1,
        *,
        host: bool = False,
        verify: bool = False,
        log: EventLog | None = None,
    ) -> None:
        self.blocks = [Block(block_id, host) for block_id in range(num_blocks)]
        self._free = FreeList()
        for block in self.blocks:
            self._free.append(block)
        self._named: list[dict[bytes, Block]] = [{} for _ in range(num_groups)]
        self._num_cached = 0
        self._verify = verify
        self._log = log
        self.collisions = 0

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    @property
    def num_free(self) -> int:
        """Blocks that can be handed out, cached ones among them."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Free blocks whose contents can still be found."""
        return self._num_cached

    @property
    def usage(self) -> float:
        """Share of active blocks, 0 .. 1: cached blocks are free."""
        return (len(self.blocks) - len(self._free)) / max(1, len(self.blocks))

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` blocks off the head of the free list; a cached one loses its name.

        The caller has checked ``num_free``.
        """
        taken = []
        for _ in range(count):
            block = self._free.pop()
            if block.content is not None:
                self._num_cached -= 1
                self._unname(block)
            block.ref_count = 1
            taken.append(block.id)
        return taken

    def find(self, group: int, content: Content) -> Block | None:
        """The block that holds this, active or cached."""
        block = self._named[group].get(content.name)
        if block is None or not self._verify:
            return block
        assert block.content is not None
        if block.content.equals(content):
            return block
        self.collisions += 1
        return None

    def is_taken(self, group: int, name: bytes) -> bool:
        """Whether some block has this name."""
        return name in self._named[group]

    def contents(self) -> Iterator[tuple[int, Content]]:
        """All that can be found: group and content."""
        for group, named in enumerate(self._named):
            for block in named.values():
                assert block.content is not None
                yield group, block.content

    def touch(self, block: Block) -> None:
        """Hold a block that was found: one more reference, off the free list."""
        if block.ref_count == 0:
            self._free.remove(block)
            self._num_cached -= 1
        block.ref_count += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """Give up one reference to each, in this order: the first to come are evicted first.

        A sequence gives its tail before its head, so that what many share lives longest. A block without a
        name is of no use to anyone and goes to the head of the free list, before any cached one.
        """
        for block_id in block_ids:
            block = self.blocks[block_id]
            assert block.ref_count > 0, f"block {block_id} is freed twice"
            block.ref_count -= 1
            if block.ref_count == 0:
                if block.content is None:
                    self._free.prepend(block)
                else:
                    self._num_cached += 1
                    self._free.append(block)

    def register(self, block_id: int, group: int, content: Content) -> None:
        """Make an active, full block findable, unless another block with the same name is already."""
        block = self.blocks[block_id]
        if block.content is None and content.name not in self._named[group]:
            block.content, block.group = content, group
            self._named[group][content.name] = block
            if self._log is not None:
                self._log.stored(content, group, host=block.host)

    def forget(self, content: Content) -> None:
        """Make this unfindable, in all groups: what the blocks hold is not to be trusted."""
        for named in self._named:
            block = named.get(content.name)
            if block is None:
                continue
            self._unname(block)
            if block.ref_count == 0:
                self._num_cached -= 1
                self._free.remove(block)
                self._free.prepend(block)

    def reset_names(self) -> None:
        """Empty the prefix cache; the log is not told. Active blocks stay with their owners, unfindable."""
        for named in self._named:
            for block in named.values():
                block.content = None
            named.clear()
        self._num_cached = 0

    def _unname(self, block: Block) -> None:
        assert block.content is not None
        del self._named[block.group][block.content.name]
        if self._log is not None:
            self._log.removed(block.content, block.group, host=block.host)
        block.content = None


def tail_first(tables: Sequence[Sequence[int]]) -> list[int]:
    """The blocks of a sequence from its last to its first, all groups of one place together."""
    length = max(map(len, tables), default=0)
    return [
        table[index]
        for index in range(length - 1, -1, -1)
        for table in tables
        if index < len(table) and table[index] != NO_BLOCK
    ]
