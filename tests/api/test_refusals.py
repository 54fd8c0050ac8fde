"""What is wrong with a request is named, in one envelope, with the right status; the next request is
answered.
"""

from __future__ import annotations

import http.client
import json
from typing import Any

import httpx
import openai
import pytest

from octavo.api.app import public_app
from octavo.api.edge import OPEN_PATHS

COMPLETION = {"model": "tiny", "prompt": "hello", "max_tokens": 2}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert isinstance(body["error"]["message"], str)
    assert body["error"]["type"]
    return body["error"]


WRONG = [
    ("n", 0), ("n", 129), ("n", 10**30), ("n", "2"), ("n", 1.5), ("n", True),
    ("temperature", -0.1), ("temperature", 2.1), ("temperature", "hot"),
    ("top_p", 0), ("top_p", 1.01), ("top_k", -2), ("top_k", "many"), ("top_k", 10**30),
    ("spaces_between_special_tokens", "x"),
    ("seed", 2**63), ("seed", "x"), ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", 1.5),
    ("stop", 3), ("stop", [""]), ("stop", ""), ("stop", ["a", "b", "c", "d", "e"]), ("stop", [1]),
    ("stop_token_ids", [384 + 10]), ("stop_token_ids", [-1]), ("stop_token_ids", ["a"]),
    ("stop_token_ids", 3),
    ("ignore_eos", "yes"), ("stream", "yes"), ("skip_special_tokens", 1), ("cache_salt", 5),
    ("stream_options", {"include_usage": True}), ("return_token_ids", 1),
    ("request_id", 7), ("request_id", "x" * 129),
    ("presence_penalty", 2.1), ("presence_penalty", "x"), ("frequency_penalty", -2.1),
    ("frequency_penalty", True), ("repetition_penalty", 0), ("repetition_penalty", "x"),
    ("repetition_penalty", 10**400),
    ("min_p", 1.1), ("min_p", -0.1), ("min_tokens", -1), ("min_tokens", 1.5), ("min_tokens", 10**6),
    ("logit_bias", [1]), ("logit_bias", {"a": 1}), ("logit_bias", {"-1": 1}), ("logit_bias", {"5": "x"}),
    ("logit_bias", {"384": 1}), ("logit_bias", {"5": True}),
    ("bad_words", "x"), ("bad_words", [""]), ("bad_words", [1]), ("bad_words", ["x"] * 257),
    ("allowed_token_ids", [384]), ("allowed_token_ids", []), ("allowed_token_ids", [-1]),
    ("allowed_token_ids", "x"),
    ("prompt_logprobs", -1), ("prompt_logprobs", 21), ("prompt_logprobs", True),
    ("truncate_prompt_tokens", 0), ("truncate_prompt_tokens", -2), ("truncate_prompt_tokens", 10**6),
    ("truncate_prompt_tokens", "x"), ("truncation_side", "middle"), ("truncation_side", ""),
    ("truncation_side", 1), ("cache_salt", ""),
    ("priority", "high"), ("priority", 2**31), ("priority", 0.5),
    ("timeout_s", 0), ("timeout_s", -1), ("timeout_s", "x"), ("timeout_s", 10**9),
    ("use_beam_search", "x"), ("length_penalty", 2), ("length_penalty", "x"), ("early_stopping", True),
    ("structured_outputs", []), ("structured_outputs", {}),
    ("structured_outputs", {"regex": "a", "choice": ["b"]}), ("structured_outputs", {"regex": 3}),
    ("structured_outputs", {"choice": []}), ("structured_outputs", {"choice": [1]}),
    ("structured_outputs", {"json": 3}), ("structured_outputs", {"json_object": False}),
    ("structured_outputs", {"json": "{"}), ("structured_outputs", {"grammar": "not a grammar"}),
    ("structured_outputs", {"regex": "a("}), ("structured_outputs", {"structural_tag": {}}),
    ("response_format", "json"), ("response_format", {"type": "xml"}), ("response_format", {}),
    ("response_format", {"type": "json_schema"}),
    ("response_format", {"type": "json_object", "schema": 3}),
    ("response_format", {"type": "json_object", "schema": {"type": "sand"}}),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": 3}}),
    ("response_format", {"type": "json_schema", "json_schema": {"schema": {"type": "sand"}}}),
]  # fmt: skip
UNSUPPORTED = [
    ("kv_transfer_params", {}),
    ("guided_json", {"type": "object"}), ("guided_choice", ["a"]),
    ("regex", "a+"), ("ebnf", 'root ::= "a"'), ("stop_regex", "a+"),
    ("logprob_token_ids", [5]), ("thinking_token_budget", 100),
]  # fmt: skip


