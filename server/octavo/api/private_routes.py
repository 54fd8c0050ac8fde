"""The private port, for the router and the operator: what the engine is, its load, tokens in and out,
administration.
"""

from __future__ import annotations

import asyncio
import secrets
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from octavo.api.body import parse_object, read_body
from octavo.api.errors import error_of
from octavo.api.fields import Fields, wrong
from octavo.api.generation import ANSWER_WITHIN_S
from octavo.api.probes import READ, json_response
from octavo.api.service import Service
from octavo.api.sse import EventStream, event
from octavo.core.outputs import EngineOutput, EngineRequest
from octavo.core.sampling_params import SamplingParams
from octavo.engine.stream import OutputStream
from octavo.errors import InvalidRequest, Unavailable


class GenerateBody(msgspec.Struct, frozen=True, kw_only=True):
    """A sequence by its token ids. ``output_token_ids`` were made elsewhere: it goes on after them.

    ``sampling`` is in tokens too: ``bad_words_token_ids`` and ``grammar`` in place of texts. ``deadline`` is
    in seconds since the epoch.
    """

    prompt_token_ids: list[int]
    output_token_ids: list[int] = []
    sampling: SamplingParams = SamplingParams()
    sample_index: int = 0
    cache_salt: str | None = None
    priority: int = 0
    deadline: float | None = None


_TEXTS = ("stop", "bad_words", "structured_outputs")


def private_routes(service: Service, drain: Callable[[], Awaitable[None]]) -> APIRouter:
    """``drain`` starts the drain that a SIGTERM starts, without ending the process."""
    routes = APIRouter()

    @routes.get("/server_info")
    async def server_info() -> Response:
        return json_response(service.server_info())

    @routes.get("/load")
    async def load() -> Response:
        return json_response(service.load())

    @routes.get("/prompt_assets")
    async def prompt_assets() -> Response:
        """Tokenizer and chat template as ``PromptAssets.to_bytes`` writes them."""
        if service.renderer is None:
            raise Unavailable(f"the prompt assets are not loaded yet: {service.stage[0]}")
        return Response(service.assets_bytes, media_type="application/msgpack")

    @routes.get("/kv/snapshot")
    async def kv_snapshot() -> Response:
        """What the prefix cache holds after the batch of KV events numbered ``sequence`` (null: none are
        published), and ``octavo.core.kv_events``'s digest of it.
        """
        _, info = service.require_ready()
        snapshot = await service.engine.admin("kv_snapshot")
        kv = {name: info.kv[name] for name in ("hash", "root", "groups")}
        return json_response({"epoch": service.epoch, **kv, **await asyncio.to_thread(_in_hex, snapshot)})

    @routes.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> Response:
        service.require_ready()
        await service.engine.admin("reset_prefix_cache")
        return json_response({"reset": True})

    @routes.post("/pause")
    async def pause(mode: str = "keep") -> Response:
        """Begin no step, take no request. Those there wait with their blocks, or end (``mode`` abort)."""
        if mode not in ("keep", "abort"):
            raise wrong("mode", mode, "keep or abort")
        if service.engine.state != "paused":
            service.require_ready()
        await service.pause(abort=mode == "abort")
        return json_response(service.describe())

    @routes.post("/resume")
    async def resume() -> Response:
        if service.engine.state == "paused":
            await service.resume()
        return json_response(service.describe())

    @routes.post("/sleep")
    async def sleep(level: str = "1", mode: str = "abort") -> Response:
        """Give back the memory of the KV cache, at level 2 of the weights too; requests are ended, or awaited
        first (``mode`` wait).
        """
        if level not in ("1", "2"):
            raise wrong("level", level, "1 or 2")
        if mode not in ("abort", "wait"):
            raise wrong("mode", mode, "abort or wait: no request keeps its place, for its KV blocks are gone")
        if service.engine.state not in ("paused", "sleeping"):
            service.require_ready()
        await service.sleep(int(level), wait=mode == "wait")
        return json_response(service.describe())

    @routes.post("/wake_up")
    async def wake_up(request: Request) -> Response:
        """Bring all back; with ``tags`` these parts (weights, kv_cache), and requests once both are there."""
        if service.engine.state == "sleeping":
            await service.wake_up(request.query_params.getlist("tags"))
        return json_response(service.describe())

    @routes.api_route("/is_sleeping", methods=READ)
    async def is_sleeping() -> Response:
        return json_response({"is_sleeping": service.engine.standing.asleep})

    @routes.post("/abort_requests")
    async def abort_requests(request: Request) -> Response:
        """End the requests whose X-Request-Id is in ``request_ids``, responses in the background by their own
        ids too; all where none are named.
        """
        raw = await read_body(request)
        fields = Fields(parse_object(raw) if raw else {})
        every = fields.body.get("request_ids") is None
        names = None if every else list(fields.texts("request_ids"))
        return json_response({"aborted": await service.abort_everywhere(names)})

    @routes.post("/drain")
    async def start_drain() -> Response:
        await drain()
        return json_response(service.describe(), 202)

    @routes.post("/internal/generate")
    async def generate(request: Request) -> Any:
        """Events of ``{token_ids, logprobs, prompt_logprobs, num_cached_tokens, finish_reason,
        stop_reason}``, then ``[DONE]``.
        """
        service.require_ready()
        stream = service.engine.submit([_engine_request(await read_body(request))])
        first = asyncio.ensure_future(anext(stream))
        await asyncio.wait({first}, timeout=ANSWER_WITHIN_S)
        if first.done() and (error := first.exception()) is not None:
            raise error

        async def close() -> None:
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            await stream.aclose()

        return EventStream(_events(stream, first), close)

    return routes


