"""From an HTTP request to a ``Generation``: checks of the body, rendering and tokenising, hand-over to the
engine.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from octavo.api.body import parse_object, read_body
from octavo.api.fields import Fields, refuse_unsupported, unknown_names, wrong
from octavo.api.generation import Generation
from octavo.api.sampling import no_beams, prompt_only, sampling_params, structured_outputs
from octavo.api.service import Service
from octavo.api.sse import unless_gone
from octavo.core.sampling_params import StructuredOutputs
from octavo.errors import InvalidRequest
from octavo.prompt.legacy import LEGACY, with_tools
from octavo.prompt.messages import template_messages
from octavo.prompt.tools.grammar import with_answer
from octavo.prompt.tools.reading import OutputReading

# A body this long is parsed, rendered and tokenised on a thread: 2,000 tokens, a few ms.
OFF_LOOP_BYTES = 8192
LONGEST_CUT = 2**17  # tokens of a prompt that is to be truncated; of more not even the end is tokenised
LONGEST_TIMEOUT_S = 86_400
LONGEST_REQUEST_ID = 128  # characters; every event of a stream repeats it
MAX_LOGGED_BYTES = 4096  # of a body, with enable-log-requests
T = TypeVar("T")
_log = logging.getLogger("octavo.api")


class ParsedRequest:
    """A checked request of ``/v1/completions`` or ``/v1/chat/completions`` and its tokenised prompts."""

    def __init__(self, service: Service, body: dict[str, Any], chat: bool) -> None:
        """Raises ``InvalidRequest``, ``ModelNotFound`` or ``Unavailable``."""
        renderer, self.info = service.require_ready()
        self.service, self.renderer, self.chat = service, renderer, chat
        self.fields = fields = Fields(body)
        self.model = service.model_named(fields.text("model"))
        refuse_unsupported(body, chat)
        self.num_unknown = len(unknown_names(body, chat))
        self.stream = fields.flag("stream", False)
        self.include_usage, self.continuous_usage = self._stream_options()
        self.cache_salt = fields.text("cache_salt")
        if self.cache_salt == "":  # a tenant that was to be alone would share with all
            raise wrong("cache_salt", "", "a string that is not empty, or left out")
        self.request_id = fields.text("request_id")
        if len(self.request_id or "") > LONGEST_REQUEST_ID:
            raise wrong("request_id", self.request_id, f"of at most {LONGEST_REQUEST_ID} characters")
        self.return_token_ids = fields.flag("return_token_ids", False)
        self.tokens_as_ids = fields.flag(
            "return_tokens_as_token_ids", service.config.return_tokens_as_token_ids
        )
        self.priority = fields.integer("priority", 0) or 0
        if not -(2**31) <= self.priority < 2**31:
            raise wrong("priority", self.priority, "a 32-bit integer")
        self.deadline = self._deadline()
        self.sampling = sampling_params(fields, service.defaults, chat)
        self.echo = fields.flag("echo", False)
        self.prompt_only = not chat and prompt_only(fields)
        self.prompt_logprobs = fields.integer("prompt_logprobs")
        if self.prompt_only and self.sampling.min_tokens:
            raise wrong("min_tokens", self.sampling.min_tokens, "0, as max_tokens is")
        if self.stream:
            for name in ("use_beam_search", "prompt_logprobs"):  # they are there at the end
                if body.get(name) not in (None, False):
                    raise InvalidRequest(f"{name} does not stream: leave stream out", param=name)
        self.include_reasoning = fields.flag("include_reasoning", True)
        self.functions = chat and body.get("functions") not in (None, [])  # the older form of tools
        self.reading: OutputReading | None = None
        self._formed_by = "tools"  # the field that the grammar comes from
        self.prompts = self._prompts()

    def _deadline(self) -> float | None:
        """Seconds since the epoch."""
        seconds = self.fields.number("timeout_s", 0.0)
        if self.fields.body.get("timeout_s") is None:
            return None
        if not 0 < seconds <= LONGEST_TIMEOUT_S:
            raise wrong("timeout_s", seconds, f"above 0 and at most {LONGEST_TIMEOUT_S}")
        return time.time() + seconds

    def _prompts(self) -> list[list[int]]:
        body, longest = self.fields.body, self.info.max_model_len
        last = self.fields.integer("truncate_prompt_tokens")
        if last is not None and not (last == -1 or 1 <= last <= longest):
            allowed = f"between 1 and {longest}, or -1 for as many as fit"
            raise wrong("truncate_prompt_tokens", last, allowed)
        side = self.fields.text("truncation_side")
        if side not in (None, "left", "right"):
            raise wrong("truncation_side", side, "left (the end is kept) or right (the beginning is)")
        fits = longest if last is None else max(longest, LONGEST_CUT)
        if self.chat:
            chat = with_tools(dict(body))
            rendered = self.renderer.render(chat)
            self.reading = self._read(chat, rendered)
            prompts = [self.renderer.chat_tokens(rendered, fits)]
        else:
            if body.get("prompt") is None:
                raise InvalidRequest("prompt is missing", param="prompt", code="missing_parameter")
            prompts = self.renderer.completion(
                body["prompt"], self.fields.flag("add_special_tokens", True), fits
            )
        if last is None:
            return prompts
        kept = max(1, longest - (self.sampling.max_tokens or 1)) if last == -1 else last
        return [prompt[:kept] if side == "right" else prompt[-kept:] for prompt in prompts]

    async def compile(self, request: Request) -> None:
        """Make the grammar of the form that is asked for, if any. ``ClientGone`` when the client leaves."""
        forms, where = structured_outputs(self.fields)
        if forms is not None:
            self._formed_by = where
            if where == "structured_outputs" and self.reading is not None:
                self.reading.refuse_form(where)
        try:
            answer = where.partition(".")[0] if forms is not None else None
            lark = self.reading.grammar(answer) if self.reading is not None else None
            if lark is not None and self.sampling.use_beam_search:
                raise no_beams("tool_choice")
            if forms is not None or lark is not None:
                grammar = await unless_gone(request, self._grammar(forms, where, lark))
                self.sampling = msgspec.structs.replace(self.sampling, grammar=grammar)
        except InvalidRequest as error:
            raise LEGACY.as_asked(error) if self.functions else error from None

    async def _grammar(self, forms: StructuredOutputs | None, where: str, lark: str | None) -> str | None:
        """Of the form and of what else the model says: reasoning and calls (``lark``)."""
        reading, service = self.reading, self.service
        grammar = await service.grammar(forms, where) if forms is not None else None
        if reading is not None:
            if lark is None:
                grammar = reading.after_reasoning(grammar) if grammar is not None else None
            elif grammar is not None and reading.choice.mode == "auto":
                grammar = with_answer(lark, grammar)
            else:
                for tool in reading.tools:
                    if tool.strict:  # by itself first: an error then names the place
                        await service.grammar(StructuredOutputs(json=tool.schema), tool.where)
                grammar = await service.lark(lark, "tools")
        return grammar

    def _read(self, chat: dict[str, Any], rendered: str) -> OutputReading | None:
        """How a chat's answers are read; None where they are content and nothing else."""
        parallel = Fields(chat).flag("parallel_tool_calls", True)
        reading = OutputReading(self.service.config, self.renderer, chat, rendered, parallel)
        return reading if reading.active else None

    def _stream_options(self) -> tuple[bool, bool]:
        """Whether usage comes at the end, and with every chunk."""
        options, always = (
            self.fields.body.get("stream_options"),
            self.service.config.enable_force_include_usage,
        )
        if options is None:
            return always, False
        if not isinstance(options, dict):
            raise wrong("stream_options", options, "an object")
        if not self.stream:
            raise InvalidRequest("stream_options needs stream true", param="stream_options")
        inner = Fields(options)
        usage = inner.flag("include_usage", False) or always
        return usage, inner.flag("continuous_usage_stats", False) and usage

    def echoed(self, index: int) -> str:
        """What answers to a prompt begin with, where ``echo`` asks for it: the text of a completion's prompt;
        the last message of a chat, where the answer goes on in its role.
        """
        if not self.echo:
            return ""
        if not self.chat:
            return self._prompt_text(index)
        last = template_messages(self.fields.body["messages"][-1:])[0]
        goes_on = last["role"] == "assistant" or not self._adds_turn()
        return (last["content"] or "") if goes_on else ""

    def _adds_turn(self) -> bool:
        """Whether the prompt of a chat begins a turn of the assistant, as the renderer has it."""
        continued = self.fields.flag("continue_final_message", False)
        return self.fields.flag("add_generation_prompt", not continued)

    def _prompt_text(self, index: int) -> str:
        """As it was sent, where it was a text."""
        given = self.fields.body["prompt"]
        one = given if isinstance(given, str) else given[index]
        if isinstance(one, str) and self.fields.body.get("truncate_prompt_tokens") is None:
            return one
        return self.renderer.decode(self.prompts[index], self.sampling.skip_special_tokens)

    def as_asked(self, error: InvalidRequest) -> InvalidRequest:
        """What the engine says of a setting, said of the field that the client sent."""
        if error.param == "grammar":
            message = f"{self._formed_by}: {error.message}"
            return type(error)(message, param=self._formed_by.partition(".")[0], code=error.code)
        if self.chat and error.param == "prompt":
            return type(error)(error.message, param="messages", code=error.code)
        names = {"max_tokens": "max_completion_tokens", "logprobs": "top_logprobs"}
        name = names.get(error.param or "")
        if error.param is None or name is None or not self.chat or self.fields.body.get(name) is None:
            return error
        return type(error)(error.message.replace(error.param, name), param=name, code=error.code)

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
            max_queue_tokens=config.max_queue_tokens,
            max_running=config.max_num_seqs,
            cache_salt=self.cache_salt,
            priority=self.priority,
            deadline=self.deadline,
            reading=self.reading,
            prompt_only=self.prompt_only,
        )


async def read_asked(service: Service, request: Request) -> bytes:
    """The body of a request for the engine, logged where that is wanted."""
    service.require_ready()  # before the body is read: a replica that cannot answer says so at once
    raw = await read_body(request)
    if service.config.enable_log_requests:
        said = raw[:MAX_LOGGED_BYTES].decode("utf-8", "replace")
        _log.info("request %s asks: %s", request.state.request_id, said)
    return raw


async def parse_request(service: Service, request: Request, chat: bool) -> ParsedRequest:
    """Read and check a request; long ones off the event loop, so that streams keep their pace."""
    raw = await read_asked(service, request)
    parsed = await off_loop(len(raw), lambda: ParsedRequest(service, parse_object(raw), chat))
    await parsed.compile(request)
    if parsed.num_unknown:
        service.metrics.ignored_fields.inc(parsed.num_unknown)
    return parsed


async def off_loop(size: int, work: Callable[[], T]) -> T:
    """``work()`` on a thread when ``size`` bytes are many, else here."""
    return await asyncio.to_thread(work) if size > OFF_LOOP_BYTES else work()
