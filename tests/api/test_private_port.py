"""The private port: what the engine is, tokens in and out, administration, behind a secret of its own."""

from __future__ import annotations

import json
from typing import Any

import pytest

from octavo.core.block_hash import BlockHasher
from octavo.core.kv_events import digest
from octavo.prompt.assets import PromptAssets
from octavo.prompt.renderer import PromptRenderer


def tokens_of(text: str) -> tuple[list[int], dict[str, Any]]:
    events = [json.loads(part[6:]) for part in text.split("\n\n") if part and part != "data: [DONE]"]
    return [token for event in events for token in event["token_ids"]], events[-1]


def test_server_info_says_what_the_router_needs(fast: Any, renderer: Any) -> None:
    info = fast.http.get(fast.private_url + "/server_info").json()
    assert info["state"] == "ready"
    assert info["model"] == {
        "name": "tiny", "aliases": ["alias"], "adapters": [], "max_model_len": 2048, "vocab_size": 384,
    }  # fmt: skip
    assert info["prompt"]["tokenizer_digest"] == renderer.assets.tokenizer_digest
    assert info["prompt"]["template_digest"] == renderer.assets.template_digest
    assert info["kv"]["root"] == BlockHasher(info["kv"]["hash"], info["kv"]["block_size"]).root.hex()
    assert info["kv"]["num_blocks"] == 400
    assert info["limits"] == {
        "max_num_seqs": 256, "max_num_batched_tokens": 2048, "max_queue": 1024, "max_queue_tokens": 0,
    }  # fmt: skip
    assert info["load"] == fast.http.get(fast.private_url + "/load").json()


def test_a_snapshot_of_the_cache_has_its_number_its_names_and_their_digest(serve: Any) -> None:
    any_port = {"endpoint": "tcp://127.0.0.1:0", "replay_endpoint": "tcp://127.0.0.1:0"}
    with serve("fast", kv_events_config=any_port) as running:
        info = running.http.get(running.private_url + "/server_info").json()
        assert info["kv"]["events"]["publish"].startswith("tcp://127.0.0.1:")
        running.post("/v1/completions", {"model": "tiny", "prompt": [5] * 33, "max_tokens": 1})
        snapshot = running.http.get(running.private_url + "/kv/snapshot").json()
        first = BlockHasher("sha256", 16).hash_blocks([5] * 16)[0].hex()
        assert [block["parent"] for block in snapshot["blocks"]] == [None, first]
        assert {(block["medium"], block["group_idx"]) for block in snapshot["blocks"]} == {("GPU", 0)}
        names = [(b["medium"], b["group_idx"], bytes.fromhex(b["name"])) for b in snapshot["blocks"]]
        assert snapshot["digest"] == digest(names)
        assert snapshot["sequence"] == running.metric("octavo:kv_event_batches_total") - 1 >= 0
        assert snapshot["epoch"] == info["epoch"] and snapshot["groups"] == info["kv"]["groups"]
        assert (snapshot["block_size"], snapshot["hash"]) == (16, "sha256")
    with serve("fast") as running:
        assert running.http.get(running.private_url + "/server_info").json()["kv"]["events"] is None
        assert running.http.get(running.private_url + "/kv/snapshot").json()["sequence"] is None


def test_prompt_assets_render_elsewhere_as_here(fast: Any) -> None:
    answer = fast.http.get(fast.private_url + "/prompt_assets")
    elsewhere = PromptRenderer(PromptAssets.from_bytes(answer.content))
    body = {"messages": [{"role": "user", "content": "naïve 日本"}]}
    assert elsewhere.chat(body) == fast.post("/tokenize", body).json()["tokens"]


def test_generation_goes_on_from_tokens_made_elsewhere(fast: Any) -> None:
    body = {"prompt_token_ids": [9, 8, 7], "sampling": {"max_tokens": 20, "seed": 4, "ignore_eos": True}}

    def generate(**more: Any) -> tuple[list[int], dict[str, Any]]:
        return tokens_of(fast.http.post(fast.private_url + "/internal/generate", json={**body, **more}).text)

    whole, last = generate(sample_index=1)
    assert (len(whole), last["finish_reason"]) == (20, "length")
    rest, _ = generate(sample_index=1, output_token_ids=whole[:8])
    assert rest == whole[8:]
    assert generate(sample_index=2)[0] != whole