@pytest.mark.parametrize("field", WRONG, ids=str)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_wrong_field_is_named(fast: Any, path: str, field: tuple[str, Any]) -> None:
    name, value = field
    body = {**(CHAT if "chat" in path else COMPLETION), name: value}
    error = error_of(fast.post(path, body), 400)
    assert error["param"] == name
    assert name in error["message"]
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("field", UNSUPPORTED, ids=str)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_known_field_that_is_not_supported_is_refused(fast: Any, path: str, field: tuple[str, Any]) -> None:
    name, value = field
    body = CHAT if "chat" in path else COMPLETION
    error = error_of(fast.post(path, {**body, name: value}), 400)
    assert (error["param"], error["code"]) == (name, "unsupported_parameter")
    assert fast.post(path, {**body, name: None}).status_code == 200


@pytest.mark.parametrize(
    "fields",
    [
        {
            "presence_penalty": 0,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1.0,
            "logit_bias": {},
            "min_p": 0,
        },
        {"response_format": {"type": "text"}, "echo": False, "bad_words": [], "priority": 0, "user": "me"},
        {"use_beam_search": False, "length_penalty": 1.0, "structured_outputs": None, "min_tokens": 0},
        {"structured_outputs": {"regex": "a", "json": None, "structural_tag": None}},
        {"logprob_token_ids": [], "thinking_token_budget": -1, "truncation_side": "right"},
        {"n": 1.0, "top_k": -1, "spaces_between_special_tokens": True, "include_reasoning": True},
    ],
)
def test_values_that_mean_off_are_taken(fast: Any, fields: dict[str, Any]) -> None:
    assert fast.post("/v1/completions", {**COMPLETION, **fields}).status_code == 200
    assert fast.post("/v1/chat/completions", {**CHAT, **fields}).status_code == 200


BEAMS = {"use_beam_search": True, "n": 2}
TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({**BEAMS, "stream": True}, "use_beam_search"),
        ({**BEAMS, "temperature": 0.7}, "temperature"),
        ({**BEAMS, "top_p": 0.9}, "top_p"),
        ({**BEAMS, "repetition_penalty": 1.2}, "repetition_penalty"),
        ({**BEAMS, "logit_bias": {"5": 1}}, "logit_bias"),
        ({**BEAMS, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({**BEAMS, "response_format": {"type": "json_object"}}, "response_format"),
        ({**BEAMS, "stop": "x"}, "stop"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs",
        ),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_fields_that_mean_nothing_together_are_refused(
    fast: Any, path: str, fields: dict[str, Any], param: str
) -> None:
    body = CHAT if "chat" in path else COMPLETION
    assert error_of(fast.post(path, {**body, **fields}), 400)["param"] == param


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids", "logit_bias"])
def test_a_token_that_the_model_does_not_have_is_named(fast: Any, name: str) -> None:
    """Case 13."""
    value = {"394": 1} if name == "logit_bias" else [394]
    error = error_of(fast.post("/v1/completions", {**COMPLETION, name: value, "min_tokens": 1}), 400)
    assert error["param"] == name and "394" in error["message"]


def test_a_pattern_that_cannot_be_held_to_is_named(fast: Any) -> None:
    """Case 22: never text without the form."""
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^(?<=a)b$"}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}
    error = error_of(fast.post("/v1/chat/completions", {**CHAT, "response_format": form}), 400)
    assert error["param"] == "response_format"
    assert "response_format.json_schema.schema.properties.a.pattern" in error["message"]
    assert "^(?<=a)b$" in error["message"]


def test_a_grammar_that_the_engine_refuses_is_a_bad_request(fast: Any) -> None:
    body = {**COMPLETION, "structured_outputs": {"choice": ["refused by the engine"]}}
    assert "too many states" in error_of(fast.post("/v1/completions", body), 400)["message"]
    error = error_of(fast.post("/v1/completions", {**body, "stream": True}), 400)
    assert error["param"] == "structured_outputs" and "structured_outputs" in error["message"]
    form = {"type": "json_schema", "json_schema": {"schema": {"const": "refused by the engine"}}}
    error = error_of(fast.post("/v1/chat/completions", {**CHAT, "response_format": form}), 400)
    assert error["param"] == "response_format"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tool_choice"),
        ({"tools": 1}, "tools"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"include_reasoning": 1}, "include_reasoning"),
        ({"documents": "x"}, "documents"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 5}, "logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_completion_tokens": 10**6}, "max_completion_tokens"),
        ({"max_tokens": 10**6}, "max_tokens"),
        ({"messages": [{"role": "user", "content": "word " * 3000}]}, "messages"),
        ({"messages": [{"role": "user", "content": "word " * 30000}]}, "messages"),
        ({"use_beam_search": True, "tool_choice": "required", "tools": TOOLS}, "tool_choice"),
        (
            {"structured_outputs": {"regex": "a"}, "tool_choice": "required", "tools": TOOLS},
            "structured_outputs",
        ),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"add_generation_prompt": "no"}, "add_generation_prompt"),
        ({"model": 3}, "model"),
    ],
)
def test_a_wrong_field_of_a_chat_is_named(fast: Any, fields: dict[str, Any], param: str) -> None:
    assert error_of(fast.post("/v1/chat/completions", {**CHAT, **fields}), 400)["param"] == param


