"""Anthropic's ``/v1/messages`` and ``/v1/messages/count_tokens``."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from octavo.api.fields import Fields
from octavo.api.messages_answer import MessageAnswer
from octavo.api.probes import json_response
from octavo.api.requests import ParsedRequest, off_loop
from octavo.api.service import Service
from octavo.api.tokenize_routes import LONGEST
from octavo.api.translated import read_request, respond
from octavo.errors import InvalidRequest
from octavo.prompt.anthropic import MESSAGES


def messages_routes(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/messages")
    async def create(request: Request) -> Any:
        asked = await read_request(service, request, MESSAGES)
        if asked.body.get("max_tokens") is None:
            message = "max_tokens is missing: say how many tokens the answer may have"
            raise InvalidRequest(message, param="max_tokens", code="missing_parameter")
        parsed = await asked.parse()
        _check_thinking(asked.body, parsed)
        return await respond(asked, parsed, MessageAnswer(parsed, request.url.path))

    @routes.post("/v1/messages/count_tokens")
    async def count_tokens(request: Request) -> Response:
        """The tokens of the prompt that ``create`` would make."""
        asked = await read_request(service, request, MESSAGES)
        with asked.named():
            count = await off_loop(asked.raw_size, lambda: _count(service, asked.body))
        return json_response({"input_tokens": count})

    return routes


def _count(service: Service, body: dict[str, Any]) -> int:
    renderer, info = service.require_ready()
    service.model_named(Fields(body).text("model"))
    return len(renderer.chat(MESSAGES.chat(body), max(info.max_model_len, LONGEST)))


def _check_thinking(body: dict[str, Any], parsed: ParsedRequest) -> None:
    thinks = parsed.reading is not None and parsed.reading.reasoning is not None
    if not thinks and (body.get("thinking") or {}).get("type") == "enabled":
        message = (
            f"thinking.type is 'enabled': {parsed.model} does not think, or shows no format of its thoughts"
        )
        raise InvalidRequest(message, param="thinking.type", code="unsupported_parameter")