@pytest.mark.parametrize(
    "body",
    [
        {}, {"prompt_token_ids": "x"}, {"prompt_token_ids": []}, {"prompt_token_ids": [384]},
        {"prompt_token_ids": [5], "sampling": {"stop": ["x"]}},
        {"prompt_token_ids": [5], "sampling": {"n": 0}},
    ],
    ids=str,
)  # fmt: skip
def test_a_wrong_internal_request_is_refused(fast: Any, body: dict[str, Any]) -> None:
    answer = fast.http.post(fast.private_url + "/internal/generate", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


def test_the_prefix_cache_can_be_reset(fast: Any) -> None:
    body = {"model": "tiny", "prompt": [5] * 100, "max_tokens": 1}

    def cached() -> int:
        usage = fast.post("/v1/completions", body).json()["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    cached()
    assert cached() == 96
    assert fast.http.post(fast.private_url + "/reset_prefix_cache").json() == {"reset": True}
    assert cached() == 0


def test_the_private_port_wants_its_secret(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_PRIVATE_KEY", "between us")
    with serve("fast", api_key=("public",)) as running:
        for method, path in (
            ("GET", "/server_info"), ("GET", "/load"), ("GET", "/prompt_assets"), ("POST", "/drain"),
            ("GET", "/kv/snapshot"), ("POST", "/pause"), ("POST", "/resume"), ("POST", "/abort_requests"),
            ("POST", "/sleep"), ("POST", "/wake_up"), ("GET", "/is_sleeping"),
            ("POST", "/reset_prefix_cache"), ("POST", "/internal/generate"), ("GET", "/health"),
        ):  # fmt: skip
            for sent in ({}, {"Authorization": "Bearer public"}):
                answer = running.http.request(method, running.private_url + path, headers=sent)
                assert answer.status_code == 401, path
        secret = {"Authorization": "Bearer between us"}
        assert running.http.get(running.private_url + "/server_info", headers=secret).status_code == 200


def test_private_routes_are_not_on_the_public_port(fast: Any) -> None:
    for method, path in (("GET", "/server_info"), ("GET", "/prompt_assets"), ("POST", "/internal/generate")):
        assert fast.http.request(method, fast.url + path).status_code == 404


@pytest.mark.parametrize(
    ("sampling", "param"),
    [
        ({"bad_words": ["x"]}, "sampling.bad_words"),
        ({"structured_outputs": {"regex": "a"}}, "sampling.structured_outputs"),
        ({"n": 2}, "sampling.n"),
        ({"use_beam_search": True}, "sampling.use_beam_search"),
        ({"allowed_token_ids": [394]}, "allowed_token_ids"),
        ({"grammar": "refused by the engine"}, "grammar"),
        ({"min_tokens": 20}, "min_tokens"),
    ],
)
def test_a_sequence_by_its_tokens_takes_no_texts_and_no_samples(
    fast: Any, sampling: dict[str, Any], param: str
) -> None:
    body = {"prompt_token_ids": [5, 6], "sampling": {"max_tokens": 4, **sampling}}
    answer = fast.http.post(fast.private_url + "/internal/generate", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_a_sequence_by_its_tokens_takes_every_other_setting(fast: Any) -> None:
    sampling = {
        "max_tokens": 4, "min_p": 0.1, "logit_bias": {"5": 1.5}, "bad_words_token_ids": [[7, 8]],
        "repetition_penalty": 1.2, "presence_penalty": 1, "frequency_penalty": 1, "min_tokens": 2,
        "allowed_token_ids": [1, 2, 3], "grammar": "g",
    }  # fmt: skip
    body = {"prompt_token_ids": [5, 6], "sampling": sampling, "priority": 3, "deadline": 1e12}
    answer = fast.http.post(fast.private_url + "/internal/generate", json=body)
    assert answer.status_code == 200, answer.text
    assert tokens_of(answer.text)[1]["finish_reason"] in ("length", "stop")


@pytest.mark.parametrize(
    ("name", "value"),
    [("sample_index", -1), ("sample_index", 128), ("sample_index", 10**30), ("priority", 2**31)],
)
def test_a_number_that_the_engine_cannot_bear_is_refused(fast: Any, name: str, value: int) -> None:
    body = {"prompt_token_ids": [5, 6], "sampling": {"max_tokens": 4}, name: value}
    answer = fast.http.post(fast.private_url + "/internal/generate", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)


LONG = {"model": "tiny", "prompt": "hello", "max_tokens": 60, "ignore_eos": True, "seed": 3}


def test_a_paused_engine_takes_nothing_and_goes_on_where_it_was(paced: Any) -> None:
    whole = paced.post("/v1/completions", LONG).json()["choices"][0]["text"]

    def admin(path: str) -> dict[str, Any]:
        return paced.http.post(paced.private_url + path).json()

    with paced.http.stream("POST", paced.url + "/v1/completions", json={**LONG, "stream": True}) as answer:
        lines = (line for line in answer.iter_lines() if line.startswith("data: {"))
        text = json.loads(next(lines)[6:])["choices"][0]["text"]
        assert admin("/pause")["state"] == "paused"
        made = paced.metric("vllm:generation_tokens_total")
        paced.thread.join(0.3)
        assert paced.metric("vllm:generation_tokens_total") <= made + 1, "the step that ran may end"
        assert paced.get("/load").json()["kv_usage"] > 0
        assert [paced.get(path).status_code for path in ("/ready", "/health", "/live")] == [503, 503, 200]
        refused = paced.post("/v1/completions", LONG)
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) >= 1
        assert paced.http.get(paced.private_url + "/server_info").json()["state"] == "paused"
        assert paced.metric("octavo:engine_state", state="paused") == 1
        assert admin("/resume")["state"] == "ready"
        text += "".join(json.loads(line[6:])["choices"][0]["text"] for line in lines)
    assert text == whole


def test_a_pause_can_end_what_runs(paced: Any) -> None:
    with paced.http.stream(
        "POST", paced.url + "/v1/completions", json={**LONG, "stream": True, "max_tokens": 1500}
    ) as answer:
        lines = (line for line in answer.iter_lines() if line.startswith("data: {"))
        next(lines)
        assert paced.http.post(paced.private_url + "/pause?mode=abort").status_code == 200
        assert json.loads(list(lines)[-1][6:])["choices"][0]["finish_reason"] == "abort"
    assert paced.http.post(paced.private_url + "/pause?mode=maybe").status_code == 400
    assert paced.http.post(paced.private_url + "/resume").json()["state"] == "ready"
    assert paced.get("/load").json()["running"] == 0


def test_requests_are_aborted_by_their_names(paced: Any) -> None:
    body = {**LONG, "stream": True, "max_tokens": 1500}
    with (
        paced.http.stream(
            "POST", paced.url + "/v1/completions", json=body, headers={"X-Request-Id": "a"}
        ) as one,
        paced.http.stream(
            "POST", paced.url + "/v1/completions", json=body, headers={"X-Request-Id": "b"}
        ) as two,
    ):
        for named, asked, answer in (("a", {"request_ids": ["a", "z"]}, one), ("b", None, two)):
            lines = (line for line in answer.iter_lines() if line.startswith("data: {"))
            next(lines)
            content = json.dumps(asked) if asked else None
            ended = paced.http.post(paced.private_url + "/abort_requests", content=content)
            assert ended.json() == {"aborted": [named]}
            assert json.loads(list(lines)[-1][6:])["choices"][0]["finish_reason"] == "abort"
    assert paced.http.post(paced.private_url + "/abort_requests").json() == {"aborted": []}


def test_responses_in_the_background_are_aborted_by_either_name(paced: Any) -> None:
    body = {"model": "tiny", "input": "hello", "ignore_eos": True, "max_output_tokens": 1500}
    for by in ("own", "request", "none"):
        sent = {"X-Request-Id": "mine"}
        made = paced.post("/v1/responses", {**body, "background": True}, headers=sent).json()["id"]
        name = {"own": made, "request": "mine", "none": None}[by]
        content = json.dumps({"request_ids": [name]}) if name else None
        ended = paced.http.post(paced.private_url + "/abort_requests", content=content).json()
        assert ended == {"aborted": [name or "mine"]}
        url = f"/v1/responses/{made}"
        paced.until(lambda url=url: paced.get(url).json()["status"] == "incomplete", "the response goes on")
        paced.until(paced.idle, "its sequence goes on")
    assert paced.http.post(paced.private_url + "/abort_requests").json() == {"aborted": []}
