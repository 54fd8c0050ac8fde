"""Read the JSON body of a request: its size is bounded, its type and form are checked, wrong ones are
named.
"""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request

from octavo.api.errors import BodyTooLarge, UnsupportedMediaType
from octavo.errors import InvalidRequest

MAX_BODY_BYTES = 32 * 2**20  # a prompt of a million token ids fits four times
# So much of a body that is too large is still taken in and thrown away: a client that writes all before it
# reads would otherwise find its connection reset, and no answer.
LINGER_BYTES = MAX_BODY_BYTES


async def read_body(request: Request) -> bytes:
    """The raw body. Raises ``UnsupportedMediaType`` or ``BodyTooLarge``, the latter before all of it was
    read.
    """
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise UnsupportedMediaType(
            f"the body's content type is {kind!r}: send JSON with the header Content-Type: application/json"
        )
    if (encoding := request.headers.get("content-encoding", "identity")) != "identity":
        raise UnsupportedMediaType(f"the body's content encoding is {encoding!r}: send it uncompressed")
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > MAX_BODY_BYTES + LINGER_BYTES:
        raise _too_large()
    body, size = bytearray(), 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > MAX_BODY_BYTES + LINGER_BYTES:
            break
        if size <= MAX_BODY_BYTES:
            body += chunk
    if size > MAX_BODY_BYTES:
        raise _too_large()
    return bytes(body)


def _too_large() -> BodyTooLarge:
    return BodyTooLarge(f"the body is too large: at most {MAX_BODY_BYTES} bytes are read")


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object in ``body``. NaN, lone surrogates and nesting without end are not JSON that we read."""
    try:
        value = msgspec.json.decode(body)
    except RecursionError as error:
        raise InvalidRequest("the body is nested too deeply", code="invalid_json") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(value, dict):
        raise InvalidRequest("the body must be a JSON object", code="invalid_json")
    return value
