"""From settings and a model on disk to an executor that runs step plans in this process."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import octavo_kernels
from octavo.config import EngineConfig
from octavo.core.plan import Row, SampleSpec, StepPlan, StepResult
from octavo.errors import ConfigError
from octavo.layers.batch import ActivationBuffers
from octavo.layers.weights import Weights
from octavo.models.base import CausalLM
from octavo.models.checkpoint import open_checkpoint
from octavo.models.config import ModelConfig, load_model_config
from octavo.models.registry import model_class
from octavo.worker import sizing
from octavo.worker.gpu import gpu_budget
from octavo.worker.host import engines_here, free_memory, set_threads
from octavo.worker.runner import ModelRunner
from octavo_kernels import Ops

log = logging.getLogger(__name__)

WARM_UP_TOKENS = 64  # enough to wake the threads, page in the weights and settle the kernels' choices

Progress = Callable[[str, str], None]


@dataclasses.dataclass(frozen=True)
class ExecutorInfo:
    """What the loaded model allows."""

    max_model_len: int
    vocab_size: int
    num_blocks: int
    eos_token_ids: tuple[int, ...]
    kv: dict[str, Any]


class LocalExecutor:
    """Runs the whole model in this process."""

    def __init__(self, runner: ModelRunner, info: ExecutorInfo) -> None:
        self.runner = runner
        self.info = info

    def execute(self, plan: StepPlan) -> StepResult:
        return self.runner.run(plan)


def build_executor(config: EngineConfig, path: Path, progress: Progress) -> LocalExecutor:
    """Load the model at ``path`` (a folder or a GGUF file), size its cache, and run it once.

    ``progress`` is told each stage as it begins. Raises ``ConfigError`` and ``ModelLoadError``.
    """
    model_config = load_model_config(path)
    sizing.check_max_model_len(config.max_model_len, model_config.max_position)
    device = pick_device(config.device)
    dtype = pick_dtype(config.dtype, model_config.dtype, device)
    ops = _load_kernels(device, dtype)
    set_threads(ops)

    kernels = f"{ops.name} kernels ({ops.isa})"
    progress("loading weights", f"{model_config.architecture}, {_name(dtype)}, {kernels}")
    began = time.monotonic()
    model = load_model(model_config, path, ops, dtype, device, _max_positions(config, model_config))
    log.info("Weights loaded in %.1f s", time.monotonic() - began)

    progress("sizing the cache", "")
    tokens = max(config.max_num_batched_tokens, config.max_num_seqs)
    activations = ActivationBuffers(model.shape, tokens, dtype, device)

    def runner_of(size: sizing.CacheSize) -> ModelRunner:
        return ModelRunner(model, ops, activations, size, config.max_num_seqs, dtype, device)

    size = _size(config, model, runner_of, dtype, device)
    sizing.log_size(device.type, size)
    runner = runner_of(size)

    progress("warming", f"{size.tokens} tokens of KV cache, up to {size.max_model_len} a request")
    warm_up(runner, size)
    info = ExecutorInfo(
        size.max_model_len,
        model_config.vocab_size,
        size.num_blocks,
        model_config.eos_token_ids,
        {"groups": [{"kind": "full"}]},
    )
    return LocalExecutor(runner, info)


def pick_device(wanted: str) -> torch.device:
    """The torch device of the ``device`` setting; "auto" is a GPU where one can be used."""
    usable = torch.cuda.is_available()
    if wanted == "cuda" and not usable:
        raise ConfigError(
            "device is 'cuda', but torch finds no usable CUDA GPU here: "
            "give the process one, or choose --device cpu"
        )
    return torch.device("cuda" if usable and wanted != "cpu" else "cpu")


def pick_dtype(wanted: str, stored: str, device: torch.device) -> torch.dtype:
    """The torch dtype of the ``dtype`` setting; "auto" is the checkpoint's own.

    On a CPU a float16 checkpoint runs in bfloat16 under "auto": the fast kernels have no float16.
    """
    if wanted == "auto":
        wanted = stored if stored in ("float32", "float16", "bfloat16") else "bfloat16"
        if wanted == "float16" and device.type == "cpu":
            log.info("The checkpoint is float16; running it in bfloat16, which CPUs compute faster")
            wanted = "bfloat16"
    dtype: torch.dtype = getattr(torch, wanted)
    return dtype


def load_model(
    config: ModelConfig, path: Path, ops: Ops, dtype: torch.dtype, device: torch.device, max_positions: int
) -> CausalLM:
    """Build the model and read every parameter."""
    build = model_class(config.architecture)
    with open_checkpoint(path, config) as checkpoint, torch.inference_mode():
        return build(config, Weights(checkpoint, dtype, device), ops, max_positions)


def warm_up(runner: ModelRunner, size: sizing.CacheSize) -> None:
    """A short prefill and a decode step, over blocks that nobody owns yet."""
    length = min(WARM_UP_TOKENS, runner.max_tokens, size.max_model_len - 1, size.tokens - 1)
    blocks = [list(range(length // size.block_size + 1))]
    for start, count in ((0, length), (length, 1)):
        if count > 0:
            draw = SampleSpec(0.0, 0, 1.0, 0, 0, start + count)
            runner.run(StepPlan(0, [Row("warm-up", [0] * count, start, blocks, [draw])]))


def _load_kernels(device: torch.device, dtype: torch.dtype) -> Ops:
    try:
        return octavo_kernels.load("auto", device, dtype)
    except (octavo_kernels.KernelsUnavailable, ValueError) as error:
        raise ConfigError(str(error)) from error


def _max_positions(config: EngineConfig, model: ModelConfig) -> int:
    wanted = config.max_model_len
    return wanted if isinstance(wanted, int) else model.max_position


def _size(
    config: EngineConfig,
    model: CausalLM,
    runner_of: Callable[[sizing.CacheSize], ModelRunner],
    dtype: torch.dtype,
    device: torch.device,
) -> sizing.CacheSize:
    limit, block, wanted = model.config.max_position, config.block_size, config.kv_cache_memory_bytes
    if wanted is not None:
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_memory()
        budget = sizing.wanted_cache_bytes(wanted, free)
    elif device.type == "cuda":
        few = sizing.CacheSize(-(-config.max_num_batched_tokens // block), block, limit)
        budget = gpu_budget(runner_of(few), config.gpu_memory_utilization, device)
    else:
        budget = sizing.cpu_cache_bytes(free_memory(), engines_here())
    shape = model.shape
    per_block = sizing.block_bytes(
        model.config.num_layers, block, shape.kv_heads, shape.head_dim, dtype.itemsize
    )
    size = sizing.size_cache(budget, per_block, block, config.max_model_len, limit)
    return size if wanted is not None else sizing.capped(size, config.max_num_seqs)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
