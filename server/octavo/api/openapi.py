"""The OpenAPI description of the public port, at ``/openapi.json``: what each route takes and answers.

A table beside the code, since ``octavo.api.fields`` reads bodies and not the framework. Tests hold it to the
routes and to the fields, and drive the server with what it allows and forbids.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import msgspec
from fastapi import APIRouter
from starlette.responses import Response

from octavo import __version__
from octavo.api.edge import OPEN_PATHS
from octavo.api.fields import CHAT_FIELDS, COMPLETION_FIELDS, MAX_STOP_STRINGS, REFUSED_FIELDS
from octavo.api.probes import READ
from octavo.config import EngineConfig
from octavo.core.sampling_params import MAX_BAD_WORDS, MAX_N
from octavo.engine.client import EngineState

Schema = dict[str, Any]
MAX_TOKEN_ID = 2**31 - 1
ERRORS = {
    "400": "A field is wrong; `param`, or the message, names it.",
    "401": "A key is needed, or the one sent is not known.",
    "404": "No such model, or nothing of this name.",
    "413": "The body is too large.",
    "415": "The body is not said to be JSON.",
    "429": "The queue is full, or the deadline cannot be met.",
    "503": "Starting, draining, paused, asleep, or the engine is dead.",
}


def openapi_routes(config: EngineConfig) -> APIRouter:
    routes = APIRouter()
    document = msgspec.json.encode(openapi_document(config.model_names, config.root_path))

    @routes.api_route("/openapi.json", methods=READ)
    async def openapi() -> Response:
        return Response(document, media_type="application/json")

    return routes


def openapi_document(models: Sequence[str], root_path: str = "") -> Schema:
    """OpenAPI 3.1, for a server of ``models``."""
    return {
        "openapi": "3.1.0",
        "info": {"title": "Octavo", "version": __version__},
        "servers": [{"url": root_path or "/"}],
        "paths": {path: {verb: _operation(path, verb) for verb in verbs} for path, verbs in _PATHS.items()},
        "components": {
            "schemas": {**_SCHEMAS, "Served": {"enum": list(models)}},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _object(properties: Schema, required: tuple[str, ...] | None = None) -> Schema:
    """An object with these properties, all of them there unless said otherwise."""
    needed = list(properties) if required is None else list(required)
    return {"type": "object", "properties": properties, "required": needed}


def _list(items: Schema, **bounds: int) -> Schema:
    return {"type": "array", "items": items, **bounds}


def _whole(low: int | None = None, high: int | None = None) -> Schema:
    bounds = {"minimum": low, "maximum": high}
    return {"type": "integer", **{name: value for name, value in bounds.items() if value is not None}}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _one_of(*schemas: Schema) -> Schema:
    return {"anyOf": list(schemas)}


_TEXT, _FLAG, _ANY, _COUNT = {"type": "string"}, {"type": "boolean"}, {}, _whole(0)
_TOKEN = _whole(0, MAX_TOKEN_ID)
_SOME_TEXT = {"type": "string", "minLength": 1}
_NUMBER = {"type": "number"}
_SERVED = _or_null({"$ref": "#/components/schemas/Served"})


def _number(low: float, high: float) -> Schema:
    return {"type": "number", "minimum": low, "maximum": high}


_MESSAGE = {
    "type": "object",
    "properties": {
        "role": {"enum": ["system", "developer", "user", "assistant", "tool", "function"]},
        "content": _one_of(_TEXT, {"type": "null"}, _list({"type": "object"})),
    },
    "required": ["role"],
}
_FUNCTION = _object(
    {
        "name": _SOME_TEXT,
        "description": _or_null(_TEXT),
        "parameters": _or_null({"type": "object"}),
        "strict": _or_null(_FLAG),
    },
    ("name",),
)
_TOOL = _object({"type": {"const": "function"}, "function": _FUNCTION})
_FORM = _one_of(
    _object({"type": {"const": "text"}}),
    _object({"type": {"const": "json_object"}, "schema": _or_null({"type": "object"})}, ("type",)),
    _object(
        {
            "type": {"const": "json_schema"},
            "json_schema": _object({"schema": {"type": "object"}}, ("schema",)),
        }
    ),
)
_NEEDED: dict[str, Schema] = {
    "model": _SERVED,
    "messages": _list(_MESSAGE, minItems=1),
    "prompt": _one_of(
        _SOME_TEXT,
        _list(_SOME_TEXT, minItems=1),
        _list(_TOKEN, minItems=1),
        _list(_list(_TOKEN, minItems=1), minItems=1),
    ),
}
_FIELDS: dict[str, Schema] = {
    "n": _whole(1, MAX_N),
    "temperature": _number(0, 2),
    "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "top_k": _whole(-1, MAX_TOKEN_ID),
    "min_p": _number(0, 1),
    "presence_penalty": _number(-2, 2),
    "frequency_penalty": _number(-2, 2),
    "repetition_penalty": {"type": "number", "exclusiveMinimum": 0},
    "logit_bias": {"type": "object", "additionalProperties": _NUMBER},
    "allowed_token_ids": _list(_TOKEN, minItems=1),
    "bad_words": _list(_SOME_TEXT, maxItems=MAX_BAD_WORDS),
    "seed": _whole(-(2**63), 2**63 - 1),
    "max_tokens": _whole(0),
    "max_completion_tokens": _whole(1),
    "min_tokens": _COUNT,
    "stop": _one_of(_SOME_TEXT, _list(_SOME_TEXT, maxItems=MAX_STOP_STRINGS)),
    "stop_token_ids": _list(_TOKEN),
    "prompt_logprobs": _COUNT,
    "top_logprobs": _COUNT,
    "length_penalty": _NUMBER,
    "structured_outputs": {"type": "object"},
    "response_format": _FORM,
    "stream_options": _object(
        {"include_usage": _or_null(_FLAG), "continuous_usage_stats": _or_null(_FLAG)}, ()
    ),
    "cache_salt": _SOME_TEXT,
    "priority": _whole(-(2**31), 2**31 - 1),
    "timeout_s": {"type": "number", "exclusiveMinimum": 0, "maximum": 86_400},
    "truncate_prompt_tokens": _whole(-1),
    "truncation_side": {"enum": ["left", "right"]},
    "request_id": _TEXT,
    "user": _ANY,
    "chat_template": _TEXT,
    "chat_template_kwargs": {"type": "object"},
    "documents": _list({"type": "object"}),
    "tools": _list(_TOOL),
    "tool_choice": _one_of({"enum": ["none", "auto", "required"]}, {"type": "object"}),
    "functions": _list(_FUNCTION),
    "function_call": _one_of({"enum": ["none", "auto"]}, _object({"name": _SOME_TEXT})),
    "reasoning_effort": {"enum": ["none", "minimal", "low", "medium", "high", "xhigh"]},
}
_SWITCHES = (
    "stream", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "echo", "early_stopping",
    "spaces_between_special_tokens", "use_beam_search", "return_token_ids", "return_tokens_as_token_ids",
    "add_generation_prompt", "continue_final_message", "parallel_tool_calls", "include_reasoning",
    "add_special_tokens",
)  # fmt: skip


def _request(names: frozenset[str], logprobs: Schema, *needed: str) -> Schema:
    """The body of a generating route, of the fields that it does not refuse. Null is as if left out."""
    known = {**_FIELDS, **dict.fromkeys(_SWITCHES, _FLAG), "logprobs": logprobs}
    properties = {name: _NEEDED.get(name) or _or_null(known[name]) for name in sorted(names - REFUSED_FIELDS)}
    return _object(properties, needed)


_USAGE = _object(
    {
        "prompt_tokens": _COUNT,
        "completion_tokens": _COUNT,
        "total_tokens": _COUNT,
        "prompt_tokens_details": _object({"cached_tokens": _COUNT}),
        "completion_tokens_details": _object({"reasoning_tokens": _COUNT}),
    }
)
_END = {
    "index": _COUNT,
    "logprobs": _or_null({"type": "object"}),
    "finish_reason": {"enum": ["stop", "length", "tool_calls", "function_call", "abort"]},
    "stop_reason": {"type": ["string", "integer", "null"]},
}


def _answer(kind: str, said: Schema) -> Schema:
    head = {"id": _TEXT, "object": {"const": kind}, "created": _COUNT, "model": _TEXT}
    return _object({**head, "choices": _list(_object({**said, **_END})), "usage": _USAGE})


_REPLY = _object({"role": {"const": "assistant"}, "content": {"type": ["string", "null"]}})
_MODEL = _object(
    {
        "id": _TEXT,
        "object": {"const": "model"},
        "created": _COUNT,
        "owned_by": _TEXT,
        "root": _TEXT,
        "parent": {"type": "null"},
        "max_model_len": {"type": ["integer", "null"]},
    }
)
_SCHEMAS: dict[str, Schema] = {
    "Error": _object(
        {
            "error": _object(
                {
                    "message": _TEXT,
                    "type": _TEXT,
                    "param": {"type": ["string", "null"]},
                    "code": _TEXT,
                }
            )
        }
    ),
    "ChatRequest": _request(CHAT_FIELDS, _FLAG, "messages"),
    "CompletionRequest": _request(COMPLETION_FIELDS, _COUNT, "prompt"),
    "TokenizeRequest": _object(
        {
            "model": _SERVED,
            "prompt": _TEXT,
            "messages": _NEEDED["messages"],
            "add_special_tokens": _or_null(_FLAG),
            "return_token_strs": _or_null(_FLAG),
        },
        (),
    ),
    "DetokenizeRequest": _object({"model": _SERVED, "tokens": _list(_TOKEN)}, ("tokens",)),
    "ResponseRequest": {
        "type": "object",
        "properties": {
            "model": _SERVED,
            "input": _one_of(_SOME_TEXT, _list({"type": "object"}, minItems=1)),
            "instructions": _or_null(_TEXT),
            "max_output_tokens": _or_null(_whole(1)),
            "temperature": _or_null(_number(0, 2)),
            "stream": _or_null(_FLAG),
            "store": _or_null(_FLAG),
            "previous_response_id": _or_null(_TEXT),
            "metadata": _or_null({"type": "object", "additionalProperties": _TEXT}),
            "tools": _or_null(_list({"type": "object"})),
        },
        "required": ["input"],
    },
    "CountRequest": _object({"model": _SERVED, "messages": _NEEDED["messages"]}, ("messages",)),
    "MessageRequest": {
        "type": "object",
        "properties": {
            "model": _SERVED,
            "messages": _NEEDED["messages"],
            "max_tokens": _whole(1),
            "system": _or_null(_one_of(_TEXT, _list({"type": "object"}))),
            "temperature": _or_null(_number(0, 1)),
            "top_k": _or_null(_COUNT),
            "stop_sequences": _or_null(_list(_SOME_TEXT)),
            "stream": _or_null(_FLAG),
        },
        "required": ["messages", "max_tokens"],
    },
    "Response": {
        "type": "object",
        "properties": {"object": {"const": "response"}, "id": _TEXT, "output": _list({"type": "object"})},
        "required": ["object", "id", "output", "status"],
    },
    "Deleted": _object({"id": _TEXT, "object": {"const": "response"}, "deleted": {"const": True}}),
    "Message": {
        "type": "object",
        "properties": {"type": {"const": "message"}, "content": _list({"type": "object"})},
        "required": ["type", "id", "role", "model", "content", "stop_reason", "usage"],
    },
    "InputTokens": _object({"input_tokens": _COUNT}),
    "MessageError": {
        "type": "object",
        "properties": {
            "type": {"const": "error"},
            "error": {"type": "object", "required": ["type", "message"]},
        },
        "required": ["type", "error"],
    },
    "Chat": _answer("chat.completion", {"message": _REPLY}),
    "Completion": _answer("text_completion", {"text": _TEXT}),
    "Model": _MODEL,
    "Models": _object({"object": {"const": "list"}, "data": _list(_MODEL)}),
    "Tokens": _object(
        {
            "count": _COUNT,
            "max_model_len": _COUNT,
            "tokens": _list(_TOKEN),
            "token_strs": _or_null(_list(_TEXT)),
        }
    ),
    "Text": _object({"prompt": _TEXT}),
    "Tokenizer": {"type": "object", "properties": {"chat_template": {"type": ["string", "null"]}}},
    "State": _object(
        {
            "state": {"enum": list(get_args(EngineState))},
            "stage": _TEXT,
            "detail": _TEXT,
            "stages": _list(_list(_TEXT)),
            "error": {"type": ["string", "null"]},
        }
    ),
    "Load": _object(
        {
            "running": _COUNT,
            "waiting": _COUNT,
            "waiting_tokens": _COUNT,
            "kv_usage": _NUMBER,
            "prefill_tokens_per_s": _NUMBER,
            "server_load": _COUNT,
        }
    ),
    "Version": _object({"version": _TEXT}),
}
# Path -> verb -> what is taken (a schema, or none) and what is answered (a schema, or a media type).
_READ_PATHS = {
    "/": "text/html", "/health": "State", "/live": "State", "/ready": "State",
    "/startup": "State", "/ping": "State",
    "/version": "Version", "/load": "Load", "/metrics": "text/plain", "/openapi.json": "application/json",
    "/v1/models": "Models", "/v1/models/{name}": "Model", "/tokenizer_info": "Tokenizer",
}  # fmt: skip
_PATHS: dict[str, dict[str, tuple[str | None, str]]] = {
    **{path: {"get": (None, said), "head": (None, said)} for path, said in _READ_PATHS.items()},
    "/v1/chat/completions": {"post": ("ChatRequest", "Chat")},
    "/v1/completions": {"post": ("CompletionRequest", "Completion")},
    "/v1/responses": {"post": ("ResponseRequest", "Response")},
    "/v1/responses/{response_id}": {"get": (None, "Response"), "delete": (None, "Deleted")},
    "/v1/responses/{response_id}/cancel": {"post": (None, "Response")},
    "/v1/messages": {"post": ("MessageRequest", "Message")},
    "/v1/messages/count_tokens": {"post": ("CountRequest", "InputTokens")},
    "/tokenize": {"post": ("TokenizeRequest", "Tokens")},
    "/detokenize": {"post": ("DetokenizeRequest", "Text")},
}
_PATHS["/ping"]["post"] = (None, "State")
_GENERATES = ("Chat", "Completion", "Response", "Message")
_PROBES = ("/health", "/live", "/ready", "/startup", "/ping")


def _operation(path: str, verb: str) -> Schema:
    takes, answers = _PATHS[path][verb]
    content = _content(answers)
    if answers in _GENERATES and takes is not None:  # with stream true
        content["text/event-stream"] = {"schema": _object({"data": _TEXT, "event": _TEXT}, ("data",))}
    name = path.strip("/").replace("/", "_").translate({ord(one): None for one in "{}."}) or "page"
    operation: Schema = {
        "operationId": f"{verb}_{name}",
        "responses": {"200": {"description": "Done.", "content": content}},
    }
    if path in _PROBES:
        operation["responses"]["503"] = {"description": "Not so.", "content": content, "headers": _RETRY}
    if path not in OPEN_PATHS:
        operation["security"] = [{"key": []}]
        operation["responses"]["401"] = _error("401")
    for part in path.split("/"):
        if part.startswith("{"):
            parameter = {"name": part[1:-1], "in": "path", "required": True, "schema": _SOME_TEXT}
            operation["parameters"] = [parameter]
            operation["responses"] |= {status: _error(status) for status in ("400", "404")}
    if path == "/tokenizer_info":
        operation["responses"]["503"] = _error("503")
    if takes is not None:
        operation["requestBody"] = {"required": True, "content": _content(takes)}
        statuses = ERRORS if answers in _GENERATES else ERRORS.keys() - {"429"}
        form = "MessageError" if path.startswith("/v1/messages") else "Error"
        operation["responses"] |= {status: _error(status, form) for status in sorted(statuses)}
    return operation


_RETRY = {"Retry-After": {"description": "Seconds.", "schema": {"type": "string", "pattern": "^[0-9]+$"}}}


def _content(what: str) -> Schema:
    if "/" in what:
        return {what: {"schema": _ANY}}
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{what}"}}}


def _error(status: str, form: str = "Error") -> Schema:
    headers = {"headers": _RETRY} if status in ("429", "503") else {}
    return {"description": ERRORS[status], "content": _content(form), **headers}
