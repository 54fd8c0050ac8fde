"""The HTTP servers themselves: sockets, and uvicorn as we want it."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Generator

import uvicorn
from starlette.types import ASGIApp

from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.http_protocol import HttpProtocol

LAST_ANSWERS_S = 5.0  # how long answers may still be written once the engine has nothing more to say
BACKLOG = 2048


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers: at SIGTERM it would cut the streams."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


def listen(host: str, port: int, flag: str, *, shared: bool = False) -> socket.socket:
    """Raises ``ConfigError`` where the port is taken. ``shared``: other processes of ours may listen on it
    too, and the kernel deals the connections out among them.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    one = socket.socket(family, socket.SOCK_STREAM)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        one.bind((host, port))
        one.listen(BACKLOG)
    except OSError as error:
        one.close()
        message = f"{flag} {port} on {host} cannot be used: {error.strerror}. Choose another --{flag}"
        raise ConfigError(message) from error
    one.setblocking(False)
    return one


def http_server(app: ASGIApp, config: EngineConfig, tls: ssl.SSLContext | None = None) -> HttpServer:
    settings = uvicorn.Config(
        app,
        http=HttpProtocol,
        ws="none",
        log_config=None,
        log_level=config.uvicorn_log_level,
        access_log=False,
        lifespan="off",
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=75,  # longer than the pools of clients and routers keep a connection
        timeout_graceful_shutdown=LAST_ANSWERS_S,  # type: ignore[arg-type]  # compared as a number
    )
    settings.load()  # which else comes later, and sets ssl
    settings.ssl = tls
    return HttpServer(settings)
