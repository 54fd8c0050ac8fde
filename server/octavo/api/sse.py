"""Server-sent events: framing, errors after the headers, and a client that leaves."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.api.errors import InternalFault
from octavo.errors import OctavoError, error_body

DONE = b"data: [DONE]\n\n"  # how streams of OpenAI's older routes end
KEEP_ALIVE = b": keep-alive\n\n"  # a comment: clients pass over it
KEEP_ALIVE_S = 15.0  # silence after which one is sent; proxies often end a connection after 30 or 60
# JSON allows these, but many clients split what they read by Python's ``splitlines``: it ends a line there.
_LINE_ENDS = [(one.encode(), b"\\u%04x" % ord(one)) for one in "\u0085\u2028\u2029"]
CLIENT_CLOSED = 499  # nginx's status for a client that left; nobody reads it
T = TypeVar("T")
_log = logging.getLogger("octavo.api")
_encoder = msgspec.json.Encoder()


class ClientGone(Exception):
    """The client closed its connection before its answer began."""


async def on_client_gone(_request: Request, _error: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED)


def event(data: Any) -> bytes:
    """One event: ``data: {json}`` and an empty line."""
    said = _encoder.encode(data)
    for end, escaped in _LINE_ENDS:
        if end in said:
            said = said.replace(end, escaped)
    return b"data: " + said + b"\n\n"


def named_event(data: dict[str, Any]) -> bytes:
    """As ``event``, with its ``type`` as its name."""
    return b"event: " + str(data["type"]).encode() + b"\n" + event(data)


def _error_event(error: OctavoError) -> bytes:
    return event(error_body(error))


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, which is cancelled as soon as the client leaves (``ClientGone``). The body
    must be read.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        await _cancelled(task, gone)


class EventStream(Response):
    """An answer of events, an ASGI application. ``source`` is closed when it ends, and when the client
    leaves; then ``close`` is awaited, also where ``source`` never began.

    While ``source`` is silent comments keep the connection alive. A client that does not read holds up this
    stream alone: at 64 KiB in the socket's buffer ``source`` is read no further.

    An exception of ``source`` becomes an event (``failed`` makes it); ``done`` always comes last.
    """

    def __init__(
        self,
        source: AsyncGenerator[bytes, None],
        close: Callable[[], Awaitable[None]],
        failed: Callable[[OctavoError], bytes] = _error_event,
        done: bytes = DONE,
    ) -> None:
        self._source = source
        self._close = close
        self._failed = failed
        self._done = done
        self.status_code = 200
        self.background = None
        self._written = 0
        self._held_up = True  # a write is not over, of the headers first

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
        writing = asyncio.ensure_future(self._write(send, [*headers, (b"x-accel-buffering", b"no")]))
        gone = asyncio.ensure_future(_gone(receive))
        try:
            while not (writing.done() or gone.done()):
                before = self._written
                first = asyncio.FIRST_COMPLETED
                done, _ = await asyncio.wait({writing, gone}, timeout=KEEP_ALIVE_S, return_when=first)
                if not done and self._written == before and not self._held_up:
                    await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})
            if writing.done():
                writing.result()
        finally:
            await _cancelled(writing, gone)
            await self._source.aclose()
            await self._close()

    async def _write(self, send: Send, headers: list[tuple[bytes, bytes]]) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        self._held_up = False
        try:
            async for data in self._source:
                self._held_up = True
                await send({"type": "http.response.body", "body": data, "more_body": True})
                self._held_up = False
                self._written += 1
        except OctavoError as error:
            if isinstance(error, InternalFault):
                _log.error("a stream ended with a fault: %s", error.message)
            await send({"type": "http.response.body", "body": self._failed(error), "more_body": True})
        except Exception:  # the headers are out: the client can only be told by an event
            _log.exception("a stream ended with an unexpected fault")
            fault = InternalFault("the server failed on this request")
            await send({"type": "http.response.body", "body": self._failed(fault), "more_body": True})
        await send({"type": "http.response.body", "body": self._done, "more_body": False})


async def _gone(receive: Receive) -> None:
    """Return when the connection is closed."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancelled(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    for task in tasks:
        with contextlib.suppress(asyncio.CancelledError, Exception):  # its own outcome was looked at before
            await task
