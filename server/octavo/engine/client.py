"""The API's end of an engine: starts its process or attaches to it, asks it, sees it die or stall."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from octavo.child_process import cause_of
from octavo.config import EngineConfig
from octavo.core.outputs import EngineRequest, EngineStats
from octavo.core.request import check_requests
from octavo.engine import messages
from octavo.engine.admin_calls import AdminCalls
from octavo.engine.child import Child
from octavo.engine.connection import Connection
from octavo.engine.launch import launch_engine, start_engine
from octavo.engine.stream import OpenStreams, OutputStream
from octavo.errors import InvalidRequest, OctavoError, Unavailable

EngineState = Literal["loading", "warming", "ready", "draining", "paused", "sleeping", "stalled", "dead"]
STALL_S = 10.0  # silence after which a ready engine counts as stalled; its heartbeat comes every 0.5 s
# How long a stalled engine may still come back; then those who wait are told, and it is ended.
END_STALLED_S = 30.0
LONG_STEP_SLACK = 5.0  # a step may take this many times what the engine foretold
WATCH_S = 0.5  # how often silence is looked at
LAST_WORDS_S = 0.3  # how long messages of a dead engine are still read: they say why it died
LOADING_RETRY_S = 5  # Retry-After while the engine is starting or down
CLOSE_S = 5.0  # how long a closing engine may take to end its step before it is killed

_log = logging.getLogger("octavo.engine")


class Standing(msgspec.Struct, frozen=True):
    """What was made of a ready engine, for all its clients."""

    paused: bool = False
    sleeping: bool = False  # from the call on
    asleep: bool = False  # from its answer on: memory is given back

    @property
    def flags(self) -> tuple[bool, ...]:
        return self.paused, self.sleeping, self.asleep


class EngineClient:
    """One engine process and the requests that it was given here. Belongs to one event loop.

    ``state`` is one of loading, warming, ready, draining, paused, sleeping, stalled, dead; ``stage`` and
    ``detail`` say what a starting engine does, ``stages`` all that it has done since its start; ``error`` why
    it died; ``info`` what it is, once ready; ``stats`` its load after the last step. ``listeners`` are called
    with each ``Outputs`` message, the empty ones of an idle engine too. ``waiting`` is a process of
    ``start_engine``, for ``start``, which makes one where there is none.
    """

    def __init__(
        self,
        waiting: subprocess.Popen[bytes] | None = None,
        *,
        stall_s: float = STALL_S,
        end_stalled_s: float = END_STALLED_S,
    ) -> None:
        self.waiting = waiting
        self.stage = "starting"
        self.detail = ""
        self.stages: list[tuple[str, str]] = []
        self.error: str | None = None
        self.info: messages.Ready | None = None
        self.stats = EngineStats()
        self.listeners: list[Callable[[messages.Outputs], None]] = []
        self._state: EngineState = "loading"
        self._failure: OctavoError | None = None
        self._draining = False
        self.standing = Standing()
        self.sleep_level = 0  # of the last call to sleep, until all is back
        self._refusing = False
        self._stall_s = stall_s
        self._end_stalled_s = end_stalled_s
        self._open = OpenStreams()
        self._shared = False  # with other clients, who had ``_elsewhere`` requests after the last step
        self._elsewhere = 0
        self._calls = AdminCalls(self._send)
        self._changed = asyncio.Event()  # replaced at each change of state or of what is in flight
        self._tasks: list[asyncio.Task[None]] = []
        self._process: Child | None = None  # of the client that started the engine
        self._client_numbers = itertools.count(messages.OWNER + 1)
        self._folder: str | None = None
        self._connection: Connection | None = None
        self._last_heard = 0.0
        self._allowed_silence = stall_s

    # Starting

    async def start(self, config: EngineConfig, *, model_path: Path | None = None, rank: int = 0) -> None:
        """Have the engine's process load; returns at once, ``wait_ready`` waits for it.

        ``model_path`` is the model already fetched; without it the engine fetches ``config.model``.
        """
        self._folder = tempfile.mkdtemp(prefix="octavo-")  # readable by this user alone
        place = messages.Attachment(f"ipc://{self._folder}/in", f"ipc://{self._folder}/out", rank)
        self._connect(place)
        process = self.waiting or start_engine()
        self._process = launch_engine(process, config, place, model_path, self._exited)

    async def attach(self, place: messages.Attachment) -> None:
        """Be one more client of an engine that another client started and admits to."""
        self._connect(place)
        self._shared = True
        self._send(messages.Attach(place.from_engine))

    def admit(self) -> messages.Attachment:
        """A place for one more client of the engine that this one started."""
        self._shared, client = True, next(self._client_numbers)
        return msgspec.structs.replace(
            self._place, from_engine=f"{self._place.from_engine}-{client}", client=client
        )

    def dismiss(self, place: messages.Attachment) -> None:
        """A client that was admitted is gone: its requests end within a step."""
        self._send(messages.Detach(place.client))

    def _connect(self, place: messages.Attachment) -> None:
        self._loop = asyncio.get_running_loop()
        self._place, self._connection = place, Connection(place)
        self._last_heard = time.monotonic()
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._watch())]

    async def wait_ready(self) -> messages.Ready:
        """Wait until requests are taken. Raises why the engine could not start (``ConfigError``, ...)."""
        while self.info is None and self._failure is None:
            await self._changed.wait()
        if self._failure is not None:
            raise self._failure
        assert self.info is not None
        return self.info

    async def changed(self) -> None:
        """Wait for the next change of state, of stage, or of what is in flight."""
        await self._changed.wait()

    @property
    def state(self) -> EngineState:
        if self._state != "ready":
            return self._state
        if self.standing.sleeping:
            return "sleeping"
        return "draining" if self._draining else "paused" if self.standing.paused else "ready"

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def in_flight(self) -> int:
        """Requests handed to the engine here that have not finished."""
        return len(self._open)

    @property
    def in_flight_everywhere(self) -> int:
        """With those of other clients, as far as the engine's last step tells of them."""
        return len(self._open) + self._elsewhere

    # Requests

    def submit(self, requests: Sequence[EngineRequest]) -> OutputStream:
        """Hand over requests that belong together; all are taken or none.

        Raises ``InvalidRequest`` (``ContextLengthExceeded``) or ``Unavailable`` at once. The stream raises
        ``QueueFull`` before its first output, and ``Unavailable`` when the engine dies.
        """
        info = self._require_ready()
        if self._refusing:
            raise Unavailable("the engine is draining: it takes no more requests")
        ids = [request.request_id for request in requests]
        check_requests(requests, info.limits)
        if len(set(ids)) < len(ids) or any(name in self._open for name in ids):
            raise InvalidRequest(
                "request_id is in use: each running request needs its own", param="request_id"
            )
        self._send(messages.AddRequests(list(requests)))
        stream = OutputStream(ids, self._forget, self._loop)
        self._open.add(stream)
        return stream

    def abort(self, request_ids: Sequence[str]) -> None:
        """End these within a step; their streams get a last output with ``finish_reason`` "abort"."""
        if ids := [name for name in request_ids if name in self._open]:
            self._send(messages.AbortRequests(ids))

    def abort_all(self) -> None:
        """As ``abort``, all that were submitted here."""
        self.abort(self._open.request_ids)

    async def admin(self, method: str, **arguments: Any) -> Any:
        """Call an admin method of the engine (``reset_prefix_cache``); ``InvalidRequest`` if it has none."""
        self._require_ready()
        return await self._calls.call(method, arguments)

    def stand(self, **changes: bool) -> None:
        """What another client made of the engine, or this one is about to: fields of ``Standing``."""
        self.standing = msgspec.structs.replace(self.standing, **changes)
        self._notify()

    async def pause(self, *, abort: bool) -> None:
        """Begin no step until ``resume``. Requests keep their blocks, or are ended with ``abort``."""
        self.stand(paused=True)
        if abort:
            self.abort_all()
        await self.admin("pause")

    async def resume(self) -> None:
        """Go on after ``pause``."""
        await self.admin("resume")
        self.stand(paused=False)

    async def sleep(self, level: int) -> None:
        """End all requests and give back the memory of the KV cache, at level 2 of the weights too, until
        ``wake_up``.
        """
        self.stand(sleeping=True)
        await self.admin("sleep", level=level)
        self.sleep_level = level
        self.stand(paused=False, asleep=True)

    async def wake_up(self, tags: Sequence[str] = ()) -> None:
        """Bring back these parts of its memory ("weights", "kv_cache"), all without any. It takes requests
        once no part is missing. ``InvalidRequest`` for an unknown one.
        """
        missing = bool(await self.admin("wake_up", tags=list(tags)))
        if not missing:
            self.sleep_level = 0
        self.stand(sleeping=missing, asleep=missing)

    async def rest(self) -> None:
        """Before a sleep: wait until no request is left here, or until the engine is woken."""
        while self.standing.sleeping and self._open:
            await self.changed()

    async def drain(self, grace_s: float, timeout_s: float) -> bool:
        """Stop gently: take requests for ``grace_s`` seconds more, let those running end until ``timeout_s``.

        ``state`` is "draining" from the first moment. Returns False when some had to be aborted at the limit.
        """
        start = time.monotonic()
        self._draining = True
        self._notify()
        await self._until(lambda: self._failure is not None, grace_s)
        self._refusing = True
        done = await self._until(lambda: not self._open, timeout_s - (time.monotonic() - start))
        if not done:
            self.abort_all()
            await self._until(lambda: not self._open, STALL_S)
        return done

    async def close(self) -> None:
        """Requests still running fail with ``Unavailable``. The client that started the engine ends it."""
        self.fail(Unavailable("the engine was closed"))
        if self._process is not None:
            if self.info is None:
                self._process.kill()
            self._send(messages.Shutdown())
            await self._process.close(CLOSE_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._connection is not None:
            self._connection.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    # What the engine says

    async def _receive(self) -> None:
        assert self._connection is not None
        while True:
            try:
                self._handle(await self._connection.receive())
            except (messages.VersionMismatch, msgspec.DecodeError) as error:
                self.fail(OctavoError(f"the engine's messages cannot be read: {error}"))

    def _handle(self, message: messages.ToEngine | messages.FromEngine) -> None:
        self._last_heard = time.monotonic()
        self._allowed_silence = self._stall_s
        if self._state == "stalled":
            self._set_state("ready")
        match message:
            case messages.Outputs(outputs, stats):
                self.stats = stats
                ended = [self._open.deliver(output) for output in outputs]
                if any(ended):
                    self._notify()
                if self._shared:
                    self._elsewhere = max(0, stats.running + stats.waiting - len(self._open))
                self._tell_listeners(message)
            case messages.LongStep(expected_s):
                self._allowed_silence = max(self._stall_s, LONG_STEP_SLACK * expected_s)
            case messages.Rejected(request_ids, error):
                self._drop(request_ids, error.error())
            case messages.AdminReply():
                self._calls.answered(message)
            case messages.Progress(stage, detail):
                self.stage, self.detail = stage, detail
                self.stages.append((stage, detail))
                self._set_state("warming" if stage == "warming" else "loading")
            case messages.Ready():
                self.info, self.stage, self.detail = message, "ready", ""
                self._set_state("ready")
            case messages.Failed(error):
                self.fail(error.error())

    def _tell_listeners(self, message: messages.Outputs) -> None:
        for listener in self.listeners:
            try:
                listener(message)
            except Exception:  # a fault in the metrics must not end the streams
                _log.exception("a listener of the engine's outputs failed")

    def _drop(self, request_ids: Sequence[str], error: OctavoError) -> None:
        self._open.fail(request_ids, error)
        self._notify()

    # What the engine does not say

    async def _watch(self) -> None:
        """Mark a ready engine stalled when it is silent for too long, and end it when it stays so."""
        while self._failure is None:
            before = time.monotonic()
            await asyncio.sleep(WATCH_S)
            now = time.monotonic()
            if now - before > 2 * WATCH_S:  # this process was held up itself, its messages may be unread
                self._last_heard = now
            silence = now - self._last_heard
            if self._state == "ready" and silence > self._allowed_silence:
                _log.error("the engine has been silent for %.0f s: stalled", silence)
                self._set_state("stalled")
            elif self._process is not None and silence > self._allowed_silence + self._end_stalled_s:
                self.fail(Unavailable(f"the engine did not answer for {silence:.0f} s and was ended"))
                self._process.kill()

    def _exited(self, status: int) -> None:
        self._tasks.append(asyncio.create_task(self._bury(status)))

    async def _bury(self, status: int) -> None:
        await self._until(lambda: self._failure is not None, LAST_WORDS_S)
        self.fail(Unavailable(f"the engine process ended: {cause_of(status)}"))
        self._notify()

    def fail(self, error: OctavoError) -> None:
        """The engine is gone for good: the first cause stays, everyone who waits is told."""
        if self._failure is not None:
            return
        self._failure, self.error = error, error.message
        self._set_state("dead")
        told = error if isinstance(error, Unavailable) else Unavailable(f"the engine failed: {error.message}")
        self._drop(self._open.request_ids, told)
        self._calls.fail(told)

    # Small parts

    def _require_ready(self) -> messages.Ready:
        if self._failure is not None:
            raise Unavailable(f"the engine is dead: {self.error}", retry_after_s=LOADING_RETRY_S)
        if self.info is None:
            raise Unavailable(f"the engine is starting: {self.stage}", retry_after_s=LOADING_RETRY_S)
        if self._state == "stalled":
            raise Unavailable("the engine is stalled: it does not answer", retry_after_s=LOADING_RETRY_S)
        return self.info

    def _send(self, body: messages.ToEngine) -> None:
        assert self._connection is not None
        self._connection.send(body)

    def _forget(self, request_ids: Sequence[str]) -> None:
        """Their reader has left."""
        self.abort(request_ids)
        self._open.forget(request_ids)
        self._notify()

    def _set_state(self, state: EngineState) -> None:
        if self._state != "dead":
            self._state = state
        self._notify()

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while not condition():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), left)
        return True
