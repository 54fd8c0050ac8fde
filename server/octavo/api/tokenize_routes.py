"""``/tokenize`` and ``/detokenize``: what a prompt or a chat is in tokens, and back."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from octavo.api.body import parse_object, read_body
from octavo.api.fields import Fields, wrong
from octavo.api.probes import READ, json_response
from octavo.api.requests import off_loop
from octavo.api.service import Service
from octavo.errors import InvalidRequest
from octavo.prompt.assets import NAMED_TOKENS

# A text may be longer than what the model takes, up to about twice so many tokens: 64 MB of memory.
LONGEST = 2**17


def tokenize_routes(service: Service) -> APIRouter:
    routes = APIRouter()

    @routes.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        """A chat (``messages``) or a ``prompt`` as token ids, rendered as the generating routes do."""
        service.require_ready()
        raw = await read_body(request)
        return json_response(await off_loop(len(raw), lambda: _tokenize(service, parse_object(raw))))

    @routes.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        """The text of token ids, special ones included."""
        service.require_ready()
        raw = await read_body(request)
        return json_response(await off_loop(len(raw), lambda: _detokenize(service, parse_object(raw))))

    @routes.api_route("/tokenizer_info", methods=READ)
    async def tokenizer_info() -> Response:
        """What a client needs to render chats itself: template, special tokens, sizes, digests."""
        renderer, info = service.require_ready()
        assets = renderer.assets
        named: dict[str, str | None] = dict.fromkeys(NAMED_TOKENS)
        return json_response(
            {
                **named,
                **assets.special_tokens,
                "tokenizer_class": assets.tokenizer_class,
                "chat_template": assets.chat_template,
                "vocab_size": assets.vocab_size,
                "model_max_length": info.max_model_len,
                "tokenizer_digest": assets.tokenizer_digest,
                "template_digest": assets.template_digest,
            }
        )

    return routes


def _tokenize(service: Service, body: dict[str, Any]) -> dict[str, Any]:
    renderer, info = service.require_ready()
    fields, longest = _checked(service, body), max(info.max_model_len, LONGEST)
    if "messages" in body:
        if fields.flag("add_special_tokens", False):  # the template has written them
            tokens = renderer.encode(renderer.render(body), True, longest)
        else:
            tokens = renderer.chat(body, longest)
    else:
        prompt = body.get("prompt")
        if not isinstance(prompt, str):
            raise wrong("prompt", prompt, "a string (or send messages)")
        tokens = renderer.encode(prompt, fields.flag("add_special_tokens", True), longest)
    shown = fields.flag("return_token_strs", False)
    return {
        "count": len(tokens),
        "max_model_len": info.max_model_len,
        "tokens": tokens,
        "token_strs": [renderer.tokenizer.id_to_token(token) for token in tokens] if shown else None,
    }


def _detokenize(service: Service, body: dict[str, Any]) -> dict[str, Any]:
    renderer, info = service.require_ready()
    tokens = list(_checked(service, body).token_ids("tokens"))
    if "tokens" not in body:
        message = "tokens is missing: give a list of token ids"
        raise InvalidRequest(message, param="tokens", code="missing_parameter")
    for token in tokens:
        if token >= info.vocab_size:
            raise wrong("tokens", token, f"token ids of this model, 0 to {info.vocab_size - 1}")
    return {"prompt": renderer.decode(tokens, skip_special_tokens=False)}


def _checked(service: Service, body: dict[str, Any]) -> Fields:
    fields = Fields(body)
    service.model_named(fields.text("model"))
    return fields
