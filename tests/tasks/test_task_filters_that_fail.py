"""Filters of tasks that fail, wrong names, full disks: the workflow sees a site fail, and the others go on."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from bad_filters import Infinite, Shorter, Undecided
from task_filter_world import Broken, Halved, left, model, plain, serving, sites
from torch import Tensor

import atoll
from atoll.errors import Busy, ConfigError, RunFailed, UsageError
from atoll.filters import Drop, Filter


class Leaving(Filter):
    def apply(self, name: str, start: int, values: Tensor) -> Tensor:
        raise SystemExit(3)


FAILURES = {
    Broken: r"the filter Broken\(\) failed at 'model\.w': KeyError: 'salt'",
    Undecided: r"the filter Undecided\(\) failed at 'model\.\w+': KeyError: 'model\.\w+'",
    Shorter: r"the filter Shorter\(\) made torch\.float\d\d \[1\] where 'model\.\w+' had torch\.float\d\d \[2\]",
    Infinite: r"the filter Infinite\(\) left NaN or Inf in 'model\.\w+'",
}
PLACES = {
    "data": "The payload of task '{task}' for site b is not sent",
    "result": "The answer of site b to task '{task}' is not used",
    "site": "The answer of site b to task '{task}' is not sent",
}
ROWS: list[tuple[str, type[Filter], str]] = [
    *((place, kind, f"{begin}: {failure}") for place, begin in PLACES.items() for kind, failure in FAILURES.items()),
    ("data", Leaving, r"^The server's filters at the payload of task '{task}' for b ended with SystemExit\(3\)\."),
    ("result", Leaving, r"^The filters of its answer failed at the server: SystemExit: 3$"),
]
"""Where a filter of site b works, how it fails, and what b's result says. Each row has a task of its own."""


def task_of(place: str, kind: type[Filter]) -> str:
    return f"{place}.{kind.__name__}"


@pytest.fixture(scope="module")
def broadcasts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Task → its results from a and b, in one run; the last task has no filters."""
    folder, came = tmp_path_factory.mktemp("rows"), dict[str, list[Any]]()
    names = [task_of(place, kind) for place, kind, _ in ROWS]

    def main(controller: Any) -> None:
        controller.sites(at_least=2, timeout_s=30)
        for name in names:
            came[name] = controller.broadcast(name, model(), min_responses=1, timeout_s=30)
            assert plain(came[name][0].payload["model"]["w"]) == [3.0, 4.0]
        with pytest.raises(RunFailed, match=r"got 1 of 2 answers: b failed: .*filter"):
            controller.broadcast(names[0], model(), min_responses=2, timeout_s=30)
        came["measure"] = controller.broadcast("measure", 7, timeout_s=30)

    def of(place: str) -> dict[str, Any]:
        return {"b": {task_of(where, kind): [kind()] for where, kind, _ in ROWS if where == place}}

    with serving(folder, main, data_filters=of("data"), filters=of("result")) as server:
        handlers: dict[str, Any] = dict.fromkeys(names, lambda payload: payload)
        with sites(server, handlers | {"measure": lambda payload: payload + 1}, **of("site")):
            assert server.wait(60)
    return came


@pytest.mark.covers("T8", "T7", "X3")
@pytest.mark.parametrize(("place", "kind", "error"), ROWS, ids=[task_of(place, kind) for place, kind, _ in ROWS])
def test_a_filter_that_fails_is_an_error_of_its_site_and_the_others_go_on(
    broadcasts: dict[str, list[Any]], place: str, kind: type[Filter], error: str
) -> None:
    task = task_of(place, kind)
    good, bad = broadcasts[task]
    assert (good.site, good.ok, bad.site, bad.ok) == ("a", True, "b", False)
    assert re.search(error.replace("{task}", re.escape(task)), bad.error), bad.error
    with pytest.raises(RunFailed, match=f"Site b failed at task '{task}'"):
        bad.payload  # noqa: B018
    assert [result.payload for result in broadcasts["measure"]] == [8, 8]


@pytest.mark.covers("T8", "X3")
def test_a_name_that_no_tensor_has_is_told_with_the_nearest(tmp_path: Path) -> None:
    """What it was to hold back would leave. In a loop of one's own the error is raised, and nothing was sent."""
    came: dict[str, Any] = {}

    def main(controller: Any) -> None:
        came["error"] = controller.send("a", "train", None, timeout_s=30).error

    with serving(tmp_path, main) as server, atoll.tasks(server.url, "a", filters=[Drop("model.haed")]) as worker:
        for task in worker.tasks():
            with pytest.raises(UsageError, match=r"no tensor of the payload is called 'model.haed'") as raised:
                task.answer(model())
            task.fail(raised.value)
    assert "The answer of site a to task 'train' is not sent" in came["error"]
    assert "Did you mean 'model.head'?" in came["error"]


