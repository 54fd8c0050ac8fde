"""The metrics that dashboards and autoscalers read: names, labels, buckets, values."""

from __future__ import annotations

import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from api.conftest import total_of
from prometheus_client.parser import text_string_to_metric_families

from octavo.api.metrics import Metrics
from octavo.core.outputs import EngineStats

PAGE = (Path(__file__).parents[2] / "docs/metrics.md").read_text().partition("## The router")[0]
ROW = re.compile(r"^\| `(\w+:\w+)` \| (\w+)(?:: (\w+))? \| (.*?)\|", re.MULTILINE)
LENGTHS = "1 2 5 10 20 50 100 200 500 1000 2000"  # of a model of 2,048 tokens


def families(text: str) -> dict[str, Any]:
    """By name; the times at which series began are left out."""
    found = {family.name: family for family in text_string_to_metric_families(text)}
    return {name: one for name, one in found.items() if not name.endswith("_created")}


def test_the_page_of_metrics_says_their_names_types_labels_and_buckets(fast: Any) -> None:
    assert fast.post("/v1/completions", {"model": "tiny", "prompt": "x", "max_tokens": 1}).status_code == 200
    found, rows = families(fast.get("/metrics").text), ROW.findall(PAGE)
    assert sorted(name for name, *_ in rows) == sorted(found)
    buckets = dict(re.findall(r"^\| (\w+) \| ([\d. ]+) \|$", PAGE, re.MULTILINE))
    for name, kind, edges, labels in rows:
        family = found[name]
        assert family.type == kind, name
        common = {"model_name", "engine"} if name.startswith("vllm:") else set()
        wanted = {*common, *re.findall(r"`(\w+)`", labels)}
        assert all(sample.labels.keys() - {"le"} == wanted for sample in family.samples), name
        if kind == "histogram":
            shown = [sample.labels["le"] for sample in family.samples if sample.name.endswith("_bucket")]
            said = LENGTHS if edges == "lengths" else buckets[edges]
            assert [float(edge) for edge in shown] == [*map(float, said.split()), math.inf], name


def test_the_cache_says_how_large_it_is(fast: Any) -> None:
    info = {
        "block_size": "16",
        "cache_dtype": "bfloat16",
        "num_gpu_blocks": "400",
        "kv_cache_size_tokens": "6400",
        "kv_cache_max_concurrency": "3.12",
        "model_name": "tiny",
        "engine": "0",
    }
    assert fast.metric("vllm:cache_config_info", **info) == 1


def test_each_count_of_the_engine_has_its_metric() -> None:
    stats = EngineStats(
        swapped=3, host_usage=0.25, cached_blocks=11, preemptions=9, preemptions_by_swap=4, drafts=20,
        draft_tokens=60, accepted_draft_tokens=31, accepted_by_position=(18, 9, 4), host_hit_tokens=64,
        host_blocks_saved=7, host_blocks_loaded=5, row_faults=2, kv_event_batches=40,
        kv_event_batches_dropped=6, kv_event_batches_missed=1,
    )  # fmt: skip
    engine: Any = SimpleNamespace(stats=stats, state="ready", listeners=[], sleep_level=0)
    shown = text_string_to_metric_families(Metrics("tiny", engine).text().decode())
    samples = [sample for family in shown for sample in family.samples]
    for name, value in {
        "vllm:num_requests_swapped": 3, "vllm:cpu_cache_usage_perc": 0.25, "octavo:cached_blocks": 11,
        "vllm:num_preemptions_total": 9, "vllm:spec_decode_num_drafts_total": 20,
        "vllm:spec_decode_num_draft_tokens_total": 60, "vllm:spec_decode_num_accepted_tokens_total": 31,
        "vllm:spec_decode_num_accepted_tokens_per_pos_total": 31, "octavo:host_cache_hits_total": 64,
        "octavo:host_blocks_saved_total": 7, "octavo:host_blocks_loaded_total": 5,
        "octavo:row_faults_total": 2, "octavo:kv_event_batches_total": 40,
        "octavo:kv_event_batches_dropped_total": 6, "octavo:kv_event_batches_missed_total": 1,
    }.items():  # fmt: skip
        assert total_of(samples, name) == value, name
    assert total_of(samples, "octavo:preemptions_total", means="swap") == 4
    assert total_of(samples, "octavo:preemptions_total", means="recompute") == 5
    positions = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
    assert total_of(samples, positions, position="1", model_name="tiny") == 9


def test_a_request_is_counted_once_in_each(fast: Any) -> None:
    counted = {
        "prompt_tokens_total": 40, "generation_tokens_total": 12, "prefix_cache_queries_total": 40,
        "time_to_first_token_seconds_count": 1, "inter_token_latency_seconds_count": 11,
        "e2e_request_latency_seconds_count": 1, "request_queue_time_seconds_count": 1,
        "request_prefill_time_seconds_count": 1, "request_decode_time_seconds_count": 1,
        "request_prompt_tokens_sum": 40, "request_generation_tokens_sum": 12, "request_params_n_sum": 1,
        "request_params_max_tokens_sum": 12, "iteration_tokens_total_sum": 52,
        "request_num_preemptions_count": 1, "request_num_preemptions_sum": 0,
    }  # fmt: skip
    names = {f"vllm:{name}" for name in counted}

    def totals() -> dict[str, float]:
        found = dict.fromkeys(names, 0.0)
        for sample in fast.samples():
            if sample.name in found:
                found[sample.name] += sample.value
        return found

    before = totals()
    lengths = fast.metric("vllm:request_success_total", finished_reason="length")
    body = {"model": "tiny", "prompt": list(range(10, 50)), "max_tokens": 12, "ignore_eos": True}
    assert fast.post("/v1/completions", {**body, "cache_salt": "counted"}).status_code == 200
    after = totals()
    assert {name: after[f"vllm:{name}"] - before[f"vllm:{name}"] for name in counted} == counted
    assert fast.metric("vllm:request_success_total", finished_reason="length") == lengths + 1


@pytest.mark.parametrize("place", [0, 3])
def test_a_sequence_that_a_stop_string_ends_is_timed_as_any_other(fast: Any, place: int) -> None:
    stages = ("queue", "prefill", "decode", "inference")

    def totals() -> list[tuple[float, float]]:
        names = [f"vllm:request_{stage}_time_seconds" for stage in stages]
        return [(fast.metric(f"{name}_count"), fast.metric(f"{name}_sum")) for name in names]

    body = {"model": "tiny", "prompt": "hello", "max_tokens": 8, "temperature": 0, "logprobs": 0}
    tokens = fast.post("/v1/completions", body).json()["choices"][0]["logprobs"]["tokens"]
    before = totals()
    answer = fast.post("/v1/completions", {**body, "stop": tokens[place]}).json()
    assert answer["choices"][0]["finish_reason"] == "stop"
    for (count, seconds), (count_before, seconds_before) in zip(totals(), before, strict=True):
        assert count == count_before + 1
        assert seconds_before <= seconds < seconds_before + 60


def test_our_own_metrics_tell_the_state_and_the_answers(fast: Any) -> None:
    assert fast.metric("octavo:engine_state", state="ready") == 1
    assert fast.metric("octavo:engine_state") == 1
    before = fast.metric("octavo:http_requests_total", route="/v1/models", status="200")
    fast.get("/v1/models")
    assert fast.metric("octavo:http_requests_total", route="/v1/models", status="200") == before + 1
    fast.get("/a/route/nobody/has")
    assert fast.metric("octavo:http_requests_total", route="unknown", status="404") >= 1
    assert fast.metric("octavo:startup_stage_seconds", stage="loading weights") >= 0
