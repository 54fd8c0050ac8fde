"""``/v1/responses``: the openai package reads typed answers; streams add up to whole answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
import typed
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent

from octavo.api.responses_store import Kept, ResponseStore
from octavo.errors import ResponseNotFound

TOOLS = [
    {"type": "function", "name": name, "parameters": {"type": "object", "properties": {}}, "strict": False}
    for name in ("f", "ping")
]
CALL = '<tool_call>{"name": "f", "arguments": {"id": 42}}</tool_call>'
PING = '<tool_call>{"name":"ping","arguments":{}}</tool_call>'
IN_EVENTS = typed.BEYOND | {
    "bytes",
    "name",
}  # of a token as in whole items; of a call as older packages have it
ENDS = ("response.completed", "response.incomplete", "response.failed")


@pytest.fixture(scope="module")
def reciting(serve: Any) -> Iterator[Any]:
    """The model says what the user says."""
    parsers = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3", "enable_prefix_caching": False}
    with serve("reciting", **parsers) as running:
        yield running


def create(running: Any, text: Any, **fields: Any) -> dict[str, Any]:
    """A whole answer, its types checked strictly."""
    answer = running.post("/v1/responses", {"model": "tiny", "input": text, **fields})
    assert answer.status_code == 200, answer.text
    typed.read(Response, answer.text)
    return answer.json()


def stream(running: Any, text: Any, **fields: Any) -> list[dict[str, Any]]:
    """The events of a stream; framing, types and numbers are checked on the way."""
    answer = running.post("/v1/responses", {"model": "tiny", "input": text, "stream": True, **fields})
    assert answer.status_code == 200, answer.text
    assert answer.text.endswith("\n\n")
    events = []
    for number, part in enumerate(answer.text[:-2].split("\n\n")):
        name, data = part.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        typed.read(ResponseStreamEvent, data.removeprefix("data: "), IN_EVENTS)
        events.append(event)
    return events


def said(response: dict[str, Any]) -> Any:
    """All that two runs of one request have in common."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            left_out = ("id", "call_id", "item_id", "created_at", "completed_at")
            return {name: plain(inner) for name, inner in value.items() if name not in left_out}
        return [plain(inner) for inner in value] if isinstance(value, list) else value

    return plain(response)


