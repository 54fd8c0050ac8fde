"""One engine as the router sees it: what it published last, what we have in flight there, whether it takes
work.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

import msgspec

from octavo_router.cost import Candidate
from octavo_router.membership import Endpoint

# How far a finished request moves the mean duration of its engine.
_DURATION_WEIGHT = 0.1
# A load report may not have seen what was sent this many seconds before it was asked for.
_REPORT_LAG_S = 0.25
# Polls missed in a row until a silent engine counts as dead; one missed makes it the last choice.
MISSES_UNTIL_DEAD = 3
# How long an answer that has begun is kept open at an engine that is dead by all signs: it may only have been
# slow.
DEAD_ANSWER_S = 30.0


class Load(msgspec.Struct, frozen=True):
    """The load block of ``/server_info`` and of the ``X-Octavo-Load`` header."""

    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    kv_usage: float = 0.0
    prefill_tokens_per_s: float = 0.0


class ModelInfo(msgspec.Struct, frozen=True):
    name: str
    aliases: list[str] = []
    max_model_len: int | None = None


class PromptInfo(msgspec.Struct, frozen=True):
    tokenizer_digest: str | None = None
    template_digest: str | None = None


class KVInfo(msgspec.Struct, frozen=True):
    hash: str | None = None
    root: str | None = None
    block_size: int | None = None
    num_blocks: int | None = None


class Limits(msgspec.Struct, frozen=True):
    max_num_seqs: int | None = None


class ServerInfo(msgspec.Struct, frozen=True):
    """What the router reads of ``/server_info``; null or missing (an engine that loads) means "not known"."""

    state: str
    epoch: str
    model: ModelInfo
    prompt: PromptInfo | None = None
    kv: KVInfo | None = None
    limits: Limits | None = None
    load: Load | None = None


class Scheme(msgspec.Struct, frozen=True):
    """What must be equal for two engines to name the same prefix by the same hashes."""

    hash: str
    root: str
    block_size: int
    tokenizer_digest: str
    template_digest: str


def decode_load(header: str) -> Load | None:
    """The load in an ``X-Octavo-Load`` header, or None when it cannot be read."""
    try:
        return msgspec.json.decode(header, type=Load)
    except msgspec.DecodeError:
        return None


class Flight:
    """One request sent to an engine, from the pick until its answer has ended, whichever way."""

    __slots__ = (
        "blocks",
        "counted",
        "cut",
        "engine",
        "prompt_tokens",
        "racing",
        "sent_at",
        "started",
        "streaming",
        "tokens",
    )

    def __init__(
        self,
        engine: Engine,
        prompt_tokens: int,
        cached: int,
        blocks: int,
        *,
        generates: bool,
        streaming: bool,
    ) -> None:
        self.engine = engine
        self.prompt_tokens = prompt_tokens  # the engine's own count of its queue knows of no cache yet
        self.tokens = max(0, prompt_tokens - cached)  # to be prefilled, as estimated at the pick
        self.blocks = blocks
        self.counted = generates
        self.streaming = streaming
        self.sent_at = time.monotonic()
        self.started = not generates
        self.cut: Callable[[], None] | None = None  # ends an answer that is being relayed
        # Others were still in prefill when this was sent: what it finds in the cache says little about the
        # index.
        self.racing = engine.unstarted_tokens > 0
        engine.flights[self] = None
        if generates:
            engine.unstarted_tokens += self.tokens
            engine.unstarted_prompt_tokens += prompt_tokens
            engine.unstarted_blocks += blocks

    def start(self) -> None:
        """Its first token is out, or must be: its prefill no longer waits there."""
        if not self.started:
            self.started = True
            self.engine.unstarted_tokens -= self.tokens
            self.engine.unstarted_prompt_tokens -= self.prompt_tokens
            self.engine.unstarted_blocks -= self.blocks

    def end(self, *, finished: bool = False) -> None:
        """It is over; ``finished`` when it ran to its end and its duration says something."""
        if self.engine.flights.pop(self, self) is self:
            return  # ended before
        self.start()
        if finished and self.counted:
            took = time.monotonic() - self.sent_at
            mean = self.engine.mean_s
            self.engine.mean_s = took if mean == 0 else mean + _DURATION_WEIGHT * (took - mean)


class Engine:
    """State of one endpoint. Not a task: the fleet polls it and calls ``polled`` or ``missed``."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.info: ServerInfo | None = None
        self.state = "unknown"
        self.alive = False
        self.misses = 0
        self.error = "not polled yet"
        self.flights: dict[Flight, None] = {}
        self.unstarted_tokens = 0
        self.unstarted_prompt_tokens = 0
        self.unstarted_blocks = 0
        self.mean_s = 0.0
        self.load = Load()
        self.wake = asyncio.Event()  # poll now
        self._own_at_report = 0
        self._own_tokens_at_report = 0
        self._changed_at = 0.0
        self._died_at = 0.0
        self._lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def name(self) -> str:
        return self.endpoint.name

    @property
    def inflight(self) -> int:
        return len(self.flights)

    @property
    def takes_work(self) -> bool:
        """Ready by its own word, reachable, and not on its way out."""
        return self.alive and self.state == "ready" and not self.endpoint.terminating

    @property
    def suspect(self) -> bool:
        """It answered once and missed the last poll: chosen only when nobody else can."""
        return self.misses > 0

    @property
    def lost(self) -> asyncio.Future[None]:
        """Done once the engine is believed dead or says it is stuck; a new one is made when it comes back."""
        return self._lost

    @property
    def names(self) -> tuple[str, ...]:
        """Model names it answers to."""
        return (self.info.model.name, *self.info.model.aliases) if self.info else ()

    @property
    def scheme(self) -> Scheme | None:
        """None while it tells no hash scheme or no digests: it is loading."""
        info = self.info
        if info is None or info.kv is None or info.prompt is None:
            return None
        kv, prompt = info.kv, info.prompt
        if not kv.hash or not kv.block_size or not prompt.tokenizer_digest:
            return None
        return Scheme(
            kv.hash, kv.root or "", kv.block_size, prompt.tokenizer_digest, prompt.template_digest or ""
        )

    def polled(self, info: ServerInfo, asked_at: float) -> bool:
        """Take in an answer of ``/server_info``. True when the engine has started anew (new epoch)."""
        if asked_at < self._changed_at:
            return False  # older than what a request has shown since
        restarted = self.info is not None and self.info.epoch != info.epoch
        if restarted:
            self.mean_s = 0.0
        self.info, self.state, self.error, self.misses = info, info.state, "", 0
        self.alive = True
        stuck = info.state in ("stalled", "dead")  # its server answers, what computes behind it does not
        if stuck and not self._lost.done():
            self._lost.set_result(None)
        elif not stuck and self._lost.done():
            self._lost = asyncio.get_running_loop().create_future()
        if info.load is not None:
            self._settle(info.load, asked_at)
            self.report(info.load)
        return restarted

    def missed(self, error: str, *, refused: bool) -> bool:
        """A poll failed. True when the engine has just died: at once when ``refused``, else after some
        misses.
        """
        self.misses += 1
        self.error = error
        if refused or self.misses >= MISSES_UNTIL_DEAD:
            died = self.die(error)
            self._cut_answers()
            return died
        return False

    def die(self, error: str) -> bool:
        """Nothing answers there: no more work until a later poll succeeds. True when it was alive before."""
        was_alive, self.alive = self.alive, False
        self.state, self.error = "dead", error
        self._changed_at = time.monotonic()
        if was_alive:
            self._died_at = self._changed_at
        self.load = Load(prefill_tokens_per_s=self.load.prefill_tokens_per_s)
        if not self._lost.done():
            self._lost.set_result(None)
        if was_alive:
            self.wake.set()
        return was_alive

    def _cut_answers(self) -> None:
        """End the answers that have hung for too long at a silent engine."""
        if time.monotonic() - self._died_at >= DEAD_ANSWER_S:
            for flight in list(self.flights):
                if flight.cut is not None:
                    flight.cut()

    def refused(self, error: str) -> None:
        """It answered 503: no more work until the next poll says that it is ready."""
        self.state, self.error = "refusing", error
        self._changed_at = time.monotonic()
        self.wake.set()

    def report(self, load: Load) -> None:
        """A fresh load report; what of it is our own is remembered, the rest belongs to others."""
        self.load = load
        self.misses = 0
        self._own_at_report = len(self.flights)
        self._own_tokens_at_report = self.unstarted_prompt_tokens

    def _settle(self, load: Load, asked_at: float) -> None:
        """Requests that do not stream show no first token; the engine's queue tells which have left it,
        oldest first.
        """
        old = [f for f in self.flights if not f.started and f.sent_at < asked_at - _REPORT_LAG_S]
        waiting = sum(f.prompt_tokens for f in old)
        for flight in old:
            if waiting <= load.waiting_tokens and load.waiting:
                break
            waiting -= flight.prompt_tokens
            if not flight.streaming:
                flight.start()

    def candidate(self, cached_tokens: int) -> Candidate:
        """The engine as the cost model wants it: its last report, less what was ours then, plus what is ours
        now.
        """
        load, info = self.load, self.info
        others = max(0, load.running + load.waiting - self._own_at_report)
        others_tokens = max(0, load.waiting_tokens - self._own_tokens_at_report)
        limits = (info.limits if info else None) or Limits()
        blocks = (info.kv.num_blocks if info and info.kv else None) or 0
        free = math.floor((1 - load.kv_usage) * blocks) - self.unstarted_blocks
        return Candidate(
            name=self.name,
            cached_tokens=cached_tokens,
            queued_tokens=others_tokens + self.unstarted_tokens,
            running=others + len(self.flights),
            rate=load.prefill_tokens_per_s,
            slots=limits.max_num_seqs or 0,
            blocks=blocks,
            free_blocks=max(0, free),
            mean_s=self.mean_s,
        )
