"""Health from the engine's own heartbeat, metrics, version and load: routes that never touch a request's
data.
"""

from __future__ import annotations

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from octavo import __version__
from octavo.api.service import STARTING_RETRY_S, Service


def json_response(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")


def probe_routes(service: Service) -> APIRouter:
    """``/health /ping /live /ready /startup`` answer 200 or 503 with state, stage, detail and error."""
    routes = APIRouter()

    def probe(healthy: bool) -> Response:
        headers = None if healthy else {"Retry-After": str(STARTING_RETRY_S)}
        return json_response(service.describe(), 200 if healthy else 503, headers)

    @routes.get("/health")
    @routes.api_route("/ping", methods=["GET", "POST"])
    async def health() -> Response:
        """Requests can be answered now."""
        return probe(service.state in ("ready", "draining"))

    @routes.get("/live")
    async def live() -> Response:
        """A restart would not help: the engine lives, or is still starting."""
        return probe(service.state not in ("stalled", "dead"))

    @routes.get("/ready")
    async def ready() -> Response:
        """New requests should be sent here."""
        return probe(service.state == "ready" and not service.draining)

    @routes.get("/startup")
    async def startup() -> Response:
        """The engine has been ready once."""
        return probe(service.started and service.state != "dead")

    @routes.get("/version")
    async def version() -> Response:
        return json_response({"version": __version__})

    @routes.get("/load")
    async def load() -> Response:
        return json_response(service.load())

    @routes.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), headers={"Content-Type": service.metrics.content_type})

    return routes
