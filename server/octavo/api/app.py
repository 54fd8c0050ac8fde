"""The two HTTP applications of an engine: the public one and the private one."""

from __future__ import annotations

import os
from collections.abc import Callable

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp

from octavo import __version__
from octavo.api.edge import OPEN_PATHS, Edge
from octavo.api.errors import on_fault, on_http_exception, on_octavo_error
from octavo.api.openai_routes import openai_routes
from octavo.api.page import page_routes
from octavo.api.private_routes import private_routes
from octavo.api.probes import probe_routes
from octavo.api.service import Service
from octavo.api.tokenize_routes import tokenize_routes
from octavo.api_keys import ApiKeys
from octavo.errors import OctavoError

PRIVATE_KEY_ENV = "OCTAVO_PRIVATE_KEY"  # what the router and the operator send to the private port


def public_app(service: Service) -> ASGIApp:
    """Raises ``ConfigError`` when the folder of keys does not exist."""
    app = _app()
    for routes in (probe_routes, openai_routes, tokenize_routes):
        app.include_router(routes(service))
    app.include_router(page_routes())
    return Edge(app, service, ApiKeys(service.config.api_key, service.config.api_key_dir), OPEN_PATHS)


def private_app(service: Service, drain: Callable[[], None]) -> ASGIApp:
    app = _app()
    app.include_router(private_routes(service, drain))
    key = os.environ.get(PRIVATE_KEY_ENV)
    return Edge(app, service, ApiKeys((key,) if key else ()), frozenset())


def _app() -> FastAPI:
    app = FastAPI(title="Octavo", version=__version__, openapi_url=None, redirect_slashes=False)
    app.add_exception_handler(OctavoError, on_octavo_error)
    app.add_exception_handler(HTTPException, on_http_exception)
    app.add_exception_handler(Exception, on_fault)
    return app
