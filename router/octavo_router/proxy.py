"""One request through the router: read it, name its prefix, pick an engine, relay, learn from the answer."""

from __future__ import annotations

import asyncio
import logging
import os
import time
import uuid
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from octavo.errors import ModelNotFound, OctavoError, Unavailable
from octavo_router.client import Client
from octavo_router.engine import Engine, Flight, decode_load
from octavo_router.envelope import (
    BadBody,
    BodyTooLarge,
    MissingModel,
    WrongContentType,
)
from octavo_router.fleet import Fleet, Selected
from octavo_router.metrics import Metrics
from octavo_router.prefix import BYTES_PER_TOKEN, NO_PREFIX, Exact, Kind, Prefix, text_prefix
from octavo_router.relay import (
    Answer,
    Failed,
    Tail,
    cached_tokens,
    open_answer,
    request_headers,
)

log = logging.getLogger(__name__)

DEFAULT_MAX_BODY_BYTES = 32 * 2**20
# So much beyond the limit is still taken in and thrown away: a client that writes all before it reads would
# otherwise find its connection reset, and no answer.
LINGER_BYTES = 32 * 2**20
# Bodies above this are routed by their text: tokenising megabytes would cost more than a better pick saves.
EXACT_BODY_BYTES = 4 * 2**20
# Bodies above this are also parsed on a thread.
PARSE_INLINE_BYTES = 256 * 2**10
# Prompts waiting for a thread at which further ones are routed by text, so that naming never becomes the
# queue.
MAX_NAMING = 256
MAX_ATTEMPTS = 4
MAX_ID_LENGTH = 128


@dataclass(frozen=True)
class ProxyRoute:
    """A route of the engine. ``generates``: its answer costs prefill and decode. One with a ``response_id``
    in its path goes to the engine that made the response, its body unread; so does the page, to any engine.
    """

    path: str
    kind: Kind
    generates: bool
    methods: tuple[str, ...] = ("POST",)


PAGE = "/"  # a chat in the browser: its calls come here as any client's
ROUTES = (
    ProxyRoute(PAGE, "other", False, ("GET",)),
    ProxyRoute("/v1/chat/completions", "chat", True),
    ProxyRoute("/v1/completions", "completion", True),
    ProxyRoute("/v1/responses", "responses", True),
    ProxyRoute("/v1/responses/{response_id}", "other", False, ("GET", "DELETE")),
    ProxyRoute("/v1/responses/{response_id}/cancel", "other", False),
    ProxyRoute("/v1/messages", "messages", True),
    ProxyRoute("/v1/messages/count_tokens", "other", False),
    ProxyRoute("/tokenize", "other", False),
    ProxyRoute("/detokenize", "other", False),
)


@dataclass(frozen=True)
class Ask:
    """A request that has been read. ``model`` None: any. ``holder``: the only engine that can answer, since
    it keeps the response that is asked for or followed.
    """

    route: ProxyRoute
    method: str
    target: str  # path and query
    raw: bytes
    body: dict[str, Any]
    model: str | None
    holder: Engine | None
    request_id: str
    headers: list[tuple[str, str]]
    streaming: bool
    read_at: float


