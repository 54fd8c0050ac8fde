"""The router's HTTP side: forwarded routes, its own health, models and metrics; keys; what runs behind it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from octavo.api_keys import ApiKeys, sent_key
from octavo.errors import ModelNotFound, OctavoError, error_body
from octavo_router.cost import Policy
from octavo_router.engine import Engine
from octavo_router.envelope import NoRoute, Unauthorized, WrongMethod, error_headers
from octavo_router.fleet import POLL_INTERVAL_S, POLL_TIMEOUT_S, Fleet
from octavo_router.index import DEFAULT_BUDGET_BYTES, PrefixIndex
from octavo_router.membership import Membership
from octavo_router.metrics import Metrics
from octavo_router.proxy import DEFAULT_MAX_BODY_BYTES, PAGE, ROUTES, Proxy, ProxyRoute
from octavo_router.relay import CONNECT_TIMEOUT_S

log = logging.getLogger(__name__)

OPEN_PATHS = frozenset((PAGE, "/health", "/live", "/ready", "/metrics"))  # the page asks for the key itself
# Kept connections are dropped before the engine's own server drops them (uvicorn: 5 s), so that a request
# rarely meets a connection that is just being closed.
KEEPALIVE_S = 4.0


@dataclass(frozen=True, kw_only=True)
class RouterSettings:
    """What ``octavo router`` was asked to do."""

    policy: Policy = "prefix-affinity"
    private_key: str | None = None
    api_keys: tuple[str, ...] = ()
    api_key_dir: Path | None = None
    index_bytes: int = DEFAULT_BUDGET_BYTES
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    poll_interval_s: float = POLL_INTERVAL_S
    poll_timeout_s: float = POLL_TIMEOUT_S


class Router:
    """Everything behind the routes. ``draining`` is set by SIGTERM: not ready from then on, serving all the
    same.
    """

    def __init__(self, settings: RouterSettings, membership: Membership) -> None:
        self.settings = settings
        self.membership = membership
        self.keys = ApiKeys(settings.api_keys, settings.api_key_dir)
        self.index = PrefixIndex(settings.index_bytes)
        self.metrics = Metrics(self.index)
        self.draining = False
        self.was_ready = False
        self.started = int(time.time())
        self.fleet: Fleet | None = None
        self.proxy: Proxy | None = None

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Follows the membership and polls engines for as long as the block lasts."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S, ttl_dns_cache=10)
        async with aiohttp.ClientSession(
            connector=connector, timeout=timeout, auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        ) as session:  # fmt: skip
            settings = self.settings
            self.fleet = Fleet(
                session, self.metrics, self.index, policy=settings.policy, private_key=settings.private_key,
                poll_interval_s=settings.poll_interval_s, poll_timeout_s=settings.poll_timeout_s,
            )  # fmt: skip
            self.proxy = Proxy(self.fleet, session, self.metrics, settings.max_body_bytes)
            follow = asyncio.create_task(self._follow(self.fleet), name="membership")
            try:
                yield
            finally:
                follow.cancel()
                await asyncio.gather(follow, return_exceptions=True)
                await self.fleet.close()
                self.proxy.close()

    async def _follow(self, fleet: Fleet) -> None:
        while True:
            try:
                await self.membership.run(fleet.apply)
            except Exception:
                log.exception("following the membership failed; it starts again")
                await asyncio.sleep(1)

    def not_ready(self) -> str:
        """Why ``/ready`` is 503; empty when it is 200."""
        if self.draining:
            return "the router is draining"
        if self.fleet is None:
            return "the router is starting"
        reason = self.fleet.not_ready()
        if reason and self.membership.problem:
            reason = f"{reason}; {self.membership.problem}"
        if not reason:
            self.was_ready = True
        return reason


def build_app(router: Router) -> ASGIApp:
    """The ASGI application."""

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with router.running():
            yield

    async def live(request: Request) -> Response:
        return _json({"status": "ok"})

    async def ready(request: Request) -> Response:
        reason = router.not_ready()
        degraded = router.fleet.degraded() if router.fleet else {}
        endpoints = (
            {e.name: {"state": e.state, "error": e.error} for e in router.fleet.engines.values()}
            if router.fleet
            else {}
        )
        body = {
            "state": "draining" if router.draining else "not ready" if reason else "ready",
            "error": reason or None,
            "routed_by_text": degraded,
            "endpoints": endpoints,
        }
        return _json(body, 503 if reason else 200)

    async def metrics(request: Request) -> Response:
        return Response(router.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    async def models(request: Request) -> Response:
        served = router.fleet.models() if router.fleet else {}
        return _json({"object": "list", "data": [_model(router, *item) for item in sorted(served.items())]})

    async def model(request: Request) -> Response:
        name = request.path_params["name"]
        served = router.fleet.models() if router.fleet else {}
        if name not in served:
            known = ", ".join(sorted(served)) or "none yet"
            return _error(
                ModelNotFound(f"model {name!r} is not served here: known are {known}", param="model")
            )
        return _json(_model(router, name, served[name]))

    routes = [
        Route("/health", live),
        Route("/live", live),
        Route("/ready", ready),
        Route("/metrics", metrics),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
        *(Route(r.path, _Forwarded(router, r), methods=r.methods) for r in ROUTES),
    ]
    handlers = {HTTPException: _http_error, Exception: _fault}
    app = Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers)
    app.router.redirect_slashes = False
    return _Keys(app, router.keys)


def _model(router: Router, name: str, engine: Engine) -> dict[str, Any]:
    assert engine.info is not None  # it has told its names
    return {
        "id": name, "object": "model", "created": router.started, "owned_by": "octavo",
        "root": engine.info.model.name, "parent": None, "max_model_len": engine.info.model.max_model_len,
    }  # fmt: skip


class _Forwarded:
    """One forwarded route as an ASGI application."""

    def __init__(self, router: Router, route: ProxyRoute) -> None:
        self._router = router
        self._route = route

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert self._router.proxy is not None  # the lifespan made it before the first request
        await self._router.proxy.handle(self._route, scope, receive, send)


class _Keys:
    """Lets in only requests with a key, but for the page, health, probes and metrics."""

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._keys.required and scope["path"] not in OPEN_PATHS:
            headers = Headers(scope=scope)
            given = sent_key(headers.get("authorization"), headers.get("x-api-key"))
            if not self._keys.allows(given):
                what = "wrong" if given else "missing"
                error = Unauthorized(f"the API key is {what}: send it as 'Authorization: Bearer KEY'")
                await _error(error, scope["path"])(scope, receive, send)
                return
        await self._app(scope, receive, send)


async def _http_error(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, HTTPException)
    path = request.url.path
    if exc.status_code == 405:
        return _error(WrongMethod(f"{request.method} is not allowed on {path}"), path, headers=exc.headers)
    if exc.status_code == 404:
        return _error(NoRoute(f"there is no {path} here"), path)
    return _error(OctavoError(str(exc.detail)), path, exc.status_code, exc.headers)


async def _fault(request: Request, exc: Exception) -> Response:
    """Anything else is our own fault; the server logs it, and closes the connection afterwards."""
    fault = OctavoError("the router failed on this request")
    return _error(fault, request.url.path, headers={"connection": "close"})


def _error(
    error: OctavoError,
    path: str = "",
    status: int | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    return _json(error_body(error, path), status or error.status, {**(headers or {}), **error_headers(error)})


def _json(body: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, headers, media_type="application/json")
