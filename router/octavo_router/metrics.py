"""What the router exports to Prometheus, under ``octavo_router:``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from octavo_router.engine import Engine
from octavo_router.index import PrefixIndex

_TTFB_BUCKETS = (
    .001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640,
)  # fmt: skip
_PICK_BUCKETS = (.0001, .00025, .0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5)  # fmt: skip


class Metrics:
    """One registry per router, so that tests can run several in a process."""

    def __init__(self, index: PrefixIndex) -> None:
        self.registry = CollectorRegistry()
        self._engines: dict[str, Engine] = {}

        def counter(name: str, help: str, labels: Iterable[str] = ()) -> Counter:
            return Counter(f"octavo_router:{name}", help, labels, registry=self.registry)

        self.requests = counter(
            "requests", "requests sent to an endpoint, by how they ended", ("endpoint", "outcome")
        )
        self.answers = counter("answers", "answers to clients, by route and status", ("route", "status"))
        self.picks = counter("picks", "choices of an endpoint, by why it was chosen", ("endpoint", "why"))
        self.retries = counter(
            "retries", "attempts sent elsewhere, by what went wrong", ("endpoint", "reason")
        )
        self.predicted = counter(
            "predicted_cached_tokens", "cached tokens counted on at the pick", ("endpoint",)
        )
        self.actual = counter("actual_cached_tokens", "cached tokens that came back", ("endpoint",))
        self.over = counter(
            "overpredicted_cached_tokens", "predicted minus actual, where more", ("endpoint",)
        )
        self.under = counter(
            "underpredicted_cached_tokens", "actual minus predicted, where more", ("endpoint",)
        )
        self.prompts = counter("prompts", "prompts by how their prefix was named", ("named_by",))
        self.text = Gauge(
            "octavo_router:routes_by_text",
            "1 while a model is routed by hashes of its text instead of the engines' own",
            ("model",),
            registry=self.registry,
        )
        self.mismatch = Gauge(
            "octavo_router:scheme_mismatch",
            "1 while engines of a model differ in hash scheme, block size or digests, or hash unlike us",
            ("model",),
            registry=self.registry,
        )
        self.pick_seconds = Histogram(
            "octavo_router:pick_seconds", "from the whole body to the pick: render, tokenise, hash, choose",
            buckets=_PICK_BUCKETS, registry=self.registry,
        )  # fmt: skip
        self.first_byte_seconds = Histogram(
            "octavo_router:first_byte_seconds", "from the whole body to the first byte of the answer",
            buckets=_TTFB_BUCKETS, registry=self.registry,
        )  # fmt: skip
        self.registry.register(_Live(self._engines, index))

    def watch_engine(self, engine: Engine) -> None:
        """Export this engine's gauges."""
        self._engines[engine.name] = engine

    def forget_engine(self, name: str) -> None:
        """The endpoint left: its gauges go; its counters stay, so that rates over the change are right."""
        self._engines.pop(name, None)

    def by_text(self, model: str, by_text: bool, *, mismatch: bool) -> None:
        """How a model is routed now."""
        self.text.labels(model).set(by_text)
        self.mismatch.labels(model).set(mismatch)

    def forget_model(self, model: str) -> None:
        """No engine serves it any more."""
        self.text.remove(model)
        self.mismatch.remove(model)

    def cached(self, endpoint: str, predicted: int, actual: int) -> None:
        """Cached tokens counted on, and found."""
        self.predicted.labels(endpoint).inc(predicted)
        self.actual.labels(endpoint).inc(actual)
        (self.over if predicted > actual else self.under).labels(endpoint).inc(abs(predicted - actual))

    def render(self) -> bytes:
        """The exposition text."""
        return generate_latest(self.registry)


class _Live(Collector):
    """Gauges read at the moment of the scrape."""

    def __init__(self, engines: dict[str, Engine], index: PrefixIndex) -> None:
        self._engines = engines
        self._index = index

    def collect(self) -> Iterator[Metric]:
        size = GaugeMetricFamily("octavo_router:index_bytes", "estimated memory of the prefix index")
        size.add_metric([], self._index.size_bytes)
        yield size
        budget = GaugeMetricFamily("octavo_router:index_budget_bytes", "what the prefix index may take")
        budget.add_metric([], self._index.budget_bytes)
        yield budget
        blocks = GaugeMetricFamily("octavo_router:index_blocks", "blocks in the index", labels=["endpoint"])
        inflight = GaugeMetricFamily(
            "octavo_router:inflight", "requests at the endpoint now", labels=["endpoint"]
        )
        queued = GaugeMetricFamily(
            "octavo_router:queued_tokens", "prefill tokens thought to wait there", labels=["endpoint"]
        )
        ready = GaugeMetricFamily(
            "octavo_router:endpoint_ready", "1 when it takes new work", labels=["endpoint"]
        )
        for name, engine in self._engines.items():
            blocks.add_metric([name], self._index.blocks_of(name))
            inflight.add_metric([name], engine.inflight)
            queued.add_metric([name], engine.candidate(0).queued_tokens)
            ready.add_metric([name], engine.takes_work)
        yield from (blocks, inflight, queued, ready)
