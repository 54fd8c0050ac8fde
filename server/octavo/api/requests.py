"""From an HTTP request to a ``Generation``: checks of the body, rendering and tokenising, hand-over to the
engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from starlette.requests import Request

from octavo.api.body import parse_object, read_body
from octavo.api.fields import Fields, refuse_unsupported, unknown_names, wrong
from octavo.api.generation import Generation
from octavo.api.sampling import sampling_params
from octavo.api.service import Service
from octavo.errors import InvalidRequest

OFF_LOOP_BYTES = (
    8192  # a body this long is parsed, rendered and tokenised on a thread: 2,000 tokens, a few ms
)
T = TypeVar("T")


class ParsedRequest:
    """A checked request of ``/v1/completions`` or ``/v1/chat/completions`` and its tokenised prompts."""

    def __init__(self, service: Service, body: dict[str, Any], chat: bool) -> None:
        """Raises ``InvalidRequest``, ``ModelNotFound`` or ``Unavailable``."""
        renderer, self.info = service.require_ready()
        self.service, self.renderer, self.chat = service, renderer, chat
        self.fields = fields = Fields(body)
        model = fields.text("model")
        if model is None:
            raise InvalidRequest("model is missing: name the model", param="model", code="missing_parameter")
        service.check_model(model)
        self.model = model
        refuse_unsupported(body, chat)
        self.num_unknown = len(unknown_names(body, chat))
        self.stream = fields.flag("stream", False)
        self.include_usage = self._stream_options()
        self.cache_salt = fields.text("cache_salt")
        self.request_id = fields.text("request_id")
        self.return_token_ids = fields.flag("return_token_ids", False)
        self.tokens_as_ids = fields.flag("return_tokens_as_token_ids", False)
        self.sampling = sampling_params(fields, service.defaults, chat)
        if chat:
            self.prompts = [renderer.chat(body, self.info.max_model_len)]
        else:
            if body.get("prompt") is None:
                raise InvalidRequest("prompt is missing", param="prompt", code="missing_parameter")
            special = fields.flag("add_special_tokens", True)
            self.prompts = renderer.completion(body["prompt"], special, self.info.max_model_len)

    def _stream_options(self) -> bool:
        options = self.fields.body.get("stream_options")
        if options is None:
            return False
        if not isinstance(options, dict):
            raise wrong("stream_options", options, "an object")
        if not self.stream:
            raise InvalidRequest("stream_options needs stream true", param="stream_options")
        inner = Fields(options)
        if inner.flag("continuous_usage_stats", False):
            raise InvalidRequest(
                "stream_options.continuous_usage_stats is true: not supported yet; leave it out",
                param="stream_options.continuous_usage_stats",
                code="unsupported_parameter",
            )
        return inner.flag("include_usage", False)

    def generation(self) -> Generation:
        config = self.service.config
        return Generation(
            self.service.engine,
            self.info,
            self.renderer,
            self.service.metrics,
            self.prompts,
            self.sampling,
            max_queue=config.max_queue,
            max_running=config.max_num_seqs,
            cache_salt=self.cache_salt,
        )


async def parse_request(service: Service, request: Request, chat: bool) -> ParsedRequest:
    """Read and check a request; long ones off the event loop, so that streams keep their pace."""
    service.require_ready()  # before the body is read: a replica that cannot answer says so at once
    raw = await read_body(request)
    parsed = await off_loop(len(raw), lambda: ParsedRequest(service, parse_object(raw), chat))
    if parsed.num_unknown:
        service.metrics.ignored_fields.inc(parsed.num_unknown)
    return parsed


async def off_loop(size: int, work: Callable[[], T]) -> T:
    """``work()`` on a thread when ``size`` bytes are many, else here."""
    return await asyncio.to_thread(work) if size > OFF_LOOP_BYTES else work()
