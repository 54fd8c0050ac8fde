"""What becomes findable in the prefix cache and what ceases to be, for routers that keep an index of it.

The structs are vLLM's, as its subscribers decode them: msgpack arrays that begin with the name of the event.
Names of blocks are ``octavo.core.block_hash``'s, in full. ``medium`` is "GPU" for the pool that the model
computes in (on any device) and "CPU" for the host tier. Who applies all events in order from the start holds
the set of (medium, group, name) that a snapshot tells; ``digest`` compares the two.

A name becomes findable when the step that fills its block is planned: in the same step others share it.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from typing import Any

import msgspec

from octavo.core.block_content import Content
from octavo.core.block_hash import ADAPTER_TAG

GPU, CPU = "GPU", "CPU"


class KVEvent(msgspec.Struct, array_like=True, omit_defaults=True, gc=False, tag=True):
    """What happened, in the order in which it did."""


class BlockStored(KVEvent):
    """Blocks that follow each other in a sequence can be found, the first behind ``parent_block_hash``.

    ``extra_keys`` has for each block None or what beside tokens went into its name: adapter, [identifier,
    offset] of each feature, salt.
    """

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None


class BlockRemoved(KVEvent):
    """These can be found no more in this medium and group."""

    block_hashes: list[bytes]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(KVEvent):
    """Nothing can be found any more, in any medium and group."""


class NamedBlock(msgspec.Struct, frozen=True):
    """A block of a snapshot; ``parent`` is None for the first of a sequence."""

    medium: str
    group_idx: int
    name: bytes
    parent: bytes | None


class KVSnapshot(msgspec.Struct, frozen=True):
    """All that can be found now, and the digest of it."""

    block_size: int
    blocks: list[NamedBlock]
    digest: str


def digest(blocks: Iterable[tuple[str, int, bytes]]) -> str:
    """One number, in hex, for a set of (medium, group, name), whatever their order.

    The sum modulo 2^256 of the SHA-256, as big-endian numbers, of medium (ASCII), a zero byte, group
    (big-endian uint32) and name.
    """
    total = 0
    for medium, group, name in blocks:
        data = medium.encode() + b"\0" + struct.pack(">I", group) + name
        total += int.from_bytes(hashlib.sha256(data).digest(), "big")
    return f"{total % (1 << 256):064x}"


def snapshot(
    block_size: int, device: Iterable[tuple[int, Content]], host: Iterable[tuple[int, Content]]
) -> KVSnapshot:
    """Of what can be found in the pool and in the host tier: group and content."""
    blocks = [
        NamedBlock(medium, group, content.name, content.before.name if content.before else None)
        for medium, contents in ((GPU, device), (CPU, host))
        for group, content in contents
    ]
    return KVSnapshot(block_size, blocks, digest((b.medium, b.group_idx, b.name) for b in blocks))


class EventLog:
    """Gathers events until they are taken. What happens to neighbours in a sequence becomes one event."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._events: list[KVEvent] = []

    def stored(self, content: Content, group: int, *, host: bool) -> None:
        """This can be found from now on."""
        medium, parent = CPU if host else GPU, content.before.name if content.before else None
        tokens = struct.unpack(f"<{self._block_size}I", content.tokens)
        keys = tuple(
            key for _, value in content.extras for key in (value if isinstance(value, tuple) else (value,))
        )
        last = self._events[-1] if self._events else None
        if not isinstance(last, BlockStored) or (last.medium, last.group_idx, last.block_hashes[-1]) != (
            medium,
            group,
            parent,
        ):
            adapter = dict(content.extras).get(ADAPTER_TAG)
            last = BlockStored([], parent, [], self._block_size, None, medium, adapter, [], group)
            self._events.append(last)
        last.block_hashes.append(content.name)
        last.token_ids += tokens
        assert last.extra_keys is not None
        last.extra_keys.append(keys or None)

    def removed(self, content: Content, group: int, *, host: bool) -> None:
        """This can be found no more."""
        medium = CPU if host else GPU
        last = self._events[-1] if self._events else None
        if not isinstance(last, BlockRemoved) or (last.medium, last.group_idx) != (medium, group):
            last = BlockRemoved([], medium, group)
            self._events.append(last)
        last.block_hashes.append(content.name)

    def cleared(self) -> None:
        """Nothing can be found any more."""
        self._events.append(AllBlocksCleared())

    def take(self) -> list[KVEvent]:
        """What happened since the last call, in order."""
        events, self._events = self._events, []
        return events
