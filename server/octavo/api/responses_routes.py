"""``/v1/responses``: create (streaming, in the background or neither), read again, cancel, delete."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from octavo.api.errors import InternalFault
from octavo.api.fields import Fields, wrong
from octavo.api.generation import Generation
from octavo.api.peers import FIRST
from octavo.api.probes import json_response
from octavo.api.responses_answer import ResponseAnswer
from octavo.api.responses_store import MAX_BYTES, MAX_RESPONSES, Kept, ResponseStore
from octavo.api.service import Service
from octavo.api.translated import read_request, respond, run
from octavo.errors import InvalidRequest, OctavoError
from octavo.prompt.responses import RESPONSES, chat_of_response, items_of

MAX_METADATA, MAX_METADATA_KEY, MAX_METADATA_VALUE = 16, 64, 512  # as OpenAI: pairs, and characters in each
_log = logging.getLogger("octavo.api")


def responses_routes(service: Service) -> APIRouter:
    routes = APIRouter()
    peers = service.peers
    store = ResponseStore(max(1, MAX_RESPONSES // peers.count), MAX_BYTES // peers.count)
    peers.answers |= {
        "response": partial(_response, store),
        "response_items": partial(_items, store),
        "response_cancel": partial(_cancel, store),
        "response_delete": partial(_delete, store),
    }

    async def of_keeper(method: str, response_id: str, request: Request) -> Any:
        """What ``method`` comes to where the response is kept."""
        return await peers.call(keeper(response_id, peers.count), method, response_id, _key(request))

    @routes.post("/v1/responses")
    async def create(request: Request) -> Any:
        asked = await read_request(service, request, RESPONSES)
        body, key = asked.body, _key(request)
        previous, stored, background = _checked(body)
        before = await of_keeper("response_items", previous, request) if previous is not None else ()
        parsed = await asked.parse(partial(chat_of_response, before=before))
        response_id = new_id(service.epoch, peers.number)
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
        begun = json_response(answer.response)  # "queued", as OpenAI has it
        kept.task = asyncio.create_task(_in_background(generation, answer))
        kept.task.add_done_callback(lambda _: service.open.pop(id(kept)))
        kept.task.add_done_callback(lambda _: done())
        store.put(kept)
        await asyncio.sleep(0)  # a task that is cancelled before it began could not close its generation
        return begun

    @routes.get("/v1/responses/{response_id}")
    async def retrieve(response_id: str, request: Request) -> Response:
        if request.query_params.get("stream", "false") != "false":
            raise wrong(
                "stream", request.query_params["stream"], "left out: a stream cannot be taken up again"
            )
        return json_response(await of_keeper("response", response_id, request))

    @routes.post("/v1/responses/{response_id}/cancel")
    async def cancel(response_id: str, request: Request) -> Response:
        return json_response(await of_keeper("response_cancel", response_id, request))

    @routes.delete("/v1/responses/{response_id}")
    async def delete(response_id: str, request: Request) -> Response:
        await of_keeper("response_delete", response_id, request)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    return routes


def new_id(epoch: str, process: int) -> str:
    """The id of a response: a router reads the engine's epoch in it, an API process the number of the one
    that keeps it (the first has none).
    """
    return f"resp_{epoch.replace('-', '')}{uuid.uuid4().hex}{process or ''}"


def keeper(response_id: str, count: int) -> int:
    """The API process, of ``count``, that keeps a response if any does."""
    number = response_id[len("resp_") + 64 :]
    known = number.isascii() and number.isdecimal() and len(number) <= len(str(count)) and int(number) < count
    return int(number) if known else FIRST


def _key(request: Request) -> str:
    key: bytes = request.state.key
    return key.hex()


async def _response(store: ResponseStore, response_id: str, key: str) -> dict[str, Any]:
    return store.get(response_id, key).response


async def _items(store: ResponseStore, response_id: str, key: str) -> Sequence[dict[str, Any]]:
    return store.items_before(response_id, key)


async def _cancel(store: ResponseStore, response_id: str, key: str) -> dict[str, Any]:
    kept = store.get(response_id, key)
    if kept.task is None:
        raise InvalidRequest("only responses in the background can be cancelled", param="response_id")
    kept.task.cancel()
    await asyncio.wait({kept.task})
    return kept.response


async def _delete(store: ResponseStore, response_id: str, key: str) -> None:
    store.delete(response_id, key)


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
