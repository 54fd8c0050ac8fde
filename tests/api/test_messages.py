"""``/v1/messages``: the anthropic package reads typed answers; streams add up to whole answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
import typed
from anthropic.types import Message, RawMessageStreamEvent
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

TOOLS = [{"name": name, "input_schema": {"type": "object", "properties": {}}} for name in ("f", "ping")]
CALL = '<tool_call>{"name": "f", "arguments": {"id": 42}}</tool_call>'
PING = '<tool_call>{"name":"ping","arguments":{}}</tool_call>'
HELLO = {"model": "tiny", "max_tokens": 20, "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture(scope="module")
def reciting(serve: Any) -> Iterator[Any]:
    """The model says what the user says."""
    parsers = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3", "enable_prefix_caching": False}
    with serve("reciting", **parsers) as running:
        yield running


def ask(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "max_tokens": 400, "messages": [{"role": "user", "content": text}], **fields}


def create(running: Any, text: str, **fields: Any) -> dict[str, Any]:
    """A whole answer, its types checked strictly."""
    answer = running.post("/v1/messages", ask(text, **fields))
    assert answer.status_code == 200, answer.text
    typed.read(Message, answer.text)
    return answer.json()


def stream(running: Any, text: str, **fields: Any) -> dict[str, Any]:
    """The message that a stream adds up to; framing, types and order are checked on the way."""
    answer = running.post("/v1/messages", ask(text, stream=True, **fields))
    assert answer.status_code == 200, answer.text
    assert answer.text.endswith("\n\n")
    message: dict[str, Any] = {}
    blocks: list[dict[str, Any]] = []
    opened, kinds, written = False, [], ""
    for part in answer.text[:-2].split("\n\n"):
        name, data = part.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        kinds.append(event["type"])
        if event["type"] != "ping":
            typed.read(RawMessageStreamEvent, data.removeprefix("data: "))
        match event["type"]:
            case "message_start":
                message, written = event["message"], ""
                assert message["content"] == []
            case "content_block_start":
                assert not opened and event["index"] == len(blocks)
                blocks.append(event["content_block"])
                opened, written = True, ""
            case "content_block_delta":
                assert opened and event["index"] == len(blocks) - 1
                delta = event["delta"]
                kind = delta.pop("type").removesuffix("_delta")
                (name, new), block = delta.popitem(), blocks[-1]
                assert kind == ("input_json" if block["type"] == "tool_use" else block["type"])
                written += new
                if name == "partial_json":
                    continue
                block[name] += new
            case "content_block_stop":
                opened = False
                if blocks[-1]["type"] == "tool_use" and written:
                    try:
                        blocks[-1]["input"] = json.loads(written)
                    except ValueError:
                        blocks[-1]["input"] = {}
            case "message_delta":
                assert not opened
                message |= event["delta"]
                message["usage"] |= event["usage"]
    assert kinds[:2] == ["message_start", "ping"] and kinds[-2:] == ["message_delta", "message_stop"]
    return {**message, "content": blocks}


def said(message: dict[str, Any]) -> dict[str, Any]:
    """All that two runs of one request have in common."""
    blocks = [{name: value for name, value in one.items() if name != "id"} for one in message["content"]]
    return {**message, "id": None, "content": blocks}


def outline(message: dict[str, Any]) -> list[Any]:
    return [one.get("text") or one.get("thinking") or one.get("input") for one in message["content"]]


@pytest.mark.parametrize(
    ("text", "expected", "reason"),
    [
        ("hello", ["hello"], "end_turn"),
        ("", [], "end_turn"),
        (f"I look.\n{CALL}", ["I look.", {"id": 42}], "tool_use"),
        (f"{CALL}\n{PING}", [{"id": 42}, {}], "tool_use"),
        (f"<think>\nhm\n</think>\n\n{PING} done", ["hm", {}, "done"], "tool_use"),
        ("<think>hm</think>hello", ["hm", "hello"], "end_turn"),
        ("<tool_call>no</tool_call>", ["<tool_call>no</tool_call>"], "end_turn"),
    ],
)
def test_blocks_are_the_same_whole_and_streamed(
    reciting: Any, text: str, expected: list[Any], reason: str
) -> None:
    one, other = create(reciting, text, tools=TOOLS), stream(reciting, text, tools=TOOLS)
    assert outline(one) == expected and one["stop_reason"] == reason
    assert said(one) == said(other)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    text=st.text("ab <{}>\n日", min_size=1, max_size=30),
    fields=st.fixed_dictionaries(
        {"seed": st.integers(0, 2**40), "max_tokens": st.integers(1, 60)},
        optional={
            "temperature": st.sampled_from([0, 0.7, 1.0]),
            "system": st.sampled_from(
                ["be brief", [{"type": "text", "text": "be"}, {"type": "text", "text": "x"}]]
            ),
            "stop_sequences": st.sampled_from([["a"], ["the", " "]]),
            "top_k": st.integers(1, 50),
        },
    ),
)
def test_a_stream_adds_up_to_the_whole_answer(fast: Any, text: str, fields: dict[str, Any]) -> None:
    whole, streamed = create(fast, text, **fields), stream(fast, text, **fields)
    for one in (whole, streamed):
        usage = one["usage"]
        usage["input_tokens"] += usage.pop("cache_read_input_tokens")
    assert said(whole) == said(streamed)


def test_why_a_message_ended_is_told(reciting: Any) -> None:
    cut = create(reciting, "one two three", max_tokens=2)
    assert (cut["stop_reason"], cut["stop_sequence"]) == ("max_tokens", None)
    stopped = create(reciting, "one two three", stop_sequences=["two"])
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "two")
    assert outline(stopped) == ["one "]
    called = create(reciting, CALL, tools=TOOLS, max_tokens=30)
    assert called["stop_reason"] == "max_tokens", "a call that was cut is none to run"
    assert said(called) == said(stream(reciting, CALL, tools=TOOLS, max_tokens=30))


def test_what_the_cache_held_is_told_apart(fast: Any) -> None:
    text = "again and again " * 20
    first, second = create(fast, text), create(fast, text)
    assert first["usage"]["cache_read_input_tokens"] == 0
    cached = second["usage"]["cache_read_input_tokens"]
    assert cached and cached % 16 == 0
    assert second["usage"]["input_tokens"] + cached == first["usage"]["input_tokens"]
    answer = fast.post("/v1/messages", ask(text, stream=True), headers={"X-Octavo-Router": "1"})
    assert answer.text.endswith(f"\n\n: cached_tokens {cached}\n\n")


def test_the_anthropic_package_creates_streams_and_counts(reciting: Any) -> None:
    client = anthropic.Anthropic(
        base_url=reciting.url, api_key="any", http_client=reciting.http, max_retries=0
    )
    made = client.messages.create(**ask(f"so {CALL}", tools=TOOLS))
    assert [block.type for block in made.content] == ["text", "tool_use"]
    assert made.content[1].input == {"id": 42}
    with client.messages.stream(**ask(f"so {CALL}", tools=TOOLS)) as events:
        text = "".join(events.text_stream)
        final = events.get_final_message()
    assert text == "so" and final.content[1].input == {"id": 42} and final.stop_reason == "tool_use"
    assert final.usage == made.usage
    counted = client.messages.count_tokens(**{k: v for k, v in ask("so").items() if k != "max_tokens"})
    assert counted.input_tokens == client.messages.create(**ask("so")).usage.input_tokens
    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        client.messages.create(**{**ask("so"), "model": "other"})


def test_an_answer_that_was_begun_goes_on(fast: Any) -> None:
    """Its prompt ends with the beginning, without the mark that ends a turn."""
    begun = [*HELLO["messages"], {"role": "assistant", "content": "it was"}]
    counts = [
        fast.post("/v1/messages/count_tokens", {"model": "tiny", "messages": messages}).json()["input_tokens"]
        for messages in (HELLO["messages"], begun)
    ]
    inner = fast.post("/tokenize", {"model": "tiny", "prompt": "it was"}).json()["count"]
    assert counts[1] == counts[0] + inner


def test_keys_come_in_either_header_and_errors_in_the_form_of_these_routes(serve: Any) -> None:
    with serve("fast", api_key=("one",)) as running:
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            for headers in ({}, {"x-api-key": "other"}):
                answer = running.post(path, HELLO, headers=headers)
                assert answer.status_code == 401
                error = answer.json()
                assert error["type"] == "error" and error["error"]["type"] == "authentication_error"
            for headers in ({"x-api-key": "one"}, {"Authorization": "Bearer one"}):
                version = {"anthropic-version": "2023-06-01"}
                assert running.post(path, HELLO, headers={**headers, **version}).status_code == 200
            answer = running.post(path, {**HELLO, "model": "other"}, headers={"x-api-key": "one"})
            assert (answer.status_code, answer.json()["error"]["type"]) == (404, "not_found_error")
            answer = running.get(path, headers={"x-api-key": "one"})
            assert (answer.status_code, answer.json()["type"]) == (405, "error")
        assert "error" in running.post("/v1/messagesx", HELLO).json()
        client = anthropic.Anthropic(base_url=running.url, api_key="two", max_retries=0)
        with pytest.raises(anthropic.AuthenticationError):
            client.messages.create(**HELLO)


def test_a_fault_in_mid_stream_is_an_error_event(serve: Any) -> None:
    with serve("late_fault") as running:
        body = ask("a", stream=True, ignore_eos=True)
        last = running.post("/v1/messages", body).text[:-2].split("\n\n")[-1]
        name, data = last.split("\n")
        error = json.loads(data.removeprefix("data: "))
        assert name == "event: error" and error["error"]["type"] == "api_error"
        client = anthropic.Anthropic(base_url=running.url, api_key="any", max_retries=0)
        with pytest.raises(anthropic.APIStatusError, match="NaN"):
            list(client.messages.create(**ask("a"), stream=True, extra_body={"ignore_eos": True}))


@pytest.mark.parametrize("streams", [True, False])
def test_a_client_that_leaves_frees_its_blocks(paced: Any, streams: bool) -> None:
    aborted = paced.metric("vllm:request_success_total", finished_reason="abort")
    body = ask("hello", max_tokens=1500, ignore_eos=True, stream=streams)
    with pytest.raises(httpx.ReadTimeout), httpx.Client(timeout=httpx.Timeout(30, read=0.4)) as client:
        if not streams:
            client.post(paced.url + "/v1/messages", json=body)
        with client.stream("POST", paced.url + "/v1/messages", json=body) as answer:
            next(answer.iter_raw())
            raise httpx.ReadTimeout("enough")
    paced.until(paced.idle, "it still holds something")
    assert paced.metric("vllm:request_success_total", finished_reason="abort") == aborted + 1


def test_thinking_that_only_its_own_server_reads_is_left_out_of_the_prompt(fast: Any) -> None:
    said, sealed = {"type": "text", "text": "five"}, {"type": "redacted_thinking", "data": "opaque"}

    def counted(*blocks: Any) -> int:
        messages = [
            {"role": "user", "content": "2 + 3?"},
            {"role": "assistant", "content": blocks},
            {"role": "user", "content": "sure?"},
        ]
        body = {"model": "tiny", "messages": messages}
        return fast.post("/v1/messages/count_tokens", body).json()["input_tokens"]

    assert counted(sealed, said) == counted(said)


def test_thinking_that_is_off_is_not_shown(reciting: Any) -> None:
    off = {"thinking": {"type": "disabled"}}
    for read in (create, stream):
        assert outline(read(reciting, "<think>hm</think>five", **off)) == ["five"]
        on = {"thinking": {"type": "enabled", "budget_tokens": 100}}
        assert outline(read(reciting, "<think>hm</think>five", **on)) == ["hm", "five"]


@pytest.mark.parametrize("words", [2_500, 20_000])
def test_a_prompt_that_is_too_long_is_told_so_in_the_words_that_clients_know(fast: Any, words: int) -> None:
    client = anthropic.Anthropic(base_url=fast.url, api_key="any", max_retries=0)
    with pytest.raises(anthropic.BadRequestError, match=r"messages: the prompt is too long.* 2048"):
        client.messages.create(**ask("word " * words))


@pytest.mark.parametrize(
    ("fields", "status", "named"),
    [
        ({"max_tokens": None}, 400, "max_tokens"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"max_tokens": 9999}, 400, "max_tokens"),
        ({"model": 3}, 400, "model"),
        ({"messages": None}, 400, "messages"),
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "system", "content": "x"}]}, 400, "messages[0].role"),
        ({"messages": [{"role": "user", "content": []}]}, 400, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            400,
            "messages[0].content[0].type",
        ),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f"}]}]},
            400,
            "messages[0].content[0].input",
        ),
        *[
            ({"messages": [{"role": role, "content": [block]}]}, 400, f"messages[0].content[0].{name}")
            for role, name, block in (
                ("assistant", "id", {"type": "tool_use", "id": "", "name": "f", "input": {}}),
                ("assistant", "name", {"type": "tool_use", "id": "1", "name": "", "input": {}}),
                ("assistant", "data", {"type": "redacted_thinking", "data": ""}),
                ("user", "tool_use_id", {"type": "tool_result", "tool_use_id": "", "content": "x"}),
            )
        ],
        ({"system": [{"type": "image"}]}, 400, "system[0].type"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, 400, "tools[0].type"),
        ({"tools": [{"name": "f"}]}, 400, "tools[0].input_schema"),
        ({"tools": [{"name": "f", "input_schema": {"type": "string"}}]}, 400, "tools[0].input_schema.type"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "g"}}, 400, "tool_choice.name"),
        ({"tool_choice": {"type": "some"}}, 400, "tool_choice.type"),
        ({"stop_sequences": ["a", ""]}, 400, "stop_sequences"),
        ({"stop_sequences": [1]}, 400, "stop_sequences"),
        ({"thinking": {"type": "enabled"}}, 400, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled", "budget_tokens": 400}}, 400, "thinking.budget_tokens"),
        ({"thinking": {"type": "deep"}}, 400, "thinking"),
        ({"output_config": {"effort": "huge"}}, 400, "output_config.effort"),
        ({"mcp_servers": [{"type": "url"}]}, 400, "mcp_servers"),
        ({"n": 2}, 400, "n"),
        ({"temperature": 5}, 400, "temperature"),
        ({"chat_template_kwargs": [], "thinking": {"type": "disabled"}}, 400, "chat_template_kwargs"),
    ],
    ids=str,
)
def test_a_wrong_field_is_named(reciting: Any, fields: dict[str, Any], status: int, named: str) -> None:
    answer = reciting.post("/v1/messages", ask("hello", **fields))
    assert answer.status_code == status, answer.text
    error = answer.json()
    assert error["type"] == "error" and error["error"]["type"] == "invalid_request_error"
    assert named in error["error"]["message"]


def test_a_model_that_does_not_think_says_so(fast: Any) -> None:
    answer = fast.post("/v1/messages", ask("x", thinking={"type": "enabled", "budget_tokens": 10}))
    assert answer.status_code == 400 and "does not think" in answer.json()["error"]["message"]
