"""Responses and messages of a real model: SmolLM2 says in each API what it says in a chat."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import openai
import pytest
from pydantic import BaseModel

pytestmark = pytest.mark.usefixtures("only_this_machine")

QUESTION = "What is the capital of France?"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Lyon"]}},
    "required": ["city"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def smollm2(serve: Any, smollm2_address: str) -> Iterator[Any]:
    settings = {"dtype": "float32", "device": "cpu", "kv_cache_memory_bytes": "64Mi", "max_model_len": 512}
    with serve(None, smollm2_address, **settings) as running:
        yield running


@pytest.fixture(scope="module")
def claude(smollm2: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=smollm2.url, api_key="any", max_retries=0)


def test_every_api_says_the_same(smollm2: Any, claude: anthropic.Anthropic) -> None:
    asked: Any = [{"role": "user", "content": QUESTION}]
    client = smollm2.client()
    chat = client.chat.completions.create(model="tiny", messages=asked, max_tokens=24, temperature=0)
    said = chat.choices[0].message.content
    response = client.responses.create(model="tiny", input=QUESTION, max_output_tokens=24, temperature=0)
    assert "Paris" in said and response.output_text == said
    message = claude.messages.create(
        model="tiny", messages=asked, max_tokens=24, extra_body={"temperature": 0}
    )
    assert message.content[0].text == said
    assert message.usage.output_tokens == response.usage.output_tokens == chat.usage.completion_tokens
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    assert message.usage.cache_read_input_tokens > 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_streams_say_the_same(smollm2: Any, claude: anthropic.Anthropic, temperature: float) -> None:
    fields: dict[str, Any] = {"model": "tiny", "extra_body": {"seed": 5, "temperature": temperature}}
    client = smollm2.client()
    whole = client.responses.create(input=QUESTION, max_output_tokens=30, **fields)
    events = client.responses.create(input=QUESTION, max_output_tokens=30, stream=True, **fields)
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text and len(deltas) > 5
    asked: Any = [{"role": "user", "content": QUESTION}]
    message = claude.messages.create(messages=asked, max_tokens=30, **fields)
    with claude.messages.stream(messages=asked, max_tokens=30, **fields) as stream:
        final = stream.get_final_message()
    assert final.content[0].text == message.content[0].text == whole.output_text
    assert final.stop_reason == message.stop_reason


def test_a_second_turn_finds_the_first_one_cached(smollm2: Any) -> None:
    client = smollm2.client()
    first = client.responses.create(model="tiny", input=QUESTION, max_output_tokens=40, temperature=0)
    fields: Any = {"model": "tiny", "previous_response_id": first.id, "max_output_tokens": 10}
    second = client.responses.create(input="And of Italy?", **fields)
    usage = second.usage
    assert usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens
    assert usage.input_tokens_details.cached_tokens >= first.usage.input_tokens // 16 * 16


def test_forms_and_calls_are_enforced(smollm2: Any, claude: anthropic.Anthropic) -> None:
    client = smollm2.client()
    form: Any = {"format": {"type": "json_schema", "name": "answer", "schema": SCHEMA, "strict": True}}
    answer = client.responses.create(model="tiny", input=QUESTION, text=form, max_output_tokens=60)
    assert json.loads(answer.output_text)["city"] in ("Paris", "Lyon")
    tool: Any = {"type": "function", "name": "find", "parameters": SCHEMA, "strict": True}
    called = client.responses.create(
        model="tiny", input=QUESTION, tools=[tool], tool_choice="required", parallel_tool_calls=False,
        max_output_tokens=200,
    )  # fmt: skip
    (call,) = called.output
    assert call.type == "function_call" and call.name == "find" and call.status == "completed"
    assert json.loads(call.arguments)["city"] in ("Paris", "Lyon")
    message = claude.messages.create(
        model="tiny", max_tokens=200, messages=[{"role": "user", "content": QUESTION}],
        tools=[{"name": "find", "input_schema": SCHEMA, "strict": True}],
        tool_choice={"type": "tool", "name": "find", "disable_parallel_tool_use": True},
    )  # fmt: skip
    assert message.stop_reason == "tool_use"
    assert message.content[0].input["city"] in ("Paris", "Lyon")


class Answer(BaseModel):
    city: Literal["Paris", "Lyon"]


def test_public_clients_hold_it_to_their_classes(smollm2: Any) -> None:
    import litellm
    from langchain_openai import ChatOpenAI

    url = f"{smollm2.url}/v1"
    for responses in (False, True):
        model = ChatOpenAI(
            model="tiny", base_url=url, api_key="any", max_retries=0, max_tokens=200, temperature=0,
            use_responses_api=responses,
        )  # fmt: skip
        for method in ("json_schema", "function_calling"):
            assert isinstance(model.with_structured_output(Answer, method=method).invoke(QUESTION), Answer)
    asked = [{"role": "user", "content": QUESTION}]
    where = {"model": "openai/tiny", "api_base": url, "api_key": "any", "max_retries": 0, "temperature": 0}
    said = litellm.completion(messages=asked, response_format=Answer, max_tokens=60, **where)
    assert Answer.model_validate_json(said.choices[0].message.content)


@pytest.mark.parametrize("api", ["chats", "responses"])
def test_an_agent_that_must_call_its_tool_does(smollm2: Any, api: str) -> None:
    """The call is enforced, and its arguments fit. No template of tools: the run ends with a result."""
    import agents

    given: list[str] = []

    @agents.function_tool
    def look_up(city: Literal["Paris", "Lyon"]) -> str:
        """The weather in a city."""
        given.append(city)
        return "It rains."

    kind = agents.OpenAIChatCompletionsModel if api == "chats" else agents.OpenAIResponsesModel
    settings = agents.ModelSettings(
        tool_choice="required", parallel_tool_calls=False, max_tokens=150, temperature=0
    )

    async def run() -> Any:
        async with openai.AsyncOpenAI(base_url=f"{smollm2.url}/v1", api_key="any", max_retries=0) as client:
            model = kind("tiny", openai_client=client)
            agent = agents.Agent(
                "a", tools=[look_up], model=model, model_settings=settings,
                tool_use_behavior="stop_on_first_tool",
            )  # fmt: skip
            return await agents.Runner.run(agent, "How is the weather in Paris?")

    result = asyncio.run(run())
    assert len(given) == 1 and given[0] in ("Paris", "Lyon")
    assert [item.type for item in result.new_items] == ["tool_call_item", "tool_call_output_item"]
    assert result.final_output == "It rains."


def test_an_answer_that_was_begun_goes_on(claude: anthropic.Anthropic) -> None:
    begun: Any = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": "The capital of"}]
    message = claude.messages.create(
        model="tiny", max_tokens=12, messages=begun, stop_sequences=["."], extra_body={"temperature": 0}
    )
    assert message.content[0].text.startswith(" France is Paris")
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", ".")
