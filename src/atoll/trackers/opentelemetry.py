"""OpenTelemetry: a span for each round, with a child for each of its phases.

train       from the opening of the round to its first update
collect     from the first update to the closing of the round
aggregate   from the closing to the new version
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from atoll.format_text import number_of, without_credentials
from atoll.protocol import run_events
from atoll.trackers.base import TrackedRun, Tracker, of_run, require_reachable, seconds_of


def _endpoint() -> str:
    """Return the address to which OpenTelemetry's own variables send spans."""
    names = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
    return next(filter(None, map(os.environ.get, names)), "http://localhost:4318")


class _Exporter:
    """Exports spans, and counts those that the collector did not take: the SDK's own thread would only log that.

    Args:
        exporter: an exporter of the SDK.
    """

    def __init__(self, exporter: Any) -> None:
        self._exporter, self._lost = exporter, 0

    def export(self, spans: Sequence[Any]) -> Any:
        """Send spans, and return whether that was possible."""
        result = self._exporter.export(spans)
        if result.name != "SUCCESS":
            self._lost += len(spans)
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._exporter, name)

    def require_taken(self, endpoint: str) -> None:
        """Raise an error if spans were lost since the last call.

        Raises:
            OSError: they were.
        """
        lost, self._lost = self._lost, 0
        if lost:
            raise OSError(f"{without_credentials(endpoint)} did not take {number_of(lost, 'span')}")


class OpenTelemetry(Tracker):
    """Makes spans. They go where the program's own provider of traces sends them; without one, by OTLP over HTTP.

    Args:
        run: the run.
        endpoint: address to which spans are sent; empty: as `OTEL_EXPORTER_OTLP_ENDPOINT` says.
    """

    module, package = "opentelemetry.sdk", "atoll[opentelemetry]"

    def __init__(self, run: TrackedRun, endpoint: str = "") -> None:
        super().__init__(run)
        from opentelemetry import trace
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        self._trace, self._own, provider = trace, None, trace.get_tracer_provider()
        if not isinstance(provider, TracerProvider):
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

            self._endpoint = endpoint or _endpoint()
            require_reachable(self._endpoint)
            self._exporter = _Exporter(OTLPSpanExporter(endpoint or None))
            provider = self._own = TracerProvider(resource=Resource.create({"service.name": "atoll"}))
            provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = provider.get_tracer("atoll")
        self._open = dict[int, tuple[Any, Any]]()  # fragment → the spans of its round, and of the phase of that

    def on_event(self, event: run_events.Happened) -> None:
        """Begin and end spans.

        Raises:
            OSError: the collector did not take earlier spans.
        """
        at_ns = int(seconds_of(event) * 1e9)
        match event:
            case run_events.RoundOpened():
                self._end(event.fragment, at_ns, {})  # a round that has no end: the run has gone back
                about: dict[str, Any] = {"atoll.run": self.run.id, "atoll.version": event.version}
                about |= {"atoll.round": event.round, "atoll.fragment": event.fragment}
                span = self._tracer.start_span(f"round {event.round}", start_time=at_ns, attributes=about)
                self._open[event.fragment] = span, self._phase(span, "train", at_ns)
            case run_events.UpdateAccepted() | run_events.UpdateRefused() | run_events.SiteSatOut():
                if event.fragment in self._open:
                    span, phase = self._open[event.fragment]
                    span.add_event(event.what, {"atoll.site": event.site}, at_ns)
                    if isinstance(event, run_events.UpdateAccepted) and phase.name == "train":
                        self._next(event.fragment, "collect", at_ns)
            case run_events.RoundClosed(fragment=fragment):
                self._next(fragment, "aggregate", at_ns)
            case run_events.RoundReopened(fragment=fragment):
                self._next(fragment, "collect", at_ns)
            case run_events.RoundEnded(fragment=fragment, summary=summary):
                self._end(fragment, at_ns, {f"atoll.{name}": value for name, value in of_run(summary).items()})
            case run_events.RunFinished():
                for fragment in list(self._open):  # rounds that the admin has stopped
                    self._end(fragment, at_ns, {})
            case run_events.RunFailed(reason=reason):
                for fragment, (span, _) in list(self._open.items()):
                    span.set_status(self._trace.StatusCode.ERROR, reason)
                    self._end(fragment, at_ns, {})
        self._require_taken()

    def _require_taken(self) -> None:
        if self._own is not None:
            self._exporter.require_taken(self._endpoint)

    def _phase(self, span: Any, name: str, at_ns: int) -> Any:
        return self._tracer.start_span(name, self._trace.set_span_in_context(span), start_time=at_ns)

    def _next(self, fragment: int, name: str, at_ns: int) -> None:
        if fragment in self._open:
            span, phase = self._open[fragment]
            phase.end(at_ns)
            self._open[fragment] = span, self._phase(span, name, at_ns)

    def _end(self, fragment: int, at_ns: int, about: dict[str, float]) -> None:
        if fragment in self._open:
            span, phase = self._open.pop(fragment)
            phase.end(at_ns)
            span.set_attributes(about)
            span.end(at_ns)

    def close(self) -> None:
        """Send what is left. The spans of open rounds begin anew when the run goes on."""
        if self._own is not None:
            self._own.shutdown()
        self._require_taken()
