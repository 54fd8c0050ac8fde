"""``octavo serve``: the HTTP servers are up at once, the engine starts behind them, and SIGTERM drains."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Generator, Sequence
from typing import Any

import msgspec
import uvicorn
import uvloop
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from octavo.api.app import private_app, public_app
from octavo.api.service import Service
from octavo.config import CommandParser, EngineConfig, add_engine_flags
from octavo.engine.client import EngineClient
from octavo.errors import ConfigError, InvalidRequest, error_body

LAST_ANSWERS_S = 5.0  # how long answers may still be written once the engine has nothing more to say
DEATH_NOTICE_S = 1.0  # a dead engine's server says so this long, so that probes and routers hear 503
BACKLOG = 2048
_log = logging.getLogger("octavo.api")


class _HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers: at SIGTERM it would cut the streams."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class _Protocol(HttpToolsProtocol):
    """What is not HTTP is told so as everything else is."""

    def send_400_response(self, msg: str) -> None:
        body = msgspec.json.encode(error_body(InvalidRequest(msg, code="invalid_http")))
        head = b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n"
        self.transport.write(b"%scontent-length: %d\r\n\r\n%s" % (head, len(body), body))
        self.transport.close()


class Server:
    """One engine behind its public and its private port, from start to drain."""

    def __init__(self, config: EngineConfig, engine: EngineClient | None = None) -> None:
        """Opens both ports. Raises ``ConfigError`` when one is taken."""
        self.config = config
        self.service = Service(config, engine)
        public = _http_server(public_app(self.service), config, **_tls(config))
        private = _http_server(private_app(self.service, self.begin_drain), config)
        self._http = [public, private]
        self._sockets = [_listen(config.host, config.port, "port")]
        try:
            self._sockets.append(_listen(config.host, config.private_port, "private-port"))
        except ConfigError:
            self._sockets[0].close()
            raise
        self.port, self.private_port = (one.getsockname()[1] for one in self._sockets)
        self._stop: asyncio.Event
        self._at_once: asyncio.Event
        self._drain: asyncio.Future[None] | None = None
        self._grace_s = config.drain_grace_s

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
                _log.error("the engine is gone: %s", self.service.failure)
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
            await asyncio.gather(*serving, life, stop, return_exceptions=True)
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

    async def _live(self) -> None:
        """Start, then wait for the engine's death, which is raised."""
        await self.service.start()
        raise await self.service.engine_died()

    async def _do_drain(self) -> None:
        grace, limit = self._grace_s, self.config.drain_timeout_s
        if not self.service.started:  # nothing was taken yet: there is nothing to wait for
            self.service.refusing = True
            return
        if self.service.engine.state == "paused":  # else what waits could not end
            await self.service.engine.resume()
        _log.info("draining: new requests are taken for %g s, running ones may take %g s", grace, limit)
        refuse = asyncio.get_running_loop().call_later(grace, self._refuse)
        try:
            if not await self.service.engine.drain(grace, limit):
                _log.warning("the drain's limit of %g s cut requests that were still running", limit)
        finally:
            refuse.cancel()
            self._refuse()

    def _refuse(self) -> None:
        self.service.refusing = True

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


def _listen(host: str, port: int, flag: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    one = socket.socket(family, socket.SOCK_STREAM)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        one.bind((host, port))
        one.listen(BACKLOG)
    except OSError as error:
        one.close()
        message = f"{flag} {port} on {host} cannot be used: {error.strerror}. Choose another --{flag}"
        raise ConfigError(message) from error
    one.setblocking(False)
    return one


def _tls(config: EngineConfig) -> dict[str, Any]:
    """uvicorn's settings for HTTPS; none without a certificate."""
    if config.ssl_certfile is None:
        return {}
    names = ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs", "ssl_cert_reqs")
    return {name: getattr(config, name) for name in names}


def _http_server(app: ASGIApp, config: EngineConfig, **more: Any) -> _HttpServer:
    settings = uvicorn.Config(
        app,
        http=_Protocol,
        log_config=None,
        log_level=config.uvicorn_log_level,
        access_log=False,
        lifespan="off",
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=75,  # longer than the pools of clients and routers keep a connection
        timeout_graceful_shutdown=LAST_ANSWERS_S,  # type: ignore[arg-type]  # compared as a number
        **more,
    )
    try:
        settings.load()
    except OSError as error:  # ssl.SSLError is one
        raise ConfigError(
            f"the certificate in ssl-certfile {config.ssl_certfile} cannot be used: {error}"
        ) from error
    return _HttpServer(settings)


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


def parse_args(argv: Sequence[str]) -> EngineConfig:
    """Settings from ``MODEL [flags]``. Raises ``ConfigError``; ``--help`` prints and exits."""
    parser = CommandParser(prog="octavo serve", description="Serve a model over the OpenAI API.")
    parser.add_argument("model", metavar="MODEL", help="a path, or a file://, package:// or hf:// address")
    add_engine_flags(parser)
    return EngineConfig(**vars(parser.parse_args(list(argv))))


def main(argv: Sequence[str]) -> int:
    """``octavo serve MODEL [flags]``. Returns 0 after a drain; errors are raised as ``OctavoError``."""
    config = parse_args(argv)
    set_up_logging(config.log_level)
    return uvloop.run(serve(Server(config)))