@pytest.mark.parametrize(
    "prompt",
    ["", [""], [], [[]], [[-1]], [384], [10**20], [1, "a"], [1.5], {"a": 1}, None, True, ["x", ""], [["x"]]],
    ids=str,
)
def test_a_wrong_prompt_is_refused_and_the_next_is_answered(fast: Any, prompt: Any) -> None:
    assert error_of(fast.post("/v1/completions", {**COMPLETION, "prompt": prompt}), 400)["param"] == "prompt"
    assert fast.post("/v1/completions", COMPLETION).status_code == 200


def test_the_templates_own_message_is_passed_on(fast: Any) -> None:
    body = {**CHAT, "messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}
    assert error_of(fast.post("/v1/chat/completions", body), 400)["message"] == "tools are not known here"


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[1]", b'"x"', b"null", b"\xff\xfe", b'{"model": NaN}', b"[" * 100_000,
        b'{"model": "tiny", "prompt": "\\ud800", "max_tokens": 1}',
        b'{"model": "tiny", "prompt": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
        b'{"model": "tiny", "prompt": "x", "temperature": Infinity}',
        b'{"model": "tiny", "prompt": "x", "temperature": 1e999}',
    ],
    ids=lambda body: repr(body[:40]),
)  # fmt: skip
def test_a_body_that_is_no_json_object_is_refused(fast: Any, body: bytes) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        answer = fast.http.post(fast.url + path, content=body, headers={"Content-Type": "application/json"})
        assert error_of(answer, 400)["code"] == "invalid_json"


def test_half_of_a_surrogate_pair_is_called_so(fast: Any) -> None:
    for body in (b'{"stop": ["\\uD83D"]}', b'{"model": "\\ud83dx"}'):
        answer = fast.http.post(fast.url + "/v1/completions", content=body)
        assert "half of a" in error_of(answer, 400)["message"]


def test_another_content_type_is_refused(fast: Any) -> None:
    answer = fast.http.post(fast.url + "/v1/completions", data={"model": "tiny"})
    assert error_of(answer, 415)["code"] == "unsupported_media_type"
    packed = fast.post("/v1/completions", COMPLETION, headers={"Content-Encoding": "gzip"})
    assert "'gzip'" in error_of(packed, 415)["message"]


def test_too_large_a_body_is_refused_before_it_is_read(fast: Any) -> None:
    def parts() -> Any:
        for _ in range(33):
            yield b"x" * 2**20

    headers = {"Content-Type": "application/json"}
    connection = http.client.HTTPConnection("127.0.0.1", fast.server.port, timeout=30)
    connection.putrequest("POST", "/v1/completions")
    connection.putheader("Content-Type", "application/json")
    connection.putheader("Content-Length", str(2**40))
    connection.endheaders()
    declared = connection.getresponse()
    assert declared.status == 413
    assert json.loads(declared.read())["error"]["code"] == "request_too_large"
    connection.close()
    answer = fast.http.post(fast.url + "/v1/completions", content=parts(), headers=headers)
    assert error_of(answer, 413)["code"] == "request_too_large"


