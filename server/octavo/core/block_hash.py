"""Names of KV blocks: a chained hash of what a block holds, equal on every machine and Python version.

The name of a full block is ``H(encoding)``; the encoding is deterministic CBOR (RFC 8949, section 4.2) of

    [parent, tokens, extras]

    parent   byte string: the name of the block before; for the first block of a sequence the root
    tokens   tag 70 (RFC 8746: little-endian uint32 array) over a byte string of 4 x block_size bytes
    extras   array of [tag, value] pairs in rising order of tag, so that no adapter's name equals a salt
             1  adapter name, text string, on every block
             2  positioned features (images), on the blocks that they cover: array of [identifier, offset],
                text string and unsigned integer, in the order of their offsets. The offset is that of the
                feature's first token in the sequence, so it is the same on all of its blocks
             3  cache salt, text string, on the first block only (the chain carries it on)
             4  is kept for hashes of prompt embeddings

All four algorithms hash this one encoding: ``sha256`` and ``sha256_cbor`` are SHA-256 (32 bytes); ``xxhash``
and ``xxhash_cbor`` are XXH3-128 in canonical big-endian form (16 bytes). Both names exist because other
servers tell a pickled from a CBOR encoding; here it is always CBOR. The root is ``H("octavo kv root 1")``.
Golden vectors are in ``tests/core/block_hash_vectors.json``.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from typing import Any

import xxhash

from octavo.core.outputs import Feature
from octavo.errors import ConfigError, InvalidRequest

_ROOT_TEXT = b"octavo kv root 1"
ADAPTER_TAG, FEATURES_TAG, SALT_TAG = 1, 2, 3
_NUMBER, _BYTES, _TEXT, _ARRAY = 0, 2, 3, 4  # CBOR major types

Extras = tuple[tuple[int, Any], ...]  # of one block: tag, and a text or (identifier, offset) pairs


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


def _text(text: str) -> bytes:
    try:
        value = text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"the cache key {text!r} is not valid Unicode text") from error
    return _head(_TEXT, len(value)) + value


def _encoded(extras: Extras) -> bytes:
    out = [_head(_ARRAY, len(extras))]
    for tag, value in extras:
        out += [_head(_ARRAY, 2), bytes([tag])]
        if isinstance(value, str):
            out.append(_text(value))
            continue
        out.append(_head(_ARRAY, len(value)))
        for identifier, offset in value:
            out += [_head(_ARRAY, 2), _text(identifier), _head(_NUMBER, offset)]
    return b"".join(out)


def block_extras(
    start: int,
    end: int,
    cache_salt: str | None = None,
    adapter: str | None = None,
    features: Sequence[Feature] = (),
) -> Extras:
    """What beside its tokens decides what the block of positions ``start`` .. ``end - 1`` holds."""
    pairs: list[tuple[int, Any]] = []
    if adapter is not None:
        pairs.append((ADAPTER_TAG, adapter))
    covering = [f for f in features if f.offset < end and f.offset + f.length > start]
    if covering:
        covering.sort(key=lambda feature: (feature.offset, feature.identifier))
        pairs.append((FEATURES_TAG, tuple((f.identifier, f.offset) for f in covering)))
    if cache_salt is not None and start == 0:
        pairs.append((SALT_TAG, cache_salt))
    return tuple(pairs)


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
        features: Sequence[Feature] = (),
        start: int = 0,
    ) -> list[bytes]:
        """The names of the full blocks of ``token_ids``, in order; a part of a block at the end has none.

        ``start_parent`` is the name of the block before ``token_ids``, which then go on at position ``start``
        of a sequence (the salt is already in the chain and is not hashed again). Token ids are 0 .. 2^32 - 1,
        else ``InvalidRequest``.
        """
        width = 4 * self.block_size
        count = len(token_ids) // self.block_size
        size = count * self.block_size
        try:
            packed = struct.pack(f"<{size}I", *(token_ids if size == len(token_ids) else token_ids[:size]))
        except struct.error as error:
            wrong = next(t for t in token_ids if not isinstance(t, int) or not 0 <= t < 1 << 32)
            raise InvalidRequest(f"token id {wrong!r} is out of range: 0 to {(1 << 32) - 1}") from error
        salt = cache_salt if start_parent is None else None
        plain = _encoded(((ADAPTER_TAG, adapter),) if adapter is not None else ())
        digest, before_parent, before_tokens = self._hash, self._before_parent, self._before_tokens
        parent = self.root if start_parent is None else start_parent
        names: list[bytes] = []
        for at in range(0, count * width, width):
            extras = plain
            if features or (at == 0 and salt is not None):
                first = start + at // 4
                last = first + self.block_size
                extras = _encoded(block_extras(first, last, salt, adapter, features))
            parent = digest(b"".join((before_parent, parent, before_tokens, packed[at : at + width], extras)))
            names.append(parent)
        return names