class Proxy:
    """The forwarded routes, each as an ASGI application (``endpoint``)."""

    def __init__(
        self,
        fleet: Fleet,
        session: aiohttp.ClientSession,
        metrics: Metrics,
        max_body_bytes: int = DEFAULT_MAX_BODY_BYTES,
    ) -> None:
        self._fleet = fleet
        self._session = session
        self._metrics = metrics
        self._max_body_bytes = max_body_bytes
        self._pool = ThreadPoolExecutor(min(8, os.cpu_count() or 1), thread_name_prefix="naming")
        self._naming = 0

    def close(self) -> None:
        """Stop the threads; those at work end by themselves."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def handle(self, route: ProxyRoute, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Whatever happens, nothing of it stays counted as in flight."""
        headers = Headers(scope=scope)
        request_id = _request_id(headers.get("x-request-id"))
        client = Client(send, request_id, route.path)
        try:
            unread = route.path == PAGE or "response_id" in scope.get("path_params", {})
            raw = await _read_body({} if unread else headers, receive, self._max_body_bytes)
            if raw is None:
                return  # gone before its body was whole
            ask = await self._read(route, raw, scope, request_id)
            work = asyncio.create_task(self._forward(ask, client))
            gone = asyncio.create_task(_until_gone(receive))
            try:
                await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            finally:
                finished = work.done()
                work.cancel()
                gone.cancel()
                await asyncio.gather(work, gone, return_exceptions=True)
            if finished:
                work.result()
        except OctavoError as error:
            await client.fail(error)
        finally:
            self._metrics.answers.labels(route.path, str(client.status or "none")).inc()

    async def _read(self, route: ProxyRoute, raw: bytes, scope: Scope, request_id: str) -> Ask:
        followed = scope.get("path_params", {}).get("response_id")
        target, model, body = route.path, None, dict[str, Any]()
        if followed is not None:
            query = scope["query_string"]
            target = (scope["raw_path"] + (b"?" + query if query else b"")).decode("latin-1")
        elif route.path != PAGE:
            loop, inline = asyncio.get_running_loop(), len(raw) <= PARSE_INLINE_BYTES
            body = _parse(raw) if inline else await loop.run_in_executor(self._pool, _parse, raw)
            model = self._model(body)
            followed = body.get("previous_response_id") if route.kind == "responses" else None
        return Ask(
            route, scope["method"], target, raw, body, model, self._fleet.holder(followed), request_id,
            request_headers(scope["headers"], request_id), body.get("stream") is True, time.monotonic(),
        )  # fmt: skip

    def _model(self, body: dict[str, Any]) -> str:
        served = self._fleet.models()
        model = body.get("model")
        if model is None and len({e.names for e in served.values()}) == 1:
            return next(iter(served))
        if isinstance(model, str) and self._fleet.knows(model):
            return model
        if not served:
            raise Unavailable(f"no engine is up yet: {self._fleet.not_ready()}")
        known = ", ".join(sorted(served))
        if not isinstance(model, str) or not model:
            raise MissingModel(f"model is {model!r}: name the model to use, here: {known}", param="model")
        raise ModelNotFound(f"model {model!r} is not served here: choose one of {known}", param="model")

    # --- naming the prefix ----------------------------------------------------------------------------------

    async def _name(self, ask: Ask) -> Prefix:
        if not ask.route.generates or ask.model is None:
            return NO_PREFIX
        if self._fleet.policy != "prefix-affinity":
            tokens = len(ask.raw) // BYTES_PER_TOKEN
            return Prefix(False, tokens, 1)
        exact = self._fleet.exact(ask.model) if ask.holder is None else None  # it goes on from what is kept
        if len(ask.raw) > EXACT_BODY_BYTES or self._naming >= MAX_NAMING:
            exact = None
        longest = self._fleet.longest(ask.model)
        self._naming += 1
        try:
            prefix = await asyncio.get_running_loop().run_in_executor(
                self._pool, _name_on_thread, exact, ask.route.kind, ask.body, longest
            )
        finally:
            self._naming -= 1
        self._metrics.prompts.labels("tokens" if prefix.exact else "text").inc()
        return prefix

    # --- sending it -----------------------------------------------------------------------------------------

    async def _forward(self, ask: Ask, client: Client) -> None:
        prefix = await self._name(ask)
        tried: set[str] = set()
        avoided: set[str] = set()  # broke off once: a kept connection may have been closed just then
        failure: Failed | None = None
        for attempt in range(MAX_ATTEMPTS):
            for barred in (tried | avoided, tried):
                out = [
                    engine
                    for engine in self._fleet.engines.values()
                    if engine.name in barred or (ask.holder is not None and engine is not ask.holder)
                ]
                selected = self._fleet.select(ask.model, prefix, ask.raw, out)
                if selected is not None:
                    break
            if selected is None:
                break
            if attempt == 0:
                self._metrics.pick_seconds.observe(time.monotonic() - ask.read_at)
            try:
                await self._attempt(ask, prefix, selected, client)
                return
            except Failed as error:
                failure = error
                name = selected.engine.name
                log.info("request %s goes elsewhere: %s", ask.request_id, error)
                self._metrics.retries.labels(name, error.reason).inc()
                (avoided if error.reason == "reset" and name not in avoided else tried).add(name)
        if failure is not None and failure.answer is not None:
            await client.whole(failure.answer, {})
            return
        why = str(failure) if failure else self._fleet.not_ready() or f"no engine of {ask.model} is ready"
        if ask.holder is not None:
            why = f"{ask.holder.name} alone keeps that response, and is {ask.holder.state}: {why}"
        raise Unavailable(f"no engine can take the request now: {why}")

    async def _attempt(self, ask: Ask, prefix: Prefix, selected: Selected, client: Client) -> None:
        """Send it to one engine and relay the answer. Raises ``Failed`` while nothing has been relayed."""
        engine, choice = selected.engine, selected.choice
        streaming = ask.streaming
        flight = Flight(
            engine, prefix.tokens, choice.cached_tokens, prefix.blocks if prefix.exact else 0,
            generates=ask.route.generates, streaming=streaming,
        )  # fmt: skip
        self._metrics.picks.labels(engine.name, choice.why).inc()
        for hashes in prefix.hashes:
            self._fleet.index.add(engine.name, hashes)
        outcome = "client_gone"
        try:
            url = engine.endpoint.url + ask.target
            answer = await open_answer(
                self._session,
                engine,
                ask.method,
                url,
                ask.raw,
                ask.headers,
                lambda: self._others(ask, engine),
            )
            if answer.load is not None and (load := decode_load(answer.load)) is not None:
                engine.report(load)
            if streaming:
                flight.start()
            self._metrics.first_byte_seconds.observe(time.monotonic() - ask.read_at)
            flight.cut = answer.close
            try:
                tail = await self._relay(answer, client, engine.name)
            finally:
                answer.close()
            outcome = "ok" if answer.status < 400 else "error_status"
            if answer.status < 400:
                self._learn(flight, prefix, selected, answer, tail)
        except Failed as error:
            outcome = error.reason
            if error.reason == "refused":
                self._fleet.dead(engine, str(error))
            elif error.reason == "reset":
                engine.wake.set()
            elif error.reason == "busy" and error.answer is not None and error.answer.status == 503:
                self._fleet.refused(engine, str(error))
            raise
        except Unavailable:
            outcome = "broken"
            raise
        finally:
            flight.end(finished=outcome == "ok")
            self._metrics.requests.labels(engine.name, outcome).inc()

    def _others(self, ask: Ask, engine: Engine) -> bool:
        if ask.holder is not None:
            return False
        others = (e for e in self._fleet.engines.values() if e is not engine and e.takes_work)
        return any(ask.model is None or ask.model in e.names for e in others)

    async def _relay(self, answer: Answer, client: Client, engine: str) -> Tail:
        extra = {"x-octavo-engine": engine}
        tail = Tail()
        tail.push(answer.first)
        if answer.response is None:
            await client.whole(answer, extra)
            return tail
        await client.begin(answer, extra)
        try:
            await client.chunk(answer.first)
            async for chunk in answer.rest():
                tail.push(chunk)
                await client.chunk(chunk)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            client.resumable = answer.is_stream and tail.between_events
            raise Unavailable(f"the engine {engine} broke off: {error or type(error).__name__}") from error
        await client.end()
        return tail

    def _learn(self, flight: Flight, prefix: Prefix, selected: Selected, answer: Answer, tail: Tail) -> None:
        """Correct the index by what the engine really found."""
        engine = selected.engine
        if not prefix.exact or len(prefix.hashes) != 1 or self._fleet.engines.get(engine.name) is not engine:
            return
        actual = tail.cached_tokens() if answer.response is not None else cached_tokens(answer.first)
        if actual is None:
            return
        predicted = selected.choice.cached_tokens
        self._metrics.cached(engine.name, predicted, actual)
        if actual >= predicted or not flight.racing:
            size = prefix.block_tokens
            self._fleet.index.correct(engine.name, prefix.hashes[0], predicted // size, actual // size)


def _name_on_thread(exact: Exact | None, kind: Kind, body: dict[str, Any], longest: int | None) -> Prefix:
    if exact is not None:
        try:
            return exact.prefix(kind, body, longest)
        except OctavoError:
            return text_prefix(kind, body)  # the engine will say what is wrong with it
        except Exception:
            log.exception("a prompt could not be rendered; it is routed by its text")
    return text_prefix(kind, body)


def _parse(raw: bytes) -> dict[str, Any]:
    try:
        body = msgspec.json.decode(raw)
    except RecursionError as error:
        raise BadBody("the body is nested too deeply") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadBody(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadBody(f"the body is a JSON {type(body).__name__}: it must be an object")
    return body


async def _read_body(headers: Mapping[str, str], receive: Receive, limit: int) -> bytes | None:
    """The whole body, or None when the client left. Raises ``BodyTooLarge`` when it is above ``limit`` bytes,
    of which no more are kept.
    """
    kind = headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise WrongContentType(f"content type is {kind!r}: send application/json")
    if (encoding := headers.get("content-encoding", "identity")) != "identity":
        raise WrongContentType(f"content encoding is {encoding!r}: send the body uncompressed")
    message = f"is above this server's limit of {limit} bytes"
    length = headers.get("content-length", "")
    if length.isdigit() and int(length) > limit + LINGER_BYTES:
        raise BodyTooLarge(f"the body of {length} bytes {message}")
    parts, size = [], 0
    while True:
        event = await receive()
        if event["type"] == "http.disconnect":
            return None
        part = event.get("body", b"")
        size += len(part)
        if size <= limit:
            parts.append(part)
        if size > limit + LINGER_BYTES or not event.get("more_body", False):
            break
    if size > limit:
        raise BodyTooLarge(f"the body {message}")
    return b"".join(parts)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        continue


def _request_id(given: str | None) -> str:
    """The client's own id where it can stand in a header and a log, else a new one."""
    if given and len(given) <= MAX_ID_LENGTH and given.isascii() and given.isprintable():
        return given
    return uuid.uuid4().hex
