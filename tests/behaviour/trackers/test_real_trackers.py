"""Each tracker with its real library, without a network: the points of a run, its sites, and a restart."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.admin import roll_back
from kit.peers import Connection, Peer, Request
from kit.world import World
from tracked import Points, of_mlflow, of_tensorboard, of_trackio, of_wandb, runs_of_mlflow

from atoll.testing.run import wait_until

START = {"w": torch.zeros(2)}
LOSSES = [(1, 1.0), (2, 0.5), (3, 0.25)]


def needs(module: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(find_spec(module) is None, reason=f"{module} is not installed")


def options(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Options with which the tracker writes into the folder."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    if name == "trackio":
        import trackio.sqlite_storage
        import trackio.utils

        for module in (trackio.utils, trackio.sqlite_storage):
            monkeypatch.setattr(module, "TRACKIO_DIR", folder / "trackio")
    return {
        "tensorboard": {"folder": str(folder / "curves")},
        "mlflow": {"uri": f"file://{folder}/mlflow", "experiment": "trial"},
        "wandb": {"mode": "offline", "project": "trial"},
        "trackio": {"project": "trial"},
    }[name]


READ: dict[str, Callable[[Path], Points]] = {
    "tensorboard": lambda folder: of_tensorboard(folder / "curves"),
    "mlflow": lambda folder: in_one(of_mlflow(f"file://{folder}/mlflow")),
    "wandb": lambda folder: of_wandb(folder / "state" / "exports"),
    "trackio": lambda folder: of_trackio("trial"),
}


def in_one(runs: dict[str, Points]) -> Points:
    """The parent's points under their names, and those of its children with the site behind."""
    return {
        key if name == "pilot" else f"{key}/{name}": points
        for name, found in runs.items()
        for key, points in found.items()
    }


def three_rounds(world: World, between: Callable[[], None]) -> None:
    """The mean of the sites' losses halves from round to round; `between` comes after the second."""
    for number, loss in LOSSES:
        world.ask(number=number)
        for site, share in (("a", 0.5), ("b", 1.5)):
            world.pull(site, number=number)
            world.submit(site, 1.0, metrics={"loss": share * loss}, steps=7)
        world.wait(number)
        if number == 2:
            between()
    world.finish()


KINDS = [pytest.param(name, marks=needs(name)) for name in READ]


