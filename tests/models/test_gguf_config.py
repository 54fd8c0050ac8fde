"""What GGUF metadata says, in the words of ``config.json``."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from octavo.models.gguf_config import gguf_as_hf_config


def eos_of(**tokenizer: Any) -> list[int]:
    metadata = {f"tokenizer.{name.replace('__', '.')}": value for name, value in tokenizer.items()}
    metadata |= {"general.architecture": "gemma3", "gemma3.embedding_length": 64}
    metadata |= {"gemma3.attention.head_count": 4, "gemma3.block_count": 1}
    return gguf_as_hf_config(SimpleNamespace(metadata=metadata, tensors={}, path=Path("m.gguf")))[
        "eos_token_id"
    ]


def test_a_chat_model_ends_at_its_end_of_turn_though_the_file_does_not_number_it() -> None:
    tokens = ["<pad>", "<eos>", "a", "<end_of_turn>"]
    assert eos_of(ggml__eos_token_id=1, ggml__tokens=tokens, chat_template="{{ messages }}") == [1, 3]
    assert eos_of(ggml__eos_token_id=3, ggml__tokens=tokens, chat_template="{{ messages }}") == [3]


def test_a_model_without_a_chat_template_ends_where_the_file_says() -> None:
    tokens = ["<pad>", "<eos>", "a", "<end_of_turn>"]
    assert eos_of(ggml__eos_token_id=1, ggml__tokens=tokens) == [1]
