"""What weights kept quantised, and a KV cache of 8 bits, cost: a GGUF model on this repository's text.

    python benchmarks/quantised.py MODEL [--tokens 20000] [--types Q4_0 Q8_0]
    python benchmarks/quantised.py MODEL --kv-cache

MODEL: a GGUF file or its address. First the file as it is, then all its matrices rounded anew to each type
(the nearest values between each group's extremes, by which Q4_K is Q4_1). The reference is float32 on the
same weights, dequantised. Beside it stand quantised weights as ``--dtype auto`` runs them, and for the file
bfloat16 on dequantised ones: the perplexity; the root mean square error of the logits against their spread
(each row's mean taken off, which no probability depends on); how often the most likely token is the
reference's. With ``--kv-cache``, the file's weights in bfloat16 with each type of the KV cache, and its bytes
a token. The text is docs and source, in windows of 512 tokens.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import torch
from tokenizers import Tokenizer
from torch import Tensor

import octavo_kernels
from octavo.config import EngineConfig, engine_config
from octavo.core.plan import Row
from octavo.fetch import fetch
from octavo.layers.weights import Checkpoint, PlainFormat, QuantisedFormat, Weights
from octavo.models.base import CausalLM
from octavo.models.checkpoint import open_checkpoint
from octavo.models.config import ModelConfig, load_model_config
from octavo.models.dequantize import BLOCKS
from octavo.models.registry import model_class
from octavo.prompt.assets import load_assets
from octavo.worker.device import Device
from octavo.worker.executor import Loaded
from octavo.worker.host import set_threads
from octavo.worker.loading import Place, pick_cache_dtype
from octavo.worker.sizing import CacheSize
from octavo_kernels import QuantisedWeight
from octavo_kernels.quantised import GROUP

WINDOW = 512  # tokens of context
PART = 128  # rows whose logits are in memory at once
WITH_MINIMA = ("Q4_1", "Q5_K")
TYPES = tuple(kind for kind in BLOCKS if kind != "Q4_K")
ROOT = Path(__file__).parents[1]


class Requantised(Checkpoint):
    """Another checkpoint's tensors, the matrices rounded to one type."""

    def __init__(self, checkpoint: Checkpoint, kind: str) -> None:
        self._checkpoint, self._kind = checkpoint, kind
        self.where, self.norms_hold_offset = checkpoint.where, checkpoint.norms_hold_offset

    def names(self) -> set[str]:
        return self._checkpoint.names()

    def read(self, name: str, dtype: torch.dtype) -> Tensor:
        tensor = self._checkpoint.read(name, torch.float32)
        return (tensor if tensor.dim() < 2 else rounded(tensor, self._kind).dequantised()).to(dtype)

    def read_quantised(self, name: str) -> QuantisedWeight | None:
        tensor = self._checkpoint.read(name, torch.float32)
        return None if tensor.dim() < 2 else rounded(tensor, self._kind)


def rounded(weight: Tensor, kind: str) -> QuantisedWeight:
    """weight [N, K] in the integers of a type."""
    block, (rows, columns) = BLOCKS[kind], weight.shape
    groups = weight.view(rows, -1, 16 if kind == "Q6_K" else GROUP)
    most, minima = 2**block.bits - 1, None
    if kind in WITH_MINIMA:
        minima = groups.amin(-1).half()
        scales = ((groups.amax(-1) - minima.float()) / most).half()
        values = (groups - minima.float()[..., None]) / scales.float()[..., None]
    else:
        scales = (groups.abs().amax(-1) / (block.zero - 1)).half()
        values = groups / scales.float()[..., None] + block.zero
    values = values.nan_to_num().round_().clamp_(0, most).to(torch.uint8).view(rows, columns)
    return QuantisedWeight(block.bits, block.zero, values, scales, minima)


@dataclasses.dataclass
class Figures:
    """Sums over all predictions of one way of running the model."""

    error: float = 0.0
    agreed: int = 0
    loss: float = 0.0

    def add(self, logits: Tensor, exact: Tensor, targets: Tensor) -> None:
        centred, reference = (x - x.mean(-1, keepdim=True) for x in (logits, exact))
        self.error += float((centred - reference).square().mean(-1).sum())
        self.agreed += int((logits.argmax(-1) == exact.argmax(-1)).sum())
        self.loss += float(torch.nn.functional.cross_entropy(logits, targets, reduction="sum"))


