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
from octavo.models.dequantize import DEQUANTIZERS, dequantize
from octavo.models.gguf_config import from_gguf_name

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
    """A GGUF file's tensors, dequantised as they are read; Llama's q and k get their own order back."""

    norms_hold_offset = True

    def __init__(self, file: GGUFFile, config: ModelConfig) -> None:
        self.where = str(file.path)
        self._file, self._config = file, config
        self._tensors = {from_gguf_name(name, config.architecture): t for name, t in file.tensors.items()}
        unsupported = sorted({t.type for t in file.tensors.values()} - set(DEQUANTIZERS))
        if unsupported:
            raise ModelLoadError(
                f"{self.where} holds tensors of type {', '.join(unsupported)}, which is not supported: "
                f"{', '.join(DEQUANTIZERS)} are"
            )

    def names(self) -> set[str]:
        return set(self._tensors)

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        stored = self._tensors[name]
        tensor = self._dequantised(stored, dtype)
        if self._config.architecture == "LlamaForCausalLM":
            heads = self._permuted_heads(name)
            return _unpermuted(tensor, heads) if heads else tensor
        return tensor

    def _permuted_heads(self, name: str) -> int:
        parameter = name.split(".")[-2]
        return {"q_proj": self._config.num_heads, "k_proj": self._config.num_kv_heads}.get(parameter, 0)

    def _dequantised(self, stored: GGUFTensor, dtype: torch.dtype) -> Tensor:
        rows = stored.shape[0] if len(stored.shape) > 1 else 1
        width = math.prod(stored.shape) // rows
        out = torch.empty(stored.shape, dtype=dtype)
        flat = out.view(rows, width)
        raw = torch.frombuffer(self._file.data(stored), dtype=torch.uint8).view(rows, -1)
        step = max(1, _CHUNK // width)
        for start in range(0, rows, step):
            flat[start : start + step] = dequantize(raw[start : start + step], stored.type)
        return out


def _unpermuted(tensor: Tensor, heads: int) -> Tensor:
    """GGUF keeps Llama's q and k with the halves of each head interleaved; back to halves."""
    half = tensor.shape[0] // heads // 2
    return tensor.view(heads, half, 2, -1).transpose(1, 2).reshape(tensor.shape)
