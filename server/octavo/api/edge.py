"""The outermost layer of an HTTP application: keys, request ids, the load header, faults, and the count of
answers.
"""

from __future__ import annotations

import logging
import time
import uuid

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.api.errors import InternalFault, Unauthorized, error_response
from octavo.api.generation import Generation
from octavo.api.requests import LONGEST_REQUEST_ID
from octavo.api.service import Service
from octavo.api_keys import ApiKeys, sent_key

OPEN_PATHS = frozenset(["/", "/health", "/live", "/ready", "/startup", "/ping", "/metrics"])
_KEY_HEADERS = (b"authorization", b"x-api-key")
_log = logging.getLogger("octavo.api")
_access_log = logging.getLogger("octavo.access")
_encoder = msgspec.json.Encoder()


class Edge:
    """Wraps an application. Without a key every path but ``open_paths`` is denied, whatever route it may
    be.
    """

    def __init__(
        self,
        app: ASGIApp,
        service: Service,
        keys: ApiKeys,
        open_paths: frozenset[str],
        root_path: str = "",
    ) -> None:
        """``root_path``: a prefix that a path may have, and is taken off."""
        self.app = app
        self._root_path = root_path
        self._service = service
        self._keys = keys
        self._open = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if self._root_path and scope["path"].startswith(self._root_path + "/"):
            scope = {**scope, "path": scope["path"].removeprefix(self._root_path)}
        began, status = time.monotonic(), 0
        headers = {name.lower(): value for name, value in scope["headers"]}
        request_id = _request_id(headers.get(b"x-request-id"))
        scope.setdefault("state", {})["request_id"] = request_id

        self._service.open[id(scope)] = scope["state"]

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", []), *self._extra_headers(request_id)]
            await send(message)

        try:
            sent = sent_key(*(headers.get(name, b"").decode("latin-1") for name in _KEY_HEADERS))
            if scope["path"] not in self._open and not self._keys.allows(sent):
                why = "the API key is not known" if sent else "an API key is needed"
                raise Unauthorized(f"{why}: send the header Authorization: Bearer KEY")
            scope["state"]["key"] = self._keys.name(sent)
            await self.app(scope, receive, answer)
        except Unauthorized as error:
            await error_response(error, scope["path"])(scope, receive, answer)
        except Exception:
            self._service.metrics.internal_errors.inc()
            _log.exception("%s %s failed (request %s)", scope["method"], scope["path"], request_id)
            if not status:
                fault = InternalFault("the server failed on this request")
                await error_response(fault, scope["path"])(scope, receive, answer)
        finally:
            del self._service.open[id(scope)]
            self._count(scope, status, time.monotonic() - began, request_id)

    def _extra_headers(self, request_id: str) -> list[tuple[bytes, bytes]]:
        headers = [(b"x-octavo-load", _encoder.encode(self._service.load()))]
        if self._service.config.enable_request_id_headers:
            headers.append((b"x-request-id", request_id.encode("latin-1")))
        if self._service.draining:  # connections that are kept open go elsewhere
            headers.append((b"connection", b"close"))
        return headers

    def _count(self, scope: Scope, status: int, seconds: float, request_id: str) -> None:
        route = scope.get("route")
        path = getattr(route, "path", "unknown")
        self._service.metrics.http.labels(scope["method"], path, str(status or "closed")).inc()
        generation: Generation | None = scope["state"].get("generation")
        if self._service.tracing is not None and generation is not None:
            now, told = time.time(), generation.summary()
            known = {name: value for name, value in told.items() if value is not None}
            self._service.tracing.request(
                dict(scope["headers"]),
                f"{scope['method']} {path}",
                now - seconds,
                now,
                generation.times,
                {"request_id": request_id, "status": status, **known},
            )
        level = logging.DEBUG if scope["path"] in self._open else logging.INFO
        if self._service.config.access_log and _access_log.isEnabledFor(level):
            line = {
                "time": time.time(),
                "request_id": request_id,
                "method": scope["method"],
                "path": scope["path"],
                "status": status or None,  # none: the client left before its answer
                "seconds": round(seconds, 4),
                **(generation.summary() if generation is not None else {}),
            }
            _access_log.log(level, _encoder.encode(line).decode())


def _request_id(sent: bytes | None) -> str:
    """The client's own, if it can stand in a header; else a new one."""
    if sent:
        text = sent.decode("latin-1")
        if len(text) <= LONGEST_REQUEST_ID and text.isascii() and text.isprintable():
            return text
    return uuid.uuid4().hex
