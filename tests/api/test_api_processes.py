"""``--api-server-count``: several API processes on one port answer as one does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from api_processes import (
    BODY,
    COUNT,
    ONE_RESPONSE,
    by_all,
    connected,
    counted,
    fresh,
    one_in_each,
    stored_in_each,
    until,
)
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.parser import text_string_to_metric_families

from octavo.api.metrics_sum import MetricsSum, families_of
from octavo.api.responses_routes import keeper, new_id


@pytest.fixture(scope="module")
def several(serve: Any) -> Iterator[Any]:
    with serve("paced", api_server_count=COUNT) as running, connected(running) as running.clients:
        yield running


def test_every_process_gives_the_same_answers(several: Any) -> None:
    answers = by_all(several, "POST", "/v1/completions", "/v1/completions", json=BODY)
    text = {answer.json()["choices"][0]["text"] for answer in answers}
    assert len(text) == 1
    streams = by_all(several, "POST", "/v1/completions", "/v1/completions", json={**BODY, "stream": True})
    for answer in streams:
        chunks = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line.startswith("data: {")]
        assert {"".join(chunk["choices"][0]["text"] for chunk in chunks)} == text
    created = {
        answer.json()["data"][0]["created"] for answer in by_all(several, "GET", "/v1/models", "/v1/models")
    }
    assert len(created) == 1
    probes = by_all(several, "GET", "/startup", "/startup")
    assert len({answer.text for answer in probes}) == 1


def test_the_load_is_that_of_all_whoever_tells_it(several: Any) -> None:
    with one_in_each(several):
        for client in several.clients:
            until(lambda client=client: client.get("/load").json()["running"] == COUNT)
        for answer in by_all(several, "GET", "/load", "/load"):
            assert answer.json()["running"] == COUNT
            assert json.loads(answer.headers["x-octavo-load"])["running"] == COUNT
    until(lambda: all(a.json()["running"] == 0 for a in by_all(several, "GET", "/load", "/load")))


def shape(text: str) -> dict[str, Any]:
    """Names, types, helps, labels and buckets."""
    return {
        family.name: (
            family.type,
            family.documentation,
            {(s.name, tuple(sorted(s.labels)), s.labels.get("le")) for s in family.samples},
        )
        for family in text_string_to_metric_families(text)
    }


def test_metrics_are_sums_under_the_names_and_buckets_of_one_process(several: Any, paced: Any) -> None:
    by_all(several, "POST", "/v1/completions", "/v1/completions", json=BODY)
    paced.post("/v1/completions", BODY)
    pages = by_all(several, "GET", "/metrics", "/metrics")
    one = shape(paced.get("/metrics").text)
    assert all(shape(page.text) == one for page in pages)
    for name in ("vllm:time_to_first_token_seconds_count", "vllm:request_success_total"):
        parts = [counted(several, number, name) for number in range(COUNT)]
        assert all(parts) and several.metric(name) == sum(parts)
    steps = several.metric("vllm:iteration_tokens_total_sum")
    tokens = several.metric("vllm:prompt_tokens_total") + several.metric("vllm:generation_tokens_total")
    assert steps == tokens, "each step counts once, though every process hears of it"


def test_a_request_counts_once(several: Any) -> None:
    names = (
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:e2e_request_latency_seconds_count",
    )

    def totals() -> list[float]:
        return [several.metric(name) for name in names]

    for client in several.clients:
        before = totals()
        assert client.post("/v1/completions", json={**BODY, "prompt": [5] * 7}).status_code == 200
        assert [now - then for now, then in zip(totals(), before, strict=True)] == [7, 4, 1]


def test_a_response_that_one_process_keeps_is_found_gone_on_with_and_deleted_by_all(several: Any) -> None:
    for name in stored_in_each(several):
        found = by_all(several, "GET", f"/v1/responses/{name}", ONE_RESPONSE)
        assert {answer.json()["id"] for answer in found} == {name}
        follow = {"model": "tiny", "input": "and?", "max_output_tokens": 2, "previous_response_id": name}
        followed = by_all(several, "POST", "/v1/responses", "/v1/responses", json=follow)
        assert {answer.json()["previous_response_id"] for answer in followed} == {name}
        assert len({answer.json()["usage"]["input_tokens"] for answer in followed}) == 1
        assert fresh(several, "DELETE", f"/v1/responses/{name}").json()["deleted"] is True
        for path, route, method in (
            (f"/v1/responses/{name}", ONE_RESPONSE, "GET"),
            (f"/v1/responses/{name}", ONE_RESPONSE, "DELETE"),
            (f"/v1/responses/{name}/cancel", ONE_RESPONSE + "/cancel", "POST"),
        ):
            for answer in by_all(several, method, path, route):
                assert (answer.status_code, answer.json()["error"]["code"]) == (404, "response_not_found")
        lost = fresh(several, "POST", "/v1/responses", json=follow)
        assert (lost.status_code, lost.json()["error"]["code"]) == (400, "previous_response_not_found")


def test_a_response_in_the_background_is_watched_and_cancelled_by_all(several: Any) -> None:
    fields = {"background": True, "max_output_tokens": 1900, "ignore_eos": True}
    for name in stored_in_each(several, **fields):
        for answer in by_all(several, "GET", f"/v1/responses/{name}", ONE_RESPONSE):
            assert answer.json()["status"] in ("queued", "in_progress")
        follow = {"model": "tiny", "input": "and?", "previous_response_id": name}
        assert fresh(several, "POST", "/v1/responses", json=follow).status_code == 400
        cancelled = by_all(several, "POST", f"/v1/responses/{name}/cancel", ONE_RESPONSE + "/cancel")
        assert {answer.json()["status"] for answer in cancelled} == {"cancelled"}
    for name in stored_in_each(several, **fields):
        aborted = several.http.post(several.private_url + "/abort_requests", json={"request_ids": [name]})
        assert aborted.json() == {"aborted": [name]}


def test_a_kept_response_belongs_to_its_key_in_every_process(serve: Any) -> None:
    settings = {"api_server_count": COUNT, "api_key": ("one", "two")}
    with serve("fast", **settings) as running, connected(running) as clients:
        body = {"model": "tiny", "input": "hello", "max_output_tokens": 4}
        for maker in clients:
            name = maker.post("/v1/responses", json=body, headers={"x-api-key": "one"}).json()["id"]
            for key, status in (("one", 200), ("two", 404), ("three", 401)):
                sent = {"headers": {"x-api-key": key}}
                answers = [client.get(f"/v1/responses/{name}", **sent) for client in clients]
                assert {answer.status_code for answer in answers} == {status}


def test_ids_name_the_process_that_keeps_the_response() -> None:
    epoch = "0f8fad5b-d9cb-469f-a165-70867728950e"
    assert len(new_id(epoch, 0)) == len("resp_") + 64
    for count in (1, 2, 12):
        assert [keeper(new_id(epoch, number), count) for number in range(count)] == list(range(count))
    for stranger in (
        "",
        "resp_",
        new_id(epoch, 7),
        new_id(epoch, 0) + "x",
        new_id(epoch, 0) + "9" * 9999,
        "²" * 80,
    ):
        assert keeper(stranger, 3) == 0


def test_pausing_and_resuming_are_one_state_for_all(several: Any) -> None:
    route = "/v1/completions"

    def admin(path: str) -> Any:
        return several.http.post(several.private_url + path).json()["state"]

    with one_in_each(several) as held:
        assert admin("/pause") == "paused"
        try:
            assert {a.status_code for a in by_all(several, "POST", route, route, json=BODY)} == {503}
            assert {a.json()["state"] for a in by_all(several, "GET", "/ready", "/ready")} == {"paused"}
        finally:
            assert admin("/resume") == "ready"
        assert {a.status_code for a in by_all(several, "POST", route, route, json=BODY)} == {200}
        assert {a.json()["state"] for a in by_all(several, "GET", "/ready", "/ready")} == {"ready"}
        assert admin("/pause?mode=abort") == "paused"
        assert [one.finish_reason() for one in held] == ["abort"] * COUNT
        assert admin("/resume") == "ready"


def test_sleeping_and_waking_are_one_state_for_all_and_a_sleep_can_await_the_requests_of_all(
    several: Any,
) -> None:
    def admin(path: str) -> Any:
        return several.http.post(several.private_url + path).json()["state"]

    with one_in_each(several, max_tokens=40) as held:
        assert admin("/sleep?mode=wait") == "sleeping"
        try:
            assert [one.finish_reason() for one in held] == ["length"] * COUNT
            assert {a.json()["state"] for a in by_all(several, "GET", "/ready", "/ready")} == {"sleeping"}
            refused = by_all(several, "POST", "/v1/completions", "/v1/completions", json=BODY)
            assert all("sleeps" in answer.json()["error"]["message"] for answer in refused)
        finally:
            assert admin("/wake_up") == "ready"
    assert {a.json()["state"] for a in by_all(several, "GET", "/ready", "/ready")} == {"ready"}
    with one_in_each(several) as held:
        assert admin("/sleep") == "sleeping"
        assert [one.finish_reason() for one in held] == ["abort"] * COUNT
        assert admin("/wake_up") == "ready"


def test_requests_are_aborted_by_their_names_wherever_they_are(several: Any) -> None:
    def abort(asked: Any) -> list[str]:
        return list(several.http.post(several.private_url + "/abort_requests", json=asked).json()["aborted"])

    with one_in_each(several) as held:
        for number in range(COUNT - 1):
            assert abort({"request_ids": [f"in-{number}", "unknown"]}) == [f"in-{number}"]
            assert held[number].finish_reason() == "abort"
        assert abort({}) == [f"in-{COUNT - 1}"]
        assert held[-1].finish_reason() == "abort"


def test_counters_never_fall_when_a_process_ends() -> None:
    def registry(count: int) -> CollectorRegistry:
        one = CollectorRegistry()
        Counter("answers", "Answers.", ["status"], registry=one).labels("200").inc(count)
        Histogram("seconds", "Seconds.", buckets=(1, 2), registry=one).observe(count)
        return one

    def totals(sums: MetricsSum) -> dict[str, float]:
        parsed = text_string_to_metric_families(sums.text(registry(1)).decode())
        samples = [sample for family in parsed for sample in family.samples]
        return {s.name + s.labels.get("le", ""): s.value for s in samples if not s.name.endswith("_created")}

    sums = MetricsSum()
    first = {"answers_total": 1, "seconds_bucket1.0": 1, "seconds_bucket2.0": 1, "seconds_bucket+Inf": 1,
             "seconds_count": 1, "seconds_sum": 1}  # fmt: skip
    assert totals(sums) == first
    sums.told(7, families_of(registry(2).collect()))
    sums.told(8, families_of(registry(5).collect()))
    both = {"answers_total": 8, "seconds_bucket1.0": 1, "seconds_bucket2.0": 2, "seconds_bucket+Inf": 3,
            "seconds_count": 3, "seconds_sum": 8}  # fmt: skip
    assert totals(sums) == both
    sums.ended(7)
    sums.ended(7)
    assert totals(sums) == both
    sums.told(8, families_of(registry(6).collect()))
    assert totals(sums)["answers_total"] == 9
