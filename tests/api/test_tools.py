"""Tool calls and reasoning in chats: the same streamed or whole, and a call only where one was finished."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers

TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("f", "ping")
]
CALL = '<tool_call>{"name": "f", "arguments": {"id": 42}}</tool_call>'
PING = '<tool_call>{"name":"ping","arguments":{}}</tool_call>'


@pytest.fixture(scope="module")
def reciting(serve: Any) -> Iterator[Any]:
    """The model says what the user says."""
    settings = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3", "enable_prefix_caching": False}
    with serve("reciting", **settings) as running:
        yield running


def ask(running: Any, text: str, **fields: Any) -> dict[str, Any]:
    """The body of a request that makes the model say ``text``."""
    return {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 400, **fields}


def whole(running: Any, text: str, **fields: Any) -> dict[str, Any]:
    answer = running.post("/v1/chat/completions", ask(running, text, **fields))
    assert answer.status_code == 200, answer.text
    body = answer.json()
    return {**body["choices"][0], "usage": body["usage"]}


def streamed(running: Any, text: str, **fields: Any) -> dict[str, Any]:
    """The same put together from a stream, each delta of a call checked for its form."""
    options = {"stream": True, "stream_options": {"include_usage": True}}
    answer = running.post("/v1/chat/completions", ask(running, text, **fields, **options))
    events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
    assert events.pop() == "[DONE]"
    chunks = [json.loads(event) for event in events]
    message: dict[str, Any] = {"content": "", "reasoning": "", "tool_calls": []}
    end: dict[str, Any] = {}
    assert sum("role" in choice["delta"] for chunk in chunks for choice in chunk["choices"]) == 1
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        assert "finish_reason" not in end
        end = {"finish_reason": choice["finish_reason"]} if choice["finish_reason"] else {}
        delta = choice["delta"]
        assert delta.get("reasoning") == delta.get("reasoning_content")
        for name in ("content", "reasoning"):
            message[name] += delta.get(name) or ""
        for call in delta.get("tool_calls", []):
            if call["index"] == len(message["tool_calls"]):
                assert call["id"] and call["type"] == "function" and call["function"]["name"]
                message["tool_calls"].append(call)
            else:
                assert call.keys() == {"index", "function"}
                message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return {"message": message, "usage": chunks[-1]["usage"], **end}


def said(answer: dict[str, Any]) -> tuple[Any, ...]:
    message = answer["message"]
    calls = [(one["function"]["name"], one["function"]["arguments"]) for one in message.get("tool_calls", [])]
    return message["content"] or "", message.get("reasoning") or "", calls, answer["finish_reason"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hello", ("hello", "", [], "stop")),
        (f"I look.\n{CALL}", ("I look.", "", [("f", '{"id": 42}')], "tool_calls")),
        (f"{CALL}\n{PING}", ("", "", [("f", '{"id": 42}'), ("ping", "{}")], "tool_calls")),
        (f"<think>\nhm\n</think>\n\n{PING} done", ("done", "hm", [("ping", "{}")], "tool_calls")),
        ("<think>hm</think>hello", ("hello", "hm", [], "stop")),
        ("<think>hm", ("", "hm", [], "stop")),
        ("<tool_call>no</tool_call>", ("<tool_call>no</tool_call>", "", [], "stop")),
    ],
)
def test_calls_and_reasoning_are_the_same_whole_and_streamed(
    reciting: Any, text: str, expected: tuple[Any, ...]
) -> None:
    one, other = whole(reciting, text, tools=TOOLS), streamed(reciting, text, tools=TOOLS)
    assert said(one) == said(other) == expected
    assert one["usage"] == other["usage"]
    if expected[2]:
        assert all(call["id"] and call["type"] == "function" for call in one["message"]["tool_calls"])
        assert expected[0] or one["message"]["content"] is None


def test_a_call_that_is_cut_ends_with_length_and_what_was_there(reciting: Any) -> None:
    text = f"{CALL}"
    every = reciting.post("/tokenize", {"model": "tiny", "prompt": text, "add_special_tokens": False})
    count = every.json()["count"]
    for most in range(1, count):
        one = whole(reciting, text, tools=TOOLS, max_tokens=most)
        assert said(one) == said(streamed(reciting, text, tools=TOOLS, max_tokens=most))
        assert one["finish_reason"] == "length"
        for name, arguments in said(one)[2]:
            assert name == "f" and '{"id": 42}'.startswith(arguments)
    assert whole(reciting, text, tools=TOOLS, max_tokens=count + 1)["finish_reason"] == "tool_calls"


def test_a_required_call_that_does_not_come_is_not_reported(reciting: Any) -> None:
    """The scripted model keeps to no grammar."""
    for read in (whole, streamed):
        assert said(read(reciting, "hello", tools=TOOLS, tool_choice="required")) == ("hello", "", [], "stop")


def test_beside_calls_no_content_is_null_and_beside_forced_ones_empty(reciting: Any) -> None:
    assert whole(reciting, CALL, tools=TOOLS)["message"]["content"] is None
    for choice in ("required", {"type": "function", "function": {"name": "f"}}):
        answer = whole(reciting, CALL, tools=TOOLS, tool_choice=choice)
        assert answer["message"]["content"] == ""
        assert answer["finish_reason"] == "tool_calls"


def test_without_calls_text_is_text(reciting: Any) -> None:
    for fields in ({"tools": TOOLS, "tool_choice": "none"}, {}):
        for read in (whole, streamed):
            assert said(read(reciting, f"a {CALL}", **fields)) == (f"a {CALL}", "", [], "stop")


def test_reasoning_is_counted_and_may_be_left_out(reciting: Any) -> None:
    text = "<think>one two three four</think>five"
    shown = whole(reciting, text)
    inner = reciting.post("/tokenize", {"model": "tiny", "prompt": "one two three four"}).json()["count"]
    counted = shown["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert inner <= counted < shown["usage"]["completion_tokens"]
    assert shown["message"]["reasoning_content"] == "one two three four"
    hidden = whole(reciting, text, include_reasoning=False)
    assert "reasoning" not in hidden["message"]
    assert hidden["message"]["content"] == "five"
    assert hidden["usage"] == shown["usage"]
    assert said(streamed(reciting, text, include_reasoning=False)) == ("five", "", [], "stop")


def test_stop_strings_are_not_doubled_between_calls_and_text(reciting: Any) -> None:
    for read in (whole, streamed):
        assert said(read(reciting, f"{CALL} abc END d", tools=TOOLS, stop=["END"]))[0] == "abc "


FUNCTIONS = [tool["function"] for tool in TOOLS]


@pytest.mark.parametrize("asked", [None, {"name": "f"}])
def test_functions_are_called_in_the_older_form(reciting: Any, asked: Any) -> None:
    fields = ask(reciting, f"so {CALL}", functions=FUNCTIONS, **({"function_call": asked} if asked else {}))
    client = reciting.client().chat.completions
    choice = client.create(**fields).choices[0]
    assert choice.finish_reason == "function_call" and choice.message.tool_calls is None
    assert (choice.message.function_call.name, choice.message.function_call.arguments) == ("f", '{"id": 42}')
    chunks = [chunk.choices[0] for chunk in client.create(**fields, stream=True)]
    pieces = [chunk.delta.function_call for chunk in chunks if chunk.delta.function_call]
    assert pieces[0].name == "f" and not any(piece.name for piece in pieces[1:])
    assert "".join(piece.arguments for piece in pieces) == '{"id": 42}'
    assert not any(chunk.delta.tool_calls for chunk in chunks)
    assert chunks[-1].finish_reason == "function_call"
    assert "".join(chunk.delta.content or "" for chunk in chunks) == (choice.message.content or "")


def test_without_a_call_functions_change_nothing(reciting: Any) -> None:
    for asked in ("auto", "none"):
        choice = whole(reciting, "hello", functions=FUNCTIONS, function_call=asked)
        assert said(choice) == ("hello", "", [], "stop") and "function_call" not in choice["message"]


def test_a_wrong_function_is_named_as_it_was_sent(reciting: Any) -> None:
    bad = {"name": "f", "parameters": {"properties": {"a": {"type": "sand"}}}}
    for fields, param in (
        ({"functions": FUNCTIONS, "function_call": {"name": "x"}}, "function_call.name"),
        ({"functions": [{**bad, "strict": True}]}, "functions[0]"),
        ({"functions": [bad], "function_call": {"name": "f"}}, "functions"),
        ({"functions": FUNCTIONS, "tools": TOOLS}, "functions"),
        ({"functions": {}}, "functions"),
        ({"functions": False}, "functions"),
    ):
        answer = reciting.post("/v1/chat/completions", ask(reciting, "x", **fields))
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_only_some_of_the_tools_may_be_allowed(reciting: Any) -> None:
    ping = {"type": "function", "function": {"name": "ping"}}
    for mode in ("auto", "required"):
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [ping]}}
        answer = whole(reciting, f"so {PING}", tools=TOOLS, tool_choice=choice)
        assert said(answer)[2:] == ([("ping", "{}")], "tool_calls")
    choice["allowed_tools"]["mode"] = "nothing"
    refused = reciting.post("/v1/chat/completions", ask(reciting, "x", tools=TOOLS, tool_choice=choice))
    assert refused.json()["error"]["param"] == "tool_choice.allowed_tools.mode"


def test_a_client_library_reads_the_calls(reciting: Any) -> None:
    answer = reciting.client().chat.completions.create(**ask(reciting, f"so {CALL}{PING}", tools=TOOLS))
    calls = answer.choices[0].message.tool_calls
    assert [(one.type, one.function.name) for one in calls] == [("function", "f"), ("function", "ping")]
    with reciting.client().chat.completions.stream(**ask(reciting, f"so {CALL}", tools=TOOLS)) as stream:
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls"
    assert final.message.tool_calls[0].function.arguments == '{"id": 42}'


@pytest.mark.parametrize(
    ("function", "param"),
    [
        (
            {"strict": True, "parameters": {"properties": {"a": {"type": "string", "pattern": "(?<=a)b"}}}},
            "tools[0]",
        ),
        ({"strict": True, "parameters": {"properties": {"a": {"type": "sand"}}}}, "tools[0]"),
        ({"parameters": {"properties": {"a": {"type": 5}}}}, "tools"),
    ],
)
def test_a_schema_that_cannot_be_held_to_is_refused(reciting: Any, function: Any, param: str) -> None:
    tools = [{"type": "function", "function": {"name": "f", **function}}]
    answer = reciting.post(
        "/v1/chat/completions", ask(reciting, "hello", tools=tools, tool_choice="required")
    )
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].partition(".")[0] == param


def test_the_model_decides_to_call_only_where_its_format_is_known(serve: Any) -> None:
    with serve("fast") as running:
        answer = running.post("/v1/chat/completions", ask(running, "x", tools=TOOLS))
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "tool_choice"
        assert "--tool-call-parser" in answer.json()["error"]["message"]
    with serve("fast", tool_call_parser="hermes", enable_auto_tool_choice=False) as running:
        answer = running.post("/v1/chat/completions", ask(running, "x", tools=TOOLS))
        assert "--enable-auto-tool-choice" in answer.json()["error"]["message"]
        fields = ask(running, "x", tools=TOOLS, tool_choice="required", max_tokens=4)
        assert running.post("/v1/chat/completions", fields).status_code == 200


def test_markers_that_are_special_tokens_are_read_and_not_shown(
    serve: Any, model_folder: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "mistral"
    shutil.copytree(model_folder, folder)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"vocab_size": 388, "eos_token_id": 1}))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["chat_template"] += "{# [TOOL_CALLS] [ARGS] [THINK] #}"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with serve("reciting", folder, enable_prefix_caching=False) as running:
        text = '[THINK]hm[/THINK]so [TOOL_CALLS]f[ARGS]{"id": 42}'
        for read in (whole, streamed):
            assert said(read(running, text, tools=TOOLS)) == ("so", "hm", [("f", '{"id": 42}')], "tool_calls")
            assert said(read(running, "a [TOOL_CALLS] b")) == ("a  b", "", [], "stop")


def test_a_form_that_looks_like_a_call_is_refused_as_the_field_that_asked_for_it(serve: Any) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "tools": TOOLS}
    forms = {"structured_outputs": {"regex": "a+"}, "response_format": {"type": "json_object"}}
    with serve("fast", tool_call_parser="llama3_json") as running:
        for name, form in forms.items():
            error = running.post("/v1/chat/completions", {**body, name: form}).json()["error"]
            assert error["param"] == name
            assert error["message"].startswith(f"{name}: calls and answers look alike")


def test_a_regex_and_a_choice_are_taken_where_reasoning_is_told_from_the_answer(serve: Any) -> None:
    with serve("fast", tool_call_parser="hermes", reasoning_parser="qwen3") as running:
        for form in ({"regex": "a+"}, {"choice": ["a", "b"]}, {"grammar": 'root ::= "a"'}):
            body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
            answer = running.post("/v1/chat/completions", {**body, "structured_outputs": form})
            assert answer.status_code == 200, answer.text