def _in_hex(snapshot: dict[str, Any]) -> dict[str, Any]:
    blocks = [
        {**block, "name": block["name"].hex(), "parent": block["parent"] and block["parent"].hex()}
        for block in snapshot["blocks"]
    ]
    return {**snapshot, "blocks": blocks}


def _engine_request(raw: bytes) -> EngineRequest:
    try:
        body = msgspec.json.decode(raw, type=GenerateBody)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequest(f"the body is not what /internal/generate takes: {error}") from error
    sampling = body.sampling
    for name in _TEXTS:
        if getattr(sampling, name):
            raise InvalidRequest(
                f"{name} is of texts: this route knows tokens only", param=f"sampling.{name}"
            )
    if sampling.n > 1 or sampling.use_beam_search:
        name = "n" if sampling.n > 1 else "use_beam_search"
        raise InvalidRequest(f"{name} is of several sequences: this route runs one", param=f"sampling.{name}")
    if sampling.max_tokens is None:
        raise InvalidRequest("sampling.max_tokens is missing", param="sampling.max_tokens")
    if sampling.seed is None:
        sampling = msgspec.structs.replace(sampling, seed=secrets.randbits(63))
    return EngineRequest(
        request_id=uuid.uuid4().hex,
        prompt_token_ids=body.prompt_token_ids + body.output_token_ids,
        num_prior_output_tokens=len(body.output_token_ids),
        sampling=sampling,
        sample_index=body.sample_index,
        cache_salt=body.cache_salt,
        priority=body.priority,
        deadline=body.deadline,
        arrival_time=time.time(),
    )


async def _events(stream: OutputStream, first: asyncio.Future[EngineOutput]) -> AsyncGenerator[bytes, None]:
    yield event(_shown(await first))
    async for output in stream:
        yield event(_shown(output))


def _shown(output: EngineOutput) -> dict[str, Any]:
    if output.finish_reason == "error":
        raise error_of(output)
    fields = (
        "token_ids", "logprobs", "prompt_logprobs", "num_cached_tokens", "finish_reason", "stop_reason",
    )  # fmt: skip
    return {name: getattr(output, name) for name in fields}
