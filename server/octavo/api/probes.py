"""Health from the engine's own heartbeat, metrics, version and load: routes that never touch a request's
data.
"""

from __future__ import annotations

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from octavo import __version__
from octavo.api.service import STARTING_RETRY_S, Service

READ = ["GET", "HEAD"]  # the methods of what is only read: clients and balancers probe with HEAD


def json_response(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")


def probe_routes(service: Service) -> APIRouter:
    """``/health /ping /live /ready /startup`` answer 200 or 503 with state, stage, detail and error."""
    routes = APIRouter()

    def probe(healthy: bool) -> Response:
        headers = None if healthy else {"Retry-After": str(STARTING_RETRY_S)}
        return json_response(service.describe(), 200 if healthy else 503, headers)

    @routes.api_route("/health", methods=READ)
    @routes.api_route("/ping", methods=[*READ, "POST"])
    async def health() -> Response:
        """Requests can be answered now."""
        return probe(service.state in ("ready", "draining"))

    @routes.api_route("/live", methods=READ)
    async def live() -> Response:
        """A restart would not help: the engine lives, or is still starting."""
        return probe(service.state not in ("stalled", "dead"))

    @routes.api_route("/ready", methods=READ)
    async def ready() -> Response:
        """New requests should be sent here."""
        return probe(service.state == "ready" and not service.draining)

    @routes.api_route("/startup", methods=READ)
    async def startup() -> Response:
        """The engine has been ready once."""
        return probe(service.started and service.state != "dead")

    @routes.api_route("/version", methods=READ)
    async def version() -> Response:
        return json_response({"version": __version__})

    @routes.api_route("/load", methods=READ)
    async def load() -> Response:
        """What the router reads of an engine, and their sum under the name that others know."""
        load = service.load()
        return json_response({**load, "server_load": load["running"] + load["waiting"]})

    @routes.api_route("/metrics", methods=READ)
    async def metrics() -> Response:
        text = await service.metrics_text()
        return Response(text, headers={"Content-Type": service.metrics.content_type})

    return routes