def test_a_text_far_too_long_is_refused_before_it_is_tokenised(fast: Any) -> None:
    text = "é" * 2**21
    for path, field in (
        ("/v1/completions", {**COMPLETION, "prompt": text}),
        ("/v1/chat/completions", {**CHAT, "messages": [{"role": "user", "content": text}]}),
        ("/tokenize", {"model": "tiny", "prompt": text}),
    ):
        error = error_of(fast.post(path, field), 400)
        assert error["code"] == "context_length_exceeded"
        assert "the first " in error["message"]


def test_unknown_models_routes_and_methods(fast: Any) -> None:
    unknown = error_of(fast.post("/v1/completions", {**COMPLETION, "model": "other"}), 404)
    assert (unknown["code"], unknown["param"]) == ("model_not_found", "model")
    assert error_of(fast.get("/v1/models/other"), 404)["code"] == "model_not_found"
    assert (
        error_of(fast.post("/tokenize", {"model": "other", "prompt": "x"}), 404)["code"] == "model_not_found"
    )
    assert error_of(fast.get("/v1/nothing"), 404)["code"] == "not_found"
    wrong_method = fast.get("/v1/completions")
    assert error_of(wrong_method, 405)["code"] == "method_not_allowed"
    assert wrong_method.headers["allow"] == "POST"
    with pytest.raises(openai.NotFoundError):
        fast.client().completions.create(model="other", prompt="x")


def test_what_can_never_fit_is_told_with_need_and_capacity(serve: Any) -> None:
    with serve("small") as running:
        client = running.client()
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model="tiny", prompt=[5] * 1000, max_tokens=5)
        assert caught.value.code == "context_length_exceeded"
        assert "1005" in str(caught.value)
        assert "800" in str(caught.value)
        too_long = {"model": "tiny", "prompt": [5] * 2048, "max_tokens": 1}
        error = error_of(running.post("/v1/completions", too_long), 400)
        assert error["code"] == "context_length_exceeded"
        for _ in range(5):
            assert client.completions.create(model="tiny", prompt="short", max_tokens=2).choices
        full = client.chat.completions.create(
            model="tiny", messages=CHAT["messages"], temperature=0, extra_body={"ignore_eos": True}
        )
        assert full.usage.total_tokens == 801  # the cache holds 800; the last token drawn is never stored


def test_a_full_queue_of_tokens_and_a_deadline_that_cannot_be_met_are_refused_with_a_time(serve: Any) -> None:
    """An engine of 50 steps of 4 tokens a second at most, with a long prompt before everyone."""
    settings = {"max_num_batched_tokens": 4, "max_queue_tokens": 1500, "enable_prefix_caching": False}
    with serve("paced", **settings) as running:
        busy = running.client().completions.create(model="tiny", prompt=[4] * 1200, max_tokens=1, stream=True)
        for _ in range(100):  # until its rate is measured
            load = running.get("/load").json()
            if load["prefill_tokens_per_s"] and load["waiting_tokens"]:
                break
            running.thread.join(0.02)
        too_much = running.post("/v1/completions", {**COMPLETION, "prompt": [5] * 1400})
        assert error_of(too_much, 429)["code"] == "rate_limit_exceeded"
        assert "max-queue-tokens 1500" in error_of(too_much, 429)["message"]
        assert 1 <= int(too_much.headers["retry-after"]) <= 60
        late = {**COMPLETION, "timeout_s": 0.05}
        for body in (late, {**late, "stream": True}):
            refused = running.post("/v1/completions", body)
            assert error_of(refused, 429)["code"] == "deadline_exceeded"
            assert int(refused.headers["retry-after"]) >= 1
        assert [chunk.choices[0].finish_reason for chunk in busy][-1] == "length"
        in_time = {**COMPLETION, "timeout_s": 60, "max_tokens": 2, "ignore_eos": True}
        answer = running.post("/v1/completions", in_time)
        assert answer.json()["choices"][0]["finish_reason"] == "length"
        over = {**COMPLETION, "timeout_s": 0.3, "max_tokens": 500, "ignore_eos": True}
        cut = running.post("/v1/completions", over).json()["choices"][0]
        assert (cut["finish_reason"], cut["stop_reason"]) == ("abort", "timeout")


