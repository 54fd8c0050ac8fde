"""What the routes share: the settings, the engine, the renderer once it is loaded, and the start that
brings them up.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from octavo import __version__
from octavo.api.metrics import Metrics
from octavo.api.threads import in_daemon_thread
from octavo.api.tracing import Tracing
from octavo.config import EngineConfig
from octavo.core.generation_config import not_applied, sampling_defaults
from octavo.core.sampling_params import StructuredOutputs
from octavo.engine.client import EngineClient
from octavo.engine.messages import ASLEEP, Ready
from octavo.errors import ModelNotFound, OctavoError, Unavailable
from octavo.fetch import fetch
from octavo.prompt.assets import PromptAssets, load_assets
from octavo.prompt.renderer import PromptRenderer
from octavo.sampling.grammar_compiler import GrammarCompiler

STARTING_RETRY_S = 5  # Retry-After of a server that is starting or draining
_log = logging.getLogger("octavo.api")


class Service:
    """One model served by one engine. ``failure`` is why it ended, once it did."""

    def __init__(self, config: EngineConfig, engine: EngineClient | None = None) -> None:
        self.config = config
        self.engine = engine if engine is not None else EngineClient()
        self.metrics = Metrics(config.model_names[0], self.engine)
        endpoint = config.otlp_traces_endpoint
        self.tracing = Tracing(endpoint, config.model_names[0]) if endpoint is not None else None
        self.epoch = str(uuid.uuid4())
        self.created = int(time.time())
        self.renderer: PromptRenderer | None = None
        self.assets_bytes = b""
        self.defaults = sampling_defaults({}, max_tokens=None)
        self._grammars = GrammarCompiler()
        self._compiling = asyncio.Lock()  # one at a time, and who waits for it holds no thread
        self.failure: OctavoError | None = None
        self.open: dict[
            int, dict[str, Any]
        ] = {}  # state of requests that are not over, or go on in the background
        self.draining = False  # from the first moment of a drain
        self.refusing = False  # after its grace
        self.started = False  # became ready once
        self._stage, self._detail = "fetching", config.model
        self._stage_began = time.monotonic()

    # States

    @property
    def state(self) -> str:
        """One of ``EngineState``."""
        if self.failure is not None:
            return "dead"
        state: str = self.engine.state
        if state == "ready" and self.renderer is None:
            return "warming"
        return "draining" if self.draining and state == "ready" else state

    @property
    def stage(self) -> tuple[str, str]:
        """What a starting server does: fetching, then what the engine says; and its detail."""
        return (
            (self._stage, self._detail)
            if self._stage == "fetching"
            else (self.engine.stage, self.engine.detail)
        )

    def describe(self) -> dict[str, Any]:
        """The body of the probes. ``stages``: the engine's, each with its detail; some last milliseconds."""
        stage, detail = self.stage
        error = self.failure.message if self.failure is not None else self.engine.error
        stages = self.engine.stages
        return {"state": self.state, "stage": stage, "detail": detail, "stages": stages, "error": error}

    def load(self) -> dict[str, Any]:
        """The load block of ``/server_info``, also the header ``X-Octavo-Load``."""
        stats = self.engine.stats
        return {
            "running": stats.running,
            "waiting": stats.waiting,
            "waiting_tokens": stats.waiting_tokens,
            "kv_usage": round(stats.kv_usage, 4),
            "prefill_tokens_per_s": round(stats.prefill_tokens_per_s, 1),
        }

    def require_ready(self) -> tuple[PromptRenderer, Ready]:
        """Renderer and engine. Raises ``Unavailable`` while either is not there, and once the drain
        refuses.
        """
        if self.refusing:
            raise _unavailable("the server is draining: it takes no more requests")
        if self.failure is not None:
            raise _unavailable(f"the engine is dead: {self.failure.message}")
        if self.engine.state == "paused":
            raise _unavailable("the engine is paused: it takes no requests until it is resumed")
        if self.engine.state == "sleeping":
            raise _unavailable(ASLEEP)
        if self.renderer is None or self.engine.info is None:
            raise _unavailable(f"the server is starting: {self.stage[0]}")
        return self.renderer, self.engine.info

    def check_model(self, name: str) -> None:
        """Raises ``ModelNotFound`` unless this model is served here."""
        if name not in self.config.model_names:
            served = ", ".join(self.config.model_names)
            raise ModelNotFound(
                f"the model {name!r:.100} does not exist: {served} is served here", param="model"
            )

    async def grammar(self, forms: StructuredOutputs, where: str) -> str:
        """The grammar of a form that ``where`` asks for. Raises ``InvalidRequest`` naming what is wrong."""
        return await self._compiled(lambda left: self._grammars.compile(forms, where, left))

    async def lark(self, lark: str, where: str) -> str:
        """As ``grammar``, of our own text that comes of what ``where`` holds."""
        return await self._compiled(lambda left: self._grammars.compile_lark(lark, where, left))

    async def _compiled(self, compile: Callable[[threading.Event], str]) -> str:
        left = threading.Event()
        async with self._compiling:
            try:
                return await in_daemon_thread(lambda: compile(left))
            except asyncio.CancelledError:  # nobody waits for it any more, but others for their turn
                self._grammars.give_up(left)
                raise

    async def close(self) -> None:
        if self.tracing is not None:
            await in_daemon_thread(self.tracing.close)
        self._grammars.close()
        await self.engine.close()

    def server_info(self) -> dict[str, Any]:
        """What the engine is, for the router and the operator."""
        info, renderer, names = self.engine.info, self.renderer, self.config.model_names
        assets = renderer.assets if renderer is not None else None
        return {
            "version": __version__,
            "state": self.state,
            "epoch": self.epoch,
            "ranks": 1,
            "model": {
                "name": names[0],
                "aliases": list(names[1:]),
                "adapters": [],
                "max_model_len": info.max_model_len if info else None,
                "vocab_size": info.vocab_size if info else None,
            },
            "prompt": {
                "tokenizer_digest": assets.tokenizer_digest if assets else None,
                "template_digest": assets.template_digest if assets else None,
            },
            "kv": info.kv if info else None,
            "limits": {
                "max_num_seqs": self.config.max_num_seqs,
                "max_num_batched_tokens": self.config.max_num_batched_tokens,
                "max_queue": self.config.max_queue,
                "max_queue_tokens": self.config.max_queue_tokens,
            },
            "load": self.load(),
        }

    # Start

    async def start(self) -> None:
        """Fetch the model, load the prompt assets and the engine beside each other, wait until requests are
        taken.

        Raises the ``OctavoError`` that says why that cannot be.
        """
        try:
            path = await in_daemon_thread(lambda: fetch(self.config.model, None, self._fetch_progress))
            self._stage_done("fetching")
            self._stage = "engine"
            await self.engine.start(self.config, model_path=path)
            watch = asyncio.ensure_future(self._log_stages())
            try:
                await in_daemon_thread(lambda: self._load_prompt(path))
                info = await self.engine.wait_ready()
            finally:
                watch.cancel()
        except OctavoError as error:
            self.failure = error
            raise
        self.metrics.engine_ready(info)
        self.started = True
        _log.info(
            "ready: %s takes requests of up to %d tokens", self.config.model_names[0], info.max_model_len
        )
        _log.info("%s", self._summary(info))

    def _summary(self, info: Ready) -> str:
        """What a person wants to know of a server that has started, a line for each thing."""
        config, block_size = self.config, info.kv["block_size"]
        seconds = time.time() - self.created
        caching = "on" if config.enable_prefix_caching else "off"
        keys = config.api_key or config.api_key_file or config.api_key_dir or os.environ.get("OCTAVO_API_KEY")
        return "\n  ".join(
            (
                f"octavo {__version__} started in {seconds:.0f} s",
                f"model     {config.model} as {', '.join(config.model_names)}",
                f"KV cache  {info.num_blocks} blocks of {block_size}: {info.num_blocks * block_size} tokens, "
                f"prefix caching {caching}",
                f"step      up to {config.max_num_seqs} sequences and {config.max_num_batched_tokens} tokens",
                f"queue     {config.max_queue} requests; one more gets 429",
                f"keys      {'needed' if keys else 'none: whoever reaches the port may use it'}",
            )
        )

    def _load_prompt(self, path: Path) -> None:
        assets: PromptAssets = load_assets(path, self.config)
        self.defaults = sampling_defaults(assets.generation_config, max_tokens=None)
        if missing := not_applied(assets.generation_config):
            _log.warning("the model's generation_config.json asks for %s: not applied", ", ".join(missing))
        self.assets_bytes = assets.to_bytes()
        self.renderer = PromptRenderer(assets)

    def _fetch_progress(self, line: str) -> None:
        self._detail = line
        _log.info("fetching: %s", line)

    async def _log_stages(self) -> None:
        """One line of log for each stage of the engine's start."""
        while self.engine.error is None:
            stage, detail = self.engine.stage, self.engine.detail
            if stage not in (self._stage, "ready"):
                self._stage_done(self._stage)
                self._stage = stage
                _log.info("%s%s", stage, f": {detail}" if detail else "")
            await self.engine.changed()

    def _stage_done(self, stage: str) -> None:
        now = time.monotonic()
        self.metrics.stage_seconds.labels(stage).set(now - self._stage_began)
        self._stage_began = now

    async def engine_died(self) -> OctavoError:
        """Wait for the end of a started engine that nobody asked for; ``failure`` says why."""
        while self.engine.error is None:
            await self.engine.changed()
        if self.failure is None:
            self.failure = Unavailable(self.engine.error)
        return self.failure


def _unavailable(message: str) -> Unavailable:
    return Unavailable(message, retry_after_s=STARTING_RETRY_S)
