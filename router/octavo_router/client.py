"""The client's side of an answer over ASGI."""

from __future__ import annotations

import logging

import msgspec
from starlette.types import Send

from octavo.errors import OctavoError, error_body
from octavo_router.envelope import error_event, error_headers
from octavo_router.relay import Answer, client_headers

log = logging.getLogger(__name__)


class Client:
    """The client's side of an answer: what has been sent, and how to end it well."""

    def __init__(self, send: Send, request_id: str, path: str) -> None:
        self._send = send
        self._path = path
        self._id = request_id
        self.status = 0
        self.resumable = False  # a stream that may still be told of an error

    async def begin(self, answer: Answer, extra: dict[str, str]) -> None:
        """Status and headers."""
        self.status = answer.status
        headers = client_headers(answer, {**extra, "x-request-id": self._id})
        await self._send({"type": "http.response.start", "status": answer.status, "headers": headers})

    async def chunk(self, data: bytes) -> None:
        """Some bytes, at once."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        """No more bytes."""
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def whole(self, answer: Answer, extra: dict[str, str]) -> None:
        """An answer that is already here."""
        await self.begin(answer, extra)
        await self._send({"type": "http.response.body", "body": answer.first, "more_body": False})

    async def fail(self, error: OctavoError) -> None:
        """The error envelope; in a stream that has begun, its last event. Else the connection is cut by the
        server.
        """
        if self.status == 0:
            body = msgspec.json.encode(error_body(error, self._path))
            self.status = error.status
            named = {"content-type": "application/json", "content-length": str(len(body))}
            named |= error_headers(error) | {"x-request-id": self._id}
            headers = [(n.encode(), v.encode("latin-1")) for n, v in named.items()]
            await self._send({"type": "http.response.start", "status": error.status, "headers": headers})
            await self._send({"type": "http.response.body", "body": body, "more_body": False})
        elif self.resumable:
            await self.chunk(error_event(error, self._path))
            await self.end()
        else:
            # Ending without the last chunk makes the server close the connection: the client sees a broken
            # answer, not a short one.
            log.warning("request %s was cut: %s", self._id, error)