@pytest.mark.covers("T8", "X3")
def test_a_task_that_no_site_can_be_sent_has_its_errors_at_once(tmp_path: Path) -> None:
    """Nobody is asked, so nobody is waited for; the site may not answer what it was not given."""
    came: dict[str, Any] = {}

    def main(controller: Any) -> None:
        controller.sites(at_least=1, timeout_s=30)
        came["failed"] = controller.send("a", "train", model())
        came["next"] = controller.send("a", "measure", 1, timeout_s=30).payload

    with serving(tmp_path, main, data_filters=[Broken()]) as server, atoll.tasks(server.url, "a") as worker:
        worker.task("measure")(lambda payload: payload)
        worker.run()
        row = server._run.task_queue.status()[0]  # type: ignore[union-attr]
    assert "The payload of task 'train' for site a is not sent: the filter Broken()" in came["failed"].error
    assert came["next"] == 1
    assert (row.answers, row.missing) == ({"failed": 1}, [])


@pytest.mark.covers("T8", "T7")
@pytest.mark.parametrize("where", ["data", "result"])
def test_a_disk_that_is_full_is_told_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """What a site is sent ends the workflow's call, as without filters; what it answered is that site's failure."""
    came: dict[str, Any] = {}

    def full(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    def main(controller: Any) -> None:
        controller.sites(at_least=1, timeout_s=30)
        with monkeypatch.context() as patched:
            for module in ("task_payloads", "task_queue"):
                patched.setattr(f"atoll.server.tasks.{module}.write_object", full)
            try:
                came["told"] = controller.send("a", "train", model(), timeout_s=30).error
            except atoll.AtollError as error:
                came["told"] = str(error)
        came["next"] = controller.send("a", "train", model(), timeout_s=30).ok

    options = {"data_filters" if where == "data" else "filters": [Halved()]}
    with serving(tmp_path, main, **options) as server, atoll.tasks(server.url, "a") as worker:
        worker.task("train")(lambda payload: payload)
        worker.run()
    assert "is full" in came["told"]
    assert came["next"]


@pytest.mark.covers("T8", "T7")
def test_a_server_without_room_for_a_sites_own_payload_says_so_and_keeps_none(tmp_path: Path) -> None:
    """There is room for one object of 80 kB, not for that of b and, beside it, that of a."""
    came: list[Any] = []

    def main(controller: Any) -> None:
        controller.sites(at_least=2, timeout_s=30)
        payload = {"w": torch.ones(20_000)}
        with pytest.raises(Busy, match="no room for a payload"):
            controller.broadcast("train", payload, timeout_s=30)
        came.append(left(tmp_path))
        came.append(controller.send("b", "train", payload, timeout_s=30).payload)

    options = {"disk.objects_max_bytes": 100_000, "data_filters": {"a": [Halved()]}}
    with serving(tmp_path, main, **options) as server:
        with sites(server, {"train": lambda payload: payload["w"].sum().item()}):
            assert server.wait(60)
    assert came == [[], 20_000.0]


def test_refuses_what_is_no_filter_before_any_site_is_asked() -> None:
    with pytest.raises(UsageError, match="is not a filter"):
        atoll.tasks("http://127.0.0.1:1", "a", filters={"train": ["drop"]})  # type: ignore[dict-item]
    with pytest.raises(UsageError, match=r"filters is Halved\(\) alone"):
        atoll.tasks("http://127.0.0.1:1", "a", filters=Halved())  # type: ignore[arg-type]
    entry = {"path": "drop", "args": ["w"], "tasks": "train"}
    with pytest.raises(ConfigError, match=r"workflow.payload_filters has .* not understood"):
        atoll.Server(workflow=print, settings={"workflow.payload_filters": [entry]})