def added_up(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The response of a stream, put together from its deltas."""
    items: list[dict[str, Any]] = []
    for event in events:
        match event["type"]:
            case "response.output_item.added":
                assert event["output_index"] == len(items)
                items.append(event["item"])
            case "response.content_part.added":
                assert event["content_index"] == len(items[-1]["content"])
                items[-1]["content"].append(event["part"])
            case "response.output_text.delta":
                items[-1]["content"][-1]["text"] += event["delta"]
                items[-1]["content"][-1]["logprobs"] += event["logprobs"]
            case "response.reasoning_text.delta":
                items[-1]["content"][-1]["text"] += event["delta"]
            case "response.function_call_arguments.delta":
                items[-1]["arguments"] += event["delta"]
            case "response.output_item.done":
                items[-1]["status"] = event["item"]["status"]
                assert items[-1] == event["item"]
        if "item_id" in event:
            assert event["item_id"] == items[-1]["id"]
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert [event["type"] for event in events if event["type"] in ENDS] == [events[-1]["type"]]
    assert events[-1]["response"]["output"] == items
    return events[-1]["response"]


def outline(response: dict[str, Any]) -> list[tuple[str, str]]:
    """Type and text of each item."""
    shown = []
    for item in response["output"]:
        text = item["arguments"] if "arguments" in item else item["content"][0]["text"]
        shown.append((item["type"], text))
    return shown


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("hello", [("message", "hello")]),
        ("", [("message", "")]),
        (f"I look.\n{CALL}", [("message", "I look."), ("function_call", '{"id": 42}')]),
        (f"{CALL}\n{PING}", [("function_call", '{"id": 42}'), ("function_call", "{}")]),
        (
            f"<think>\nhm\n</think>\n\n{PING} done",
            [("reasoning", "hm"), ("function_call", "{}"), ("message", "done")],
        ),
        ("<think>hm</think>hello", [("reasoning", "hm"), ("message", "hello")]),
        ("<tool_call>no</tool_call>", [("message", "<tool_call>no</tool_call>")]),
    ],
)
def test_items_are_the_same_whole_and_streamed(reciting: Any, text: str, expected: Any) -> None:
    fields = {"tools": TOOLS, "max_output_tokens": 300, "include": ["message.output_text.logprobs"]}
    one, other = create(reciting, text, **fields), added_up(stream(reciting, text, **fields))
    assert outline(one) == expected
    assert said(one) == said(other)
    assert one["status"] == "completed" and all(item["status"] == "completed" for item in one["output"])
    for item in one["output"]:
        if item["type"] == "message" and text:
            tokens = [entry["token"] for entry in item["content"][0]["logprobs"]]
            assert "".join(tokens).strip().removesuffix("<|end|>").strip() == item["content"][0]["text"]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    text=st.text("ab <{}>\n日", min_size=1, max_size=30),
    fields=st.fixed_dictionaries(
        {"seed": st.integers(0, 2**40), "max_output_tokens": st.integers(1, 60)},
        optional={
            "temperature": st.sampled_from([0, 0.7, 1.5]),
            "instructions": st.just("be brief"),
            "stop": st.sampled_from(["a", "the", " "]),
            "include": st.just(["message.output_text.logprobs"]),
            "top_logprobs": st.just(0),
            "metadata": st.just({"a": "b"}),
        },
    ),
)
def test_a_stream_adds_up_to_the_whole_answer(fast: Any, text: str, fields: dict[str, Any]) -> None:
    whole = create(fast, text, **fields)
    streamed = added_up(stream(fast, text, **fields))
    cached = [one["usage"].pop("input_tokens_details") for one in (whole, streamed)]
    assert cached[0]["cached_tokens"] <= cached[1]["cached_tokens"]
    assert said(whole) == said(streamed)


def test_a_response_that_is_cut_is_incomplete_and_so_is_its_call(reciting: Any) -> None:
    one = create(reciting, CALL, tools=TOOLS, max_output_tokens=30)
    assert (one["status"], one["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert one["output"][-1]["status"] == "incomplete"
    assert said(one) == said(added_up(stream(reciting, CALL, tools=TOOLS, max_output_tokens=30)))
    follow = create(reciting, "go on", tools=TOOLS, previous_response_id=one["id"], max_output_tokens=5)
    assert follow["previous_response_id"] == one["id"]


def test_the_openai_package_creates_streams_reads_and_deletes(reciting: Any) -> None:
    client = reciting.client()
    made = client.responses.create(model="tiny", input=f"so {CALL}", tools=TOOLS, metadata={"a": "b"})
    assert made.output_text == "so" and made.metadata == {"a": "b"} and made.tools[0].name == "f"
    assert client.responses.retrieve(made.id).output_text == made.output_text
    with client.responses.stream(model="tiny", input=f"so {CALL}", tools=TOOLS) as events:
        deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
        final = events.get_final_response()
    assert "".join(deltas) == final.output_text == made.output_text
    assert final.output[1].arguments == '{"id": 42}'
    assert client.responses.retrieve(final.id).output_text == made.output_text
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError) as error:
        client.responses.retrieve(made.id)
    assert error.value.code == "response_not_found"


def test_a_response_follows_another_as_if_all_had_been_sent(fast: Any) -> None:
    first = create(fast, "hello", instructions="be brief", max_output_tokens=8, seed=1)
    second = create(fast, "and then?", previous_response_id=first["id"], max_output_tokens=8, seed=2)
    items = [{"role": "user", "content": "hello"}, *first["output"], {"role": "user", "content": "and then?"}]
    sent = create(fast, items, max_output_tokens=8, seed=2)
    assert second["output"][0]["content"] == sent["output"][0]["content"], "instructions do not go on"
    third = create(fast, "so?", previous_response_id=second["id"], max_output_tokens=8)
    assert third["usage"]["input_tokens"] > second["usage"]["input_tokens"]


def test_what_was_not_stored_or_is_unknown_is_not_found(fast: Any) -> None:
    passing = create(fast, "hello", store=False, max_output_tokens=2)
    for name in (passing["id"], "resp_unknown"):
        answer = fast.get(f"/v1/responses/{name}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "response_not_found")
        assert fast.post(f"/v1/responses/{name}/cancel").status_code == 404
        assert fast.http.delete(f"{fast.url}/v1/responses/{name}").status_code == 404
        body = {"model": "tiny", "input": "x", "previous_response_id": name}
        answer = fast.post("/v1/responses", body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "previous_response_id")
        assert answer.json()["error"]["code"] == "previous_response_not_found"


def test_a_response_belongs_to_the_key_that_made_it(serve: Any) -> None:
    with serve("fast", api_key=("one", "two")) as running:
        mine, theirs = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
        body = {"model": "tiny", "input": "hello", "max_output_tokens": 2}
        made = running.post("/v1/responses", body, headers=mine).json()["id"]
        assert running.get(f"/v1/responses/{made}", headers=mine).status_code == 200
        assert running.get(f"/v1/responses/{made}", headers={"x-api-key": "one"}).status_code == 200
        assert running.get(f"/v1/responses/{made}", headers=theirs).status_code == 404
        after = {**body, "previous_response_id": made}
        assert running.post("/v1/responses", after, headers=theirs).status_code == 400
        assert running.post("/v1/responses", after, headers=mine).status_code == 200
        assert running.get(f"/v1/responses/{made}").status_code == 401


def test_a_response_in_the_background_is_read_when_it_is_done_or_cancelled(paced: Any) -> None:
    client = paced.client()
    made = client.responses.create(model="tiny", input="hello", max_output_tokens=60, background=True)
    assert made.status == "queued"
    with pytest.raises(openai.BadRequestError, match="still in progress"):
        client.responses.create(model="tiny", input="x", previous_response_id=made.id)
    paced.until(
        lambda: client.responses.retrieve(made.id).status in ("completed", "incomplete"), "it never ends"
    )
    long = {"max_output_tokens": 1500, "extra_body": {"ignore_eos": True}}
    endless = client.responses.create(model="tiny", input="hello", background=True, **long)
    paced.until(lambda: client.responses.retrieve(endless.id).output, "it never begins")
    assert client.responses.cancel(endless.id).status == "cancelled"
    assert client.responses.retrieve(endless.id).output[0].status == "incomplete"
    gone = client.responses.create(model="tiny", input="hello", background=True, **long)
    client.responses.delete(gone.id)
    paced.until(paced.idle, "a response that was deleted still runs")
    assert paced.get(f"/v1/responses/{gone.id}").status_code == 404
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(client.responses.create(model="tiny", input="x", max_output_tokens=1).id)


@pytest.mark.parametrize("streams", [True, False])
def test_a_client_that_leaves_frees_its_blocks(paced: Any, streams: bool) -> None:
    body = {
        "model": "tiny",
        "input": "hello",
        "max_output_tokens": 1500,
        "ignore_eos": True,
        "stream": streams,
    }
    with pytest.raises(httpx.ReadTimeout), httpx.Client(timeout=httpx.Timeout(30, read=0.4)) as client:
        if not streams:
            client.post(paced.url + "/v1/responses", json=body)
        with client.stream("POST", paced.url + "/v1/responses", json=body) as answer:
            for _ in answer.iter_raw():
                if paced.get("/load").json()["running"]:
                    raise httpx.ReadTimeout("enough")
    paced.until(paced.idle, "the response of a client that left still runs")


def test_a_fault_in_mid_stream_is_a_failed_response(serve: Any) -> None:
    with serve("late_fault") as running:
        fields = {"max_output_tokens": 50, "ignore_eos": True}
        events = stream(running, "a", **fields)
        assert events[-1]["type"] == "response.failed"
        failed = events[-1]["response"]
        assert failed["status"] == "failed" and failed["error"]["code"] == "server_error"
        assert "NaN" in failed["error"]["message"]
        assert running.get(f"/v1/responses/{failed['id']}").json()["status"] == "failed"
        answer = running.post("/v1/responses", {"model": "tiny", "input": "a", **fields})
        assert answer.status_code == 500
        assert running.metric("vllm:request_success_total", finished_reason="error") == 2


def test_requests_are_counted_as_those_of_chats(fast: Any) -> None:
    names = ("vllm:request_success_total", "vllm:time_to_first_token_seconds_count")
    before = [fast.metric(name) for name in names]
    create(fast, "hello", max_output_tokens=3)
    stream(fast, "hello", max_output_tokens=3)
    assert [fast.metric(name) for name in names] == [count + 2 for count in before]
    assert fast.metric("octavo:http_requests_total", route="/v1/responses", status="200") >= 2


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"input": None}, 400, "input"),
        ({"input": []}, 400, "input"),
        ({"input": [5]}, 400, "input[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, 400, "input[0].type"),
        ({"input": [{"role": "robot", "content": "x"}]}, 400, "input[0].role"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            400,
            "input[0].content[0].type",
        ),
        (
            {"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "{"}]},
            400,
            "input[0].arguments",
        ),
        ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, 400, "input[0].encrypted_content"),
        ({"model": "other"}, 404, "model"),
        ({"model": 3}, 400, "model"),
        ({"tools": [{"type": "web_search"}]}, 400, "tools[0].type"),
        ({"tools": [{"type": "function", "name": "no spaces"}]}, 400, "tools[0].name"),
        ({"tool_choice": {"type": "file_search"}}, 400, "tool_choice.type"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "g"}}, 400, "tool_choice.name"),
        ({"text": {"format": {"type": "sand"}}}, 400, "text.format"),
        (
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"pattern": "(?<=a)b"}}}},
            400,
            "text.format",
        ),
        ({"text": {"verbosity": "high"}}, 400, "text.verbosity"),
        ({"max_output_tokens": 0}, 400, "max_output_tokens"),
        ({"max_output_tokens": 9999}, 400, "max_output_tokens"),
        ({"include": ["reasoning.encrypted_content"]}, 400, "include[0]"),
        ({"include": False}, 400, "include"),
        ({"top_logprobs": 3}, 400, "top_logprobs"),
        ({"reasoning": {"effort": "huge"}}, 400, "reasoning.effort"),
        ({"reasoning": {"summary": "detailed"}}, 400, "reasoning.summary"),
        ({"truncation": "auto"}, 400, "truncation"),
        ({"conversation": "x"}, 400, "conversation"),
        ({"metadata": {"a": 5}}, 400, "metadata"),
        ({"background": True, "stream": True}, 400, "background"),
        ({"background": True, "store": False}, 400, "background"),
        ({"n": 2}, 400, "n"),
        ({"messages": []}, 400, "messages"),
        ({"temperature": 5}, 400, "temperature"),
        ({"input": "word " * 3000}, 400, "input"),
    ],
    ids=str,
)
def test_a_wrong_field_is_named(reciting: Any, fields: dict[str, Any], status: int, param: str) -> None:
    answer = reciting.post("/v1/responses", {"model": "tiny", "input": "hello", **fields})
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert (error["param"] or "").startswith(param), error
    assert "messages" not in error["message"] or param == "messages"


def test_the_form_of_the_text_is_held_to(serve: Any) -> None:
    """The grammar reaches the engine: the scripted one refuses this text."""
    with serve("fast") as running:
        schema = {"type": "object", "properties": {"a": {"const": "refused by the engine"}}}
        form = {"type": "json_schema", "name": "x", "schema": schema}
        answer = running.post("/v1/responses", {"model": "tiny", "input": "x", "text": {"format": form}})
        assert answer.status_code == 400
        assert "too many states" in answer.json()["error"]["message"]
        assert answer.json()["error"]["param"] == "text.format"


def test_the_least_recently_used_responses_make_room() -> None:
    store = ResponseStore(max_responses=3, max_bytes=10_000)

    def put(name: str, size: int = 10) -> None:
        store.put(Kept({"id": name}, [{"content": "x" * size}], ""))

    for name in "abc":
        put(name)
    store.get("a", "")
    put("d")
    with pytest.raises(ResponseNotFound):
        store.get("b", "")
    assert store.get("a", "").response["id"] == "a"
    put("e", 9_930)
    assert len(store) < 3 and store.num_bytes <= 10_000
    put("f", 20_000)
    assert len(store) == 0 and store.num_bytes == 0
