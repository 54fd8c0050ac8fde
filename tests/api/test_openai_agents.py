"""Agents of openai-agents run to their end on our server, over chats and over responses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from pydantic import BaseModel

pytestmark = pytest.mark.usefixtures("only_this_machine")


class City(BaseModel):
    name: str
    people: int


def call(tool: str, **arguments: int) -> str:
    return f"<tool_call>{json.dumps({'name': tool, 'arguments': arguments})}</tool_call>"


ADDS = ["<think>hm</think>I add. " + call("add", a=2, b=3) + call("add", a=5, b=6), call("add", a=7, b=8)]


@pytest.fixture(params=["chats", "responses"])
def model_of(request: pytest.FixtureRequest) -> Any:
    """``async with model_of(server) as model``: the agents' model over either API."""
    from agents import OpenAIChatCompletionsModel, OpenAIResponsesModel

    kind = OpenAIChatCompletionsModel if request.param == "chats" else OpenAIResponsesModel

    @asynccontextmanager
    async def build(running: Any) -> AsyncIterator[Any]:
        url = f"{running.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            yield kind("tiny", openai_client=client)

    return build


@pytest.fixture
def adder() -> Any:
    """A function tool, and the calls that it was given."""
    from agents import function_tool

    given: list[tuple[int, int]] = []

    @function_tool
    def add(a: int, b: int) -> int:
        """The sum of two numbers."""
        given.append((a, b))
        return a + b

    return add, given


def test_an_agent_runs_to_its_end(model_of: Any, acting: Any, script: Any, adder: Any) -> None:
    """The scripted model ends with what it was told last: the last call's result went all the way round."""
    from agents import Agent, Runner

    tool, given = adder

    async def run() -> Any:
        async with model_of(acting) as model:
            return await Runner.run(Agent("a", instructions=script(*ADDS), tools=[tool], model=model), "add")

    result = asyncio.run(run())
    assert result.final_output == "15"
    assert given == [(2, 3), (5, 6), (7, 8)]
    kinds = [item.type for item in result.new_items]
    first = ["reasoning_item", "message_output_item", "tool_call_item", "tool_call_item"]
    told = ["tool_call_output_item"]
    assert kinds == [*first, *told * 2, "tool_call_item", *told, "message_output_item"]
    usage = result.context_wrapper.usage
    assert usage.requests == 3 and usage.output_tokens_details.reasoning_tokens > 0
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens


def test_a_streamed_run_ends_as_the_whole_one(model_of: Any, acting: Any, script: Any, adder: Any) -> None:
    from agents import Agent, ModelSettings, Runner

    tool, given = adder
    settings = ModelSettings(include_usage=True)

    async def run() -> tuple[Any, Any, list[str]]:
        async with model_of(acting) as model:
            agent = Agent("a", instructions=script(*ADDS), tools=[tool], model=model, model_settings=settings)
            whole, streamed, text = await Runner.run(agent, "add"), Runner.run_streamed(agent, "add"), []
            async for event in streamed.stream_events():
                if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
                    text.append(event.data.delta)
            return whole, streamed, text

    whole, streamed, text = asyncio.run(run())
    assert streamed.final_output == whole.final_output == "15"
    assert [item.type for item in streamed.new_items] == [item.type for item in whole.new_items]
    assert given == [(2, 3), (5, 6), (7, 8)] * 2
    assert "".join(text) == "I add.15" and len(text) > 3
    for name in ("requests", "input_tokens", "output_tokens", "total_tokens"):
        assert getattr(streamed.context_wrapper.usage, name) == getattr(whole.context_wrapper.usage, name) > 0


def test_one_agent_hands_over_to_another(model_of: Any, acting: Any, script: Any) -> None:
    from agents import Agent, Runner

    async def run() -> Any:
        async with model_of(acting) as model:
            second = Agent("second", instructions=script("not said", "I am the second."), model=model)
            hand_over = script(call("transfer_to_second"))
            return await Runner.run(
                Agent("first", instructions=hand_over, handoffs=[second], model=model), "hello"
            )

    result = asyncio.run(run())
    assert (result.last_agent.name, result.final_output) == ("second", "I am the second.")


def test_a_form_and_settings_are_taken(model_of: Any, acting: Any, script: Any, adder: Any) -> None:
    from agents import Agent, ModelSettings, Runner

    tool, given = adder
    said = [call("add", a=1, b=1), '{"name": "Oslo", "people": 2}']
    settings = ModelSettings(
        tool_choice="required", parallel_tool_calls=False, temperature=0.5, top_p=0.9, max_tokens=200,
        store=False, metadata={"a": "b"},
    )  # fmt: skip

    async def run() -> Any:
        async with model_of(acting) as model:
            agent = Agent(
                "a", instructions=script(*said), tools=[tool], output_type=City, model=model,
                model_settings=settings,
            )  # fmt: skip
            return await Runner.run(agent, "hello")

    assert asyncio.run(run()).final_output == City(name="Oslo", people=2)
    assert given == [(1, 1)]


def test_a_run_goes_on_from_a_stored_response(acting: Any, script: Any, adder: Any) -> None:
    from agents import Agent, OpenAIResponsesModel, Runner

    tool, given = adder

    async def run() -> tuple[Any, Any]:
        url = f"{acting.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            model = OpenAIResponsesModel("tiny", openai_client=client)
            said = script("Ask on.", call("add", a=4, b=4))
            agent = Agent("a", instructions=said, tools=[tool], model=model)
            first = await Runner.run(agent, "hello")
            return first, await Runner.run(agent, "add", previous_response_id=first.last_response_id)

    first, second = asyncio.run(run())
    assert (first.final_output, second.final_output) == ("Ask on.", "8")
    assert given == [(4, 4)]


def test_a_refusal_reaches_the_caller(model_of: Any, acting: Any) -> None:
    from agents import Agent, ModelSettings, Runner

    async def run() -> None:
        async with model_of(acting) as model:
            settings = ModelSettings(temperature=9)
            await Runner.run(Agent("a", instructions="x", model=model, model_settings=settings), "hello")

    with pytest.raises(openai.BadRequestError, match="temperature is 9") as caught:
        asyncio.run(run())
    assert caught.value.param == "temperature"