@pytest.mark.parametrize("name", KINDS)
def test_trackers_show_the_run_and_its_sites(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tracker shows the means of the metrics, the values of each site, and Atoll's own measurements under a
    prefix.
    """
    chosen = {name: options(name, tmp_path, monkeypatch)}
    world = World(tmp_path, START, "ab", rounds=3, **{"server.trackers": chosen, "run.name": "pilot"})
    with world:
        three_rounds(world, lambda: None)
    found = READ[name](tmp_path)
    assert found["loss"] == LOSSES
    assert found["loss/a"] == [(step, loss / 2) for step, loss in LOSSES]
    assert found["loss/b"] == [(step, loss * 1.5) for step, loss in LOSSES]
    assert [value for _, value in found["atoll/steps/a"]] == [7.0] * 3
    assert [value for _, value in found["atoll/updates"]] == [2.0] * 3
    assert not world.status.warnings


@pytest.mark.parametrize("is_noted", [True, False], ids=["stopped", "killed"])
@pytest.mark.parametrize("name", KINDS)
def test_a_restart_repeats_no_point_in_a_tracker(
    name: str, is_noted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restarted server continues the same tracker run without repeated points, even if it was killed in the middle of
    writing.
    """
    chosen = {name: options(name, tmp_path, monkeypatch)}
    world = World(tmp_path, START, "ab", rounds=3, **{"server.trackers": chosen, "run.name": "pilot"})

    def restart() -> None:
        world.stop()
        note = tmp_path / "state" / f"tracker-{name}.json"
        assert note.exists()
        if not is_noted:
            note.unlink()
        world.start()

    with world:
        three_rounds(world, restart)
    found = READ[name](tmp_path)
    assert found["loss"] == LOSSES
    assert found["loss/a"] == [(step, loss / 2) for step, loss in LOSSES]


@needs("mlflow")
def test_mlflow_has_a_child_run_for_each_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In MLflow, the run has the settings and a child run for each site, and all end with the run."""
    chosen = {"mlflow": options("mlflow", tmp_path, monkeypatch)}
    world = World(tmp_path, START, "ab", rounds=3, **{"server.trackers": chosen, "run.name": "pilot"})
    with world:
        three_rounds(world, lambda: None)
    runs = runs_of_mlflow(f"file://{tmp_path}/mlflow")
    parent = runs["pilot"]
    assert {name: run.info.status for name, run in runs.items()} == dict.fromkeys(("pilot", "a", "b"), "FINISHED")
    assert [runs[site].data.tags["mlflow.parentRunId"] for site in "ab"] == [parent.info.run_id] * 2
    assert parent.data.params["algorithm.name"] == "fedavg"
    assert not [key for key in parent.data.params if key.startswith(("network.", "server.", "disk."))]


@needs("mlflow")
def test_mlflow_accepts_unusual_metric_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Characters that MLflow would refuse in a metric's name are replaced, so that one site cannot spoil a round."""
    chosen = {"mlflow": options("mlflow", tmp_path, monkeypatch)}
    world = World(tmp_path, START, "a", rounds=1, **{"server.trackers": chosen, "run.name": "pilot"})
    with world:
        world.pull(number=1)
        world.submit("a", 1.0, metrics={"../x": 1.0, "val//acc %": 2.0, "..": 3.0, "ok": 4.0})
        world.finish()
    found = of_mlflow(f"file://{tmp_path}/mlflow")["a"]
    assert {key: points for key, points in found.items() if not key.startswith("atoll/")} == {
        "x": [(1, 1.0)],
        "val/acc _": [(1, 2.0)],
        "_": [(1, 3.0)],
        "ok": [(1, 4.0)],
    }


@needs("opentelemetry.exporter")
def test_a_lost_collector_causes_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a collector of OpenTelemetry goes away, one warning says so, and the run goes on."""
    from opentelemetry import trace

    monkeypatch.setattr(trace, "get_tracer_provider", trace.ProxyTracerProvider)  # as in a program without one
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")  # milliseconds
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")

    def take(connection: Connection, request: Request) -> None:
        connection.body(request)
        connection.answer(200)

    collector = Peer.answering(take)
    chosen = {"opentelemetry": {"endpoint": f"{collector.url}/v1/traces"}}
    with World(tmp_path, START, "a", rounds=1000, **{"server.trackers": chosen}) as world:
        with collector:
            world.rounds(1.0, 1)
            wait_until(lambda: bool(collector.requests), "the spans of the first round")
            assert not world.status.warnings
        number = 1
        while not world.status.warnings and number < 900:
            number += 1
            world.rounds(1.0, number)
        (warning,) = world.status.warnings
        assert "tracker opentelemetry failed, and may lack something from now on: OSError: " in warning
        assert f"{collector.url}/v1/traces did not take " in warning
        world.rounds(1.0, *range(number + 1, number + 20))
    assert world.text.count("tracker opentelemetry failed") == 1


def spans_of_this_process() -> Any:
    """Collects the spans that end from now on."""
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    provider, spans = trace.get_tracer_provider(), InMemorySpanExporter()
    if not isinstance(provider, TracerProvider):  # a process has one
        provider = TracerProvider()
        trace.set_tracer_provider(provider)
    provider.add_span_processor(SimpleSpanProcessor(spans))
    return spans


@needs("opentelemetry.sdk")
def test_the_span_of_a_dropped_round_ends(tmp_path: Path) -> None:
    """Round 2 is open when the run goes back to version 0; then come rounds 1 and 2 again."""
    spans = spans_of_this_process()
    with World(tmp_path, START, "a", rounds=2, **{"server.trackers": ("opentelemetry",)}) as world:
        world.rounds(1.0, 1)
        world.pull(number=2)
        roll_back(world, 0)
        world.rounds(1.0, 1, 2)
        world.finish()
    names = [each.name for each in spans.get_finished_spans() if each.parent is None]
    assert names == ["round 1", "round 2", "round 1", "round 2"]


@needs("opentelemetry.sdk")
def test_opentelemetry_has_a_span_for_each_round(tmp_path: Path) -> None:
    """In OpenTelemetry, each round is a span whose children are its phases, without gaps."""
    spans = spans_of_this_process()
    world = World(tmp_path, START, "ab", rounds=3, **{"server.trackers": ("opentelemetry",)})
    with world:
        three_rounds(world, world.restart)
    done = spans.get_finished_spans()
    rounds = {each.name: each for each in done if each.parent is None}
    assert sorted(rounds) == ["round 1", "round 2", "round 3"]
    for number, (name, span) in enumerate(sorted(rounds.items()), 1):
        children = [each for each in done if each.parent and each.parent.span_id == span.context.span_id]
        assert [each.name for each in children] == ["train", "collect", "aggregate"], name
        times = [(each.start_time, each.end_time) for each in children]
        assert [begin for begin, _ in times] == [span.start_time, *(end for _, end in times[:-1])]
        assert times[-1][1] == span.end_time
        assert span.attributes["atoll.round"] == number
        assert span.attributes["atoll.loss"] == LOSSES[number - 1][1]
        assert [event.attributes["atoll.site"] for event in span.events] == ["a", "b"]
