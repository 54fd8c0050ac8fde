"""Prometheus metrics of the operator."""

from __future__ import annotations

from prometheus_client import Counter, Gauge

RECONCILES = Counter("octavo_operator_reconciles_total", "Passes that applied a service", ["result"])
SCRAPE_FAILURES = Counter("octavo_operator_scrape_failures_total", "Engines that did not tell their load")
DESIRED_REPLICAS = Gauge(
    "octavo_operator_desired_replicas", "Engine replicas the autoscaler wants", ["namespace", "name"]
)
LEADER = Gauge("octavo_operator_leader", "1 while this process holds the Lease")
