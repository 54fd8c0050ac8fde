"""The API's end of an engine: starts its process, hands it requests, sees it die or stall."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import zmq
import zmq.asyncio

from octavo.config import EngineConfig
from octavo.core.outputs import EngineOutput, EngineRequest, EngineStats
from octavo.core.request import check_requests
from octavo.engine import messages
from octavo.engine.stream import OutputStream
from octavo.errors import InvalidRequest, OctavoError, Unavailable

EngineState = Literal["loading", "warming", "ready", "draining", "paused", "sleeping", "stalled", "dead"]
DEFAULT_EXECUTOR = "octavo.worker.executor:build_executor"
STALL_S = 10.0  # silence after which a ready engine counts as stalled; its heartbeat comes every 0.5 s
END_STALLED_S = (
    30.0  # how long a stalled engine may still come back; then those who wait are told, and it is ended
)
LONG_STEP_SLACK = 5.0  # a step may take this many times what the engine foretold
WATCH_S = 0.5  # how often silence is looked at
LAST_WORDS_S = 0.3  # how long messages of a dead engine are still read: they say why it died
LOADING_RETRY_S = 5  # Retry-After while the engine is starting or down
CLOSE_S = 5.0  # how long a closing engine may take to end its step before it is killed

_log = logging.getLogger("octavo.engine")


class EngineClient:
    """One engine process and the requests it was given. Belongs to one event loop.

    ``state`` is one of loading, warming, ready, draining, paused, sleeping, stalled, dead; ``stage`` and
    ``detail`` say what a starting engine does, ``stages`` all that it has done since its start; ``error`` why
    it died; ``info`` what it is, once ready; ``stats`` its load after the last step; ``asleep`` whether its
    memory is given back. ``listeners`` are called with each ``Outputs`` message, the empty ones of an idle
    engine too.
    """

    def __init__(self, *, stall_s: float = STALL_S, end_stalled_s: float = END_STALLED_S) -> None:
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
        self._paused = False
        self._sleeping = False  # from the call on
        self.asleep = False  # from its answer on
        self._refusing = False
        self._stall_s = stall_s
        self._end_stalled_s = end_stalled_s
        self._streams: dict[str, weakref.ref[OutputStream]] = {}
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._call_ids = itertools.count()
        self._changed = asyncio.Event()  # replaced at each change of state or of what is in flight
        self._tasks: list[asyncio.Task[None]] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: str | None = None
        self._context: zmq.Context[Any] | None = None
        self._last_heard = 0.0
        self._allowed_silence = stall_s

    # Starting

    async def start(
        self,
        config: EngineConfig,
        *,
        model_path: Path | None = None,
        executor: str = DEFAULT_EXECUTOR,
        rank: int = 0,
    ) -> None:
        """Start the engine's process; returns at once, ``wait_ready`` waits for it.

        ``model_path`` is the model already fetched; without it the engine fetches ``config.model``.
        """
        self._loop = asyncio.get_running_loop()
        self._rank = rank
        self._folder = tempfile.mkdtemp(prefix="octavo-")  # readable by this user alone
        to_engine, from_engine = f"ipc://{self._folder}/in", f"ipc://{self._folder}/out"
        self._context = zmq.Context()
        self._to_engine = self._context.socket(zmq.PUSH)
        self._from_engine = zmq.asyncio.Context(self._context).socket(zmq.PULL)
        for socket in (self._to_engine, self._from_engine):
            socket.set_hwm(0)  # no side ever blocks; the engine's bounded queue bounds what is in flight
            socket.linger = 0
        self._from_engine.bind(from_engine)
        self._to_engine.connect(to_engine)
        launch = messages.Launch(
            version=messages.VERSION,
            rank=rank,
            config={**dataclasses.asdict(config), "api_key": ()},
            model_path=None if model_path is None else str(model_path),
            executor=executor,
            to_engine=to_engine,
            from_engine=from_engine,
        )
        # A session of its own: Ctrl-C and signals to the group reach the owner, which drains first.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "octavo.engine.process"], stdin=subprocess.PIPE, start_new_session=True
        )
        assert self._process.stdin is not None
        frame = messages.encode_launch(launch)
        try:
            self._process.stdin.write(len(frame).to_bytes(4, "big") + frame)
            self._process.stdin.flush()  # stays open: its end tells the engine that we are gone
        except BrokenPipeError:
            _log.debug("the engine ended before it was told what to do")  # its exit status says why
        self._last_heard = time.monotonic()
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._watch())]
        threading.Thread(target=self._wait_exit, args=(self._process,), daemon=True).start()

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
        if self._sleeping:
            return "sleeping"
        return "draining" if self._draining else "paused" if self._paused else "ready"

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def in_flight(self) -> int:
        """Requests handed to the engine that have not finished."""
        return len(self._streams)

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
        if len(set(ids)) < len(ids) or any(name in self._streams for name in ids):
            raise InvalidRequest(
                "request_id is in use: each running request needs its own", param="request_id"
            )
        self._send(messages.AddRequests(list(requests)))
        stream = OutputStream(ids, self._forget, self._loop)
        for name in ids:
            self._streams[name] = weakref.ref(stream)
        return stream

    def abort(self, request_ids: Sequence[str]) -> None:
        """End these within a step; their streams get a last output with ``finish_reason`` "abort"."""
        if ids := [name for name in request_ids if name in self._streams]:
            self._send(messages.AbortRequests(ids))

    async def admin(self, method: str, **arguments: Any) -> Any:
        """Call an admin method of the engine (``reset_prefix_cache``); ``InvalidRequest`` if it has none."""
        self._require_ready()
        call_id = next(self._call_ids)
        self._calls[call_id] = future = self._loop.create_future()
        self._send(messages.AdminCall(call_id, method, arguments))
        try:
            return await future
        finally:
            self._calls.pop(call_id, None)

    async def pause(self, *, abort: bool) -> None:
        """Begin no step until ``resume``. Requests keep their blocks, or are ended with ``abort``."""
        self._paused = True
        self._notify()
        if abort:
            self.abort(list(self._streams))
        await self.admin("pause")

    async def resume(self) -> None:
        """Go on after ``pause``."""
        await self.admin("resume")
        self._paused = False
        self._notify()

    async def sleep(self, level: int, *, wait: bool) -> None:
        """Give back the memory of the KV cache, and of level 2 on of the weights, until ``wake_up``.

        Requests are ended; with ``wait`` they may end by themselves first.
        """
        self._sleeping = True
        self._notify()
        while wait and self._sleeping and self._streams:
            await self.changed()
        if self._sleeping:  # nobody has woken it meanwhile
            await self.admin("sleep", level=level)
            self._paused, self.asleep = False, True
            self._notify()

    async def wake_up(self, tags: Sequence[str] = ()) -> None:
        """Bring back these parts of its memory ("weights", "kv_cache"), all without any. It takes requests
        once no part is missing. ``InvalidRequest`` for an unknown one.
        """
        self._sleeping = self.asleep = bool(await self.admin("wake_up", tags=list(tags)))
        self._notify()

    async def drain(self, grace_s: float, timeout_s: float) -> bool:
        """Stop gently: take requests for ``grace_s`` seconds more, let those running end until ``timeout_s``.

        ``state`` is "draining" from the first moment. Returns False when some had to be aborted at the limit.
        """
        start = time.monotonic()
        self._draining = True
        self._notify()
        await self._until(lambda: self._failure is not None, grace_s)
        self._refusing = True
        done = await self._until(lambda: not self._streams, timeout_s - (time.monotonic() - start))
        if not done:
            self.abort(list(self._streams))
            await self._until(lambda: not self._streams, STALL_S)
        return done

    async def close(self) -> None:
        """End the process; requests still running fail with ``Unavailable``."""
        self._fail(Unavailable("the engine was closed"))
        process = self._process
        if process is not None and process.poll() is None:
            if self.info is None:
                process.kill()
            else:
                self._send(messages.Shutdown())
            if not await self._until(lambda: process.poll() is not None, CLOSE_S):
                process.kill()
                await asyncio.to_thread(process.wait)
        if process is not None and process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # it ended before it had read what is still buffered
                process.stdin.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._context is not None:
            self._to_engine.close()
            self._from_engine.close()
            self._context.term()
            self._context = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    # What the engine says

    async def _receive(self) -> None:
        while True:
            frame = await self._from_engine.recv()
            try:
                self._handle(messages.decode(frame))
            except (messages.VersionMismatch, msgspec.DecodeError) as error:
                self._fail(OctavoError(f"the engine's messages cannot be read: {error}"))

    def _handle(self, message: messages.ToEngine | messages.FromEngine) -> None:
        self._last_heard = time.monotonic()
        self._allowed_silence = self._stall_s
        if self._state == "stalled":
            self._set_state("ready")
        match message:
            case messages.Outputs(outputs, stats):
                self.stats = stats
                for output in outputs:
                    self._deliver(output)
                self._tell_listeners(message)
            case messages.LongStep(expected_s):
                self._allowed_silence = max(self._stall_s, LONG_STEP_SLACK * expected_s)
            case messages.Rejected(request_ids, error):
                for name in request_ids:
                    self._drop(name, error.error())
            case messages.AdminReply(call_id, value, failure):
                if (future := self._calls.get(call_id)) and not future.done():
                    if failure is None:
                        future.set_result(value)
                    else:
                        future.set_exception(failure.error())
            case messages.Progress(stage, detail):
                self.stage, self.detail = stage, detail
                self.stages.append((stage, detail))
                self._set_state("warming" if stage == "warming" else "loading")
            case messages.Ready():
                self.info, self.stage, self.detail = message, "ready", ""
                self._set_state("ready")
            case messages.Failed(error):
                self._fail(error.error())

    def _deliver(self, output: EngineOutput) -> None:
        reference = self._streams.get(output.request_id)
        if reference is not None and (stream := reference()) is not None:
            stream.put(output)
        if output.finish_reason is not None:
            self._streams.pop(output.request_id, None)
            self._notify()

    def _tell_listeners(self, message: messages.Outputs) -> None:
        for listener in self.listeners:
            try:
                listener(message)
            except Exception:  # a fault in the metrics must not end the streams
                _log.exception("a listener of the engine's outputs failed")

    def _drop(self, name: str, error: OctavoError) -> None:
        reference = self._streams.pop(name, None)
        if reference is not None and (stream := reference()) is not None:
            stream.fail(error)
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
            elif self._state == "stalled" and silence > self._allowed_silence + self._end_stalled_s:
                self._fail(Unavailable(f"the engine did not answer for {silence:.0f} s and was ended"))
                assert self._process is not None
                self._process.kill()

    def _wait_exit(self, process: subprocess.Popen[bytes]) -> None:
        """Runs in a thread of its own: returns when the engine has ended, whatever ended it."""
        status = process.wait()
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._exited, status)

    def _exited(self, status: int) -> None:
        self._tasks.append(asyncio.create_task(self._bury(status)))

    async def _bury(self, status: int) -> None:
        await self._until(lambda: self._failure is not None, LAST_WORDS_S)
        if status < 0:
            cause = f"killed by {signal.Signals(-status).name}"
            cause += " (out of memory?)" if status == -signal.SIGKILL else ""
        else:
            cause = f"exit status {status}"
        self._fail(Unavailable(f"the engine process ended: {cause}"))
        self._notify()

    def _fail(self, error: OctavoError) -> None:
        """The engine is gone for good: the first cause stays, everyone who waits is told."""
        if self._failure is not None:
            return
        self._failure, self.error = error, error.message
        self._set_state("dead")
        told = error if isinstance(error, Unavailable) else Unavailable(f"the engine failed: {error.message}")
        for name in list(self._streams):
            self._drop(name, told)
        for future in self._calls.values():
            if not future.done():
                future.set_exception(told)

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
        frame = messages.encode(body, self._rank)
        if not self._to_engine.closed:
            self._to_engine.send(frame)

    def _forget(self, request_ids: Sequence[str]) -> None:
        """Their reader has left."""
        self.abort(request_ids)
        for name in request_ids:
            self._streams.pop(name, None)
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
