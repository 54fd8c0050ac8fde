"""The metrics of several API processes as those of one: sums, under the same names, labels and buckets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector, CollectorRegistry

Families = list[tuple[str, str, str, list[tuple[str, dict[str, str], float]]]]  # name, help, type, samples


def families_of(collected: Iterable[Metric]) -> Families:
    """What a registry has collected, as plain values."""
    return [
        (one.name, one.documentation, one.type, [(s.name, s.labels, s.value) for s in one.samples])
        for one in collected
    ]


class MetricsSum:
    """Remembers what each process told last: what one counted stays in the sums when it is gone, so that no
    counter ever falls. Processes go by their numbers as clients of the engine, which are never used again.
    """

    def __init__(self) -> None:
        self._last: dict[int, Families] = {}  # by the client's number
        self._ended = _Sum()

    def told(self, client: int, families: Families) -> None:
        """In place of what this process told before."""
        self._last[client] = families

    def ended(self, client: int) -> None:
        """The process is gone: what it told last is final."""
        self._ended.add(self._last.pop(client, []))

    def text(self, registry: CollectorRegistry) -> bytes:
        """All with what this process's own ``registry`` holds, in Prometheus's format."""
        total = _Sum()
        total.add(families_of(registry.collect()))
        for families in (self._ended.families(), *self._last.values()):
            total.add(families)
        return generate_latest(total)


class _Sum(Collector):
    def __init__(self) -> None:
        self._heads: dict[str, tuple[str, str]] = {}
        self._samples: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}

    def add(self, families: Iterable[Any]) -> None:
        for name, help, kind, samples in families:
            self._heads.setdefault(name, (help, kind))
            values = self._samples.setdefault(name, {})
            for sample, labels, value in samples:
                key = sample, tuple(labels.items())
                if sample.endswith("_created"):  # a moment: the first counts
                    values[key] = min(value, values.get(key, value))
                else:
                    values[key] = values.get(key, 0.0) + value

    def families(self) -> Families:
        return families_of(self.collect())

    def collect(self) -> Iterator[Metric]:
        for name, (help, kind) in self._heads.items():
            family = Metric(name, help, kind)
            for (sample, labels), value in self._samples[name].items():
                family.add_sample(sample, dict(labels), value)
            yield family
