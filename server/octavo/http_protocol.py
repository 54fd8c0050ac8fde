"""uvicorn's HTTP on one connection, as engines and the router want it where uvicorn leaves things open."""

from __future__ import annotations

import asyncio
from typing import Any

import httptools
import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from octavo.errors import InvalidRequest, error_body

LONGEST_HEAD = 1 << 18  # bytes; servers and proxies take 8 to 64 KiB, and a read brings up to 256 KiB at once
LONGEST_HEAD_S = 60.0  # until the head of a request is whole
LEAST_BODY = 1 << 10  # bytes of a body that is not whole, in each LEAST_BODY_S: the slowest line brings more
LEAST_BODY_S = 60.0


class HttpProtocol(HttpToolsProtocol):
    """What is not HTTP is told so as everything else is. So is a head without end, which the parser would
    keep in memory, and a head or body that comes too slowly. (A body's size is bounded where it is read.)
    """

    _unread = 0  # bytes that came since the last head or piece of a body was whole
    _head_due: asyncio.TimerHandle | None = None
    _came = 0  # bytes of the body, in this LEAST_BODY_S
    _body_due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect_no_head()
        self._expect_no_body()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unread += len(data)
        self._unset_keepalive_if_required()
        self._parse(data)
        if self._unread > LONGEST_HEAD and not self.transport.is_closing():
            error = InvalidRequest(
                f"the request's line and headers are longer than {LONGEST_HEAD} bytes", code="head_too_large"
            )
            self._refuse(b"431 Request Header Fields Too Large", error)
        elif self._unread and self._head_due is None:
            self._expect_head()

    def _parse(self, data: bytes) -> None:
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserError:
                message = "Invalid HTTP request received."
                self.logger.warning(message)
                self.send_400_response(message)
                return
            except httptools.HttpParserUpgrade as end:
                data = data[end.args[0] :]
                if self._wants_upgrade():
                    data = self._head_without_upgrade() + data
                    self.parser = httptools.HttpRequestParser(self)  # as uvicorn makes it
                    self.parser.set_dangerous_leniencies(lenient_data_after_close=True)

    def _wants_upgrade(self) -> bool:
        """Whether the head asks for another protocol (a websocket, HTTP/2). There is none, and it may be
        ignored, but the parser takes the body for that protocol's: so what it calls a request counts for
        nothing, and another is given the head without the wish, and what follows it.
        """
        return self.parser.should_upgrade() and any(name == b"upgrade" for name, _ in self.headers)

    def _head_without_upgrade(self) -> bytes:
        version = self.parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version)]
        lines += [b"%s: %s" % header for header in self.headers if header[0] != b"upgrade"]
        return b"\r\n".join([*lines, b"\r\n"])

    def on_message_begin(self) -> None:
        self._unread = self._unread or 1  # it may begin in the data that another ends in
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        if self._wants_upgrade():
            return
        self._unread = 0
        self._expect_no_head()
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0":  # uvicorn made the cycle, of its own class; it has not begun
            self.cycle.__class__ = _UntilClosed
        self._expect_body()

    def on_body(self, body: bytes) -> None:
        self._unread = 0
        self._came += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._wants_upgrade():
            return
        self._unread = 0
        self._expect_no_body()
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(b"400 Bad Request", InvalidRequest(msg, code="invalid_http"))

    def _expect_head(self) -> None:
        self._head_due = self.loop.call_later(LONGEST_HEAD_S, self._head_is_late)

    def _expect_no_head(self) -> None:
        if self._head_due is not None:
            self._head_due.cancel()
            self._head_due = None

    def _head_is_late(self) -> None:
        self._head_due = None
        if self.cycle is not None and not self.cycle.response_complete:  # first the answer that is under way
            self._expect_head()
        elif self._unread:
            error = InvalidRequest(
                f"the request's line and headers took longer than {LONGEST_HEAD_S:g} s", code="head_too_slow"
            )
            self._refuse(b"408 Request Timeout", error)
        elif self.cycle is None:  # nothing was asked; after an answer uvicorn counts the idle time
            self.transport.close()

    def _expect_body(self) -> None:
        self._came = 0
        self._body_due = self.loop.call_later(LEAST_BODY_S, self._body_is_late, self._holds_back())

    def _expect_no_body(self) -> None:
        if self._body_due is not None:
            self._body_due.cancel()
            self._body_due = None

    def _holds_back(self) -> bool:
        """Whether it is we who do not read, as while an answer before this one is under way."""
        return self.flow.read_paused or bool(self.pipeline)

    def _body_is_late(self, held_back: bool) -> None:
        self._body_due = None
        if self._came >= LEAST_BODY or held_back or self._holds_back():
            self._expect_body()
        elif self.cycle.response_started:
            self.transport.close()
        else:
            error = InvalidRequest(
                f"less than {LEAST_BODY} bytes of the body came in {LEAST_BODY_S:g} s", code="body_too_slow"
            )
            self._refuse(b"408 Request Timeout", error)

    def _refuse(self, status: bytes, error: InvalidRequest) -> None:
        body = msgspec.json.encode(error_body(error))
        head = b"HTTP/1.1 %s\r\ncontent-type: application/json\r\nconnection: close\r\n" % status
        self.transport.write(b"%scontent-length: %d\r\n\r\n%s" % (head, len(body), body))
        self.transport.close()


class _UntilClosed(RequestResponseCycle):
    """An answer to HTTP/1.0, which knows no chunks: a stream ends where the connection does."""

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.chunked_encoding = False
        else:  # uvicorn holds each piece to the length that is left
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)
