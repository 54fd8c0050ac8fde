"""From settings and a model on disk to an executor that runs step plans in this process."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from octavo.config import EngineConfig
from octavo.core.kv_layout import KVLayout, blocks_needed, kv_layout
from octavo.core.plan import Row, SampleSpec, StepPlan, StepResult
from octavo.errors import ConfigError
from octavo.layers.batch import ActivationBuffers
from octavo.models.base import CausalLM
from octavo.models.config import ModelConfig, load_model_config
from octavo.prompt.assets import load_assets
from octavo.sampling.grammar import Grammars
from octavo.sampling.rules import RuleBook
from octavo.sampling.sampler import Sampler
from octavo.worker import sizing
from octavo.worker.connector import HostConnector, NullConnector
from octavo.worker.draft_model import DraftModel
from octavo.worker.draws import Drawer
from octavo.worker.forward import Forward
from octavo.worker.gpu import Gpu, MemoryUse, capture_sizes, largest_step, memory_use, out_of_memory_refused
from octavo.worker.host import engines_here, free_memory, give_memory_back, set_threads
from octavo.worker.inputs import StepInputs
from octavo.worker.loading import Place, load_model, pick_place
from octavo.worker.pages import KVPages, page_bytes
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
    """Runs the whole model in this process. ``load`` reads the weights, ``build`` makes a cache beside."""

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


class Loaded:
    """The models in memory, and what their steps need beside the KV cache."""

    def __init__(self, config: EngineConfig, place: Place, model: CausalLM, draft: CausalLM | None) -> None:
        self.config, self.place, self.model, self.draft = config, place, model, draft
        self.layout = kv_layout(model.config.windows)
        tokens = max(config.max_num_batched_tokens, config.max_num_seqs)
        where = place.device.torch_device
        self._activations = ActivationBuffers(model.shape, tokens, place.dtype, where)
        self._draft_activations = None
        if draft is not None:  # what the target drew comes on top
            tokens += config.max_num_seqs
            self._draft_activations = ActivationBuffers(draft.shape, tokens, place.dtype, where)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: a page of each cache tensor."""
        layers = [(self.layout.layers_per_group, self.model.shape)]
        if self.draft is not None:
            layers.append((self.draft.config.num_layers, self.draft.shape))
        place, size = self.place, self.config.block_size
        return sum(count * page_bytes(place.ops, shape, size, place.cache_dtype) for count, shape in layers)

    def blocks_needed(self, num_tokens: int) -> int:
        """Blocks of one request of so many tokens."""
        chunk = self.config.max_num_batched_tokens
        return blocks_needed(self.layout.groups, num_tokens, self.config.block_size, chunk)

    def largest_steps(self, max_length: int) -> list[StepPlan]:
        """As many rows and tokens as a step may have, of requests no longer than ``max_length``; and as many
        rows that decode.
        """
        rows, block, groups = self.config.max_num_seqs, self.config.block_size, len(self.layout.groups)
        most = self._activations.max_tokens
        return [largest_step(rows, tokens, max_length, block, groups) for tokens in (most, rows)]

    def capture_sizes(self) -> list[int]:
        """Rows of the decode steps to capture: on a GPU whose kernels record graphs, unless refused."""
        on_gpu = isinstance(self.place.device, Gpu)
        if not on_gpu or self.place.ops.replays_any_size or self.config.enforce_eager:
            return []
        return capture_sizes(self.config.max_num_seqs)

    def runner(
        self, size: sizing.CacheSize, host_blocks: int = 0, grammars: Grammars | None = None
    ) -> ModelRunner:
        """A runner with a KV cache of this size."""
        config, place = self.config, self.place
        where = place.device.torch_device
        read = place.device.read if isinstance(place.device, Gpu) else None
        sampler = Sampler(place.ops, RuleBook(config.max_num_seqs, grammars), read)

        def pages(model: CausalLM, places: Sequence[tuple[int, int]]) -> KVPages:
            return KVPages.allocate(
                place.ops,
                model.shape,
                places,
                size.num_blocks,
                size.block_size,
                place.cache_dtype,
                where,
            )

        def forward(model: CausalLM, activations: ActivationBuffers, groups: int, own: KVPages) -> Forward:
            rows, length = config.max_num_seqs, size.max_model_len
            inputs = StepInputs(
                activations, rows, length, size.block_size, groups, size.num_blocks, place.device
            )
            return Forward(model, place.ops, inputs, own, config.enforce_eager)

        draft = None
        if self.draft is not None and self._draft_activations is not None:
            own = pages(self.draft, [(0, layer) for layer in range(self.draft.config.num_layers)])
            drafting = forward(self.draft, self._draft_activations, 1, own)
            draft = DraftModel(drafting, Drawer(self.draft, sampler, place.device), own, size.block_size)
        own = pages(self.model, self.layout.layers)
        tensors = own.tensors + (draft.pages.tensors if draft is not None else [])
        return ModelRunner(
            self.model,
            place.ops,
            Drawer(self.model, sampler, place.device),
            forward(self.model, self._activations, len(self.layout.groups), own),
            own,
            HostConnector(tensors, host_blocks) if host_blocks else NullConnector(),
            place.device,
            draft,
        )


