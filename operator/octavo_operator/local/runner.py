"""The loop of `octavo up`: plan, act, wait until something changed."""

from __future__ import annotations

import asyncio
import dataclasses
import signal
import time
from collections.abc import Coroutine
from pathlib import Path
from secrets import token_hex
from typing import Any

from octavo.errors import ConfigError, OctavoError, Unavailable
from octavo_operator.local import demo, plan
from octavo_operator.local.engine import Engine
from octavo_operator.local.machine import cores, emptied, refuse_taken
from octavo_operator.local.manifest import Manifest, first_key
from octavo_operator.local.model import local_model
from octavo_operator.local.router import Router, write_endpoints
from octavo_operator.local.scaling import INTERVAL_S, Scaler
from octavo_operator.local.supervised import KILL_MARGIN_S, Supervised
from octavo_operator.resource import InferenceService, settings

INTERRUPT_LIMIT_S = 3.0  # for a process to end by itself after Ctrl-C
INTERRUPTED = 130  # a shell's status for an end by SIGINT


class Runner:
    """One `octavo up`. ``folder``: where logs and the endpoints file go."""

    def __init__(
        self, manifest: Manifest, port: int, once: bool, api_key_dir: Path | None, folder: Path
    ) -> None:
        self._manifest, self._port, self._once, self._folder = manifest, port, once, folder
        self._api_key_dir = api_key_dir
        self._secret = token_hex(32)  # opens the engines' private ports, this run only
        self._began = time.monotonic()
        self._service: InferenceService | None = None
        self._wanted: plan.Desired | None = None
        self._router: Router | None = None
        self._engines: list[Engine] = []
        self._engines_made = 0  # a name is never used again
        self._stops: set[asyncio.Task[None]] = set()
        self._listed: list[tuple[str, int, int]] | None = None  # as in the endpoints file
        self._changed = asyncio.Event()
        self._served = False  # the first answer was given

    async def run(self) -> int:
        """The exit status. Raises ``OctavoError`` for what cannot run; nothing is left running either way."""
        self._service = service = self._manifest.read()
        first_key(self._api_key_dir)
        refuse_taken(self._port)
        emptied(self._folder)
        self._say(f"{service.name}: {service.model.uri}; logs in {self._folder}")
        for line in plan.only_in_a_cluster(service):
            self._say(line)
        work = asyncio.create_task(self._work())
        self._end_on_signals(work)
        try:
            await work
        except asyncio.CancelledError:
            self._say("stopping")
            return 0 if self._served else INTERRUPTED
        finally:
            await self._end_all()
        return 0

    def _say(self, line: str) -> None:
        print(f"[{time.monotonic() - self._began:6.1f}s] {line}", flush=True)

    def _end_on_signals(self, work: asyncio.Task[None]) -> None:
        """The first signal ends all in order, a second at once."""

        def interrupt() -> None:
            if not work.cancel():
                for process in self._processes():
                    process.kill()

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, interrupt)

    async def _work(self) -> None:
        """Serve until cancelled, or with ``once`` until the first answer."""
        assert self._service is not None
        self._wanted = await self._desired(self._service)
        if self._wanted.replicas == 0 and self._once:
            raise ConfigError("spec.replicas is 0: nobody would answer; give 1 or more")
        beside = [self._beside(self._follow_edits()), self._beside(self._autoscale())]
        try:
            while not (self._once and self._served):
                self._changed.clear()
                self._reconcile()
                if len(beside) == 2 and self._all_ready():
                    beside.append(self._beside(self._first_answer()))
                for task in beside:
                    if task.done():
                        task.result()  # raises what ended it
                await self._wait_for_change()
        finally:
            for task in beside:
                task.cancel()
            await asyncio.wait(beside)

    def _beside(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task whose end, good or bad, the loop sees at once."""
        task = asyncio.create_task(coroutine)
        task.add_done_callback(lambda _task: self._changed.set())
        return task

    async def _desired(self, service: InferenceService, scaled: int | None = None) -> plan.Desired:
        """``scaled``: the replicas that autoscaling had decided before an edit."""
        model = await local_model(service.model.uri, self._say)
        keys = str(self._api_key_dir) if self._api_key_dir else None
        return plan.desired(service, model, cores(), replicas=scaled, api_key_dir=keys)

    async def _wait_for_change(self) -> None:
        waiting = [process.retry_at for process in self._processes() if process.phase == "backoff"]
        timeout = max(0.0, min(waiting) - time.monotonic()) if waiting else None
        try:
            await asyncio.wait_for(self._changed.wait(), timeout)
        except TimeoutError:
            return  # a backoff is over

    # --- acting

    def _processes(self) -> list[Supervised]:
        return [*([self._router] if self._router else []), *self._engines]

    def _reconcile(self) -> None:
        """Take every step that can be taken now."""
        assert self._wanted is not None
        for process in self._processes():
            self._mourn(process)
        self._reconcile_router(self._wanted)
        by_name = {engine.name: engine for engine in self._engines}
        for action in plan.plan(self._wanted, [engine.state() for engine in self._engines], time.monotonic()):
            match action:
                case plan.Start(count):
                    for _ in range(count):
                        self._start_engine(self._wanted)
                case plan.Restart(name):
                    self._say(f"{name}: starting again")
                    by_name[name].restart()
                case plan.Stop(name):
                    self._say(f"{name}: stopping once its streams have ended")
                    by_name[name].enter("stopping")
                    self._in_background(self._drain(by_name[name]))
        ready = [
            (engine.name, engine.port, engine.private_port)
            for engine in self._engines
            if engine.phase == "ready"
        ]
        if ready != self._listed:
            write_endpoints(self._folder, ready)
            self._listed = ready

    def _mourn(self, process: Supervised) -> None:
        """Say why a process died. Before the first answer nothing is worth keeping up: raise it."""
        if not process.failure:
            return
        failure, process.failure = process.failure, []
        if not self._served:
            if process is self._router:
                refuse_taken(self._port)
            raise Unavailable("\n".join(failure))
        for line in failure:
            self._say(line)
        self._say(f"{process.name}: again in {max(0.0, process.retry_at - time.monotonic()):.0f} s")

    def _reconcile_router(self, wanted: plan.Desired) -> None:
        router = self._router
        if router is None:
            self._listed = None  # the file is there before the router looks for it
            self._router = Router(
                wanted.router, self._port, self._secret, self._folder, self._say, self._changed.set
            )
        elif router.phase == "backoff" and router.retry_at <= time.monotonic():
            router.restart()
        elif router.spec != wanted.router and not router.stopping:
            router.enter("stopping")
            self._in_background(self._replace_router(router))

    async def _replace_router(self, router: Router) -> None:
        """The port has room for one: the old router ends before the new one starts."""
        await router.stop(KILL_MARGIN_S)
        self._router = None
        self._changed.set()

    def _start_engine(self, wanted: plan.Desired) -> None:
        name = f"{wanted.name}-engine-{self._engines_made}"
        self._engines_made += 1
        self._say(f"{name}: starting on {wanted.engine.threads} of {cores()} cores")
        self._engines.append(
            Engine(name, wanted.engine, self._secret, self._folder, self._say, self._changed.set)
        )

    async def _drain(self, engine: Engine) -> None:
        assert self._service is not None
        await engine.stop(settings(self._service).drain_timeout_s + KILL_MARGIN_S)
        self._engines.remove(engine)
        self._say(f"{engine.name}: gone")
        self._changed.set()

    def _in_background(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._stops.add(task)
        task.add_done_callback(self._stops.discard)

    async def _end_all(self) -> None:
        """Interrupt every process, kill what has not ended soon, and return when none is left."""
        stops = [process.stop(INTERRUPT_LIMIT_S, signal.SIGINT) for process in self._processes()]
        await asyncio.gather(*stops, *self._stops)

    # --- what goes on beside

    async def _follow_edits(self) -> None:
        """Apply each edit of the manifest; a broken one is said in one line and changes nothing."""
        while True:
            await self._manifest.edited()
            assert self._wanted is not None and self._service is not None
            try:
                service = self._manifest.read()
                if service.name != self._wanted.name:
                    raise ConfigError(
                        f"metadata.name {self._wanted.name} -> {service.name}: that is another service"
                    )
                both = service.autoscaling and self._service.autoscaling
                new = await self._desired(service, self._wanted.replicas if both else None)
            except OctavoError as error:
                self._say(f"the edit is not applied: {error.message}")
                continue
            for line in plan.changes(self._wanted, new):
                self._say(line)
            self._service, self._wanted = service, new
            self._changed.set()

    async def _autoscale(self) -> None:
        """Under native autoscaling, decide the number of replicas every few seconds."""
        scaler = Scaler(self._secret)
        while True:
            await asyncio.sleep(INTERVAL_S)
            assert self._wanted is not None and self._service is not None
            if self._service.autoscaling is None or not self._served:
                scaler.forget()
                continue
            current = self._wanted.replicas
            decision = await scaler.decide(self._service.autoscaling, self._engines, current)
            if decision.replicas != current and self._wanted.replicas == current:
                self._say(f"autoscaling: replicas {current} -> {decision.replicas}: {decision.reason}")
                self._wanted = dataclasses.replace(self._wanted, replicas=decision.replicas)
                self._changed.set()

    async def _first_answer(self) -> None:
        """Say how to call the service, and show one answer."""
        assert self._router is not None and self._wanted is not None
        await self._router.knows_an_engine()
        url, model, key = (
            f"http://{plan.HOST}:{self._port}/v1",
            self._wanted.model_name,
            first_key(self._api_key_dir),
        )
        print(f"\n{demo.how_to_call(url, model, key)}\n\n> {demo.QUESTION}\n", flush=True)
        answer = await demo.ask(url, model, key, lambda piece: print(piece, end="", flush=True))
        print(f"\n\n{answer.summary()}\n", flush=True)
        self._served = True
        if not self._once:
            self._say("serving until Ctrl-C; edits of the manifest are applied")

    def _all_ready(self) -> bool:
        assert self._wanted is not None
        ready = sum(
            engine.phase == "ready" and engine.spec == self._wanted.engine for engine in self._engines
        )
        router_ready = self._router is not None and self._router.phase == "ready"
        return router_ready and 0 < self._wanted.replicas <= ready
