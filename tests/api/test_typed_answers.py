"""Chats, completions and models as the openai package's own types have them, checked strictly."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import pytest
import typed
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.completion_choice import CompletionChoice
from pydantic import ValidationError

SAYS = 'so <tool_call>{"name": "f", "arguments": {"id": 42}}</tool_call>'
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 9}
COMPLETION = {"model": "tiny", "prompt": ["hello", "one two"], "max_tokens": 9}
OF_MODELS = frozenset(["root", "parent", "max_model_len"])  # as vLLM has them


class ChunkChoice(CompletionChoice):
    """The package's type serves whole answers; OpenAI's server sends null until a choice ends."""

    finish_reason: Literal["stop", "length", "content_filter"] | None  # type: ignore[assignment]


class CompletionChunk(Completion):
    choices: list[ChunkChoice]  # type: ignore[assignment]


@pytest.fixture(scope="module")
def reciting(serve: Any) -> Iterator[Any]:
    """The model says what the user says."""
    parsers = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3", "enable_prefix_caching": False}
    with serve("reciting", **parsers) as running:
        yield running


def check(running: Any, path: str, kind: Any, chunk: Any, body: dict[str, Any]) -> None:
    """Ask for a whole answer and for a stream."""
    whole = running.post(path, body)
    assert whole.status_code == 200, whole.text
    typed.read(kind, whole.text)
    streamed = running.post(path, {**body, "stream": True, "stream_options": {"include_usage": True}})
    *events, done = streamed.text.removesuffix("\n\n").split("\n\n")
    assert done == "data: [DONE]" and len(events) > 2
    for event in events:
        typed.read(chunk, event.removeprefix("data: "))


@pytest.mark.parametrize("logprobs", [{}, {"logprobs": True}, {"logprobs": True, "top_logprobs": 3}], ids=str)
@pytest.mark.parametrize("more", [{}, {"n": 3}, {"stop": ["e", "o"]}], ids=str)
def test_chats_have_the_types_of_the_package(
    fast: Any, logprobs: dict[str, Any], more: dict[str, Any]
) -> None:
    for seed in range(3):
        body = {**CHAT, "seed": seed, **logprobs, **more}
        check(fast, "/v1/chat/completions", ChatCompletion, ChatCompletionChunk, body)


@pytest.mark.parametrize("text", [SAYS, f"<think>hm</think>{SAYS}{SAYS}", "<think>hm</think>hello"])
def test_calls_and_reasoning_have_the_types_of_the_package(reciting: Any, text: str) -> None:
    asked = {"messages": [{"role": "user", "content": text}], "max_tokens": 400, "tools": [TOOL]}
    for more in ({}, {"logprobs": True, "top_logprobs": 1}):
        body = {**CHAT, **asked, **more}
        check(reciting, "/v1/chat/completions", ChatCompletion, ChatCompletionChunk, body)


@pytest.mark.parametrize("more", [{}, {"logprobs": 2}, {"logprobs": 0, "n": 2}, {"stop": "e"}], ids=str)
def test_completions_have_the_types_of_the_package(fast: Any, more: dict[str, Any]) -> None:
    for seed in range(3):
        check(fast, "/v1/completions", Completion, CompletionChunk, {**COMPLETION, "seed": seed, **more})


def test_models_have_the_types_of_the_package(fast: Any) -> None:
    listed = fast.get("/v1/models").json()
    assert listed.keys() == {"object", "data"} and listed["object"] == "list"
    for model in listed["data"]:
        assert typed.read(Model, json.dumps(model), OF_MODELS).id == model["id"]
        assert fast.get(f"/v1/models/{model['id']}").json() == model


def test_a_wrong_type_or_an_unknown_field_is_noticed(fast: Any) -> None:
    whole = fast.post("/v1/chat/completions", CHAT).json()
    whole["choices"][0]["message"]["feeling"] = "fine"
    with pytest.raises(AssertionError, match=r"choices\[0\].message.feeling"):
        typed.read(ChatCompletion, json.dumps(whole))
    whole["usage"]["prompt_tokens"] = "5"
    with pytest.raises(ValidationError, match="prompt_tokens"):
        typed.read(ChatCompletion, json.dumps(whole))
