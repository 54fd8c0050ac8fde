"""Turn the tokenizer inside a GGUF file into a ``tokenizer.json`` for the ``tokenizers`` library.

A GGUF file keeps vocabulary, scores or merges, and token types under llama.cpp's key names. Two kinds are
converted: ``gpt2`` (byte-level BPE, split by the pre-tokenizer the file names) and ``llama`` (SentencePiece
BPE with byte fallback, whose merges are recovered from the vocabulary). Any other is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from octavo.errors import ModelLoadError

_CONTROL, _USER_DEFINED = 3, 4  # llama.cpp's token types that are matched whole in text
_SPACE = "\u2581"  # how SentencePiece spells a space

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _byte_level(use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _split(pattern: str) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [split, _byte_level(use_regex=False)]}


# Digits apart, then GPT-2's rule: what SmolLM2's own tokenizer.json and llama.cpp do.
_SMOLLM = {
    "type": "Sequence",
    "pretokenizers": [{"type": "Digits", "individual_digits": True}, _byte_level(use_regex=True)],
}
PRE_TOKENIZERS: dict[str, dict[str, Any]] = {
    "default": _byte_level(use_regex=True),
    "gpt-2": _byte_level(use_regex=True),
    "smollm": _SMOLLM,
    "llama-bpe": _split(_LLAMA3_SPLIT),
    "llama3": _split(_LLAMA3_SPLIT),
    "llama-v3": _split(_LLAMA3_SPLIT),
    "qwen2": _split(_QWEN2_SPLIT),
}
_BOS_BY_DEFAULT = ("llama-bpe", "llama3", "llama-v3")  # as llama.cpp does when the file does not say


def adds_bos(metadata: Mapping[str, Any]) -> bool:
    """Whether a prompt starts with the beginning-of-sequence token, as the file says or as its kind
    implies.
    """
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "default")
    default = kind == "llama" or pre in _BOS_BY_DEFAULT
    return (
        bool(metadata.get("tokenizer.ggml.add_bos_token", default))
        and "tokenizer.ggml.bos_token_id" in metadata
    )


def tokenizer_json(metadata: Mapping[str, Any]) -> str:
    """The whole ``tokenizer.json`` of the file's tokenizer.

    Raises ``ModelLoadError`` naming the kind or pre-tokenizer that is not known, or what the file lacks.
    """
    kind = metadata.get("tokenizer.ggml.model")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise ModelLoadError("the GGUF file holds no tokenizer (tokenizer.ggml.tokens is missing)")
    if kind == "gpt2":
        parts = _byte_level_bpe(metadata, tokens)
    elif kind == "llama":
        parts = _sentencepiece_bpe(metadata, tokens)
    else:
        raise ModelLoadError(f"the GGUF file's tokenizer is of kind {kind!r}: gpt2 and llama are supported")
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(metadata, tokens, parts["model"]["vocab"]),
        "post_processor": _post_processor(metadata, tokens),
        **parts,
    }
    return json.dumps(document, ensure_ascii=False)


def _byte_level_bpe(metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, Any]:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    if pre not in PRE_TOKENIZERS:
        known = ", ".join(PRE_TOKENIZERS)
        raise ModelLoadError(f"the GGUF file's pre-tokenizer is {pre!r}: {known} are supported")
    if "tokenizer.ggml.merges" not in metadata:
        raise ModelLoadError(
            "the GGUF file's gpt2 tokenizer has no merges (tokenizer.ggml.merges is missing)"
        )
    spelling = bytes_to_characters()
    alphabet = set(spelling)
    # Some converters write added tokens as plain text: bring them into the byte alphabet, as in a
    # tokenizer.json.
    vocab = {
        token if alphabet.issuperset(token) else "".join(spelling[byte] for byte in token.encode()): index
        for index, token in enumerate(tokens)
    }
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": "",
        "end_of_word_suffix": "",
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": vocab,
        "merges": [merge.split(" ") for merge in metadata["tokenizer.ggml.merges"]],
    }
    decoder = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    return {"normalizer": None, "pre_tokenizer": PRE_TOKENIZERS[pre], "decoder": decoder, "model": model}


def _sentencepiece_bpe(metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, Any]:
    gemma = str(metadata.get("general.architecture", "")).startswith("gemma")
    if gemma:  # its runs of spaces are stored as real spaces
        tokens = [_SPACE * len(token) if token and not token.strip(" ") else token for token in tokens]
        merges = _merges(tokens)
    else:
        if "tokenizer.ggml.scores" not in metadata:
            raise ModelLoadError(
                "the GGUF file's llama tokenizer has no scores (tokenizer.ggml.scores is missing)"
            )
        merges = _merges_by_score(tokens, metadata["tokenizer.ggml.scores"])
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None if unknown is None else tokens[unknown],
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": True,
        "ignore_merges": False,
        "vocab": {token: index for index, token in enumerate(tokens)},
        "merges": merges,
    }
    to_space = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    decoders: list[dict[str, Any]] = [to_space, {"type": "ByteFallback"}, {"type": "Fuse"}]
    if gemma:
        from_space = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
        pre = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
        return {
            "normalizer": from_space,
            "pre_tokenizer": pre,
            "decoder": {"type": "Sequence", "decoders": decoders},
            "model": model,
        }
    prefix_space = metadata.get("tokenizer.ggml.add_space_prefix", True)
    if prefix_space:
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    metaspace = {
        "type": "Metaspace",
        "replacement": _SPACE,
        "prepend_scheme": "first" if prefix_space else "never",
        "split": False,
    }
    return {
        "normalizer": None,
        "pre_tokenizer": metaspace,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": model,
    }


def _merges(tokens: list[str]) -> list[tuple[str, str]]:
    """Merges in the order in which the tokens appear (Gemma: its scores do not follow its merge order).

    A token yields one merge for each way to cut it into two tokens, the longest left part first.
    """
    vocab = set(tokens)
    return [
        (token[:cut], token[cut:])
        for token in dict.fromkeys(tokens)
        for cut in range(len(token) - 1, 0, -1)
        if token[:cut] in vocab and token[cut:] in vocab
    ]


def _merges_by_score(tokens: list[str], scores: list[float]) -> list[tuple[str, str]]:
    """Merges of every token, best score first; of equal scores the longer left part, then the longer right
    part.
    """
    score = dict(zip(tokens, scores, strict=True))
    merges = _merges(tokens)
    merges.sort(key=lambda pair: (score[pair[0] + pair[1]], len(pair[0]), len(pair[1])), reverse=True)
    return merges


def _added_tokens(
    metadata: Mapping[str, Any], tokens: list[str], vocab: Mapping[str, int]
) -> list[dict[str, Any]]:
    """Control tokens (special) and user-defined ones (plain), both matched whole in the text."""
    types = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    named = {
        metadata.get(f"tokenizer.ggml.{name}_token_id")
        for name in ("bos", "eos", "eot", "eom", "unknown", "padding")
    }
    added = []
    for index, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        special = kind == _CONTROL or index in named
        if (special or kind == _USER_DEFINED) and vocab.get(token) == index:
            flags = {
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": special,
            }
            added.append({"id": index, "content": token, **flags})
    return added


def _post_processor(metadata: Mapping[str, Any], tokens: list[str]) -> dict[str, Any]:
    bos = metadata["tokenizer.ggml.bos_token_id"] if adds_bos(metadata) else None
    eos = (
        metadata.get("tokenizer.ggml.eos_token_id") if metadata.get("tokenizer.ggml.add_eos_token") else None
    )
    return _template_processor(
        None if bos is None else (tokens[bos], bos), None if eos is None else (tokens[eos], eos)
    )


def _template_processor(bos: tuple[str, int] | None, eos: tuple[str, int] | None) -> dict[str, Any]:
    """Puts ``bos`` before and ``eos`` after a text (each as token and id, or None)."""
    before = [{"SpecialToken": {"id": bos[0], "type_id": 0}}] if bos else []
    after = [{"SpecialToken": {"id": eos[0], "type_id": 0}}] if eos else []
    return {
        "type": "TemplateProcessing",
        "single": [*before, {"Sequence": {"id": "A", "type_id": 0}}, *after],
        "pair": [
            *before,
            {"Sequence": {"id": "A", "type_id": 0}},
            {"Sequence": {"id": "B", "type_id": 1}},
            *after,
        ],
        "special_tokens": {
            token: {"id": token, "ids": [index], "tokens": [token]}
            for token, index in filter(None, (bos, eos))
        },
    }


def bytes_to_characters() -> list[str]:
    """The 256 printable characters that byte-level BPE writes for the bytes 0 .. 255 (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {byte: chr(byte) for byte in printable}
    others = (byte for byte in range(256) if byte not in table)
    table.update({byte: chr(256 + offset) for offset, byte in enumerate(others)})
    return [table[byte] for byte in range(256)]
