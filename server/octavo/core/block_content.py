"""What a full block holds, as far as its name, its place in a sequence and a check of both need it."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from octavo.core.block_hash import BlockHasher, Extras, block_extras
from octavo.core.outputs import EngineRequest


class Content:
    """``name`` is the chained hash (``octavo.core.block_hash``); ``before`` is the block before.

    ``tokens`` (little-endian uint32) and ``extras`` are empty where nobody asks for them. A plain class: the
    interpreter takes a long chain of these apart without recursion.
    """

    __slots__ = ("before", "extras", "name", "tokens")

    def __init__(self, name: bytes, before: Content | None) -> None:
        self.name = name
        self.before = before
        self.tokens = b""
        self.extras: Extras = ()

    def equals(self, other: Content) -> bool:
        """Whether the whole prefix up to here is the same, not only its name."""
        mine: Content | None = self
        theirs: Content | None = other
        while mine is not theirs:
            if mine is None or theirs is None or (mine.tokens, mine.extras) != (theirs.tokens, theirs.extras):
                return False
            mine, theirs = mine.before, theirs.before
        return True


def name_blocks(
    contents: list[Content],
    token_ids: Sequence[int],
    asked: EngineRequest,
    hasher: BlockHasher,
    *,
    keep: bool,
) -> None:
    """Append to ``contents`` those of the full blocks of ``token_ids`` that it lacks.

    With ``keep`` they remember what their names stand for.
    """
    size = hasher.block_size
    start = len(contents) * size
    if len(token_ids) - start < size:
        return
    last = contents[-1] if contents else None
    salt, adapter, features = asked.cache_salt, asked.adapter, asked.features
    rest = token_ids[start:]
    parent = last.name if last else None
    for name in hasher.hash_blocks(rest, salt, parent, adapter=adapter, features=features, start=start):
        last = Content(name, last)
        if keep:
            last.tokens = struct.pack(f"<{size}I", *token_ids[start : start + size])
            last.extras = block_extras(start, start + size, salt, adapter, features)
        contents.append(last)
        start += size
