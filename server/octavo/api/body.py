"""Read the JSON body of a request: its size is bounded, its type and form are checked, wrong ones are
named.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
from starlette.requests import Request

from octavo.api.errors import BodyTooLarge, UnsupportedMediaType
from octavo.errors import InvalidRequest

# half of a pair: of it msgspec says only that the data end there, or are malformed
_HALF_PAIR = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])")


async def read_body(request: Request) -> bytes:
    """The raw body, of at most ``max_request_body`` bytes. Raises ``UnsupportedMediaType`` or
    ``BodyTooLarge``, the latter before all of it was read.

    As much again of a body that is too large is still taken in and thrown away: a client that writes all
    before it reads would otherwise find its connection reset, and no answer.
    """
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise UnsupportedMediaType(
            f"the body's content type is {kind!r}: send JSON with the header Content-Type: application/json"
        )
    if (encoding := request.headers.get("content-encoding", "identity")) != "identity":
        raise UnsupportedMediaType(f"the body's content encoding is {encoding!r}: send it uncompressed")
    most: int = request.app.state.max_request_body
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > 2 * most:
        raise _too_large(most)
    body, size = bytearray(), 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > 2 * most:
            break
        if size <= most:
            body += chunk
    if size > most:
        raise _too_large(most)
    return bytes(body)


def _too_large(most: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body is too large: at most {most} bytes are read (max-request-body)")


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object in ``body``. NaN, lone surrogates and nesting without end are not JSON that we read."""
    try:
        value = msgspec.json.decode(body)
    except RecursionError as error:
        raise InvalidRequest("the body is nested too deeply", code="invalid_json") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        why = "half of a \\ud800-\\udfff pair is no character" if _HALF_PAIR.search(body) else error
        raise InvalidRequest(f"the body is not valid JSON: {why}", code="invalid_json") from error
    if not isinstance(value, dict):
        raise InvalidRequest("the body must be a JSON object", code="invalid_json")
    return value
