"""The OpenAI routes: models, completions, chat completions, streaming or not."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from octavo.api.answers import ChatAnswer, CompletionAnswer
from octavo.api.generation import Generation
from octavo.api.owner import answered, cached_tokens_comment, owned
from octavo.api.probes import READ, json_response
from octavo.api.requests import ParsedRequest, parse_request
from octavo.api.service import Service
from octavo.api.sse import EventStream, event, unless_gone
from octavo.errors import InvalidRequest

Answer = ChatAnswer | CompletionAnswer


def openai_routes(service: Service) -> APIRouter:
    """Routes under ``/v1``."""
    routes = APIRouter()

    @routes.api_route("/v1/models", methods=READ)
    async def models() -> Response:
        data = [_model(service, name) for name in service.config.model_names]
        return json_response({"object": "list", "data": data})

    @routes.api_route("/v1/models/{name:path}", methods=READ)
    async def model(name: str) -> Response:
        return json_response(_model(service, service.model_named(name)))

    @routes.post("/v1/completions")
    async def completions(request: Request) -> Any:
        return await _complete(service, request, chat=False, kind=CompletionAnswer)

    @routes.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Any:
        return await _complete(service, request, chat=True, kind=ChatAnswer)

    return routes


def _model(service: Service, name: str) -> dict[str, Any]:
    info = service.engine.info
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "octavo",
        "root": service.config.model,
        "parent": None,
        "max_model_len": info.max_model_len if info else None,
    }


async def _complete(
    service: Service, request: Request, *, chat: bool, kind: Callable[[ParsedRequest, str, int], Answer]
) -> Any:
    parsed = await parse_request(service, request, chat)
    name = parsed.request_id or request.state.request_id
    answer = kind(parsed, name, int(time.time()))
    generation = request.state.generation = parsed.generation()
    answer.prompt_logprobs = generation.prompt_logprobs

    async def begin() -> Response:
        try:
            if parsed.stream:
                await unless_gone(request, generation.start(answer_first=True))
                for_router = "x-octavo-router" in request.headers
                events = _events(generation, answer, parsed, for_router)
                return EventStream(events, generation.close)
            return json_response(await unless_gone(request, _whole(generation, answer)))
        except InvalidRequest as error:
            raise parsed.as_asked(error) from error

    return await answered(generation, begin())


async def _whole(generation: Generation, answer: Answer) -> dict[str, Any]:
    async with owned(generation):
        await generation.start(answer_first=False)
        async for delta in generation.deltas():
            answer.add(delta)
        return answer.whole(generation.usage())


async def _events(
    generation: Generation, answer: Answer, parsed: ParsedRequest, for_router: bool
) -> AsyncGenerator[bytes, None]:
    """The first chunks at once, then one for each step that shows something, usage if asked for."""

    def with_usage(chunk: dict[str, Any]) -> dict[str, Any]:
        return {**chunk, "usage": generation.usage()} if parsed.continuous_usage else chunk

    async with owned(generation):
        for chunk in answer.first_chunks():
            yield event(with_usage(chunk))
        async for delta in generation.deltas():
            if (shown := answer.chunk(delta)) is not None:
                yield event(with_usage(shown))
        if parsed.include_usage:
            yield event(answer.usage_chunk(generation.usage()))
        if for_router:
            yield cached_tokens_comment(generation)