def build_executor(config: EngineConfig, path: Path, progress: Progress) -> LocalExecutor:
    """Load the model at ``path`` (a folder or a GGUF file), size its cache, and run it once.

    ``progress`` is told each stage as it begins. Raises ``ConfigError`` and ``ModelLoadError``.
    """
    model_config = load_model_config(path)
    sizing.check_max_model_len(config.max_model_len, model_config.max_position)
    place = pick_place(config.device, config.dtype, model_config.dtype, config.kv_cache_dtype)
    set_threads(place.ops)

    kernels = f"{place.ops.name} kernels ({place.ops.isa})"
    progress("loading weights", f"{model_config.architecture}, {place.dtype_name}, {kernels}")
    if isinstance(place.device, Gpu) and config.kv_cache_memory_bytes is None:
        gpu = place.device
        sizing.check_gpu_share(gpu.total(), config.gpu_memory_utilization, gpu.free_at_start)
    began = time.monotonic()
    loaded = _load(config, model_config, path, place)
    log.info("Weights loaded in %.1f s", time.monotonic() - began)

    progress("sizing the cache", "")
    size = _size(loaded)
    host_blocks = _host_blocks(loaded, size)
    sizing.log_size(place.device.torch_device.type, size)
    grammars = Grammars(lambda: load_assets(path).tokenizer_json, model_config.eos_token_ids)

    def build(loaded: Loaded) -> ModelRunner:
        with out_of_memory_refused("making the KV cache and capturing graphs"):
            runner = loaded.runner(size, host_blocks, grammars)
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
        host_blocks,
        model_config.eos_token_ids,
        {"dtype": place.cache_dtype_name, "groups": group_descriptions(loaded.layout)},
    )
    return LocalExecutor(lambda: _load(config, model_config, path, place), build, loaded, info, grammars)


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


def _load(config: EngineConfig, model_config: ModelConfig, path: Path, place: Place) -> Loaded:
    wanted, limit = config.max_model_len, model_config.max_position
    positions = wanted if isinstance(wanted, int) else limit
    speculation = config.speculative_config
    with out_of_memory_refused("loading the weights"):
        model = load_model(model_config, path, place, positions)
        if speculation is None or speculation.model is None:
            return Loaded(config, place, model, None)
        draft_config = load_model_config(Path(speculation.model))
        check_draft(draft_config, model_config)
        draft = load_model(draft_config, Path(speculation.model), place, positions)
        return Loaded(config, place, model, draft)


def check_draft(draft: ModelConfig, target: ModelConfig) -> None:
    """Refuse (``ConfigError``) a draft model that cannot speak for the target or share its blocks."""
    if draft.vocab_size != target.vocab_size:
        raise ConfigError(
            f"the draft model's vocabulary has {draft.vocab_size} tokens, the model's {target.vocab_size}: "
            "give speculative-config a smaller model of the same family"
        )
    if None not in target.windows:
        raise ConfigError("all layers of the model slide: no blocks of it keep every token for a draft model")


def _size(loaded: Loaded) -> sizing.CacheSize:
    config, device, limit = loaded.config, loaded.place.device, loaded.model.config.max_position
    wanted, block = config.kv_cache_memory_bytes, config.block_size
    if wanted is not None:
        free = device.free() if isinstance(device, Gpu) else free_memory()
        budget = sizing.wanted_cache_bytes(wanted, free)
    elif isinstance(device, Gpu):
        use = _memory_use(loaded, device)
        budget = sizing.gpu_cache_bytes(
            device.total(), config.gpu_memory_utilization, use.weights, use.activations, use.graphs
        )
    else:
        budget = sizing.cpu_cache_bytes(free_memory(), engines_here())
    size = sizing.size_cache(
        budget, loaded.block_bytes, block, config.max_model_len, limit, loaded.blocks_needed
    )
    return size if wanted is not None else sizing.capped(size, config.max_num_seqs)


def _memory_use(loaded: Loaded, gpu: Gpu) -> MemoryUse:
    """On a cache that is as small as the largest step allows."""
    wanted, limit = loaded.config.max_model_len, loaded.model.config.max_position
    length = wanted if isinstance(wanted, int) else limit
    plans, block = loaded.largest_steps(length), loaded.config.block_size
    few = 1 + max(max(row.block_tables[0]) for plan in plans for row in plan.rows)
    with out_of_memory_refused("running the largest step"):
        runner = loaded.runner(sizing.CacheSize(few, block, length, few))
        cache = (few + 1) * loaded.block_bytes  # with the page of zeros
        return memory_use(gpu, runner, cache, plans, loaded.capture_sizes())


def _host_blocks(loaded: Loaded, size: sizing.CacheSize) -> int:
    """Blocks of the host tier."""
    config, on_gpu = loaded.config, isinstance(loaded.place.device, Gpu)
    cache = size.num_blocks * loaded.block_bytes
    free = free_memory() // engines_here() - (0 if on_gpu else cache)
    wanted = sizing.host_bytes(config.swap_space, config.kv_offloading_gib, cache, on_gpu, free)
    return wanted // loaded.block_bytes
