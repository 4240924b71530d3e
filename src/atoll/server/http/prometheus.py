"""Prometheus metrics, computed from the status of the run at each request."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from atoll.server.coordinator.build_status import status_of
from atoll.server.coordinator.coordinator import Coordinator


class RunMetrics(Collector):
    """A Prometheus collector that reads the status of a run."""

    def __init__(self, run: Coordinator) -> None:
        self._run = run

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of the run."""
        status = status_of(self._run)
        yield GaugeMetricFamily("atoll_version", "Version at the head.", value=status.version)
        yield GaugeMetricFamily(
            "atoll_awaited_workers",
            "Workers the round waits for.",
            value=max(len(fragment.waiting_for) for fragment in status.fragments),
        )
        yield GaugeMetricFamily(
            "atoll_workers", "Workers alive.", value=sum(worker.state == "alive" for worker in status.workers)
        )
        yield CounterMetricFamily("atoll_received_bytes", "Bytes of updates received.", value=status.bytes_up)
        yield CounterMetricFamily("atoll_sent_bytes", "Bytes of versions sent.", value=status.bytes_down)
        yield CounterMetricFamily("atoll_deaths", "Workers declared dead.", value=status.deaths)
        yield CounterMetricFamily("atoll_refused", "Updates refused.", value=status.refused)
        per_worker = GaugeMetricFamily("atoll_worker_step", "Local step of a worker.", labels=["site"])
        for worker in status.workers:
            per_worker.add_metric([worker.site], worker.step)
        yield per_worker
