"""The errors that a caller can act on: what was wrong, the value, what is allowed, what to do.

The API turns each into the OpenAI error envelope with the status and code of its class; the command line
prints the message as one line.
"""

from __future__ import annotations

from typing import Any


class OctavoError(Exception):
    """Base of every error whose message is meant for the person who caused it."""

    status = 500
    type = "server_error"
    code = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code


class InvalidRequest(OctavoError):
    """A field of a request is of the wrong type, out of range, or not supported."""

    status = 400
    type = "invalid_request_error"
    code = "invalid_value"


class ContextLengthExceeded(InvalidRequest):
    """Prompt plus output can never fit the model's length or the whole KV cache."""

    code = "context_length_exceeded"


class ModelNotFound(OctavoError):
    """The request names a model that is not served here."""

    status = 404
    type = "invalid_request_error"
    code = "model_not_found"


class ResponseNotFound(OctavoError):
    """No such response is kept here."""

    status = 404
    type = "invalid_request_error"
    code = "response_not_found"


class QueueFull(OctavoError):
    """The waiting queue is at its bound; come back after ``retry_after_s`` seconds."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineExceeded(QueueFull):
    """The request could not start before its deadline; come back after ``retry_after_s`` seconds."""

    code = "deadline_exceeded"


class SlowReader(OctavoError):
    """A client reads its stream so slowly that too much waits for it; the request was ended."""

    status = 408
    type = "invalid_request_error"
    code = "slow_reader"


class Unavailable(OctavoError):
    """Loading, draining or dead: another replica, or a later try, can answer."""

    status = 503
    type = "service_unavailable_error"
    code = "service_unavailable"

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ConfigError(OctavoError):
    """A flag, setting or manifest that cannot be used; ends the start with one line."""

    code = "invalid_config"


class ModelLoadError(OctavoError):
    """The model cannot be found, fetched or read."""

    code = "model_load_failed"


_ANTHROPIC_PATH = "/v1/messages"
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_body(error: OctavoError, path: str = "") -> dict[str, Any]:
    """The one envelope, ``{"error": {"message", "type", "param", "code"}}``; for requests to Anthropic's
    routes theirs, ``{"type": "error", "error": {"type", "message"}}``, with a type for each status.
    """
    if path != _ANTHROPIC_PATH and not path.startswith(_ANTHROPIC_PATH + "/"):
        body = {"message": error.message, "type": error.type, "param": error.param, "code": error.code}
        return {"error": body}
    kind = _ANTHROPIC_TYPES.get(error.status, "invalid_request_error")
    named = error.param is None or error.param in error.message
    message = error.message if named else f"{error.param}: {error.message}"
    return {"type": "error", "error": {"type": kind, "message": message}}
