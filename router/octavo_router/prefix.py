"""From a request body to the names of its prefix: the engine's own block hashes, or hashes of the raw text.

Exact: the body is rendered and tokenised by ``octavo.prompt`` with the engine's assets and hashed by
``octavo.core.block_hash`` with the engine's scheme. By text: where engines differ, or publish no scheme, or
the body cannot be rendered, the raw text of tools and messages is cut into chunks whose chained hashes serve
the same way.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from octavo.core.block_hash import BlockHasher
from octavo.errors import OctavoError
from octavo.prompt.anthropic import MESSAGES
from octavo.prompt.dialect import Dialect
from octavo.prompt.renderer import PromptRenderer
from octavo.prompt.responses import RESPONSES

Kind = Literal["chat", "completion", "responses", "messages", "other"]
_DIALECTS: dict[Kind, Dialect] = {"responses": RESPONSES, "messages": MESSAGES}

TEXT_CHUNK = 64  # bytes of text a chunk
BYTES_PER_TOKEN = 4  # of text, as a rule of thumb for English and code
# Longest prefix that is hashed, in blocks or chunks. Beyond it two prompts count as different anyway.
MAX_HASHES = 8192


@dataclass(frozen=True, slots=True)
class Prefix:
    """``tokens`` in all prompts together, and per prompt the chained hashes of its blocks of ``block_tokens``
    tokens.
    """

    exact: bool
    tokens: int
    block_tokens: int
    hashes: tuple[Sequence[bytes], ...] = ()
    lengths: tuple[int, ...] = field(default=())

    @property
    def blocks(self) -> int:
        """KV blocks that the prompts need."""
        return sum(-(-length // self.block_tokens) for length in self.lengths)


NO_PREFIX = Prefix(exact=False, tokens=0, block_tokens=1)


class Exact:
    """Names prefixes as one kind of engine does. Safe to call from several threads."""

    def __init__(self, renderer: PromptRenderer, hasher: BlockHasher) -> None:
        self._renderer = renderer
        self._hasher = hasher

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self._hasher.block_size

    def prefix(self, kind: Kind, body: dict[str, Any], longest: int | None = None) -> Prefix:
        """Raises ``InvalidRequest`` as an engine that takes ``longest`` tokens would for the same body."""
        kind, body = _as_chat(kind, body)
        if kind == "chat":
            prompts = [self._renderer.chat(body, longest)]
        else:
            prompts = self._renderer.completion(
                body.get("prompt"), body.get("add_special_tokens") is not False, longest
            )
        size = self._hasher.block_size
        salt = body.get("cache_salt")
        salt = salt if isinstance(salt, str) else None
        limit = MAX_HASHES * size
        hashes = tuple(
            self._hasher.hash_blocks(p if len(p) <= limit else p[:limit], cache_salt=salt) for p in prompts
        )
        lengths = tuple(len(p) for p in prompts)
        return Prefix(True, sum(lengths), size, hashes, lengths)


def text_prefix(kind: Kind, body: dict[str, Any]) -> Prefix:
    """The prefix named by its text. Never fails: what is not text is taken as its JSON."""
    try:
        kind, body = _as_chat(kind, body)
    except OctavoError:  # the engine will say what is wrong with it
        kind, body = "completion", {"prompt": body}
    salt = _plain(body.get("cache_salt") or "")
    if kind == "chat":
        texts = [_chat_text(body)]
    else:
        prompt = body.get("prompt", "")
        many = isinstance(prompt, list) and any(isinstance(p, str | list) for p in prompt)
        texts = [_plain(p) for p in prompt] if many and isinstance(prompt, list) else [_plain(prompt)]
    hashes = tuple(_chain(salt, text) for text in texts)
    lengths = tuple(-(-len(text) // BYTES_PER_TOKEN) for text in texts)
    return Prefix(False, sum(lengths), TEXT_CHUNK // BYTES_PER_TOKEN, hashes, lengths)


def _as_chat(kind: Kind, body: dict[str, Any]) -> tuple[Kind, dict[str, Any]]:
    """Other APIs' requests as the chats that engines make of them. Raises ``InvalidRequest``."""
    dialect = _DIALECTS.get(kind)
    return ("chat", dialect.chat(body)) if dialect is not None else (kind, body)


def _chat_text(body: dict[str, Any]) -> bytes:
    parts = [_plain(body.get("tools") or "")]
    messages = body.get("messages")
    for message in messages if isinstance(messages, list) else [messages]:
        if isinstance(message, dict):
            parts += [_plain(message.get("role", "")), _plain(message.get("content", ""))]
            if message.get("tool_calls"):
                parts.append(_plain(message["tool_calls"]))
        else:
            parts.append(_plain(message))
    return b"\0".join(parts)


def _plain(value: object) -> bytes:
    if isinstance(value, str):
        return value.encode("utf-8", "surrogatepass")
    return msgspec.json.encode(value)


def _chain(salt: bytes, text: bytes) -> list[bytes]:
    parent = hashlib.blake2b(salt, digest_size=16, person=b"octavo text").digest()
    names = []
    for start in range(0, min(len(text) - TEXT_CHUNK + 1, MAX_HASHES * TEXT_CHUNK), TEXT_CHUNK):
        parent = hashlib.blake2b(parent + text[start : start + TEXT_CHUNK], digest_size=16).digest()
        names.append(parent)
    return names


def rendezvous_key(prefix: Prefix, matched: int, fallback: bytes) -> bytes:
    """What the request shares with those that should go with it: its first block that no endpoint holds yet.

    ``matched`` is the most blocks any endpoint holds of the first prompt. Blocks that everybody already
    shares (a template's opening, a common system prompt) do not tell requests apart; the first one after them
    does, and it is the same on every router that has seen the same traffic. ``fallback`` serves prompts
    shorter than a block.
    """
    first = prefix.hashes[0] if prefix.hashes else ()
    if not first:
        return hashlib.blake2b(fallback, digest_size=16).digest()
    return first[min(matched, len(first) - 1)]