def test_more_sequences_than_the_queue_holds_are_refused(serve: Any) -> None:
    with serve("paced", max_queue=4, max_num_seqs=1) as running:
        body = {**COMPLETION, "n": 5, "temperature": 1}
        assert error_of(running.post("/v1/completions", body), 400)["param"] == "n"
        busy = [
            running.client().completions.create(
                model="tiny", prompt="x", max_tokens=500, stream=True, extra_body={"ignore_eos": True}
            )
            for _ in range(5)
        ]
        full = running.post("/v1/completions", COMPLETION)
        assert error_of(full, 429)["code"] == "rate_limit_exceeded"
        assert int(full.headers["retry-after"]) >= 1
        streamed = running.post("/v1/completions", {**COMPLETION, "stream": True})
        assert error_of(streamed, 429)["type"] == "rate_limit_error"
        for stream in busy:
            stream.close()


ROUTES = [
    ("GET", "/v1/models"), ("GET", "/v1/models/tiny"), ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"), ("POST", "/tokenize"), ("POST", "/detokenize"), ("GET", "/version"),
    ("GET", "/load"), ("GET", "/nowhere"), ("GET", "/health/"), ("GET", "//health"), ("GET", "/docs"),
    ("GET", "/openapi.json"),
]  # fmt: skip
NO_KEY = [None, "Bearer wrong", "one", "Basic one"]
OPEN = ["/health", "/live", "/ready", "/startup", "/ping", "/metrics"]


def test_with_keys_everything_but_probes_and_metrics_is_denied(serve: Any, tmp_path: Any) -> None:
    keys = tmp_path / "keys"
    keys.mkdir()
    (keys / "team-a").write_text("secret-a\n")
    (keys / ".hidden").write_text("secret-hidden")
    with serve("fast", api_key=("one", "two"), api_key_dir=str(keys)) as running:
        for path in OPEN:
            assert running.get(path).status_code == 200
        for method, path in ROUTES:
            for sent in NO_KEY:
                headers = {"Authorization": sent} if sent else {}
                answer = running.http.request(method, running.url + path, json={}, headers=headers)
                assert error_of(answer, 401)["code"] == "invalid_api_key"
        for key in ("one", "two", "secret-a"):
            assert [model.id for model in running.client(api_key=key).models.list()] == ["tiny", "alias"]
        for key in ("secret-hidden", "on", "onee", "ONE"):
            assert running.get("/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code == 401
        (keys / "team-a").unlink()
        (keys / "team-b").write_text("secret-b")
        fresh = {"Authorization": "Bearer secret-b"}
        running.until(lambda: running.get("/v1/models", headers=fresh).status_code == 200, "it is not known")
        assert running.get("/v1/models", headers={"Authorization": "Bearer secret-a"}).status_code == 401


def test_no_prompt_text_is_logged(fast: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG", logger="octavo"):
        fast.post("/v1/completions", {**COMPLETION, "prompt": "a very private sentence"})
        fast.post("/v1/completions", {**COMPLETION, "stop": "a very private stop", "n": "x"})
    assert "/v1/completions" in caplog.text
    assert "private" not in caplog.text
    assert json.loads(fast.get("/health").text)["state"] == "ready"


def test_every_route_that_is_not_open_is_denied_without_a_key(serve: Any) -> None:
    with serve("fast", api_key=("one",), ready=False) as running:
        app = public_app(running.server.service).app
        found = [
            (method, route.path.replace("{name:path}", "tiny"))
            for router in app.routes
            for route in router.original_router.routes
            for method in route.methods
        ]
        assert len(found) > 20
        for method, path in [*found, ("GET", "/mounted"), ("PUT", "/v1/models"), ("OPTIONS", "/tokenize")]:
            answer = httpx.request(method, running.url + path)
            assert (answer.status_code == 401) == (path not in OPEN_PATHS), (method, path, answer.status_code)
