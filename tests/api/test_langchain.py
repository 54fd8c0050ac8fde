"""ChatOpenAI of langchain-openai as a client, over chats and over responses."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from pydantic import BaseModel

pytestmark = pytest.mark.usefixtures("only_this_machine")

CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'


class City(BaseModel):
    """A city and how many live there."""

    name: str
    people: int


def add(a: int, b: int) -> int:
    """The sum of two numbers."""
    return a + b


@pytest.fixture(params=["chats", "responses"])
def chat_model(request: pytest.FixtureRequest) -> Any:
    """``chat_model(server, temperature=0)``: LangChain's model over either API."""
    from langchain_openai import ChatOpenAI

    def build(running: Any, **more: Any) -> ChatOpenAI:
        settings = {"model": "tiny", "base_url": f"{running.url}/v1", "api_key": "one", "max_retries": 0}
        settings |= {"use_responses_api": request.param == "responses", "stream_usage": True}
        return ChatOpenAI(**{**settings, **more})

    return build


def usage_of(running: Any, text: str, **fields: Any) -> dict[str, Any]:
    """The usage of the same chat without LangChain, in its names."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": text}], **fields}
    usage = running.post("/v1/chat/completions", body).json()["usage"]
    reasoning = usage["completion_tokens_details"]["reasoning_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"],
        "output_tokens": usage["completion_tokens"],
        "total_tokens": usage["total_tokens"],
        "output_token_details": {"reasoning": reasoning},
    }


def test_an_answer_has_text_reason_and_usage(chat_model: Any, acting: Any, script: Any) -> None:
    text = script("<think>hm</think>hello")
    answer = chat_model(acting).invoke(text)
    assert answer.text == "hello"
    assert usage_of(acting, text).items() <= answer.usage_metadata.items()
    assert answer.usage_metadata["output_token_details"]["reasoning"] > 0
    told = answer.response_metadata
    assert told["model_name"] == "tiny"
    assert told.get("finish_reason") == "stop" or told.get("status") == "completed"


def test_a_stream_adds_up_to_the_whole_answer(chat_model: Any, fast: Any) -> None:
    settings = {"extra_body": {"seed": 3}, "max_tokens": 30, "temperature": 1.0}
    model = chat_model(fast, **settings)
    whole = model.invoke("hello")
    chunks = list(model.stream("hello"))
    assert len(chunks) > 3
    total = chunks[0]
    for chunk in chunks[1:]:
        total += chunk
    assert total.text == whole.text != ""
    for name in ("input_tokens", "output_tokens", "total_tokens"):
        assert total.usage_metadata[name] == whole.usage_metadata[name]

    async def later() -> tuple[str, str]:
        async with httpx.AsyncClient(trust_env=False) as http:  # its own would outlive this event loop
            beside = chat_model(fast, http_async_client=http, **settings)
            told = [chunk.text async for chunk in beside.astream("hello")]
            return "".join(told), (await beside.ainvoke("hello")).text

    assert asyncio.run(later()) == (whole.text, whole.text)


def test_bound_tools_are_called_and_told_of(chat_model: Any, acting: Any, script: Any) -> None:
    from langchain_core.messages import HumanMessage
    from langchain_core.tools import tool

    adder = tool(add)
    model = chat_model(acting).bind_tools([adder])
    asked: list[Any] = [HumanMessage(script(f"<think>hm</think>I add.{CALL}{CALL}", CALL))]
    answer = model.invoke(asked)
    assert answer.text == "I add." and not answer.invalid_tool_calls
    assert [(call["name"], call["args"]) for call in answer.tool_calls] == [("add", {"a": 2, "b": 3})] * 2
    streamed = list(model.stream(asked))
    total = streamed[0]
    for chunk in streamed[1:]:
        total += chunk
    assert [call["args"] for call in total.tool_calls] == [call["args"] for call in answer.tool_calls]
    assert total.text == answer.text
    for turn in range(2):
        assert answer.tool_calls, f"turn {turn}"
        asked += [answer, *(adder.invoke(call) for call in answer.tool_calls)]
        answer = model.invoke(asked)
    assert answer.text == "5" and not answer.tool_calls


@pytest.mark.parametrize("method", ["json_schema", "json_mode", "function_calling"])
def test_an_answer_is_an_object_of_a_class(chat_model: Any, acting: Any, script: Any, method: str) -> None:
    said = '{"name": "Oslo", "people": 700000}'
    if method == "function_calling":
        said = f'<tool_call>{{"name": "City", "arguments": {said}}}</tool_call>'
    model = chat_model(acting).with_structured_output(City, method=method)
    assert model.invoke(script(said)) == City(name="Oslo", people=700_000)


@pytest.fixture(scope="module")
def keyed(serve: Any) -> Iterator[Any]:
    with serve("fast", api_key=("one",)) as running:
        yield running


@pytest.mark.parametrize(
    ("fields", "text", "name"),
    [
        ({"temperature": 1.9, "top_p": 7}, "hello", "ModelInvalidRequestError"),
        ({"max_tokens": 99_999}, "hello", "ModelInvalidRequestError"),
        ({}, "word " * 2_500, "ContextOverflowError"),
        ({}, "word " * 9_000, "ContextOverflowError"),
        ({"api_key": "two"}, "hello", "ModelAuthenticationError"),
        ({"model": "other"}, "hello", "ModelNotFoundError"),
    ],
    ids=["top_p", "max_tokens", "prompt", "text", "key", "model"],
)
def test_a_refusal_is_the_exception_of_its_kind(
    chat_model: Any, keyed: Any, fields: dict[str, Any], text: str, name: str
) -> None:
    from langchain_core import exceptions

    model = chat_model(keyed, **fields)
    for ask in (model.invoke, lambda said: list(model.stream(said))):
        with pytest.raises(getattr(exceptions, name)):
            ask(text)
