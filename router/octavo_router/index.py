"""Which endpoint was sent which prefix: a bounded map from block hash to endpoints.

The index is a guess at what each engine's cache holds. It learns when a request is sent, forgets the least
recently used blocks beyond a byte budget (and beyond the engine's own number of blocks), and is corrected by
the cached tokens that come back. It does not know tokens: a hash is the name of a block and of everything
before it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

# Bytes one entry takes: hash-table slot, linked-list node, the 32-byte digest as an object of its own.
# Measured with tracemalloc on CPython 3.11 (tests/router/test_index.py holds it).
ENTRY_BYTES = 288
DEFAULT_BUDGET_BYTES = 256 * 2**20

# An entry's value: whether the last request that counted on it found it in the engine's cache.
_TRUSTED, _MISSED_ONCE = 0, 1


class PrefixIndex:
    """Block hashes per endpoint, each list in least-recently-used order.

    Blocks of a prompt are touched last to first, so that the end of a prefix is forgotten before its
    beginning, the same order in which an engine evicts.
    """

    def __init__(self, budget_bytes: int = DEFAULT_BUDGET_BYTES) -> None:
        self.budget_bytes = budget_bytes
        self._max_entries = max(1, budget_bytes // ENTRY_BYTES)
        self._held: dict[str, OrderedDict[bytes, int]] = {}
        self._capacity: dict[str, int] = {}
        self._entries = 0

    def __len__(self) -> int:
        return self._entries

    @property
    def size_bytes(self) -> int:
        """Estimated memory of the index; never above the budget."""
        return self._entries * ENTRY_BYTES

    def blocks_of(self, endpoint: str) -> int:
        """How many blocks the endpoint is thought to hold."""
        return len(self._held.get(endpoint, ()))

    def set_capacity(self, endpoint: str, num_blocks: int) -> None:
        """The engine's cache holds ``num_blocks`` blocks: never believe that it holds more."""
        self._capacity[endpoint] = max(1, num_blocks)
        self._trim(endpoint)

    def match(self, hashes: Sequence[bytes], endpoint: str) -> int:
        """How many leading blocks of the prompt the endpoint is thought to hold."""
        held = self._held.get(endpoint)
        if not held:
            return 0
        count = 0
        for name in hashes:
            if name not in held:
                break
            count += 1
        return count

    def add(self, endpoint: str, hashes: Sequence[bytes]) -> None:
        """The endpoint was sent a prompt of these blocks: it will hold them."""
        if not hashes:
            return
        held = self._held.setdefault(endpoint, OrderedDict())
        before = len(held)
        limit = min(self._max_entries, self._capacity.get(endpoint, self._max_entries))
        for name in reversed(hashes[:limit]):
            held.setdefault(name, _TRUSTED)
            held.move_to_end(name)
        self._entries += len(held) - before
        self._trim(endpoint)

    def correct(self, endpoint: str, hashes: Sequence[bytes], predicted: int, actual: int) -> None:
        """A request came back: ``predicted`` leading blocks were expected in the cache, ``actual`` were
        there.

        Blocks found become trusted (also those not known before). A block that was missing has just been
        computed by that same request, so one miss leaves it in place; when it is missing again, the engine
        does not keep it (caching off, or a pool too small for its traffic) and it is removed.
        """
        found = hashes[:actual]
        if actual > predicted:
            self.add(endpoint, found)
        held = self._held.get(endpoint)
        if held is None:
            return
        for name in found:
            if name in held:
                held[name] = _TRUSTED
        for name in hashes[actual:predicted]:
            if held.get(name) == _MISSED_ONCE:
                del held[name]
                self._entries -= 1
            elif name in held:
                held[name] = _MISSED_ONCE

    def remove_endpoint(self, endpoint: str) -> None:
        """The endpoint left, or its engine started anew with an empty cache."""
        self._entries -= len(self._held.pop(endpoint, ()))
        self._capacity.pop(endpoint, None)

    def _trim(self, endpoint: str) -> None:
        held = self._held.get(endpoint)
        if held is None:
            return
        limit = self._capacity.get(endpoint, self._max_entries)
        while len(held) > limit:
            held.popitem(last=False)
            self._entries -= 1
        while self._entries > self._max_entries:
            largest = max(self._held.values(), key=len)
            share = max(
                1, len(largest) // 64
            )  # several at once: finding the largest costs a pass over endpoints
            for _ in range(min(share, self._entries - self._max_entries)):
                largest.popitem(last=False)
                self._entries -= 1
