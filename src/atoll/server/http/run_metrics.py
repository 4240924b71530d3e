"""The metrics of a run for Prometheus: base units (seconds, bytes), and `_total` for what only rises."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from atoll.protocol.status_messages import Status, WorkerStatus
from atoll.server.http.gate import Refusals

Number = Callable[[Status], float | None]

OF_RUN: dict[str, tuple[str, Number]] = {
    "atoll_version": ("Number of the newest version.", lambda run: run.version),
    "atoll_rounds": ("Number of rounds until the run is finished; 0: until stopped.", lambda run: run.rounds),
    "atoll_finished": ("1 after the last round, else 0.", lambda run: run.finished),
    "atoll_failed": ("1 if the run has failed, else 0.", lambda run: bool(run.failed)),
    "atoll_uptime_seconds": ("Seconds since the server's start.", lambda run: run.uptime_s),
    "atoll_left_seconds": ("Estimated seconds until the last round ends.", lambda run: run.left_s),
    "atoll_model_bytes": ("Size of the model.", lambda run: run.model_bytes),
    "atoll_warnings": ("Number of present warnings.", lambda run: len(run.warnings)),
    "atoll_workers": ("Workers alive.", lambda run: sum(each.state == "alive" for each in run.workers)),
    "atoll_awaited_workers": (
        "Workers the round waits for.",
        lambda run: max((len(each.waiting_for) for each in run.fragments), default=0),
    ),
    "atoll_awaited_seconds": (
        "Longest time that a round has waited for a worker.",
        lambda run: max((site.for_s for each in run.fragments for site in each.waiting_for), default=0.0),
    ),
    "atoll_aggregation_seconds": (
        "Duration of the newest aggregation.",
        lambda run: run.history[-1].seconds if run.history else None,
    ),
    "atoll_received_bytes_total": ("Bytes of updates received.", lambda run: run.bytes_up),
    "atoll_sent_bytes_total": ("Bytes of versions sent.", lambda run: run.bytes_down),
    "atoll_deaths_total": ("Workers declared dead.", lambda run: run.deaths),
    "atoll_refused_total": ("Updates refused.", lambda run: run.refused),
}
"""Name → help, and the value by the status; without a value, the metric is left out."""

OF_SITE: dict[str, tuple[str, Callable[[WorkerStatus], float]]] = {
    "atoll_worker_alive": ("1 while the site takes part, else 0.", lambda site: site.state == "alive"),
    "atoll_worker_step": ("Local step of a worker.", lambda site: site.step),
    "atoll_worker_steps_per_second": ("Local steps a second.", lambda site: site.steps_per_s),
    "atoll_worker_silence_seconds": ("Seconds since the last request.", lambda site: site.last_heartbeat_s),
    "atoll_worker_staleness_rounds": ("Rounds behind the newest version.", lambda site: site.staleness),
    "atoll_worker_updates_total": ("Updates that counted.", lambda site: site.rounds),
    "atoll_worker_waited_seconds_total": ("Seconds that training stood still.", lambda site: site.waited_s),
    "atoll_worker_received_bytes_total": ("Bytes received from the site.", lambda site: site.bytes_up),
    "atoll_worker_sent_bytes_total": ("Bytes sent to the site.", lambda site: site.bytes_down),
    "atoll_worker_retries_total": ("Requests that the site repeated.", lambda site: site.retries),
}
"""Name → help, and the value of a site, which is the label `site`."""


class RunMetrics(Collector):
    """A Prometheus collector, which computes its metrics from the run's status."""

    def __init__(self, status: Status, refusals: Refusals) -> None:
        self._status, self._refusals = status, refusals

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of the run, those of each site, and the newest values that training reports."""
        status = self._status
        for name, (text, number) in OF_RUN.items():
            if (value := number(status)) is not None:
                family = _family(name, text)
                family.add_metric([], value)
                yield family
        for name, (text, of_site) in OF_SITE.items():
            family = _family(name, text, "site")
            for worker in status.workers:
                family.add_metric([worker.site], of_site(worker))
            yield family
        refused = _family("atoll_refused_requests_total", "Requests refused, by reason.", "reason")
        for reason, count in sorted(self._refusals.counts.items()):
            refused.add_metric([reason], count)
        yield refused
        mean = _family("atoll_metric", "Mean of a reported metric in the newest round.", "name")
        each = _family("atoll_worker_metric", "A site's metric in its newest round.", "site", "name")
        for key, value in (status.history[-1].metrics if status.history else {}).items():
            mean.add_metric([key], value)
        for worker in status.workers:
            for key, value in (worker.last.metrics if worker.last is not None else {}).items():
                each.add_metric([worker.site, key], value)
        yield from (mean, each)


def _family(name: str, text: str, *labels: str) -> CounterMetricFamily | GaugeMetricFamily:
    kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    return kind(name, text, labels=labels)
