"""Prometheus metrics: vLLM's names, which dashboards and autoscalers read, and our own under ``octavo:``."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from octavo.core.outputs import EngineRequest, EngineStats, FinishReason, RequestTimes
from octavo.core.sampling_params import SamplingParams
from octavo.engine.client import EngineClient, EngineState
from octavo.engine.messages import Outputs, Ready

_TTFT = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40,
    80, 160, 640, 2560,
)  # fmt: skip
_BETWEEN = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
_REQUEST = (
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
_ITERATION = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_PREEMPTIONS = (0, 1, 2, 5, 10, 20, 50)
_STATES = get_args(EngineState)
_SLEEP = ("awake", "weights_offloaded", "discard_all")  # by the level of the sleep


def _lengths(longest: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50 ... up to the context length."""
    series = (mantissa * 10**exponent for exponent in range(10) for mantissa in (1, 2, 5))
    return tuple(value for value in series if value <= longest) or (1,)


class Metrics:
    """The metrics of one API process, in a registry of their own. The ``first`` has those of the engine too,
    so that each counts once in the sums over all processes.
    """

    content_type = "text/plain; version=0.0.4; charset=utf-8"

    def __init__(self, model_name: str, engine: EngineClient, *, first: bool = True) -> None:
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model_name, "engine": "0"}
        self._engine = engine
        self._first = first
        self._before = EngineStats()
        self._length_metrics: dict[str, Histogram] = {}
        if first:
            self.registry.register(_EngineGauges(self._labels, engine))
        self._success = Counter(
            "vllm:request_success",
            "Finished sequences.",
            [*self._labels, "finished_reason"],
            registry=self.registry,
        )
        for reason in ("stop", "length", "abort", "error"):
            self._success.labels(**self._labels, finished_reason=reason)
        self._ttft = self._histogram("time_to_first_token_seconds", "Arrival to first token.", _TTFT)
        self._itl = self._histogram("inter_token_latency_seconds", "Between tokens of a sequence.", _BETWEEN)
        self._tpot = self._histogram(
            "time_per_output_token_seconds", "Older name of inter-token latency.", _BETWEEN
        )
        self._mean_tpot = self._histogram(
            "request_time_per_output_token_seconds", "Mean between tokens, by request.", _BETWEEN
        )
        self._e2e = self._histogram("e2e_request_latency_seconds", "Arrival to last token.", _REQUEST)
        self._queue = self._histogram("request_queue_time_seconds", "Arrival to first scheduled.", _REQUEST)
        self._prefill = self._histogram("request_prefill_time_seconds", "Scheduled to first token.", _REQUEST)
        self._decode = self._histogram("request_decode_time_seconds", "First to last token.", _REQUEST)
        self._inference = self._histogram(
            "request_inference_time_seconds", "Scheduled to last token.", _REQUEST
        )
        self._iteration = self._histogram("iteration_tokens_total", "Tokens of an engine step.", _ITERATION)
        self._preemptions = self._histogram(
            "request_num_preemptions", "Times that sequences were put back to make room.", _PREEMPTIONS
        )
        self._n = self._histogram("request_params_n", "The n of requests.", (1, 2, 5, 10, 20, 50, 100))
        self.http = Counter(
            "octavo:http_requests", "Answers by route and status.", ["method", "route", "status"],
            registry=self.registry,
        )  # fmt: skip
        self.ignored_fields = Counter(
            "octavo:ignored_request_fields", "Fields of requests that no one knows.", registry=self.registry
        )
        self.internal_errors = Counter(
            "octavo:internal_errors", "Requests that failed by a fault of ours.", registry=self.registry
        )
        self.stage_seconds = Gauge(
            "octavo:startup_stage_seconds", "How long each stage of the start took.", ["stage"],
            registry=self.registry,
        )  # fmt: skip
        if first:
            engine.listeners.append(self._step)

    def _histogram(self, name: str, help: str, buckets: Sequence[float]) -> Histogram:
        metric = Histogram(f"vllm:{name}", help, list(self._labels), buckets=buckets, registry=self.registry)
        return metric.labels(**self._labels)

    def engine_ready(self, info: Ready) -> None:
        """What depends on the engine's limits: buckets of lengths, and the cache's configuration."""
        buckets = _lengths(info.max_model_len)
        for name, help in (
            ("request_prompt_tokens", "Tokens of prompts."),
            ("request_generation_tokens", "Tokens of answers."),
            ("request_params_max_tokens", "The max_tokens of requests."),
        ):
            self._length_metrics[name] = self._histogram(name, help, buckets)
        if not self._first:
            return
        tokens = info.num_blocks * info.kv["block_size"]
        config = {
            "block_size": str(info.kv["block_size"]),
            "cache_dtype": info.kv["dtype"],
            "num_gpu_blocks": str(info.num_blocks),
            "kv_cache_size_tokens": str(tokens),
            "kv_cache_max_concurrency": f"{tokens / info.max_model_len:.2f}",  # requests of the full length
        }
        gauge = Gauge(
            "vllm:cache_config_info", "Configuration of the KV cache.", [*self._labels, *config],
            registry=self.registry,
        )  # fmt: skip
        gauge.labels(**self._labels, **config).set(1)

    # Requests

    def started(self, requests: Sequence[EngineRequest], sampling: SamplingParams) -> None:
        self._n.observe(sampling.n)
        for request in requests:
            self._length_metrics["request_prompt_tokens"].observe(len(request.prompt_token_ids))
            self._length_metrics["request_params_max_tokens"].observe(request.sampling.max_tokens or 0)

    def tokens(self, seconds: float, count: int, first: bool) -> None:
        """``count`` new tokens, ``seconds`` after those before them, or after the arrival for the
        ``first``.
        """
        if first:
            self._ttft.observe(seconds)
            return
        for _ in range(count):
            self._itl.observe(seconds / count)
            self._tpot.observe(seconds / count)

    def finished(self, reason: FinishReason) -> None:
        self._success.labels(**self._labels, finished_reason=reason).inc()

    def sequence(self, seconds: float, num_tokens: int, times: RequestTimes | None) -> None:
        """A sequence came to its own end."""
        self._e2e.observe(seconds)
        self._length_metrics["request_generation_tokens"].observe(num_tokens)
        if times is None or not times.first_token:
            return
        self._preemptions.observe(times.preemptions)
        self._queue.observe(times.scheduled - times.arrival)
        self._prefill.observe(times.first_token - times.scheduled)
        self._decode.observe(times.finished - times.first_token)
        self._inference.observe(times.finished - times.scheduled)
        if num_tokens > 1:
            self._mean_tpot.observe((times.finished - times.first_token) / (num_tokens - 1))

    def _step(self, message: Outputs) -> None:
        before, now = self._before, message.stats
        if now.steps > before.steps:
            self._before = now
            tokens = (
                now.prompt_tokens - before.prompt_tokens + now.generation_tokens - before.generation_tokens
            )
            self._iteration.observe(tokens)

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _EngineGauges(Collector):
    """The engine's own counts, read when they are scraped."""

    def __init__(self, labels: dict[str, str], engine: EngineClient) -> None:
        self._labels = labels
        self._engine = engine

    def collect(self) -> Iterable[Metric]:
        stats, labels = self._engine.stats, self._labels
        for name, help, value in (
            ("num_requests_running", "Sequences in the running batch.", stats.running),
            ("num_requests_waiting", "Sequences that wait to run.", stats.waiting),
            ("num_requests_swapped", "Waiting sequences whose K/V is in host memory.", stats.swapped),
            ("kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1.", stats.kv_usage),
            ("gpu_cache_usage_perc", "Older name of kv_cache_usage_perc.", stats.kv_usage),
            ("cpu_cache_usage_perc", "Share of the host tier in use, 0 to 1.", stats.host_usage),
        ):
            yield _gauge(f"vllm:{name}", help, [(labels, value)])
        reasons = [({**labels, "reason": "capacity"}, stats.waiting), ({**labels, "reason": "deferred"}, 0)]
        yield _gauge("vllm:num_requests_waiting_by_reason", "Waiting sequences by what for.", reasons)
        level = self._engine.sleep_level
        sleep = [({**labels, "sleep_state": name}, float(i == level)) for i, name in enumerate(_SLEEP)]
        yield _gauge("vllm:engine_sleep_state", "1 for how deep the engine sleeps.", sleep)
        lora = {"max_lora": "0", "running_lora_adapters": "", "waiting_lora_adapters": ""}
        yield _gauge("vllm:lora_requests_info", "Adapters in use: none.", [({**labels, **lora}, time.time())])
        for name, help, total in (
            ("prompt_tokens", "Prompt tokens taken in.", stats.prompt_tokens),
            ("generation_tokens", "Tokens made.", stats.generation_tokens),
            ("prefix_cache_queries", "Prompt tokens looked up in the cache.", stats.prefix_cache_queries),
            ("prefix_cache_hits", "Prompt tokens found in the cache.", stats.prefix_cache_hits),
            ("num_preemptions", "Sequences put back to make room.", stats.preemptions),
            ("spec_decode_num_drafts", "Rows that carried drafts.", stats.drafts),
            ("spec_decode_num_draft_tokens", "Tokens guessed ahead.", stats.draft_tokens),
            ("spec_decode_num_accepted_tokens", "Guesses that were right.", stats.accepted_draft_tokens),
        ):
            yield _counter(f"vllm:{name}", help, [(labels, total)])
        places = [({**labels, "position": str(i)}, n) for i, n in enumerate(stats.accepted_by_position)]
        yield _counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos", "Right guesses by place.", places,
            labels=[*labels, "position"],
        )  # fmt: skip
        yield from self._own(stats)

    def _own(self, stats: EngineStats) -> Iterable[Metric]:
        states = [({"state": name}, float(name == self._engine.state)) for name in _STATES]
        yield _gauge("octavo:engine_state", "1 for the state the engine is in.", states)
        for name, help, value in (
            ("prefill_tokens_per_second", "How fast prompts are computed.", stats.prefill_tokens_per_s),
            ("waiting_tokens", "Tokens of waiting sequences to compute.", stats.waiting_tokens),
            ("cached_blocks", "Free blocks that can still be found.", stats.cached_blocks),
        ):
            yield _gauge(f"octavo:{name}", help, [({}, value)])
        swap = stats.preemptions_by_swap
        by_means = [({"means": "swap"}, swap), ({"means": "recompute"}, stats.preemptions - swap)]
        yield _counter("octavo:preemptions", "Preemptions by their means.", by_means)
        for name, help, total in (
            ("host_cache_hits", "Prompt tokens found in the host tier.", stats.host_hit_tokens),
            ("host_blocks_saved", "Blocks copied to the host tier.", stats.host_blocks_saved),
            ("host_blocks_loaded", "Blocks copied from the host tier.", stats.host_blocks_loaded),
            (
                "prefix_cache_collisions",
                "Look-ups that found other tokens under an equal hash (with prefix-caching-verify).",
                stats.prefix_cache_collisions,
            ),
            ("row_faults", "Requests that failed alone in a step (NaN logits).", stats.row_faults),
            ("kv_event_batches", "Batches of KV events made.", stats.kv_event_batches),
            (
                "kv_event_batches_dropped",
                "Batches that found the queue full.",
                stats.kv_event_batches_dropped,
            ),
            ("kv_event_batches_missed", "Times a subscriber was too slow.", stats.kv_event_batches_missed),
        ):
            yield _counter(f"octavo:{name}", help, [({}, total)])


_Samples = Sequence[tuple[dict[str, str], float]]


def _gauge(name: str, help: str, samples: _Samples) -> Metric:
    family = GaugeMetricFamily(name, help, labels=list(samples[0][0]))
    for labels, value in samples:
        family.add_metric(list(labels.values()), value)
    return family


def _counter(name: str, help: str, samples: _Samples, labels: Sequence[str] | None = None) -> Metric:
    family = CounterMetricFamily(name, help, labels=labels or list(samples[0][0]))
    for values, total in samples:
        family.add_metric(list(values.values()), total)
    return family
