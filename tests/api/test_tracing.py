"""Traces reach a collector: the request within the client's trace, its stages within the request."""

from __future__ import annotations

import queue
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def test_a_request_and_its_stages_are_spans_of_the_clients_trace(serve: Any) -> None:
    got: queue.Queue[bytes] = queue.Queue()

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.put(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    collector = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{collector.server_port}/v1/traces"
    with serve("fast", otlp_traces_endpoint=endpoint) as running:
        body = {"model": "tiny", "prompt": "hello", "max_tokens": 5, "ignore_eos": True}
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "X-Request-Id": "mine"}
        running.post("/v1/completions", body, headers=headers)
        running.get("/version")
    collector.shutdown()
    spans = []
    while not got.empty():
        for resource in ExportTraceServiceRequest.FromString(got.get()).resource_spans:
            spans += [span for scope in resource.scope_spans for span in scope.spans]
    assert sorted(span.name for span in spans) == ["POST /v1/completions", "decode", "prefill", "queue"]
    assert {span.trace_id.hex() for span in spans} == {TRACE}
    by_name = {span.name: span for span in spans}
    whole = by_name.pop("POST /v1/completions")
    assert whole.parent_span_id.hex() == PARENT
    told = {one.key: one.value for one in whole.attributes}
    assert told["request_id"].string_value == "mine" and told["completion_tokens"].int_value == 5
    assert {span.parent_span_id for span in by_name.values()} == {whole.span_id}
    queued, prefill, decode = (by_name[name] for name in ("queue", "prefill", "decode"))
    assert queued.end_time_unix_nano == prefill.start_time_unix_nano
    assert prefill.end_time_unix_nano == decode.start_time_unix_nano <= decode.end_time_unix_nano
