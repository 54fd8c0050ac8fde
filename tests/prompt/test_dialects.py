"""Requests of OpenAI's responses and Anthropic's messages as the chats that they are."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.errors import InvalidRequest
from octavo.prompt.anthropic import MESSAGES
from octavo.prompt.legacy import with_tools
from octavo.prompt.messages import template_messages
from octavo.prompt.responses import RESPONSES, chat_of_response
from octavo.prompt.tools.definitions import parse_tool_choice, parse_tools

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
CALLS = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}]


def test_a_conversation_is_the_same_chat_in_both_apis() -> None:
    response = {
        "model": "m",
        "instructions": "be brief",
        "input": [
            {"role": "user", "content": "hello"},
            {
                "type": "reasoning",
                "id": "rs",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "hm"}],
            },
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "so"}]},
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"a": 1}'},
            {"type": "function_call_output", "call_id": "1", "output": "42"},
            {
                "role": "user",
                "content": [{"type": "input_text", "text": "and"}, {"type": "input_text", "text": "?"}],
            },
        ],
        "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}],
        "tool_choice": {"type": "function", "name": "f"},
        "parallel_tool_calls": False,
        "stop": ["x"],
        "max_output_tokens": 5,
        "reasoning": {"effort": "low"},
        "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}},
    }
    message = {
        "model": "m",
        "system": "be brief",
        "messages": [
            {"role": "user", "content": "hello"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": ""},
                    {"type": "text", "text": "so"},
                    {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "42"}]},
            {"role": "user", "content": "and"},
            {"role": "user", "content": [{"type": "text", "text": "?"}]},
        ],
        "tools": [{"name": "f", "input_schema": SCHEMA}],
        "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
        "stop_sequences": ["x"],
        "max_tokens": 5,
        "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}},
    }
    one, other = RESPONSES.chat(response), MESSAGES.chat(message)
    assert one["messages"] == other["messages"]
    assert one["messages"] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "reasoning": "hm", "content": "so", "tool_calls": CALLS},
        {"role": "tool", "tool_call_id": "1", "content": "42"},
        {"role": "user", "content": [{"type": "text", "text": "and"}, {"type": "text", "text": "?"}]},
    ]
    for name in ("model", "tools", "tool_choice", "parallel_tool_calls", "stop", "reasoning_effort"):
        assert one[name] == other[name], name
    assert one["max_completion_tokens"] == other["max_tokens"] == 5
    for chat in (one, other):
        assert chat["response_format"]["json_schema"]["schema"] == SCHEMA
        assert parse_tool_choice(chat["tool_choice"], parse_tools(chat["tools"])).names == ("f",)


def test_some_of_the_tools_are_named_by_responses_as_by_chats() -> None:
    tools = [{"type": "function", "name": name, "parameters": SCHEMA} for name in ("f", "g")]
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "g"}]}
    chat = RESPONSES.chat({"input": "hello", "tools": tools, "tool_choice": choice})
    read = parse_tool_choice(chat["tool_choice"], parse_tools(chat["tools"]))
    assert (read.mode, read.names) == ("auto", ("g",))
    for changed, param in (
        ({"mode": "none"}, "tool_choice.mode"),
        ({"tools": [{"type": "function", "name": "x"}]}, "tool_choice.tools[0].name"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            chat = RESPONSES.chat({"input": "hello", "tools": tools, "tool_choice": {**choice, **changed}})
            parse_tool_choice(chat["tool_choice"], parse_tools(chat["tools"]))
        assert RESPONSES.as_asked(caught.value).param == param
    for wrong in ({"tools": "g"}, {"tools": [{"type": "mcp"}]}, {"tools": [{"type": "function"}]}):
        with pytest.raises(InvalidRequest, match=r"tool_choice\.tools"):
            RESPONSES.chat({"input": "hello", "tools": tools, "tool_choice": {**choice, **wrong}})


FUNCTIONS = [{"name": name, "description": "does it", "parameters": SCHEMA} for name in ("f", "g")]


def test_functions_are_tools_of_the_older_form() -> None:
    body = {"model": "m", "messages": [], "functions": FUNCTIONS}
    chat = with_tools(body)
    assert chat.keys() == {"model", "messages", "tools", "tool_choice", "parallel_tool_calls"}
    assert [tool["function"] for tool in chat["tools"]] == FUNCTIONS and not chat["parallel_tool_calls"]
    for call, mode, names in (
        (None, "auto", None),
        ("none", "none", None),
        ({"name": "g"}, "required", ("g",)),
    ):
        chat = with_tools({**body, "function_call": call})
        read = parse_tool_choice(chat["tool_choice"], parse_tools(chat["tools"]))
        assert (read.mode, read.names) == (mode, names)
    plain = {"model": "m", "functions": [], "function_call": "auto", "tools": None}
    assert with_tools(plain) == plain


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"functions": "f"}, "functions"),
        ({"functions": [1]}, "functions[0]"),
        ({"functions": [{"name": "a b"}]}, "functions[0].name"),
        ({"functions": [*FUNCTIONS, FUNCTIONS[0]]}, "functions[2].name"),
        ({"functions": [{"name": "f", "parameters": {"type": "string"}}]}, "functions[0].parameters.type"),
        ({"functions": FUNCTIONS, "function_call": {"name": "x"}}, "function_call.name"),
        ({"functions": FUNCTIONS, "function_call": "required"}, "function_call"),
        ({"function_call": {"name": "f"}}, "function_call"),
        ({"functions": FUNCTIONS, "tools": []}, "functions"),
        ({"functions": FUNCTIONS, "tool_choice": "auto"}, "functions"),
    ],
)
def test_a_wrong_function_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        with_tools({"model": "m", **fields})
    assert caught.value.param == param
    assert param in caught.value.message


def test_what_the_assistant_said_in_a_row_is_one_turn() -> None:
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"a": 1}'}
    said = [{"type": "message", "role": "assistant", "content": text} for text in ("one", "two")]
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]}

    def turns(*items: dict[str, Any]) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = chat_of_response({"input": "go on"}, items)["messages"]
        return messages[:-1]

    assert turns(*said) == [{"role": "assistant", "content": text} for text in ("one", "two")]
    assert turns(said[0], call, said[1]) == [{"role": "assistant", "content": "onetwo", "tool_calls": CALLS}]
    assert turns(call, said[0], thought) == [
        {"role": "assistant", "content": "one", "tool_calls": CALLS},
        {"role": "assistant", "content": "", "reasoning": "hm"},
    ]


def test_a_call_that_was_cut_is_left_out_of_what_follows() -> None:
    cut = {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"a"', "status": "incomplete"}
    assert len(chat_of_response({"input": "go on"}, [cut])["messages"]) == 1
    with pytest.raises(InvalidRequest, match="arguments"):
        chat_of_response({"input": [{**cut, "status": "completed"}]})


def test_an_error_of_a_tool_is_told() -> None:
    result = {"type": "tool_result", "tool_use_id": "1", "content": "no such file", "is_error": True}
    chat = MESSAGES.chat({"messages": [{"role": "user", "content": [result]}]})
    (message,) = template_messages(chat["messages"])
    assert message["content"] == "Error:\nno such file"


@pytest.mark.parametrize(
    ("thinking", "expected"),
    [
        (
            {"type": "disabled"},
            {"chat_template_kwargs": {"enable_thinking": False}, "include_reasoning": False},
        ),
        (
            {"type": "enabled", "budget_tokens": 1024},
            {"chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "low"},
        ),
        (
            {"type": "enabled", "budget_tokens": 20_000},
            {"chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "high"},
        ),
        ({"type": "adaptive"}, {}),
    ],
)
def test_thinking_is_an_effort_to_reason(thinking: dict[str, Any], expected: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 30_000, "thinking": thinking}
    chat = MESSAGES.chat(body)
    assert {name: chat[name] for name in chat if name not in ("messages", "max_tokens")} == expected


@pytest.mark.parametrize(
    ("dialect", "param", "named", "others"),
    [
        (RESPONSES, "tools[3].function.name", "tools[3].name", ""),
        (RESPONSES, "max_tokens", "max_output_tokens", ""),
        (RESPONSES, "max_tokens", "max_output_tokens", " as min_tokens"),
        (RESPONSES, "prompt", "input", ""),
        (RESPONSES, "stop", "stop", ""),
        (MESSAGES, "stop", "stop_sequences", ""),
        (MESSAGES, "stop_token_ids", "stop_token_ids", ""),
        (MESSAGES, "tools[0].function.parameters.type", "tools[0].input_schema.type", ""),
    ],
)
def test_errors_name_the_field_that_was_sent(dialect: Any, param: str, named: str, others: str) -> None:
    error = dialect.as_asked(InvalidRequest(f"{param} is 5{others}", param=param, code="x"))
    assert (error.param, error.message, error.code) == (named, f"{named} is 5{others}", "x")


def test_an_error_that_names_no_field_stays_as_it_is() -> None:
    error = InvalidRequest("no stop in sight")
    assert MESSAGES.as_asked(error) is error


KEYS = ["type", "role", "content", "text", "name", "arguments", "call_id", "input", "id", "format", "summary"]
WORDS = ["", "a", "user", "assistant", "message", "text", "function", "function_call", "tool_use", "enabled"]
NUMBERS = st.integers(-5, 5) | st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.sampled_from(WORDS),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(KEYS),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@pytest.mark.parametrize("dialect", [RESPONSES, MESSAGES], ids=["responses", "messages"])
@given(data=st.data())
def test_any_json_makes_a_chat_or_a_named_error(dialect: Any, data: st.DataObject) -> None:
    names = sorted(dialect.fields)
    body = data.draw(st.dictionaries(st.sampled_from(names), JSON, max_size=4))
    body |= data.draw(st.sampled_from([{}, {"input": "x", "messages": [{"role": "user", "content": "x"}]}]))
    with contextlib.suppress(InvalidRequest):
        chat = dialect.chat(body)
        json.dumps(chat)
        template_messages(chat["messages"])
