"""Models in memory, the cache beside them, and the runners made of both."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from octavo.config import EngineConfig
from octavo.core.kv_layout import blocks_needed, kv_layout
from octavo.core.plan import StepPlan
from octavo.errors import ConfigError
from octavo.layers.batch import ActivationBuffers
from octavo.models.base import CausalLM
from octavo.models.config import ModelConfig, load_model_config
from octavo.sampling.grammar import Grammars
from octavo.sampling.rules import RuleBook
from octavo.sampling.sampler import Sampler
from octavo.worker import sizing
from octavo.worker.connector import HostConnector, NullConnector
from octavo.worker.draft_model import DraftModel
from octavo.worker.draws import Drawer
from octavo.worker.forward import Forward
from octavo.worker.gpu import Gpu, MemoryUse, capture_sizes, largest_step, memory_use, out_of_memory_refused
from octavo.worker.host import engines_here, free_memory
from octavo.worker.inputs import StepInputs
from octavo.worker.loading import Place, load_model
from octavo.worker.pages import KVPages, page_bytes
from octavo.worker.runner import ModelRunner


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
        sampler = None
        if place.rank == 0:
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


def load(config: EngineConfig, model_config: ModelConfig, path: Path, place: Place) -> Loaded:
    """Read the weights: this rank's share of them. A draft model is whole, on the first rank.

    Raises ``ConfigError`` and ``ModelLoadError``.
    """
    wanted, limit = config.max_model_len, model_config.max_position
    positions = wanted if isinstance(wanted, int) else limit
    speculation = config.speculative_config
    with out_of_memory_refused("loading the weights"):
        model = load_model(model_config, path, place, positions)
        if speculation is None or speculation.model is None or place.rank > 0:
            return Loaded(config, place, model, None)
        draft_config = load_model_config(Path(speculation.model))
        check_draft(draft_config, model_config)
        alone = dataclasses.replace(place, communicator=None)
        draft = load_model(draft_config, Path(speculation.model), alone, positions)
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


def cache_bytes(loaded: Loaded) -> int:
    """What this rank's KV cache may take. Raises ``ConfigError``."""
    config, device, world = loaded.config, loaded.place.device, loaded.place.world
    if (wanted := config.kv_cache_memory_bytes) is not None:
        free = device.free() if isinstance(device, Gpu) else free_memory() // world
        return sizing.wanted_cache_bytes(wanted, free)
    if not isinstance(device, Gpu):
        return sizing.cpu_cache_bytes(free_memory(), engines_here() * world)
    use = _memory_use(loaded, device)
    share = config.gpu_memory_utilization
    return sizing.gpu_cache_bytes(device.total(), share, use.weights, use.activations, use.graphs)


def cache_size(loaded: Loaded, num_bytes: int) -> sizing.CacheSize:
    """The cache that so many bytes hold. Raises ``ConfigError``."""
    config, limit = loaded.config, loaded.model.config.max_position
    size = sizing.size_cache(
        num_bytes, loaded.block_bytes, config.block_size, config.max_model_len, limit, loaded.blocks_needed
    )
    if config.kv_cache_memory_bytes is not None:
        return size
    return sizing.capped(size, config.max_num_seqs)


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


def host_blocks(loaded: Loaded, size: sizing.CacheSize) -> int:
    """Blocks of this rank's host tier. Raises ``ConfigError``."""
    config, on_gpu = loaded.config, isinstance(loaded.place.device, Gpu)
    cache = size.num_blocks * loaded.block_bytes
    free = free_memory() // (engines_here() * loaded.place.world) - (0 if on_gpu else cache)
    wanted = sizing.host_bytes(config.swap_space, config.kv_offloading_gib, cache, on_gpu, free)
    return wanted // loaded.block_bytes
