"""The litellm package as a client: chats, streams, tools, and the exception that each status becomes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("only_this_machine")

CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
NUMBERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": NUMBERS}}]
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def litellm() -> Any:
    import litellm

    litellm.telemetry = False
    return litellm


@pytest.fixture(params=["openai", "hosted_vllm"])
def to(request: pytest.FixtureRequest) -> Any:
    """``to(server)``: how litellm is told of it, as OpenAI's and as vLLM's kind of endpoint."""

    def fields(running: Any, **more: Any) -> dict[str, Any]:
        where = {"model": f"{request.param}/tiny", "api_base": f"{running.url}/v1", "api_key": "one"}
        return {**where, "max_retries": 0, **more}

    return fields


def counted(running: Any, messages: Any, **fields: Any) -> dict[str, Any]:
    """The usage of the same request without litellm."""
    answer = running.post("/v1/chat/completions", {"model": "tiny", "messages": messages, **fields})
    usage: dict[str, Any] = answer.json()["usage"]
    return usage


def check_usage(found: Any, expected: dict[str, Any]) -> None:
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert found[name] == expected[name] > 0
    reasoning = expected["completion_tokens_details"]["reasoning_tokens"]
    assert found.completion_tokens_details.reasoning_tokens == reasoning


def test_a_chat_with_a_tool_goes_to_its_end(litellm: Any, to: Any, acting: Any, script: Any) -> None:
    messages: list[Any] = [{"role": "user", "content": script(f"<think>hm</think>I add. {CALL}")}]
    answer = litellm.completion(messages=messages, tools=TOOLS, **to(acting))
    (choice,) = answer.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I add.")
    assert choice.message.reasoning_content == "hm"
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "add")
    assert json.loads(call.function.arguments) == {"a": 2, "b": 3}
    check_usage(answer.usage, counted(acting, messages, tools=TOOLS))
    messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "five"}]
    end = litellm.completion(messages=messages, tools=TOOLS, **to(acting)).choices[0]
    assert (end.finish_reason, end.message.content) == ("stop", "five")


def test_a_stream_adds_up_to_the_whole_answer(litellm: Any, to: Any, acting: Any, script: Any) -> None:
    messages = [{"role": "user", "content": script(f"<think>hm</think>I add. {CALL}{CALL}")}]
    options = {"stream": True, "stream_options": {"include_usage": True}}
    chunks = list(litellm.completion(messages=messages, tools=TOOLS, **options, **to(acting)))
    ends = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert [end for end in ends if end] == ["tool_calls"]
    message = litellm.stream_chunk_builder(chunks).choices[0].message
    assert (message.content, message.reasoning_content) == ("I add.", "hm")
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls]
    assert calls == [("add", {"a": 2, "b": 3})] * 2
    assert len({call.id for call in message.tool_calls}) == 2
    check_usage(chunks[-1].usage, counted(acting, messages, tools=TOOLS))


def test_sixteen_at_once_say_what_each_says_alone(litellm: Any, to: Any, fast: Any) -> None:
    fields = [to(fast, messages=HELLO, seed=seed, max_tokens=20, logprobs=True) for seed in range(16)]

    async def one(settings: dict[str, Any], stream: bool) -> str:
        answer = await litellm.acompletion(**settings, stream=stream)
        if not stream:
            return str(answer.choices[0].message.content)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in answer])

    async def every() -> list[str]:
        return await asyncio.gather(*(one(each, stream) for stream in (False, True) for each in fields))

    together = asyncio.run(every())
    assert together[:16] == together[16:]
    answer = litellm.completion(**fields[5]).choices[0]
    assert together[5] == answer.message.content
    said = answer.logprobs["content"] if isinstance(answer.logprobs, dict) else answer.logprobs.content
    assert len(said) == 20


def test_other_routes_say_what_chats_and_completions_say(litellm: Any, fast: Any) -> None:
    where = {"api_base": f"{fast.url}/v1", "api_key": "one", "max_retries": 0, "temperature": 0}
    made = litellm.responses(model="openai/tiny", input="hello", max_output_tokens=9, **where)
    chat = litellm.completion(model="openai/tiny", messages=HELLO, max_tokens=9, **where)
    assert made.output[0].content[0].text == chat.choices[0].message.content
    model = "text-completion-openai/tiny"
    text = litellm.text_completion(model=model, prompt="hello", max_tokens=9, logprobs=1, **where)
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 9, "temperature": 0}
    assert text.choices[0].text == fast.post("/v1/completions", body).json()["choices"][0]["text"]
    assert text.choices[0].logprobs.token_logprobs == [-0.5] * 9


@pytest.fixture(scope="module")
def narrow(serve: Any) -> Iterator[Any]:
    """It takes one request at a time, lets one wait, and knows the key "one"."""
    with serve("paced", max_num_seqs=1, max_queue=1, api_key=("one",)) as running:
        yield running


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "name", "status"),
    [
        ({"temperature": 9}, "BadRequestError", 400),
        ({"max_tokens": 99_999}, "ContextWindowExceededError", 400),
        ({"messages": [{"role": "user", "content": "word " * 9_000}]}, "ContextWindowExceededError", 400),
        ({"messages": [{"role": "user", "content": "word " * 2_500}]}, "ContextWindowExceededError", 400),
        ({"api_key": "two"}, "AuthenticationError", 401),
    ],
    ids=str,
)
def test_a_refusal_is_the_exception_of_its_kind(
    litellm: Any, to: Any, narrow: Any, fields: dict[str, Any], name: str, status: int, stream: bool
) -> None:
    with pytest.raises(getattr(litellm, name)) as caught:
        litellm.completion(**{**to(narrow, messages=HELLO), "stream": stream, **fields})
    assert caught.value.status_code == status


def test_an_unknown_model_is_not_found(litellm: Any, to: Any, narrow: Any) -> None:
    settings = to(narrow, messages=HELLO)
    with pytest.raises(litellm.NotFoundError, match="other"):
        litellm.completion(**{**settings, "model": settings["model"].replace("tiny", "other")})


def test_a_full_queue_is_a_rate_limit(litellm: Any, to: Any, narrow: Any) -> None:
    client = narrow.client(api_key="one")
    busy = [
        client.completions.create(
            model="tiny", prompt="x", max_tokens=1000, stream=True, extra_body={"ignore_eos": True}
        )
        for _ in range(2)
    ]
    with pytest.raises(litellm.RateLimitError):
        litellm.completion(messages=HELLO, **to(narrow))
    for one in busy:
        one.close()


def test_a_server_that_takes_nothing_is_unavailable(litellm: Any, to: Any, serve: Any) -> None:
    with serve("fast") as running:
        assert running.http.post(f"{running.private_url}/pause?mode=abort").status_code == 200
        with pytest.raises(litellm.ServiceUnavailableError):
            litellm.completion(messages=HELLO, **to(running))
