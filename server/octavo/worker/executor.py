"""From settings and a model on disk to an executor that runs step plans in this process."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from octavo.config import EngineConfig
from octavo.core.kv_layout import KVLayout
from octavo.core.plan import Row, SampleSpec, StepPlan, StepResult
from octavo.engine.executor import Executor
from octavo.models.config import load_model_config
from octavo.prompt.assets import load_assets
from octavo.sampling.grammar import Grammars
from octavo.worker import sizing
from octavo.worker.gpu import Gpu, out_of_memory_refused
from octavo.worker.host import give_memory_back, set_threads
from octavo.worker.loaded import Loaded, cache_bytes, cache_size, host_blocks, load
from octavo.worker.loading import check_shares, pick_place
from octavo.worker.ranks import Alone, OtherRanks, Ranks, TensorParallelExecutor
from octavo.worker.runner import ModelRunner

log = logging.getLogger(__name__)

WARM_UP_TOKENS = 64  # enough to wake the threads, page in the weights and settle the kernels' choices

Progress = Callable[[str, str], None]


@dataclasses.dataclass(frozen=True)
class ExecutorInfo:
    """What the loaded model allows."""

    max_model_len: int
    vocab_size: int
    num_blocks: int
    block_bytes: int
    num_host_blocks: int
    eos_token_ids: tuple[int, ...]
    kv: dict[str, Any]


class LocalExecutor:
    """Runs the model, or a rank's share of it, in this process. ``load`` reads the weights, ``build`` makes a
    cache beside.
    """

    def __init__(
        self,
        load: Callable[[], Loaded],
        build: Callable[[Loaded], ModelRunner],
        loaded: Loaded,
        info: ExecutorInfo,
        grammars: Grammars,
    ) -> None:
        self.info = info
        self._load, self._build, self._grammars = load, build, grammars
        self._loaded: Loaded | None = loaded
        self._runner: ModelRunner | None = build(loaded)

    @property
    def runner(self) -> ModelRunner:
        if self._runner is None:
            raise RuntimeError("the executor sleeps: it has no KV cache")
        return self._runner

    def prepare(self, grammar: str) -> Future[Any]:
        return self._grammars.prepare(grammar)

    def execute(self, plan: StepPlan) -> StepResult:
        return self.runner.run(plan)

    def check(self) -> None:
        """Nothing can be missing: all is in this process."""

    def sleep(self, level: int) -> None:
        self._runner = None
        if level > 1 or (self._loaded is not None and isinstance(self._loaded.place.device, Gpu)):
            self._loaded = None  # of a GPU too: the file in the page cache is what host memory keeps of them
        give_memory_back()

    def load_weights(self) -> None:
        if self._loaded is None:
            self._loaded = self._load()

    def make_cache(self) -> None:
        assert self._loaded is not None
        self._runner = self._build(self._loaded)
        give_memory_back()  # of what loading has left


def build_executor(config: EngineConfig, path: Path, progress: Progress) -> Executor:
    """Load the model at ``path`` (a folder or a GGUF file), size its cache, and run it once.

    With ``tensor_parallel_size`` other processes do the same with their shares. ``progress`` is told each
    stage as it begins. Raises ``ConfigError`` and ``ModelLoadError``.
    """
    if config.tensor_parallel_size == 1:
        return build_rank(config, path, progress, Alone())
    ranks = OtherRanks(config, path)
    try:
        with ranks.faults():
            own = build_rank(config, path, progress, ranks)
    except BaseException:
        ranks.close()
        raise
    return TensorParallelExecutor(own, ranks)


def build_rank(config: EngineConfig, path: Path, progress: Progress, ranks: Ranks) -> LocalExecutor:
    """One rank's part in :func:`build_executor`. All ranks call this at the same time."""
    model_config = load_model_config(path)
    sizing.check_max_model_len(config.max_model_len, model_config.max_position)
    check_shares(model_config, ranks.world)
    place = pick_place(
        config.device, config.dtype, model_config.dtype, config.kv_cache_dtype, ranks.rank, ranks.world
    )
    set_threads(place.ops, ranks.world)
    place = dataclasses.replace(place, communicator=ranks.join(place, model_config))

    kernels = f"{place.ops.name} kernels ({place.ops.isa})"
    progress("loading weights", f"{model_config.architecture}, {place.dtype_name}, {kernels}")
    if isinstance(place.device, Gpu) and config.kv_cache_memory_bytes is None:
        gpu = place.device
        sizing.check_gpu_share(gpu.total(), config.gpu_memory_utilization, gpu.free_at_start)
    began = time.monotonic()
    loaded = load(config, model_config, path, place)
    ranks.least(0)  # all have loaded: what is free now stays so
    log.info("Weights loaded in %.1f s", time.monotonic() - began)

    progress("sizing the cache", "")
    size = _agreed_size(loaded, ranks)
    hosted = ranks.least(host_blocks(loaded, size))
    sizing.log_size(place.device.torch_device.type, size)
    grammars = Grammars(lambda: load_assets(path).tokenizer_json, model_config.eos_token_ids)

    def build(loaded: Loaded) -> ModelRunner:
        with out_of_memory_refused("making the KV cache and capturing graphs"):
            runner = loaded.runner(size, hosted, grammars)
            if sizes := loaded.capture_sizes():
                began = time.monotonic()
                runner.capture(sizes)
                log.info("Decode steps of %d sizes captured in %.1f s", len(sizes), time.monotonic() - began)
            tokens = min(WARM_UP_TOKENS, config.max_num_batched_tokens)
            warm_up(runner, size, tokens, len(loaded.layout.groups))
        return runner

    progress("warming", f"{size.tokens} tokens of KV cache, up to {size.max_model_len} a request")
    info = ExecutorInfo(
        size.max_model_len,
        model_config.vocab_size,
        size.num_blocks,
        loaded.block_bytes,
        hosted,
        model_config.eos_token_ids,
        {"dtype": place.cache_dtype_name, "groups": group_descriptions(loaded.layout)},
    )
    return LocalExecutor(lambda: load(config, model_config, path, place), build, loaded, info, grammars)


def _agreed_size(loaded: Loaded, ranks: Ranks) -> sizing.CacheSize:
    """The cache that fits in every rank's memory."""
    budget, block = cache_bytes(loaded), loaded.block_bytes
    fewest = ranks.least(budget // block)
    return cache_size(loaded, min(budget, (fewest + 1) * block - 1))


def group_descriptions(layout: KVLayout) -> list[dict[str, Any]]:
    """The ``groups`` of ``info.kv``: each group's kind, its window if it has one, and its layers."""
    return [
        {
            "kind": spec.kind,
            **({} if spec.window is None else {"window": spec.window}),
            "layers": [layer for layer, (group, _) in enumerate(layout.layers) if group == index],
        }
        for index, spec in enumerate(layout.groups)
    ]


def warm_up(runner: ModelRunner, size: sizing.CacheSize, tokens: int, num_groups: int) -> None:
    """A prefill of so many tokens if they fit and a decode step, over blocks that nobody owns yet.

    A draft model also computes the token that the decode step draws.
    """
    length = max(0, min(tokens, size.max_model_len - 2, size.num_blocks * size.block_size - 1))
    tables = [list(range(length // size.block_size + 1))] * num_groups
    for start, count in ((0, length), (length, 1)):
        if count > 0:
            draw = SampleSpec(0.0, 0, 1.0, 0, 0, start + count)
            runner.run(StepPlan(0, [Row("warm-up", [0] * count, start, tables, [draw], propose=1)]))
