"""Requests of other APIs than OpenAI's completions: read as the chats they are, answered in their own way."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from octavo.api.body import parse_object
from octavo.api.fields import CHAT_FIELDS
from octavo.api.generation import Delta, Generation
from octavo.api.owner import answered, cached_tokens_comment, owned
from octavo.api.probes import json_response
from octavo.api.requests import ParsedRequest, off_loop, read_asked
from octavo.api.service import Service
from octavo.api.sse import EventStream, named_event, unless_gone
from octavo.errors import InvalidRequest, OctavoError
from octavo.prompt.dialect import Dialect, unsupported


class Answer(Protocol):
    """Makes events of deltas; the whole answer is what the events add up to."""

    def first(self) -> Iterator[dict[str, Any]]:
        """Events before any token."""

    def events(self, delta: Delta) -> Iterator[dict[str, Any]]:
        """Events of what is new."""

    def last(self, generation: Generation) -> Iterator[dict[str, Any]]:
        """Events at the end."""

    def failed(self, error: OctavoError) -> dict[str, Any]:
        """The event of an error."""

    def whole(self) -> dict[str, Any]:
        """The answer, once ``last`` has been consumed."""


class Translated:
    """A request, its body, and the chat that it is. ``raw_size`` in bytes."""

    def __init__(
        self, service: Service, request: Request, dialect: Dialect, raw_size: int, body: dict[str, Any]
    ) -> None:
        self.service, self.request, self.dialect = service, request, dialect
        self.raw_size, self.body = raw_size, body

    async def parse(self, chat: Callable[[dict[str, Any]], dict[str, Any]] | None = None) -> ParsedRequest:
        """Checked, rendered and tokenised; ``chat`` in place of the dialect's own. Errors name fields of the
        body.
        """
        make = chat or self.dialect.chat
        with self.named():
            parsed = await off_loop(
                self.raw_size, lambda: ParsedRequest(self.service, make(self.body), chat=True)
            )
            await parsed.compile(self.request)
        return parsed

    @contextlib.contextmanager
    def named(self, parsed: ParsedRequest | None = None) -> Iterator[None]:
        """What is wrong with the chat, or with what the engine was given of it, is raised as what is wrong
        with the body.
        """
        try:
            yield
        except InvalidRequest as error:
            asked = error if parsed is None else parsed.as_asked(error)
            raise self.dialect.as_asked(asked) from error


async def read_request(service: Service, request: Request, dialect: Dialect) -> Translated:
    """Read the body. Raises ``InvalidRequest`` for fields that only chats have; counts those nobody knows."""
    raw = await read_asked(service, request)
    body = await off_loop(len(raw), lambda: parse_object(raw))
    unknown = [name for name in body if name not in dialect.fields]
    for name in unknown:
        if name in CHAT_FIELDS and body[name] is not None:
            raise unsupported(name, body[name], "leave it out: it is a field of other routes")
    if unknown:
        service.metrics.ignored_fields.inc(len(unknown))
    return Translated(service, request, dialect, len(raw), body)


async def respond(
    asked: Translated, parsed: ParsedRequest, answer: Answer, done: Callable[[], None] = lambda: None
) -> Response:
    """Run it. ``done`` is called with the answer whole, or failed after its stream had begun."""
    request = asked.request
    generation = request.state.generation = parsed.generation()

    async def begin() -> Response:
        with asked.named(parsed):
            if parsed.stream:
                await unless_gone(request, generation.start(answer_first=True))
                events = _events(generation, answer, "x-octavo-router" in request.headers, done)
                return EventStream(events, generation.close, lambda error: _failed(answer, error, done), b"")
            await unless_gone(request, run(generation, answer))
            done()
            return json_response(answer.whole())

    return await answered(generation, begin())


async def run(generation: Generation, answer: Answer, started: bool = False) -> None:
    """From start to end without a stream."""
    async with owned(generation):
        if not started:
            await generation.start(answer_first=False)
        for _ in answer.first():
            pass
        async for delta in generation.deltas():
            for _ in answer.events(delta):
                pass
        for _ in answer.last(generation):
            pass


async def _events(
    generation: Generation, answer: Answer, for_router: bool, done: Callable[[], None]
) -> AsyncGenerator[bytes, None]:
    async with owned(generation):
        for event in answer.first():
            yield named_event(event)
        async for delta in generation.deltas():
            if shown := b"".join(map(named_event, answer.events(delta))):
                yield shown
        shown = b"".join(map(named_event, answer.last(generation)))
        done()
        yield shown
        if for_router:
            yield cached_tokens_comment(generation)


def _failed(answer: Answer, error: OctavoError, done: Callable[[], None]) -> bytes:
    event = named_event(answer.failed(error))
    done()
    return event
