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
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from octavo import __version__
from octavo.api.generation import Generation
from octavo.api.metrics import Metrics
from octavo.api.metrics_sum import Families, families_of
from octavo.api.peers import FIRST, Peers
from octavo.api.threads import in_daemon_thread
from octavo.api.tracing import Tracing
from octavo.config import EngineConfig
from octavo.core.generation_config import not_applied, sampling_defaults
from octavo.core.sampling_params import StructuredOutputs
from octavo.engine.client import EngineClient
from octavo.engine.messages import ASLEEP, Attachment, Ready
from octavo.errors import ModelNotFound, OctavoError, Unavailable
from octavo.fetch import fetch
from octavo.prompt.assets import PromptAssets, load_assets
from octavo.prompt.renderer import PromptRenderer
from octavo.sampling.grammar_compiler import GrammarCompiler

STARTING_RETRY_S = 5  # Retry-After of a server that is starting or draining
_log = logging.getLogger("octavo.api")


class Service:
    """One model served by one engine. ``failure`` is why it ended, once it did."""

    def __init__(
        self,
        config: EngineConfig,
        engine: EngineClient | None = None,
        peers: Peers | None = None,
        *,
        epoch: str | None = None,
        created: int | None = None,
    ) -> None:
        """``epoch`` and ``created`` are those of the first API process, where this is another."""
        self.config = config
        self.engine = engine if engine is not None else EngineClient()
        self.peers = peers if peers is not None else Peers()
        self.first = self.peers.number == FIRST
        self.metrics = Metrics(config.model_names[0], self.engine, first=self.first)
        endpoint = config.otlp_traces_endpoint
        self.tracing = Tracing(endpoint, config.model_names[0]) if endpoint is not None else None
        self.epoch = epoch or str(uuid.uuid4())
        self.created = created or int(time.time())
        self.renderer: PromptRenderer | None = None
        self.assets_bytes = b""
        self.defaults = sampling_defaults({}, max_tokens=None)
        self._grammars = GrammarCompiler()
        self._compiling = asyncio.Lock()  # one at a time, and who waits for it holds no thread
        self.failure: OctavoError | None = None
        # Of requests that are not over, or go on in the background: the state, by an id that is their own.
        self.open: dict[int, dict[str, Any]] = {}
        self.draining = False  # from the first moment of a drain
        self.refusing = False  # after its grace
        self.started = False  # became ready once
        self._deciding = asyncio.Lock()  # one order of an administrator after the other
        self.ordering = asyncio.Lock()  # of what the first process tells the others
        self.peers.answers |= {
            "metrics": self._told_metrics,
            "abort": self.abort,
            "stand": self._stand,
            "rest": self.engine.rest,
            "draining": self._be_draining,
            "drain": self.drain,
            "engine_failed": self._engine_failed,
        }
        self._stage, self._detail = "fetching", config.model
        self._stage_began = time.monotonic()

    # States

    @property
    def state(self) -> str:
        """One of ``EngineState``."""
        if self.failure is not None:
            return "dead"
        state: str = self.engine.state
        if state == "ready" and not self.started:
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

    def model_named(self, name: str | None) -> str:
        """``name``, or the first one here where a request has none. Raises ``ModelNotFound`` for another."""
        if name is None:
            return self.config.model_names[0]
        if name not in self.config.model_names:
            served = ", ".join(self.config.model_names)
            raise ModelNotFound(
                f"the model {name!r:.100} does not exist: {served} is served here", param="model"
            )
        return name

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

    async def metrics_text(self) -> bytes:
        """The metrics of all API processes as those of one."""
        if self.peers.count == 1:
            return self.metrics.text()
        text: str = await self.peers.call(FIRST, "metrics_text")
        return text.encode()

    # What the first API process decides for all

    async def pause(self, *, abort: bool) -> None:
        """Begin no step, take no request; with ``abort`` end those that are there."""
        async with self._deciding:
            self.engine.stand(paused=True)
            await self._tell_standing(abort)
            await self.engine.pause(abort=abort)

    async def resume(self) -> None:
        async with self._deciding:
            await self.engine.resume()
            await self._tell_standing()

    async def sleep(self, level: int, *, wait: bool) -> None:
        """Give back memory; requests are ended, or come to their ends first with ``wait``."""
        async with self._deciding:
            self.engine.stand(sleeping=True)
            await self._tell_standing()
        if wait:
            await asyncio.gather(self.engine.rest(), self.peers.tell_others("rest", within_s=None))
        async with self._deciding:
            if self.engine.standing.sleeping:  # nobody has woken it meanwhile
                await self.engine.sleep(level)
                await self._tell_standing()

    async def wake_up(self, tags: Sequence[str]) -> None:
        async with self._deciding:
            await self.engine.wake_up(tags)
            await self._tell_standing()

    async def _tell_standing(self, abort: bool = False) -> None:
        async with self.ordering:
            await self.peers.tell_others("stand", *self.engine.standing.flags, abort)

    async def abort_everywhere(self, request_ids: list[str] | None) -> list[str]:
        """As ``abort``, in all API processes."""
        here, others = await self.abort(request_ids), await self.peers.tell_others("abort", request_ids)
        return [*here, *(name for told in others.values() for name in told)]

    # What each does then

    async def abort(self, request_ids: list[str] | None) -> list[str]:
        """End the requests here that have these ids (responses in the background their own too), all where
        none are given: the ids of those ended.
        """
        wanted = None if request_ids is None else set(request_ids)
        running: dict[Generation, str] = {}  # who has just gone into the background is there twice
        for state in self.open.values():
            for name in (state["request_id"], state.get("response_id")):
                if "generation" in state and name is not None and (wanted is None or name in wanted):
                    running.setdefault(state["generation"], name)
        return [name for generation, name in running.items() if generation.abort()]

    async def _be_draining(self) -> None:
        self.draining = True

    async def drain(self, grace_s: float, limit_s: float) -> bool:
        """Refuse requests after the grace; False where the limit cut some that were still running."""
        self.draining = True
        refuse = asyncio.get_running_loop().call_later(grace_s, self._refuse)
        try:
            return await self.engine.drain(grace_s, limit_s)
        finally:
            refuse.cancel()
            self._refuse()

    def _refuse(self) -> None:
        self.refusing = True

    async def _stand(self, paused: bool, sleeping: bool, asleep: bool, abort: bool) -> None:
        self.engine.stand(paused=paused, sleeping=sleeping, asleep=asleep)
        if abort:
            self.engine.abort_all()

    async def _engine_failed(self, why: str) -> None:
        self.engine.fail(Unavailable(why))

    async def _told_metrics(self) -> Families:
        return families_of(self.metrics.registry.collect())

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

    async def start(self, beside: Callable[[Path], Awaitable[None]]) -> None:
        """Fetch the model; load the engine and the prompt assets, and await ``beside`` with the model's path,
        all at the same time; wait until requests are taken.

        Raises the ``OctavoError`` that says why that cannot be.
        """
        try:
            path = await in_daemon_thread(lambda: fetch(self.config.model, None, self._fetch_progress))
            self._stage_done("fetching")
            self._stage = "engine"
            await self.engine.start(self.config, model_path=path)
            watch = asyncio.ensure_future(self._log_stages())
            others = asyncio.ensure_future(beside(path))
            ready = asyncio.ensure_future(self._be_ready(path))
            try:
                _, info = await asyncio.gather(others, ready)
            finally:
                for task in (watch, others, ready):
                    task.cancel()
        except OctavoError as error:
            self.failure = error
            raise
        self.started = True
        _log.info(
            "ready: %s takes requests of up to %d tokens", self.config.model_names[0], info.max_model_len
        )
        _log.info("%s", self._summary(info))

    async def join(self, path: Path, place: Attachment) -> None:
        """In an API process beside the first: share its engine, which it starts. Raises as ``start``."""
        self._stage = "engine"
        await self.engine.attach(place)
        await self._be_ready(path)
        self.started = True

    async def _be_ready(self, path: Path) -> Ready:
        await in_daemon_thread(lambda: self._load_prompt(path))
        info = await self.engine.wait_ready()
        self.metrics.engine_ready(info)
        return info

    def _summary(self, info: Ready) -> str:
        """What a person wants to know of a server that has started, a line for each thing."""
        config, block_size = self.config, info.kv["block_size"]
        seconds = time.time() - self.created
        caching = "on" if config.enable_prefix_caching else "off"
        count = config.api_server_count
        keys = config.api_key or config.api_key_file or config.api_key_dir or os.environ.get("OCTAVO_API_KEY")
        return "\n  ".join(
            (
                f"octavo {__version__} started in {seconds:.0f} s",
                f"model     {config.model} as {', '.join(config.model_names)}",
                f"KV cache  {info.num_blocks} blocks of {block_size}: {info.num_blocks * block_size} tokens "
                f"of {info.kv['dtype']}, prefix caching {caching}",
                f"step      up to {config.max_num_seqs} sequences and {config.max_num_batched_tokens} tokens",
                f"queue     {config.max_queue} requests; one more gets 429",
                *([f"API       {count} processes"] if count > 1 else ()),
                f"keys      {'needed' if keys else 'none: whoever reaches the port may use it'}",
            )
        )

    def _load_prompt(self, path: Path) -> None:
        assets: PromptAssets = load_assets(path, self.config)
        self.defaults = sampling_defaults(assets.generation_config, max_tokens=None)
        if self.first and (missing := not_applied(assets.generation_config)):
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
