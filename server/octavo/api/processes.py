"""The API processes beside the first (``--api-server-count``): it starts them, replaces one that dies, and
adds up what all of them count. Each listens on the public port once it takes requests.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import shutil
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from octavo.api.http_server import LAST_ANSWERS_S
from octavo.api.metrics_sum import MetricsSum
from octavo.api.service import Service
from octavo.child_process import cause_of, start_module
from octavo.engine.child import Child
from octavo.engine.messages import Attachment
from octavo.errors import OctavoError

END_S = LAST_ANSWERS_S + 2.0  # how long a process that was told to stop may take before it is killed
_log = logging.getLogger("octavo.api")


class ApiLaunch(msgspec.Struct, frozen=True):
    """What a new API process is told on its standard input. ``place``: where it meets the engine; ``port``:
    the public one; the rest is what it has in common with the first.
    """

    number: int
    count: int
    folder: str
    place: Attachment
    port: int
    config: dict[str, Any]
    model_path: str
    epoch: str
    created: int


class _Process:
    def __init__(self, place: Attachment, child: Child) -> None:
        self.place, self.child = place, child
        self.joined = asyncio.Event()  # it takes requests


class ApiProcesses:
    """Those of a server of ``service``; none where the count is 1. ``broken`` becomes why one of them could
    not start: without it the server cannot go on.
    """

    def __init__(self, service: Service, port: int) -> None:
        self._service, self._peers, self._port = service, service.peers, port
        self._path: Path
        self._running: dict[int, _Process] = {}
        self._stopping = False
        self._sums = MetricsSum()
        self.broken: asyncio.Future[OctavoError]
        self._peers.answers |= {"joined": self._joined, "metrics_text": self._metrics_text}

    async def start(self, path: Path) -> None:
        """Start them over the model at ``path``; returns when each takes requests. Raises ``broken``."""
        self.broken = asyncio.get_running_loop().create_future()
        if self._peers.count == 1:
            return
        self._path = path
        self._peers.folder = Path(tempfile.mkdtemp(prefix="octavo-api-"))  # only this user can enter
        await self._peers.listen()
        for number in range(1, self._peers.count):
            self._launch(number)
        all_joined: asyncio.Future[Any] = asyncio.gather(
            *(process.joined.wait() for process in self._running.values())
        )
        try:
            waits: set[asyncio.Future[Any]] = {all_joined, self.broken}
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            all_joined.cancel()
        if self.broken.done():
            raise self.broken.result()

    async def stop(self, *, at_once: bool) -> None:
        """Let them write what they have to say, unless ``at_once``, and end."""
        self._stopping = True
        for process in self._running.values():
            if at_once or not process.joined.is_set():
                process.child.kill()
        if not at_once:
            await self._peers.tell_others("stop")
        await asyncio.gather(*(process.child.close(END_S) for process in list(self._running.values())))
        self._peers.close()
        if self._peers.folder is not None:
            shutil.rmtree(self._peers.folder, ignore_errors=True)

    def _launch(self, number: int) -> None:
        service = self._service
        place = service.engine.admit()
        launch = ApiLaunch(
            number=number,
            count=self._peers.count,
            folder=str(self._peers.folder),
            place=place,
            port=self._port,
            config=dataclasses.asdict(service.config),
            model_path=str(self._path),
            epoch=service.epoch,
            created=service.created,
        )
        frame, exited = msgspec.msgpack.encode(launch), partial(self._exited, number)
        try:
            child = Child(start_module("octavo.api.process"), frame, exited)
        except OSError as error:
            self._break(f"API process {number} cannot be started: {error}")
        else:
            self._running[number] = _Process(place, child)

    async def _joined(self, number: int) -> list[tuple[str, str]]:
        """A process takes requests from now on. Returns the stages of the engine's start: it saw none."""
        service = self._service
        async with service.ordering:
            self._peers.others.add(number)
            await self._peers.call(number, "stand", *service.engine.standing.flags, False)
            if service.draining:
                await self._peers.call(number, "drain", 0.0, 0.0)
        self._running[number].joined.set()
        return service.engine.stages

    def _exited(self, number: int, status: int) -> None:
        process = self._running[number]
        if self._stopping:
            return
        del self._running[number]
        self._peers.others.discard(number)
        self._service.engine.dismiss(process.place)
        self._sums.ended(process.place.client)
        cause = cause_of(status)
        if not process.joined.is_set():
            self._break(f"API process {number} ended before it took requests: {cause}")
        elif self._service.draining or self._service.failure is not None:
            _log.error("API process %d ended (%s): its requests are lost", number, cause)
        else:
            _log.error(
                "API process %d ended (%s): its requests are lost, another takes its place", number, cause
            )
            self._launch(number)

    def _break(self, why: str) -> None:
        if not self.broken.done():
            self.broken.set_result(OctavoError(why))

    async def _metrics_text(self) -> str:
        asked = dict(self._running)
        for number, families in (await self._peers.tell_others("metrics")).items():
            if self._running.get(number) is asked[number]:  # else what it told is beside the sums
                self._sums.told(asked[number].place.client, families)
        return self._sums.text(self._service.metrics.registry).decode()
