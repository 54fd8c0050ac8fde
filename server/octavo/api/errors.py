"""One envelope for every error: ``{"error": {"message", "type", "param", "code"}}`` with the status of its
class.
"""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import InvalidRequest, OctavoError


class Unauthorized(OctavoError):
    """No key was sent, or one that is not known."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class NotFound(OctavoError):
    """No such route."""

    status = 404
    type = "invalid_request_error"
    code = "not_found"


class MethodNotAllowed(OctavoError):
    """The route exists, for another method."""

    status = 405
    type = "invalid_request_error"
    code = "method_not_allowed"


class BodyTooLarge(OctavoError):
    """The body is over the limit; it was not read to its end."""

    status = 413
    type = "invalid_request_error"
    code = "request_too_large"


class UnsupportedMediaType(OctavoError):
    """The body is said not to be JSON."""

    status = 415
    type = "invalid_request_error"
    code = "unsupported_media_type"


class InternalFault(OctavoError):
    """A fault of ours. It ends this request alone, and is counted."""


def envelope(error: OctavoError) -> dict[str, Any]:
    """The JSON object that clients get."""
    body = {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
    return {"error": body}


def error_response(error: OctavoError, headers: dict[str, str] | None = None) -> Response:
    """The whole answer to a request that failed before its answer began."""
    headers = dict(headers or {})
    if (retry := getattr(error, "retry_after_s", None)) is not None:
        headers["Retry-After"] = str(retry)
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if error.status == 413:
        headers["Connection"] = "close"  # the rest of the body will not be read
    return Response(
        msgspec.json.encode(envelope(error)), error.status, headers, media_type="application/json"
    )


async def on_octavo_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, OctavoError)
    return error_response(error)


async def on_fault(_request: Request, _error: Exception) -> Response:
    """Anything else is our fault; the edge logs and counts it."""
    return error_response(InternalFault("the server failed on this request"))


async def on_http_exception(request: Request, error: Exception) -> Response:
    """What the framework itself refuses: unknown routes and methods."""
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path}"
    headers = dict(error.headers or {})
    if error.status_code == 404:
        return error_response(NotFound(f"there is no route {where}"), headers)
    if error.status_code == 405:
        allowed = headers.get("Allow", "another method")
        return error_response(MethodNotAllowed(f"{where} is not allowed: use {allowed}"), headers)
    wrong = InvalidRequest(str(error.detail))
    wrong.status = error.status_code
    return error_response(wrong, headers)
