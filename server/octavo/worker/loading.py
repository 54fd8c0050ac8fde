"""A model from disk into memory: where it runs, in which numbers, with which kernels."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import torch

import octavo_kernels
from octavo.errors import ConfigError
from octavo.layers.weights import PlainFormat, QuantisedFormat, WeightFormat, Weights
from octavo.models.base import CausalLM
from octavo.models.checkpoint import open_checkpoint
from octavo.models.config import ModelConfig
from octavo.models.registry import model_class
from octavo.worker.device import Device
from octavo.worker.gpu import BFLOAT16_CAPABILITY, Gpu, find_gpu
from octavo_kernels import Ops
from octavo_kernels.communicator import Communicator
from octavo_kernels.ops import FP8

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Place:
    """Where models run and how they compute."""

    device: Device
    dtype: torch.dtype
    cache_dtype: torch.dtype
    ops: Ops
    format: WeightFormat = dataclasses.field(default_factory=PlainFormat)
    communicator: Communicator | None = None
    """Of the ranks that share a model; None: there is one."""

    @property
    def rank(self) -> int:
        return 0 if self.communicator is None else self.communicator.rank

    @property
    def world(self) -> int:
        return 1 if self.communicator is None else self.communicator.world

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def cache_dtype_name(self) -> str:
        return "fp8" if self.cache_dtype == FP8 else str(self.cache_dtype).removeprefix("torch.")


def pick_place(
    device: str, dtype: str, stored: str, cache_dtype: str = "auto", rank: int = 0, world: int = 1
) -> Place:
    """From the ``device``, ``dtype`` and ``kv_cache_dtype`` settings and the checkpoint's own dtype, for one
    rank of ``world``.

    Raises ``ConfigError``.

    Quantised weights stay so under "auto" with the C++ kernels; any other dtype dequantises them.
    """
    where = pick_device(device, rank, world)
    numbers = pick_dtype(dtype, stored, where)
    try:
        ops = octavo_kernels.load("auto", where.torch_device, numbers)
    except (octavo_kernels.KernelsUnavailable, ValueError) as error:
        raise ConfigError(str(error)) from error
    keeps = dtype == "auto" and numbers is torch.bfloat16 and ops.name == "cpu"
    form = QuantisedFormat() if keeps else PlainFormat()
    return Place(where, numbers, pick_cache_dtype(cache_dtype, numbers), ops, form)


def pick_device(wanted: str, rank: int = 0, world: int = 1) -> Device:
    """The device of the ``device`` setting; "auto" is a GPU where one can be used. Each rank has its own."""
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return Device()
    return find_gpu(rank, world)


def pick_dtype(wanted: str, stored: str, device: Device) -> torch.dtype:
    """The torch dtype of the ``dtype`` setting; "auto" is the checkpoint's own.

    On a CPU a float16 checkpoint runs in bfloat16 under "auto", since the fast kernels have no float16, and
    on a GPU that has no bfloat16 one in bfloat16 runs in float16. Raises ``ConfigError`` where bfloat16 was
    asked for on such a GPU.
    """
    asked = wanted
    if wanted == "auto":
        wanted = stored if stored in ("float32", "float16", "bfloat16") else "bfloat16"
        if wanted == "float16" and not isinstance(device, Gpu):
            log.info("The checkpoint is float16; running it in bfloat16, which CPUs compute faster")
            wanted = "bfloat16"
    if wanted == "bfloat16" and isinstance(device, Gpu) and not device.computes_bfloat16:
        needed = ".".join(map(str, BFLOAT16_CAPABILITY))
        if asked != "auto":
            raise ConfigError(
                f"dtype is 'bfloat16', but {device.description} does not compute in it, as GPUs do from "
                f"compute capability {needed} on: choose --dtype float16 or auto"
            )
        log.info("%s has no bfloat16; running the model in float16", device.description)
        wanted = "float16"
    dtype: torch.dtype = getattr(torch, wanted)
    return dtype


def pick_cache_dtype(wanted: str, computed: torch.dtype) -> torch.dtype:
    """The torch dtype of the ``kv_cache_dtype`` setting, of a model that computes in ``computed``."""
    if wanted in ("fp8", "fp8_e4m3"):
        return FP8
    dtype: torch.dtype = computed if wanted == "auto" else getattr(torch, wanted)
    if dtype not in (computed, torch.int8):
        name = str(computed).removeprefix("torch.")
        raise ConfigError(
            f"kv-cache-dtype is {wanted!r}, but the model computes keys and values in {name}: "
            f"choose auto, {name}, fp8 or int8, or --dtype {wanted}"
        )
    return dtype


def check_shares(config: ModelConfig, world: int) -> None:
    """Refuse (``ConfigError``) a number of ranks that the model's heads and widths cannot be shared among."""

    def fits(ranks: int) -> bool:
        heads, kv_heads = config.num_heads, config.num_kv_heads
        if heads % ranks or config.intermediate_size % ranks:
            return False
        return kv_heads % ranks == 0 or ranks % kv_heads == 0

    if not fits(world):
        known = ", ".join(str(ranks) for ranks in range(1, config.num_heads + 1) if fits(ranks))
        raise ConfigError(
            f"tensor-parallel-size is {world}, but {config.num_heads} attention heads, {config.num_kv_heads} "
            f"heads of keys and values and an MLP {config.intermediate_size} wide cannot be shared out among "
            f"so many: choose one of {known}"
        )


def load_model(config: ModelConfig, path: Path, place: Place, max_positions: int) -> CausalLM:
    """Build the model and read every parameter; its rotary tables reach ``max_positions``."""
    build = model_class(config.architecture)
    with open_checkpoint(path, config) as checkpoint, torch.inference_mode():
        weights = Weights(
            checkpoint,
            place.dtype,
            place.device.torch_device,
            format=place.format,
            cache_dtype=place.cache_dtype,
            communicator=place.communicator,
        )
        return build(config, weights, place.ops, max_positions)
