"""What each token of a vocabulary stands for, as bytes, so that text can be put together token by token."""

from __future__ import annotations

import json
import re
from typing import Any

import tokenizers

from octavo.errors import ModelLoadError
from octavo.prompt.gguf_tokenizer import bytes_to_characters

_BYTE_TOKEN = re.compile(r"^<0x([0-9A-Fa-f]{2})>$")


class PieceTable:
    """Token id to bytes, by the rule of the tokenizer's decoder: byte-level (GPT-2) or byte fallback
    (SentencePiece).
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        """Raises ``ModelLoadError`` naming a decoder whose text cannot be put together token by token."""
        document = _without_vocabulary(tokenizer)
        self._tokenizer = tokenizer
        self._replace: list[tuple[str, str]] = []
        kinds = []
        for step in _steps(document["decoder"]):
            kinds.append(step["type"])
            if step["type"] == "Replace" and "String" in step["pattern"]:
                self._replace.append((step["pattern"]["String"], step["content"]))
            elif step["type"] == "Metaspace":
                self._replace.append((step["replacement"], " "))
            elif step["type"] not in ("ByteLevel", "ByteFallback", "Fuse", "Strip"):
                raise ModelLoadError(
                    f"the tokenizer's decoder is of kind {step['type']!r}, which is not supported"
                )
        self.byte_level = "ByteLevel" in kinds
        self._byte_of = {character: byte for byte, character in enumerate(bytes_to_characters())}
        self.special = frozenset(token["id"] for token in document["added_tokens"] if token["special"])
        self._known: dict[int, tuple[bytes, bool]] = {}

    def __contains__(self, token_id: int) -> bool:
        return 0 <= token_id < 2**32 and self._tokenizer.id_to_token(token_id) is not None

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of one token; empty for an id outside the vocabulary."""
        return self.piece(token_id)[0]

    def piece(self, token_id: int) -> tuple[bytes, bool]:
        """The bytes of one token, and whether it is a single byte written out (``<0x0A>``), valid only among
        others.
        """
        if token_id not in self._known:
            self._known[token_id] = self._read(token_id)
        return self._known[token_id]

    def _read(self, token_id: int) -> tuple[bytes, bool]:
        token = self._tokenizer.id_to_token(token_id) if 0 <= token_id < 2**32 else None
        if token is None:
            return b"", False
        if self.byte_level:
            if all(character in self._byte_of for character in token):
                return bytes(self._byte_of[character] for character in token), False
            return token.encode(), False
        if match := _BYTE_TOKEN.match(token):
            return bytes([int(match[1], 16)]), True
        for old, new in self._replace:
            token = token.replace(old, new)
        return token.encode(), False


def _without_vocabulary(tokenizer: tokenizers.Tokenizer) -> dict[str, Any]:
    """Decoder and added tokens. Asking for the whole ``tokenizer.json`` would write out a vocabulary of
    megabytes.
    """
    state = tokenizer.decoder.__getstate__() if tokenizer.decoder is not None else b'{"type":"none"}'
    added = [
        {"id": index, "special": token.special}
        for index, token in tokenizer.get_added_tokens_decoder().items()
    ]
    return {"decoder": json.loads(state), "added_tokens": added}


def _steps(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for part in decoder["decoders"] for step in _steps(part)]
