"""``/v1/responses``: create (streaming, in the background or neither), read again, cancel, delete."""

from __future__ import annotations

import asyncio
import logging
import uuid
from functools import partial
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from octavo.api.errors import InternalFault
from octavo.api.fields import Fields, wrong
from octavo.api.generation import Generation
from octavo.api.probes import json_response
from octavo.api.responses_answer import ResponseAnswer
from octavo.api.responses_store import Kept, ResponseStore
from octavo.api.service import Service
from octavo.api.translated import read_request, respond, run
from octavo.errors import InvalidRequest, OctavoError
from octavo.prompt.responses import RESPONSES, chat_of_response, items_of

MAX_METADATA, MAX_METADATA_KEY, MAX_METADATA_VALUE = 16, 64, 512  # as OpenAI: pairs, and characters in each
_log = logging.getLogger("octavo.api")


def responses_routes(service: Service) -> APIRouter:
    routes = APIRouter()
    store = ResponseStore()

    @routes.post("/v1/responses")
    async def create(request: Request) -> Any:
        asked = await read_request(service, request, RESPONSES)
        body, key = asked.body, request.state.key
        previous, stored, background = _checked(body)
        before = store.items_before(previous, key) if previous is not None else ()
        parsed = await asked.parse(partial(chat_of_response, before=before))
        response_id = f"resp_{service.epoch.replace('-', '')}{uuid.uuid4().hex}"  # a router reads the epoch
        answer = ResponseAnswer(parsed, body, response_id, background)
        kept = Kept(answer.response, (), key)

        def done() -> None:
            kept.items = [*before, *items_of(body["input"]), *answer.output]
            if background:
                store.changed(kept)
            elif stored:
                store.put(kept)

        if not background:
            return await respond(asked, parsed, answer, done)
        generation = request.state.generation = parsed.generation()
        with asked.named():
            await _begun(generation)
        service.open[id(kept)] = {**request.scope["state"], "response_id": response_id}
        kept.task = asyncio.create_task(_in_background(generation, answer))
        kept.task.add_done_callback(lambda _: service.open.pop(id(kept)))
        kept.task.add_done_callback(lambda _: done())
        store.put(kept)
        await asyncio.sleep(0)  # a task that is cancelled before it began could not close its generation
        return json_response(answer.response)

    @routes.get("/v1/responses/{response_id}")
    async def retrieve(response_id: str, request: Request) -> Response:
        if request.query_params.get("stream", "false") != "false":
            raise wrong(
                "stream", request.query_params["stream"], "left out: a stream cannot be taken up again"
            )
        return json_response(store.get(response_id, request.state.key).response)

    @routes.post("/v1/responses/{response_id}/cancel")
    async def cancel(response_id: str, request: Request) -> Response:
        kept = store.get(response_id, request.state.key)
        if kept.task is None:
            raise InvalidRequest("only responses in the background can be cancelled", param="response_id")
        kept.task.cancel()
        await asyncio.wait({kept.task})
        return json_response(kept.response)

    @routes.delete("/v1/responses/{response_id}")
    async def delete(response_id: str, request: Request) -> Response:
        store.delete(response_id, request.state.key)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    return routes


def _checked(body: dict[str, Any]) -> tuple[str | None, bool, bool]:
    """``previous_response_id``, ``store`` and ``background``. Raises ``InvalidRequest``."""
    fields = Fields(body)
    for name in ("prompt_cache_key", "safety_identifier", "user"):
        fields.text(name)
    fields.integer("max_tool_calls")
    _check_metadata(fields.object("metadata") or {})
    stored, background = fields.flag("store", True), fields.flag("background", False)
    if background and not stored:
        raise InvalidRequest("background needs store true: it is read when it is done", param="background")
    if background and fields.flag("stream", False):
        raise InvalidRequest("background does not stream: leave stream out", param="background")
    return fields.text("previous_response_id"), stored, background


def _check_metadata(metadata: dict[str, Any]) -> None:
    if len(metadata) > MAX_METADATA:
        raise wrong("metadata", metadata, f"at most {MAX_METADATA} pairs")
    for name, value in metadata.items():
        if not isinstance(value, str) or len(name) > MAX_METADATA_KEY or len(value) > MAX_METADATA_VALUE:
            allowed = f"names and strings of at most {MAX_METADATA_KEY} and {MAX_METADATA_VALUE} characters"
            raise wrong("metadata", {name: value}, allowed)


async def _begun(generation: Generation) -> None:
    """Hand it to the engine, so that a refusal is the answer to the request itself."""
    try:
        await generation.start(answer_first=True)
    except BaseException:
        await generation.close()
        raise


async def _in_background(generation: Generation, answer: ResponseAnswer) -> None:
    try:
        await run(generation, answer, started=True)
    except asyncio.CancelledError:
        answer.cancelled()
    except OctavoError as error:
        answer.failed(error)
    except Exception:
        _log.exception("a response in the background ended with an unexpected fault")
        answer.failed(InternalFault("the server failed on this request"))
