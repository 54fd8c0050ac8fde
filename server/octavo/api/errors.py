"""Errors as answers: the envelope of ``octavo.errors.error_body`` with the status of the error's class."""

from __future__ import annotations

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from octavo.core.outputs import EngineOutput
from octavo.errors import InvalidRequest, OctavoError, error_body


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


def error_of(output: EngineOutput) -> OctavoError:
    """Why an output ended with the reason "error"."""
    if output.refused:
        return InvalidRequest(f"the answer cannot go on: {output.error}")
    return InternalFault(f"the engine failed on this request: {output.error}")


def error_response(error: OctavoError, path: str, headers: dict[str, str] | None = None) -> Response:
    """The whole answer to a request to ``path`` that failed before its answer began."""
    headers = dict(headers or {})
    if (retry := getattr(error, "retry_after_s", None)) is not None:
        headers["Retry-After"] = str(retry)
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if error.status == 413:
        headers["Connection"] = "close"  # the rest of the body will not be read
    body = msgspec.json.encode(error_body(error, path))
    return Response(body, error.status, headers, media_type="application/json")


async def on_octavo_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, OctavoError)
    return error_response(error, request.url.path)


async def on_fault(request: Request, _error: Exception) -> Response:
    """Anything else is our fault; the edge logs and counts it."""
    return error_response(InternalFault("the server failed on this request"), request.url.path)


async def on_http_exception(request: Request, error: Exception) -> Response:
    """What the framework itself refuses: unknown routes and methods."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    where = f"{request.method} {path}"
    headers = dict(error.headers or {})
    if error.status_code == 404:
        return error_response(NotFound(f"there is no route {where}"), path, headers)
    if error.status_code == 405:
        allowed = headers.get("Allow", "another method")
        return error_response(MethodNotAllowed(f"{where} is not allowed: use {allowed}"), path, headers)
    wrong = InvalidRequest(str(error.detail))
    wrong.status = error.status_code
    return error_response(wrong, path, headers)
