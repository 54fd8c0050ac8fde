"""Block tables of sequences, and the prefix cache: which blocks a sequence has, needs, and may share."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.core.block_content import Content, name_blocks
from octavo.core.block_hash import BlockHasher
from octavo.core.block_pool import Block, BlockPool, tail_first
from octavo.core.host_tier import HostTier, Move
from octavo.core.kv_events import EventLog, KVEvent, KVSnapshot, snapshot
from octavo.core.kv_layout import KVSpec, blocks_needed
from octavo.core.kv_prefix import NO_HIT, PrefixHit, PrefixSearch
from octavo.core.plan import NO_BLOCK, Transfer, TransferDone
from octavo.core.request import Request
from octavo.errors import ConfigError


class KVCache:
    """The blocks of all sequences: ``groups`` share one pool of equal blocks, each with its own block tables.

    ``hasher`` is None where the prefix cache is off. ``max_chunk`` is the most tokens one step computes of a
    sequence. The host tier has ``num_host_blocks``; with ``offload`` cached blocks are saved there.
    ``verify`` compares contents on a hit, ``events`` records what becomes findable and what ceases to be.

    A sequence writes only into blocks that it alone holds and that have no name; ``grow`` and ``admit``
    replace others, and ``take_copies`` tells what has to be copied before the step is run. A block table only
    ever gets longer: where an entry changes the request gets new lists, so a planned row may keep the old.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        hasher: BlockHasher | None,
        groups: Sequence[KVSpec],
        *,
        max_chunk: int = 2048,
        num_host_blocks: int = 0,
        offload: bool = False,
        verify: bool = False,
        events: bool = False,
    ) -> None:
        if num_blocks < 1 or not groups:
            raise ConfigError(
                f"the KV cache has {num_blocks} blocks in {len(groups)} groups: at least 1 each"
            )
        self.block_size = block_size
        self.groups = tuple(groups)
        self._log = EventLog(block_size) if events else None
        self._keeps_contents = verify or events
        self.pool = BlockPool(num_blocks, len(groups), verify=verify, log=self._log)
        host = BlockPool(num_host_blocks, len(groups), host=True, verify=verify, log=self._log)
        self.host = HostTier(self.pool, host, offload=offload)
        self.host_hit_tokens = 0
        self._search = PrefixSearch(self.groups, block_size, self.pool, self.host.pool)
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
        if self._hasher is not None:
            contents, asked = request.contents, request.request
            name_blocks(contents, request.token_ids, asked, self._hasher, keep=self._keeps_contents)

    def find_prefix(self, request: Request) -> PrefixHit:
        """The longest cached prefix, in whole blocks, that leaves at least the last token to compute.

        None for a request with ``prompt_logprobs``: those come of computing the whole prompt.
        """
        if self._hasher is None or request.request.sampling.prompt_logprobs is not None:
            return NO_HIT
        limit = min(len(request.contents), (request.num_tokens - 1) // self.block_size)
        return self._search.longest(request.contents, limit)

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
        self.host.pool.reset_names()
        self.host.forget()
        if self._log is not None:
            self._log.cleared()

    @property
    def collisions(self) -> int:
        """Look-ups that found something else under an equal name, and so nothing (only with ``verify``)."""
        return self.pool.collisions + self.host.pool.collisions

    def take_events(self) -> list[KVEvent]:
        """What became findable and ceased to be since the last call; nothing without ``events``."""
        return self._log.take() if self._log is not None else []

    def snapshot(self) -> KVSnapshot:
        """All that can be found now, as one holds who applied all events, those not taken yet too."""
        return snapshot(self.block_size, self.pool.contents(), self.host.pool.contents())

    # Sequences

    def admit(self, request: Request, hit: PrefixHit, reserve: int, upto: int) -> bool:
        """Give a sequence that holds nothing its hit, and blocks for the positions below ``upto``.

        Does nothing and returns False where that would leave fewer than ``reserve`` blocks free.
        """
        end, total = hit.num_tokens // self.block_size, self._blocks(upto)
        found = [block for blocks in hit.blocks for block in blocks if block is not None]
        near = [block for block in found if not block.host]
        new = len(self._states) + len(self._tables) * max(0, total - end) + hit.host_blocks
        if new + sum(block.ref_count == 0 for block in near) + reserve > self.pool.num_free:
            return False
        for block in near:
            self.pool.touch(block)
        moves: list[Move] = []
        for group, blocks in enumerate(hit.blocks):
            request.block_tables[group] += [
                NO_BLOCK if block is None else self._loaded(block, group, moves) if block.host else block.id
                for block in blocks
            ]
        request.num_computed_tokens, request.num_registered = hit.num_tokens, end
        if not moves:
            return self.grow(request, upto)
        self._lengthen(request, total)
        self.host_hit_tokens += hit.num_host_tokens
        request.transfer = self.host.start(True, moves[::-1], [request])
        return True

    def _loaded(self, twin: Block, group: int, moves: list[Move]) -> int:
        """A block to load a host block into; the transfer holds both."""
        self.host.pool.touch(twin)
        (block_id,) = self.pool.allocate(1)
        self.pool.touch(self.pool.blocks[block_id])
        moves.append(Move(block_id, twin.id, group, twin.content))
        return block_id

    def grow(self, request: Request, upto: int, reading_from: int | None = None) -> bool:
        """Give a sequence blocks to write into for positions from ``num_computed_tokens`` up to ``upto``.

        ``reading_from`` is the first position that the step computes, where some before ``upto`` are planned
        already and counted in ``num_computed_tokens``.

        Blocks that slid out of a window are given up when a new one is needed. False, and nothing else done,
        if too few blocks are free.
        """
        if upto <= request.room and not request.snapshot_due:
            return True
        self._slide(request, request.num_computed_tokens if reading_from is None else reading_from)
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
        if new + len(shared) > self.pool.num_free:
            return False
        for group, index in shared:
            table = self._new_table(request, group)
            table[index] = self._copy(table[index])
        self._lengthen(request, total)
        request.room = total * self.block_size
        return True

    def _lengthen(self, request: Request, total: int) -> None:
        for group, table in enumerate(request.block_tables):
            missing = (total if self.groups[group].kind != "state" else 1) - len(table)
            if missing > 0:
                table += self.pool.allocate(missing)

    def _new_table(self, request: Request, group: int) -> list[int]:
        """A table to change, in place of the one that planned rows hold."""
        request.block_tables = [*request.block_tables]
        request.block_tables[group] = table = request.block_tables[group].copy()
        return table

    def _slide(self, request: Request, position: int) -> None:
        for group in self._sliding:
            table = request.block_tables[group]
            index = self.groups[group].first_kept(position) // self.block_size - 1
            if not 0 <= index < len(table) or table[index] == NO_BLOCK:
                continue
            table = self._new_table(request, group)
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
        parent.room = 0  # whoever writes next has to see whether it is the last owner
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
        else:
            self.forget(request.contents[: request.num_registered])
        tables, request.block_tables = request.block_tables, [[] for _ in self.groups]
        self._release(tail_first(tables))
        if request.host_tables:
            self.host.pool.release(tail_first(request.host_tables))
            request.host_tables = []
        request.num_computed_tokens = request.num_registered = request.room = 0
        request.snapshot_due = False
        request.transfer = None

    def forget(self, contents: list[Content]) -> None:
        """Make unfindable what is not to be trusted."""
        for content in contents:
            self.pool.forget(content)
            self.host.pool.forget(content)
        self.host.forget({content.name for content in contents})

    def _release(self, block_ids: Sequence[int]) -> None:
        """Give up one reference to each, in this order; a copy that nobody waits for any more is not made."""
        self.host.release(self.pool, block_ids)
        if self._copies:
            for block_id in block_ids:
                if self.pool.blocks[block_id].ref_count == 0 and block_id in self._copies:
                    source = self._copies.pop(block_id)
                    self._sources[source] -= 1
                    self._release([source])

    # The host tier

    def swap_out(self, requests: Sequence[Request]) -> bool:
        """Move a group of sequences to the host tier. They keep what is computed, and hold no block here.

        ``host_tables`` then say where they are. False, and nothing done, if one waits for a transfer or too
        few host blocks are free.
        """
        if any(request.transfer is not None for request in requests):
            return False
        for request in requests:
            self._name_snapshot(request)
            self._take_back_copies(request)
            request.room = 0
        return self.host.swap(requests, load=False)

    def _take_back_copies(self, request: Request) -> None:
        """Share again what was to be copied for the step now planned: there is nothing in it to save yet."""
        for table in request.block_tables if self._copies else ():
            for index, block_id in enumerate(table):
                if (source := self._copies.get(block_id)) is not None:
                    self.pool.touch(self.pool.blocks[source])
                    self._release([block_id])
                    table[index] = source

    def swap_in(self, requests: Sequence[Request], reserve: int = 0) -> bool:
        """Bring a group of sequences back, leaving ``reserve`` blocks free.

        Blocks that the pool still holds are shared, the others loaded: the sequences wait for ``transfer``,
        unless it is None. False, and nothing done, if too few blocks are free or they are still being saved.
        """
        if any(request.transfer is not None for request in requests):
            return False
        return self.host.swap(requests, load=True, reserve=reserve)

    def take_transfers(self) -> list[Transfer]:
        """What is to start with the step now planned, after ``take_copies``."""
        return self.host.take_transfers()

    def transfer_done(self, done: TransferDone) -> None:
        """A transfer has ended: who waited may be planned. Raises ``RuntimeError`` for an unknown id."""
        self.host.done(done)

    def transfer_lost(self, transfer_id: int) -> list[Request]:
        """A transfer broke off: those who waited for it hold nothing now, and are to be computed again."""
        lost = self.host.lost(transfer_id)
        for request in lost:
            self.free(request)
        return lost
