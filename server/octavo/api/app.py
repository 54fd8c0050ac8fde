"""The two HTTP applications of an engine: the public one and the private one."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp

from octavo import __version__
from octavo.api.edge import OPEN_PATHS, Edge
from octavo.api.errors import on_fault, on_http_exception, on_octavo_error
from octavo.api.messages_routes import messages_routes
from octavo.api.openai_routes import openai_routes
from octavo.api.openapi import openapi_routes
from octavo.api.page import page_routes
from octavo.api.private_routes import private_routes
from octavo.api.probes import probe_routes
from octavo.api.responses_routes import responses_routes
from octavo.api.service import Service
from octavo.api.sse import ClientGone, on_client_gone
from octavo.api.tokenize_routes import tokenize_routes
from octavo.api_keys import ApiKeys, read_key_file
from octavo.config import EngineConfig
from octavo.errors import ConfigError, OctavoError

API_KEY_ENV = "OCTAVO_API_KEY"  # one more key that clients may send
PRIVATE_KEY_ENV = "OCTAVO_PRIVATE_KEY"  # what the router and the operator send to the private port


def public_app(service: Service) -> ASGIApp:
    """Raises ``ConfigError`` when the keys cannot be read."""
    config = service.config
    app = _app(service)
    for routes in (probe_routes, openai_routes, responses_routes, messages_routes, tokenize_routes):
        app.include_router(routes(service))
    app.include_router(page_routes())
    app.include_router(openapi_routes(config))
    edge = Edge(app, service, client_keys(config), OPEN_PATHS, config.root_path)
    if not config.allowed_origins:
        return edge
    return CORSMiddleware(  # outside: a browser asks without a key first
        edge,
        allow_origins=config.allowed_origins,
        allow_methods=config.allowed_methods,
        allow_headers=config.allowed_headers,
        allow_credentials=config.allow_credentials,
        expose_headers=("x-request-id", "x-octavo-load", "retry-after"),
    )


def client_keys(config: EngineConfig) -> ApiKeys:
    """Those of the flags, of the files, and of the environment."""
    keys = config.api_key
    if config.api_key_file is not None:
        keys += read_key_file(config.api_key_file)
    if (from_environment := os.environ.get(API_KEY_ENV)) is not None:
        if not from_environment.strip():
            raise ConfigError(f"{API_KEY_ENV} is empty in the environment: give the key, or unset it")
        keys += (from_environment,)
    return ApiKeys(keys, config.api_key_dir)


def private_app(service: Service, drain: Callable[[], Awaitable[None]]) -> ASGIApp:
    app = _app(service)
    app.include_router(private_routes(service, drain))
    key = os.environ.get(PRIVATE_KEY_ENV)
    return Edge(app, service, ApiKeys((key,) if key else ()), frozenset())


def _app(service: Service) -> FastAPI:
    app = FastAPI(title="Octavo", version=__version__, openapi_url=None, redirect_slashes=False)
    app.state.max_request_body = service.config.max_request_body
    app.add_exception_handler(OctavoError, on_octavo_error)
    for gone in (ClientGone, ClientDisconnect):  # before its answer, or amid its body
        app.add_exception_handler(gone, on_client_gone)
    app.add_exception_handler(HTTPException, on_http_exception)
    app.add_exception_handler(Exception, on_fault)
    return app
