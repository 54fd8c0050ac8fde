"""Names of KV blocks: a chained hash of what a block holds, equal on every machine and Python version.

The name of a full block is ``H(encoding)``; the encoding is deterministic CBOR (RFC 8949, section 4.2) of

    [parent, tokens, extras]

    parent   byte string: the name of the block before; for the first block of a sequence the root
    tokens   tag 70 (RFC 8746: little-endian uint32 array) over a byte string of 4 x block_size bytes
    extras   array of [tag, value] pairs in rising order of tag, so that no adapter's name equals a salt
             1  adapter name, text string, on every block
             3  cache salt, text string, on the first block only (the chain carries it on)
             2 and 4 are kept for positioned multimodal identifiers and hashes of prompt embeddings

All four algorithms hash this one encoding: ``sha256`` and ``sha256_cbor`` are SHA-256 (32 bytes); ``xxhash``
and ``xxhash_cbor`` are XXH3-128 in canonical big-endian form (16 bytes). Both names exist because other
servers tell a pickled from a CBOR encoding; here it is always CBOR. The root is ``H("octavo kv root 1")``.
Golden vectors are in ``tests/core/block_hash_vectors.json``.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence

import xxhash

from octavo.errors import ConfigError, InvalidRequest

_ROOT_TEXT = b"octavo kv root 1"
_ADAPTER_TAG = 1
_SALT_TAG = 3
_BYTES, _TEXT, _ARRAY = 2, 3, 4  # CBOR major types


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _xxh3_128(data: bytes) -> bytes:
    return xxhash.xxh3_128_digest(data)


_ALGORITHMS: dict[str, Callable[[bytes], bytes]] = {
    "sha256": _sha256,
    "sha256_cbor": _sha256,
    "xxhash": _xxh3_128,
    "xxhash_cbor": _xxh3_128,
}


def _head(major: int, length: int) -> bytes:
    """The shortest CBOR head of an item."""
    if length < 24:
        return bytes([major << 5 | length])
    for extra, (code, limit) in enumerate((("B", 1 << 8), (">H", 1 << 16), (">I", 1 << 32))):
        if length < limit:
            return bytes([major << 5 | 24 + extra]) + struct.pack(code, length)
    raise InvalidRequest(f"a cache key of {length} bytes is too long: at most {(1 << 32) - 1}")


def _extras(pairs: Sequence[tuple[int, str]]) -> bytes:
    out = [_head(_ARRAY, len(pairs))]
    for tag, text in pairs:
        try:
            value = text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequest(f"the cache key {text!r} is not valid Unicode text") from error
        out += [_head(_ARRAY, 2), bytes([tag]), _head(_TEXT, len(value)), value]
    return b"".join(out)


class BlockHasher:
    """Hashes the full blocks of token sequences.

    ``root`` is the parent of every first block. Raises ``ConfigError`` for an unknown algorithm.
    """

    def __init__(self, algo: str, block_size: int) -> None:
        if algo not in _ALGORITHMS:
            raise ConfigError(f"prefix-caching-hash-algo is {algo!r}: choose one of {', '.join(_ALGORITHMS)}")
        self.algo = algo
        self.block_size = block_size
        self._hash = _ALGORITHMS[algo]
        self.root = self._hash(_ROOT_TEXT)
        self._before_parent = _head(_ARRAY, 3) + _head(_BYTES, len(self.root))
        self._before_tokens = b"\xd8\x46" + _head(_BYTES, 4 * block_size)  # tag 70

    def hash_blocks(
        self,
        token_ids: Sequence[int],
        cache_salt: str | None = None,
        start_parent: bytes | None = None,
        *,
        adapter: str | None = None,
    ) -> list[bytes]:
        """The names of the full blocks of ``token_ids``, in order; a part of a block at the end has none.

        ``start_parent`` is the name of the block before ``token_ids``, which then go on in the middle of a
        sequence (the salt is already in the chain and is not hashed again). Token ids are 0 .. 2^32 - 1, else
        ``InvalidRequest``.
        """
        width = 4 * self.block_size
        count = len(token_ids) // self.block_size
        size = count * self.block_size
        try:
            packed = struct.pack(f"<{size}I", *(token_ids if size == len(token_ids) else token_ids[:size]))
        except struct.error as error:
            wrong = next(t for t in token_ids if not isinstance(t, int) or not 0 <= t < 1 << 32)
            raise InvalidRequest(f"token id {wrong!r} is out of range: 0 to {(1 << 32) - 1}") from error
        every = [] if adapter is None else [(_ADAPTER_TAG, adapter)]
        later = _extras(every)
        first = start_parent is None
        extras = _extras([*every, (_SALT_TAG, cache_salt)]) if first and cache_salt is not None else later
        digest, before_parent, before_tokens = self._hash, self._before_parent, self._before_tokens
        parent = self.root if start_parent is None else start_parent
        names: list[bytes] = []
        for start in range(0, count * width, width):
            parent = digest(
                b"".join((before_parent, parent, before_tokens, packed[start : start + width], extras))
            )
            names.append(parent)
            extras = later
        return names
