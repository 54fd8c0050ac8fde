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


async def read_body(request: Request) -> bytes:
    """The raw body. Raises ``UnsupportedMediaType`` or ``BodyTooLarge``, the latter before all of it was
    read.
    """
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise UnsupportedMediaType(
            f"the body's content type is {kind!r}: send JSON with the header Content-Type: application/json"
        )
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > MAX_BODY_BYTES:
        raise BodyTooLarge(f"the body has {declared} bytes: at most {MAX_BODY_BYTES} are read")
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise BodyTooLarge(f"the body has more than {MAX_BODY_BYTES} bytes")
    return bytes(body)


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
