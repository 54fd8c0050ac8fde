"""``octavo serve``: the HTTP servers are up at once, the engine starts behind them, and SIGTERM drains."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import subprocess
import sys
from typing import Any

import uvloop

from octavo.api.app import private_app, public_app
from octavo.api.http_server import http_server, listen
from octavo.api.peers import FIRST, Peers
from octavo.api.processes import ApiProcesses
from octavo.api.service import Service
from octavo.api.tls import tls_context
from octavo.config import EngineConfig
from octavo.engine.client import EngineClient
from octavo.errors import ConfigError, OctavoError

DEATH_NOTICE_S = 1.0  # a dead engine's server says so this long, so that probes and routers hear 503
_log = logging.getLogger("octavo.api")


class Server:
    """One engine behind its public and its private port, from start to drain; this is the first of its API
    processes.
    """

    def __init__(self, config: EngineConfig, engine: EngineClient | None = None) -> None:
        """Opens both ports. Raises ``ConfigError`` when one is taken."""
        self.config = config
        self.service = Service(config, engine, Peers(FIRST, config.api_server_count))
        public = http_server(public_app(self.service), config, tls_context(config))
        private = http_server(private_app(self.service, self._take_drain), config)
        self._http = [public, private]
        self._sockets = [self._listen_first()]
        try:
            self._sockets.append(listen(config.host, config.private_port, "private-port"))
        except ConfigError:
            self._sockets[0].close()
            raise
        self.port, self.private_port = (one.getsockname()[1] for one in self._sockets)
        self._processes = ApiProcesses(self.service, self.port)
        self._stop: asyncio.Event
        self._at_once: asyncio.Event
        self._drain: asyncio.Future[None] | None = None
        self._grace_s = config.drain_grace_s

    def _listen_first(self) -> socket.socket:
        config, shared = self.config, self.config.api_server_count > 1
        if shared and config.port:  # a port that is shared may be taken by another server: not seen below
            listen(config.host, config.port, "port").close()
        return listen(config.host, config.port, "port", shared=shared)

    async def run(self) -> int:
        """Serve until ``stop``. Returns 0 after a drain; raises why the engine could not start or died."""
        self._stop, self._at_once = asyncio.Event(), asyncio.Event()
        serving = [
            asyncio.ensure_future(server.serve([one]))
            for server, one in zip(self._http, self._sockets, strict=True)
        ]
        scheme = "https" if self.config.ssl_certfile else "http"
        _log.info(
            "listening on %s://%s:%d (private port %d)",
            scheme,
            self.config.host,
            self.port,
            self.private_port,
        )
        life: asyncio.Future[Any] = asyncio.ensure_future(self._live())
        stop: asyncio.Future[Any] = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({life, stop}, return_when=asyncio.FIRST_COMPLETED)
            if life.done():
                _log.error("the server cannot go on: %s", self.service.failure)
                await self._wait_stop(DEATH_NOTICE_S)
                life.result()
            await self._drained()
            if life.done():
                life.result()
            return 0
        finally:
            life.cancel()
            stop.cancel()
            for server in self._http:
                server.should_exit = True
                server.force_exit = self._at_once.is_set()
            ending = self._processes.stop(at_once=self._at_once.is_set())
            await asyncio.gather(*serving, life, stop, ending, return_exceptions=True)
            await self.service.close()

    def stop(self, *, hurry: bool = False) -> None:
        """Drain, then end. ``hurry`` takes no more requests from now on. A second call ends at once."""
        if self._stop.is_set():
            self._at_once.set()
        if hurry:
            self._grace_s = 0.0
        self.begin_drain()
        self._stop.set()

    def begin_drain(self) -> None:
        """Not ready from now on; requests are taken for the grace, then refused."""
        if self._drain is None:
            self.service.draining = True
            self._drain = asyncio.ensure_future(self._do_drain())

    async def _take_drain(self) -> None:
        """Begin to drain; no API process says that it is ready once this returns."""
        self.begin_drain()
        await self.service.peers.tell_others("draining")

    async def _live(self) -> None:
        """Start, then wait for what nobody asked for: the engine's death, or that of an API process that
        cannot be replaced; that is raised.
        """
        await self.service.start(self._processes.start)
        died: asyncio.Future[OctavoError] = asyncio.ensure_future(self.service.engine_died())
        try:
            await asyncio.wait({died, self._processes.broken}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            died.cancel()
        if self.service.failure is None:
            self.service.failure = self._processes.broken.result()
        await self.service.peers.tell_others("engine_failed", self.service.failure.message)
        raise self.service.failure

    async def _do_drain(self) -> None:
        grace, limit = self._grace_s, self.config.drain_timeout_s
        if not self.service.started:  # nothing was taken yet: there is nothing to wait for
            self.service.refusing = True
            return
        if self.service.engine.state == "paused":  # else what waits could not end
            await self.service.resume()
        _log.info("draining: new requests are taken for %g s, running ones may take %g s", grace, limit)
        others = self.service.peers.tell_others("drain", grace, limit, within_s=None)
        here, elsewhere = await asyncio.gather(self.service.drain(grace, limit), others)
        if not (here and all(elsewhere.values())):
            _log.warning("the drain's limit of %g s cut requests that were still running", limit)

    async def _drained(self) -> None:
        assert self._drain is not None
        at_once = asyncio.ensure_future(self._at_once.wait())
        waits: set[asyncio.Future[Any]] = {self._drain, at_once}
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        at_once.cancel()
        self._drain.cancel()
        await asyncio.gather(self._drain, return_exceptions=True)

    async def _wait_stop(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stop.wait(), seconds)


async def serve(server: Server) -> int:
    """Run ``server``; SIGTERM drains it, Ctrl-C too but without the grace; a second ends it at once."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, server.stop)
    loop.add_signal_handler(signal.SIGINT, lambda: server.stop(hurry=True))
    return await server.run()


def set_up_logging(level: str) -> None:
    """One line a record on stderr, with the time and the part that speaks."""
    logging.basicConfig(
        stream=sys.stderr,
        level=level.upper(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        force=True,
    )
    lines, access = logging.StreamHandler(sys.stderr), logging.getLogger("octavo.access")
    lines.setFormatter(logging.Formatter("%(message)s"))  # JSON and nothing else
    access.handlers, access.propagate = [lines], False


def run(config: EngineConfig, engine: subprocess.Popen[bytes]) -> int:
    """Serve until told to stop, with a process of ``start_engine``. Returns 0 after a drain; raises
    ``OctavoError``.
    """
    set_up_logging(config.log_level)
    return uvloop.run(serve(Server(config, EngineClient(engine))))
