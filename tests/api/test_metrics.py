"""The metrics that dashboards and autoscalers read: names, labels, buckets, values."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from conftest import total_of
from prometheus_client.parser import text_string_to_metric_families

from octavo.api.metrics import Metrics
from octavo.core.outputs import EngineStats

GAUGES = [
    "num_requests_running",
    "num_requests_waiting",
    "num_requests_swapped",
    "kv_cache_usage_perc",
    "gpu_cache_usage_perc",
    "cpu_cache_usage_perc",
    "cache_config_info",
    "lora_requests_info",
]
COUNTERS = [
    "prompt_tokens",
    "generation_tokens",
    "prefix_cache_queries",
    "prefix_cache_hits",
    "num_preemptions",
    "request_success",
    "spec_decode_num_drafts",
    "spec_decode_num_draft_tokens",
    "spec_decode_num_accepted_tokens",
    "spec_decode_num_accepted_tokens_per_pos",
]
TTFT = ".001 .005 .01 .02 .04 .06 .08 .1 .25 .5 .75 1 2.5 5 7.5 10 20 40 80 160 640 2560"
BETWEEN = ".01 .025 .05 .075 .1 .15 .2 .3 .4 .5 .75 1 2.5 5 7.5 10 20 40 80"
REQUEST = ".3 .5 .8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680"
LENGTHS = "1 2 5 10 20 50 100 200 500 1000 2000"
HISTOGRAMS = {
    "time_to_first_token_seconds": TTFT,
    "inter_token_latency_seconds": BETWEEN,
    "time_per_output_token_seconds": BETWEEN,
    "request_time_per_output_token_seconds": BETWEEN,
    "e2e_request_latency_seconds": REQUEST,
    "request_queue_time_seconds": REQUEST,
    "request_prefill_time_seconds": REQUEST,
    "request_decode_time_seconds": REQUEST,
    "request_inference_time_seconds": REQUEST,
    "request_prompt_tokens": LENGTHS,
    "request_generation_tokens": LENGTHS,
    "request_params_max_tokens": LENGTHS,
    "request_params_n": None,
    "iteration_tokens_total": None,
}


def families(running: Any) -> dict[str, Any]:
    return {family.name: family for family in text_string_to_metric_families(running.get("/metrics").text)}


def test_names_types_labels_and_buckets_are_the_fields_own(fast: Any) -> None:
    found = families(fast)
    labels = {"model_name": "tiny", "engine": "0"}
    for names, kind in ((GAUGES, "gauge"), (COUNTERS, "counter"), (HISTOGRAMS, "histogram")):
        for name in names:
            family = found[f"vllm:{name}"]
            assert family.type == kind, name
            assert all(labels.items() <= sample.labels.items() for sample in family.samples), name
    for name, buckets in HISTOGRAMS.items():
        edges = [s.labels["le"] for s in found[f"vllm:{name}"].samples if s.name.endswith("_bucket")]
        assert edges[-1] == "+Inf"
        if buckets is not None:
            assert [float(edge) for edge in edges[:-1]] == [float(edge) for edge in buckets.split()], name
    info = found["vllm:cache_config_info"].samples[0]
    assert (info.labels["block_size"], info.labels["num_gpu_blocks"], info.value) == ("16", "400", 1)


def test_each_count_of_the_engine_has_its_metric() -> None:
    stats = EngineStats(
        swapped=3, host_usage=0.25, cached_blocks=11, preemptions=9, preemptions_by_swap=4, drafts=20,
        draft_tokens=60, accepted_draft_tokens=31, accepted_by_position=(18, 9, 4), host_hit_tokens=64,
        host_blocks_saved=7, host_blocks_loaded=5, row_faults=2, kv_event_batches=40,
        kv_event_batches_dropped=6, kv_event_batches_missed=1,
    )  # fmt: skip
    engine: Any = SimpleNamespace(stats=stats, state="ready", listeners=[])
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
