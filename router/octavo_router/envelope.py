"""Errors of the router, and how clients get them in a stream that has begun."""

from __future__ import annotations

import msgspec

from octavo.errors import OctavoError, error_body


class MissingModel(OctavoError):
    """The body names no model: which engine should answer cannot be known."""

    status = 400
    type = "invalid_request_error"
    code = "missing_parameter"


class BadBody(OctavoError):
    """The body is not what the route takes."""

    status = 400
    type = "invalid_request_error"
    code = "invalid_json"


class WrongContentType(OctavoError):
    """The body is of a type that is not read here."""

    status = 415
    type = "invalid_request_error"
    code = "unsupported_media_type"


class BodyTooLarge(OctavoError):
    """The body is above the router's bound."""

    status = 413
    type = "invalid_request_error"
    code = "request_too_large"


class Unauthorized(OctavoError):
    """No key, or a wrong one."""

    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class NoRoute(OctavoError):
    """The router does not serve this path."""

    status = 404
    type = "invalid_request_error"
    code = "not_found"


class WrongMethod(OctavoError):
    """The path is served, but not with this method."""

    status = 405
    type = "invalid_request_error"
    code = "method_not_allowed"


def error_headers(error: OctavoError) -> dict[str, str]:
    """``Retry-After`` where to come back makes sense, ``Connection: close`` where the body was not read."""
    headers = {}
    if (after := getattr(error, "retry_after_s", None)) is not None:
        headers["retry-after"] = str(after)
    if isinstance(error, BodyTooLarge):
        headers["connection"] = "close"
    if isinstance(error, Unauthorized):
        headers["www-authenticate"] = "Bearer"
    return headers


def error_event(error: OctavoError, path: str) -> bytes:
    """The last events of a stream of ``path`` that broke: the error, and ``[DONE]`` where streams end so."""
    body = error_body(error, path)
    name = b"event: error\n" if body.get("type") == "error" else b""
    done = b"data: [DONE]\n\n" if path.endswith("completions") else b""
    return name + b"data: " + msgspec.json.encode(body) + b"\n\n" + done