class Running:
    """A model in some numbers, with a cache of one window."""

    def __init__(
        self,
        config: EngineConfig,
        shape: ModelConfig,
        source: Checkpoint,
        dtype: str,
        kept: bool,
        cache: str = "auto",
    ) -> None:
        numbers = getattr(torch, dtype)
        ops = octavo_kernels.load("cpu")
        set_threads(ops)
        form = QuantisedFormat() if kept else PlainFormat()
        place = Place(Device(), numbers, pick_cache_dtype(cache, numbers), ops, form)
        where, kept_in = place.device.torch_device, place.cache_dtype
        weights = Weights(source, numbers, where, format=form, cache_dtype=kept_in)
        self.model: CausalLM = model_class(shape.architecture)(shape, weights, ops, WINDOW)
        loaded = Loaded(config, place, self.model, None)
        self.token_bytes = loaded.block_bytes / config.block_size
        needed = loaded.blocks_needed(WINDOW)
        self._runner = loaded.runner(CacheSize(needed, config.block_size, WINDOW, needed))
        blocks = WINDOW // config.block_size
        self._tables = [list(range(blocks * i, blocks * (i + 1))) for i in range(len(loaded.layout.groups))]

    def hidden(self, ids: list[int]) -> Tensor:
        return self._runner.forward([Row("window", ids, 0, self._tables)])[: len(ids)]


def windows(path: Path, count: int) -> Iterator[list[int]]:
    """About ``count`` tokens of the repository's own text."""
    files = sorted(
        [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "server/octavo/core").glob("*.py")]
    )
    files += sorted((ROOT / "server/octavo/engine").glob("*.py"))
    text = "\n\n".join(file.read_text() for file in files)
    ids = Tokenizer.from_str(load_assets(path).tokenizer_json).encode(text).ids
    if len(ids) < count:
        raise SystemExit(f"the text has {len(ids)} tokens; ask for fewer than {count}")
    for start in range(0, count - WINDOW + 1, WINDOW):
        yield ids[start : start + WINDOW]


Way: TypeAlias = tuple[str, bool, str]
"""Of running the model: its numbers, whether weights stay quantised, the type of the KV cache."""
REFERENCE, PLAIN, KEPT = ("float32", False, "auto"), ("bfloat16", False, "auto"), ("bfloat16", True, "auto")
CACHES = ("bfloat16", "fp8", "int8")


def compare(
    config: EngineConfig,
    shape: ModelConfig,
    source: Checkpoint,
    texts: list[list[int]],
    ways: Sequence[Way],
) -> list[str]:
    """The cells of each way's row. The first is the reference."""
    runs = [Running(config, shape, source, *way) for way in ways]
    figures, spread, count = [Figures() for _ in runs], 0.0, 0
    for ids in texts:
        hidden = [run.hidden(ids) for run in runs]
        targets = torch.tensor(ids[1:])
        for start in range(0, WINDOW - 1, PART):
            wanted = targets[start : start + PART]
            rows = slice(start, start + len(wanted))
            logits = [run.model.logits(h[rows], None) for run, h in zip(runs, hidden, strict=True)]
            for own, each in zip(figures, logits, strict=True):
                own.add(each, logits[0], wanted)
            spread += float((logits[0] - logits[0].mean(-1, keepdim=True)).square().mean(-1).sum())
            count += len(wanted)
    return [
        f"{math.exp(own.loss / count):.3f} | {math.sqrt(own.error / spread):.1%} | {own.agreed / count:.1%}"
        f" | {run.token_bytes:.0f}"
        for run, own in zip(runs, figures, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=20_000)
    compared = parser.add_mutually_exclusive_group()
    compared.add_argument("--kv-cache", action="store_true")
    compared.add_argument("--types", nargs="*", default=TYPES, choices=TYPES, metavar="TYPE")
    arguments = parser.parse_args()
    path = fetch(arguments.model)
    config = engine_config(str(path), {"max_num_batched_tokens": WINDOW, "max_num_seqs": 1, "device": "cpu"})
    shape = load_model_config(path)
    texts = list(windows(path, arguments.tokens))
    figures = "perplexity | error of logits | agreement | KV bytes a token |\n|---|---|---|---|---|"
    with open_checkpoint(path, shape) as checkpoint, torch.inference_mode():
        if arguments.kv_cache:
            print(f"| KV cache | {figures}")
            ways = [REFERENCE, *(("bfloat16", False, cache) for cache in CACHES)]
            cells = compare(config, shape, checkpoint, texts, ways)
            for way, row in zip(("float32 (and all else)", *CACHES), cells, strict=True):
                print(f"| {way} | {row} |", flush=True)
            return
        print(f"| weights | run in | {figures}---|")
        cells = compare(config, shape, checkpoint, texts, (REFERENCE, PLAIN, KEPT))
        for way, row in zip(("float32", "bfloat16", "auto"), cells, strict=True):
            print(f"| the file's | {way} | {row} |", flush=True)
        for kind in arguments.types:
            source = Requantised(checkpoint, kind)
            for way, row in zip(
                ("float32", "auto"), compare(config, shape, source, texts, (REFERENCE, KEPT)), strict=True
            ):
                print(f"| {kind} | {way} | {row} |", flush=True)


if __name__ == "__main__":
    main()
