"""What monitoring reads of a server: metrics for Prometheus, the dashboard for Grafana, /healthz and /readyz."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.local_run import LocalRun
from kit.world import World
from prometheus_client.parser import text_string_to_metric_families
from torch import nn

from atoll.server.http.gate import open_gate
from atoll.server.http.run_routes import RunRoutes
from atoll.testing.run import wait_until

START = {"w": torch.zeros(2)}
DASHBOARD = Path(__file__).parents[3] / "docs" / "grafana" / "atoll.json"


def fetched(url: str, method: str = "GET") -> tuple[int, str]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as refused:
        return refused.code, refused.read().decode()


def metrics_of(world: World) -> dict[str, dict[str, float]]:
    """Name of each sample → its labels → its value, as Prometheus reads them."""
    text = fetched(f"{world.url}/metrics")[1]
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation.endswith("."), family.name
        found.setdefault(family.name + ("_total" if family.type == "counter" else ""), {})
        for sample in family.samples:
            found.setdefault(sample.name, {})[" ".join(sample.labels.values())] = sample.value
    return found


def test_metrics_equal_the_numbers_of_the_status(tmp_path: Path) -> None:
    """The server's Prometheus metrics have the numbers of the status: of the run, of each site, and the metrics of the
    training.
    """
    with World(tmp_path, START, "ab", rounds=3) as world:
        world.pull(number=1)
        for site, loss in (("a", 1.0), ("b", 3.0)):
            world.submit(site, 1.0, metrics={"loss": loss})
        world.wait(1)
        found, status = metrics_of(world), world.status
        assert found["atoll_version"] == {"": 1}
        assert found["atoll_rounds"] == {"": 3}
        assert (found["atoll_finished"], found["atoll_failed"]) == ({"": 0}, {"": 0})
        assert found["atoll_model_bytes"] == {"": 8}
        assert found["atoll_received_bytes_total"] == {"": status.bytes_up}
        assert found["atoll_metric"] == {"loss": 2.0}
        assert found["atoll_worker_metric"] == {"loss a": 1.0, "loss b": 3.0}
        assert found["atoll_worker_alive"] == {"a": 1, "b": 1}
        assert found["atoll_worker_updates_total"] == {"a": 1, "b": 1}
        assert found["atoll_worker_waited_seconds_total"] == {each.site: each.waited_s for each in status.workers}
        assert found["atoll_worker_received_bytes_total"] == {each.site: each.bytes_up for each in status.workers}
        assert found["atoll_aggregation_seconds"] == {"": status.history[-1].seconds}
        world.rounds(1.0, 2, 3)
        world.wait(3)
        wait_until(lambda: metrics_of(world)["atoll_finished"] == {"": 1}, "the end in the metrics")
        world.finish()


@pytest.mark.parametrize("fragments", [1, 2])
def test_waited_seconds_are_counted_once(tmp_path: Path, fragments: int) -> None:
    """The metrics count the seconds that a site waited for all its updates once, even if it waited in several fragments
    at the same time.
    """
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    world = World(tmp_path, model, "a", algorithm="diloco", rounds=3, H=2, K=fragments)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    world.train_steps(model, optimizer, optimizer.step)
    (worker,) = world.status.workers
    (line,) = [line for line in world.log if ", waited " in line]
    waited_s = float(line.rpartition("waited ")[2].removesuffix(" s"))
    assert 0 < worker.waited_s <= waited_s + 0.05


def test_metrics_are_in_seconds_and_bytes(tmp_path: Path) -> None:
    """The server's metrics are in seconds and bytes, not in multiples of them, and those that end in `_total` only
    rise.
    """
    with World(tmp_path, START, "a", rounds=1) as world:
        world.pull(number=1)
        text, found = fetched(f"{world.url}/metrics")[1], metrics_of(world)
        world.submit("a", 1.0)
        world.finish()
    units = re.compile(r"_(ms|millis\w*|minutes|hours|kb|mb|gb|kib|mib|percent|_s)(_|$)")
    assert len(found) > 20
    for name in found:
        assert name.startswith("atoll_"), name
        assert not units.search(name), name
        assert f"# TYPE {name} {'counter' if name.endswith('_total') else 'gauge'}\n" in text, name


def test_the_dashboard_uses_only_existing_metrics(tmp_path: Path) -> None:
    """Each expression and variable of the Grafana dashboard uses a metric that the server has, and no
    panels overlap.
    """
    dashboard: dict[str, Any] = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked += [each["query"] for each in dashboard["templating"]["list"]]
    named = {name for text in asked for name in re.findall(r"\batoll_\w+", text)}
    with World(tmp_path, START, "ab", rounds=4) as world:
        world.rounds(1.0, 1, 2, 3, metrics={"loss": 1.0})  # there is an estimate of the time left
        world.wait(3)
        found = metrics_of(world)
        world.rounds(1.0, 4, metrics={"loss": 1.0})
        world.finish()
    assert len(named) >= 15
    assert named <= found.keys()
    places = [
        (x, y)
        for panel in dashboard["panels"]
        for place in [panel["gridPos"]]
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(places) == len(set(places))
    assert max(x for x, _ in places) < 24
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_readyz_answers_while_sites_may_join(tmp_path: Path) -> None:
    """`/readyz` says ready without a token while sites may join. After the last round, the server answers that it is
    not ready.
    """
    with World(tmp_path, START, "a", rounds=1) as world:
        assert fetched(f"{world.url}/readyz") == (200, "ready\n")
        assert fetched(f"{world.url}/readyz", "HEAD") == (200, "")
        world.rounds(1.0, 1)
        wait_until(lambda: world.server.finished, "the end")
        status, body = fetched(f"{world.url}/readyz")
        assert status == 503
        assert json.loads(body)["message"] == "The server is not ready: the run is finished."
        assert fetched(f"{world.url}/healthz") == (200, "ok\n")
        world.finish()


def test_readyz_refuses_after_a_failed_run(tmp_path: Path) -> None:
    has_joined = threading.Event()

    def fails(controller: Any) -> None:
        has_joined.wait(30)
        raise ValueError("no cohort")

    with World(tmp_path, START, "a", workflow=fails) as world:
        world.join("a")  # the server tells this site before it ends
        has_joined.set()
        wait_until(lambda: bool(world.status.failed), "the failure")
        status, body = fetched(f"{world.url}/readyz")
    assert status == 503
    assert "the run has failed" in body


@pytest.mark.parametrize("state", ["ending", "beginning again"])
async def test_readyz_refuses_while_the_server_ends(tmp_path: Path, state: str) -> None:
    async with LocalRun(tmp_path, START, {"rounds.sites": 1}) as run:
        handlers = RunRoutes(run.served, "1", open_gate(run.run.settings))
        assert (await handlers.get_readiness()).status == 200
        if state == "ending":
            run.run.send_away()
        else:
            run.run.begins_again.set()
        assert (await handlers.get_readiness()).status == 503
        await asyncio.sleep(0)
