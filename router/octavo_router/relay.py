"""Bytes of one attempt: open it upstream up to its first byte, then hand it on chunk by chunk."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import dataclass

import aiohttp
import msgspec
from yarl import URL

from octavo_router.engine import Engine

# Meant for one connection only (RFC 9110, 7.6.1); whatever ``Connection`` names is dropped too.
HOP_BY_HOP = frozenset(
    (
        b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection",
        b"te", b"trailer", b"transfer-encoding", b"upgrade",
    )
)  # fmt: skip
# Set anew on the way to the engine.
_REPLACED = frozenset((b"host", b"content-length", b"expect", b"x-request-id"))
# An answer that is not a stream and not larger is taken in whole before a byte of it is passed on, so that an
# engine that dies while it writes can still be replaced.
WHOLE_ANSWER_BYTES = 2**20
CACHED_COMMENT = b": cached_tokens "  # of server-sent events, with a number; clients skip comments
# The end of a stream in which its usage is looked for.
_TAIL_BYTES = 8192
# How long a request waits for a silent engine when there is no other.
LAST_CHANCE_S = 5.0
# Seconds to connect: engines are near.
CONNECT_TIMEOUT_S = 2.0


class Failed(Exception):
    """The attempt gave nothing to pass on: another engine may be tried. ``reason`` is a metric label."""

    def __init__(self, reason: str, message: str, answer: Answer | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.answer = answer


@dataclass
class Answer:
    """An answer up to its first byte. ``response`` is None when ``first`` is all of it."""

    status: int
    headers: list[tuple[bytes, bytes]]
    first: bytes
    response: aiohttp.ClientResponse | None
    load: str | None

    @property
    def is_stream(self) -> bool:
        """Server-sent events."""
        return any(
            n.lower() == b"content-type" and v.startswith(b"text/event-stream") for n, v in self.headers
        )

    async def rest(self) -> AsyncIterator[bytes]:
        """The chunks after the first, as they come. Raises ``aiohttp.ClientError`` when the engine breaks
        off.
        """
        if self.response is not None:
            async for chunk in self.response.content.iter_any():
                yield chunk

    def close(self) -> None:
        """Let go of the connection: back to the pool when the answer was read to its end, else closed."""
        if self.response is not None:
            if self.response.content.at_eof():
                self.response.release()
            else:
                self.response.close()


def request_headers(headers: Iterable[tuple[bytes, bytes]], request_id: str) -> list[tuple[str, str]]:
    """What goes on to the engine: all but hop-by-hop headers, with the request's id. ``x-octavo-router`` asks
    it to end every stream with ``CACHED_COMMENT``.
    """
    kept = [(n.decode("latin-1"), v.decode("latin-1")) for n, v in end_to_end(headers) if n not in _REPLACED]
    return [*kept, ("x-request-id", request_id), ("x-octavo-router", "1")]


def end_to_end(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """The headers without those of this connection; names in lower case."""
    lowered = [(name.lower(), value) for name, value in headers]
    named = {
        token.strip().lower()
        for name, value in lowered
        if name == b"connection"
        for token in value.split(b",")
    }
    return [(n, v) for n, v in lowered if n not in HOP_BY_HOP and n not in named]


async def open_answer(
    session: aiohttp.ClientSession,
    engine: Engine,
    method: str,
    url: str,
    body: bytes,
    headers: list[tuple[str, str]],
    others: Callable[[], bool],
) -> Answer:
    """Send the request and wait for the first byte of its answer, as long as the engine lives.

    An engine that falls silent may only be slow: while there are no ``others`` it gets LAST_CHANCE_S more.

    Raises ``Failed``: refused (nobody listens), reset (the connection broke), lost (the engine fell silent),
    busy (503 or 429; its answer is kept).
    """
    task = asyncio.create_task(_first_byte(session, method, url, body, headers))
    try:
        await asyncio.wait((task, engine.lost), return_when=asyncio.FIRST_COMPLETED)
        if not task.done() and not others():
            await asyncio.wait((task,), timeout=LAST_CHANCE_S)
    except asyncio.CancelledError:
        await _drop(task)
        raise
    if not task.done():
        await _drop(task)
        raise Failed("lost", f"{engine.name} fell silent: {engine.error}")
    try:
        answer = task.result()
    except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
        raise Failed("refused", f"{engine.name} cannot be reached: {error}") from error
    except (aiohttp.ClientError, OSError) as error:
        raise Failed("reset", f"{engine.name} broke off: {error or type(error).__name__}") from error
    if answer.status in (429, 503):
        if answer.response is not None:
            answer.close()
            raise Failed("busy", f"{engine.name} answered {answer.status}")
        raise Failed("busy", f"{engine.name} answered {answer.status}", answer)
    return answer


async def _drop(task: asyncio.Task[Answer]) -> None:
    """End an attempt nobody waits for any more; its connection closes, which tells the engine."""
    task.cancel()
    (result,) = await asyncio.gather(task, return_exceptions=True)
    if isinstance(result, Answer):
        result.close()


async def _first_byte(
    session: aiohttp.ClientSession, method: str, url: str, body: bytes, headers: list[tuple[str, str]]
) -> Answer:
    response = await session.request(
        method, URL(url, encoded=True), data=body, headers=headers, allow_redirects=False
    )
    try:
        is_stream = response.headers.get("content-type", "").startswith("text/event-stream")
        length = response.content_length
        if not is_stream and length is not None and length <= WHOLE_ANSWER_BYTES:
            first = await response.read()
            rest: aiohttp.ClientResponse | None = None
        else:
            first = await response.content.readany()
            while is_stream and says_nothing_yet(first) and (more := await response.content.readany()):
                first += more
            rest = response
    except BaseException:
        response.close()
        raise
    kept = end_to_end(response.raw_headers)
    return Answer(response.status, kept, first, rest, response.headers.get("x-octavo-load"))


_BEGINNINGS = tuple(
    f"event: {name}\n".encode()
    for name in ("response.created", "response.in_progress", "message_start", "ping")
)


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice]


def says_nothing_yet(data: bytes) -> bool:
    """True for whole events that hold a role and no text, or tell that an answer begins.

    An engine sends them as soon as it has taken a request, long before the first token of a queued one. They
    are held until the first token, which they precede anyway: until then another engine can still answer.
    """
    if not data.endswith(b"\n\n"):
        return False
    events = data[:-2].split(b"\n\n")
    if all(event.startswith(_BEGINNINGS) for event in events):
        return True
    if b'"role"' not in data:
        return False
    try:
        chunks = [msgspec.json.decode(event.removeprefix(b"data: "), type=_Chunk) for event in events]
    except msgspec.DecodeError:
        return False
    choices = [choice for chunk in chunks for choice in chunk.choices]
    return all(c.delta.role and not c.delta.content and c.finish_reason is None for c in choices)


class Tail:
    """The last bytes of an answer, for its usage; and whether an event has just ended."""

    def __init__(self) -> None:
        self._bytes = b""

    def push(self, chunk: bytes) -> None:
        """One more chunk went by."""
        self._bytes = (
            (self._bytes + chunk)[-_TAIL_BYTES:] if len(chunk) < _TAIL_BYTES else chunk[-_TAIL_BYTES:]
        )

    @property
    def between_events(self) -> bool:
        """True when an event may be added without cutting another in two."""
        return not self._bytes or self._bytes.endswith((b"\n\n", b"\r\n\r\n"))

    def cached_tokens(self) -> int | None:
        """What the engine found in its cache: its comment at the end of a stream, else a usage says it."""
        for event in reversed(self._bytes.split(b"\n\n")):
            if event.startswith(CACHED_COMMENT) and (count := event[len(CACHED_COMMENT) :]).isdigit():
                return int(count)
            if event.startswith(b"data: {") and b'"usage"' in event:
                return cached_tokens(event[len(b"data: ") :])
        return None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None  # of responses
    cache_read_input_tokens: int | None = None  # of Anthropic's messages


class _HasUsage(msgspec.Struct):
    usage: _Usage | None = None


def cached_tokens(body: bytes) -> int | None:
    """The cached tokens in the ``usage`` of a JSON answer, or None when it does not say."""
    try:
        answer = msgspec.json.decode(body, type=_HasUsage)
    except msgspec.DecodeError:
        return None
    if (usage := answer.usage) is None:
        return None
    details = usage.prompt_tokens_details or usage.input_tokens_details
    return details.cached_tokens if details else usage.cache_read_input_tokens


def client_headers(answer: Answer, extra: Mapping[str, str]) -> list[tuple[bytes, bytes]]:
    """What goes back to the client: the engine's headers, with the router's own in place of equal names."""
    own = [(n.encode("latin-1"), v.encode("latin-1")) for n, v in extra.items()]
    names = {name for name, _ in own}
    return [(n, v) for n, v in answer.headers if n not in names] + own
