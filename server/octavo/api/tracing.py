"""OpenTelemetry traces (``--otlp-traces-endpoint``): a span for each generating request, within the client's
trace where it sends a W3C ``traceparent``, and in it the stages that the engine told the times of.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.core.outputs import RequestTimes
from octavo.errors import ConfigError

_STAGES = (
    ("queue", "arrival", "scheduled"),
    ("prefill", "scheduled", "first_token"),
    ("decode", "first_token", "finished"),
)


class Tracing:
    """Sends spans in batches from a thread of its own; ``close`` sends what is left."""

    def __init__(self, endpoint: str, service_name: str) -> None:
        """Raises ``ConfigError`` without the packages of ``octavo[otel]``."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace import set_span_in_context
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            raise ConfigError("otlp-traces-endpoint needs more packages: pip install octavo[otel]") from error
        resource = Resource.create({"service.name": service_name})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
        self._tracer = self._provider.get_tracer("octavo")
        self._extract = TraceContextTextMapPropagator().extract
        self._within = set_span_in_context

    def request(
        self,
        headers: Mapping[bytes, bytes],
        name: str,
        began: float,
        ended: float,
        times: RequestTimes | None,
        attributes: Mapping[str, Any],
    ) -> None:
        """A request that is over. Times are in seconds since the epoch."""
        carrier = {
            key: headers[key.encode()].decode("latin-1")
            for key in ("traceparent", "tracestate")
            if key.encode() in headers
        }
        span = self._tracer.start_span(
            name, self._extract(carrier), attributes=dict(attributes), start_time=_ns(began)
        )
        for stage, start, end in _STAGES if times is not None else ():
            first, last = getattr(times, start), getattr(times, end)
            if first and last:
                inner = self._tracer.start_span(stage, self._within(span), start_time=_ns(first))
                inner.end(_ns(last))
        span.end(_ns(ended))

    def close(self) -> None:
        self._provider.shutdown()


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
