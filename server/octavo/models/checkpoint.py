"""Checkpoints on disk: safetensors folders and GGUF files, tensor by tensor under Hugging Face's names."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from octavo.errors import ModelLoadError
from octavo.gguf_file import GGUFFile, GGUFTensor
from octavo.layers.weights import Checkpoint
from octavo.models.config import ModelConfig
from octavo.models.dequantize import BLOCKS, SUPPORTED, dequantize, keep
from octavo.models.gguf_config import from_gguf_name
from octavo_kernels import QuantisedWeight
from octavo_kernels.quantised import stack

# Numbers dequantised at once: the steps between stay in the CPU's cache, and a large table never stands in
# memory whole as float32.
_CHUNK = 1 << 18


@contextlib.contextmanager
def open_checkpoint(path: Path, config: ModelConfig) -> Iterator[Checkpoint]:
    """Open a model folder or a GGUF file; closed on leaving. Raises ``ModelLoadError``."""
    if path.is_dir():
        yield SafetensorsCheckpoint(path)
        return
    with GGUFFile(path) as file:
        yield GGUFCheckpoint(file, config)


class SafetensorsCheckpoint(Checkpoint):
    """``model.safetensors``, or the shards that ``model.safetensors.index.json`` lists."""

    norms_hold_offset = False

    def __init__(self, folder: Path) -> None:
        self.where = str(folder)
        self._file_of: dict[str, Path] = {}
        for file in _shards(folder):
            with _opened(file) as shard:
                for name in shard.keys():  # noqa: SIM118 - not a mapping
                    if not name.endswith(".rotary_emb.inv_freq"):  # a table, in old checkpoints
                        self._file_of[name] = file

    def names(self) -> set[str]:
        return set(self._file_of)

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        with _opened(self._file_of[name]) as shard:
            tensor: Tensor = shard.get_tensor(name)
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            raise ModelLoadError(f"{self.where}: {name} has the type {tensor.dtype}, which is not supported")
        return tensor.to(dtype)


def _shards(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    if index.exists():
        try:
            listed = json.loads(index.read_text())["weight_map"].values()
        except (OSError, ValueError, KeyError, AttributeError) as error:
            raise ModelLoadError(f"{index} cannot be read: {error}") from error
        files = [folder / name for name in sorted(set(listed))]
    else:
        files = [single]
    if missing := [file.name for file in files if not file.exists()]:
        raise ModelLoadError(f"{folder} lacks {', '.join(missing)}")
    return files


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt") as shard:
            yield shard
    except (OSError, SafetensorError) as error:
        raise ModelLoadError(f"{file} cannot be read: {error}") from error


class GGUFCheckpoint(Checkpoint):
    """A GGUF file's tensors, dequantised as they are read, or kept; Llama's q and k get their order back."""

    norms_hold_offset = True

    def __init__(self, file: GGUFFile, config: ModelConfig) -> None:
        self.where = str(file.path)
        self._file, self._config = file, config
        self._tensors = {from_gguf_name(name, config.architecture): t for name, t in file.tensors.items()}
        unsupported = sorted({t.type for t in file.tensors.values()} - set(SUPPORTED))
        if unsupported:
            raise ModelLoadError(
                f"{self.where} holds tensors of type {', '.join(unsupported)}, which is not supported: "
                f"{', '.join(SUPPORTED)} are"
            )

    def names(self) -> set[str]:
        return set(self._tensors)

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        stored = self._tensors[name]
        tensor = self._dequantised(stored, dtype)
        heads = self._permuted_heads(name)
        return tensor[_unpermuted(len(tensor), heads)] if heads else tensor

    def read_quantised(self, name: str) -> QuantisedWeight | None:
        stored = self._tensors[name]
        if (
            stored.type not in BLOCKS
            or len(stored.shape) != 2
            or stored.shape[1] % BLOCKS[stored.type].numbers
        ):
            return None
        parts = [keep(raw, stored.type) for raw in self._chunks(stored)]
        kept = [part for part in parts if part is not None]
        if len(kept) < len(parts):
            return None
        weight, heads = stack(kept), self._permuted_heads(name)
        return weight.rearranged(_unpermuted(weight.shape[0], heads)) if heads else weight

    def _permuted_heads(self, name: str) -> int:
        """How many heads the rows of Llama's q and k belong to; 0 for what has its own order."""
        if self._config.architecture != "LlamaForCausalLM":
            return 0
        parameter = name.split(".")[-2]
        return {"q_proj": self._config.num_heads, "k_proj": self._config.num_kv_heads}.get(parameter, 0)

    def _dequantised(self, stored: GGUFTensor, dtype: torch.dtype) -> Tensor:
        out = torch.empty(stored.shape, dtype=dtype)
        flat = out.view(_rows(stored), -1)
        start = 0
        for raw in self._chunks(stored):
            flat[start : start + len(raw)] = dequantize(raw, stored.type)
            start += len(raw)
        return out

    def _chunks(self, stored: GGUFTensor) -> Iterator[Tensor]:
        """The bytes of some rows after the other, uint8 [rows, bytes of a row]."""
        rows = _rows(stored)
        raw = torch.frombuffer(self._file.data(stored), dtype=torch.uint8).view(rows, -1)
        step = max(1, _CHUNK // (math.prod(stored.shape) // rows))
        for start in range(0, rows, step):
            yield raw[start : start + step]


def _rows(stored: GGUFTensor) -> int:
    return stored.shape[0] if len(stored.shape) > 1 else 1


def _unpermuted(rows: int, heads: int) -> Tensor:
    """GGUF keeps Llama's q and k with the halves of each head interleaved: the order that makes halves."""
    return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).flatten()
