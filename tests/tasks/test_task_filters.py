"""Filters of tasks, at the server and at a site: what one site is sent, and what is taken of its answer."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from task_filter_world import Halved, model, plain, serving, sites

import atoll
from atoll import Settings
from atoll.filters import Drop, Filter, Outgoing

STREAMS = pytest.mark.parametrize("stream", [(), ("train",)], ids=["inline", "streamed"])


@pytest.mark.covers("T8", "T3", "T7")
@STREAMS
def test_the_run_file_says_what_a_site_is_sent_and_what_is_taken_of_its_answer(
    tmp_path: Path, stream: tuple[str, ...]
) -> None:
    """a is sent half of (3, 4), without the head, to train, and everything to measure; b is sent all it is, shared.

    They answer with what they were sent; of b's answers the norm is at most 2.5, which is half of (3, 4).
    """
    (tmp_path / "run.toml").write_text(
        """
        workflow.payload_filters = [
            {path = "norm_clip", args = {max_norm = 2.5}, sites = ["a"], tasks = ["train"]},
            {path = "drop", args = ["*.head"], sites = ["a"], tasks = ["train"]},
        ]
        workflow.result_filters = [{path = "norm_clip", args = {max_norm = 2.5}, sites = ["b"]}]
        """
    )
    given = Settings.read(tmp_path / "run.toml", environ={})
    filters = {key: given.at(key) for key in ("workflow.payload_filters", "workflow.result_filters")}
    came: dict[str, Any] = {}
    objects = []

    def main(controller: Any) -> None:
        controller.sites(at_least=2, timeout_s=30)
        for task in ("train", "measure"):
            results = controller.broadcast(task, model(), min_responses=2, timeout_s=30)
            came[task] = {result.site: result.payload for result in results}
        came["text"] = controller.send("b", "measure", "no tensors", timeout_s=30).payload

    def answer(payload: Any) -> Any:
        objects.append(len(list((tmp_path / "state" / "objects").glob("*.safetensors"))))
        return payload

    with serving(tmp_path, main, **{"workflow.streamed_tasks": stream}, **filters) as server:
        with sites(server, {"train": answer, "measure": answer}):
            assert server.wait(60)
    whole = {"model": {"w": [3.0, 4.0], "head": [0.0, 0.0]}, "n": 9, "lr": 0.5}
    half = {"model": {"w": [1.5, 2.0], "head": [0.0, 0.0]}, "n": 9, "lr": 0.5}
    assert plain(came["train"]) == {"a": half | {"model": {"w": [1.5, 2.0], "head": None}}, "b": half}
    assert plain(came["measure"]) == {"a": whole, "b": half}
    assert isinstance(came["measure"]["b"]["model"]["head"], np.ndarray)
    assert came["measure"]["b"]["n"].dtype == torch.int64
    assert came["text"] == "no tensors"
    assert max(objects) <= 2  # one for a, one for everybody else


@pytest.mark.covers("T8", "T3")
def test_sites_without_filters_share_one_object_and_one_with_filters_does_not_keep_its_own(tmp_path: Path) -> None:
    """Three sites, one object for b and c; a's goes with a's answer, while the others are still at work."""

    def main(controller: Any) -> None:
        controller.broadcast("train", model(), sites=["a", "b", "c"], timeout_s=30)

    def files() -> int:
        return len(list((tmp_path / "state" / "objects").glob("*.safetensors")))

    with serving(tmp_path, main, data_filters={"a": [Halved()]}) as server, ExitStack() as stack:
        workers = {name: stack.enter_context(atoll.tasks(server.url, name)) for name in "abc"}
        tasks = {name: next(iter(worker.tasks())) for name, worker in workers.items()}
        assert {name: task.payload["model"]["w"].tolist() for name, task in tasks.items()} == {
            "a": [1.5, 2.0],
            "b": [3.0, 4.0],
            "c": [3.0, 4.0],
        }
        assert files() == 2
        assert len({task.id for task in tasks.values()}) == 1
        assert tasks["a"].answer(1)
        assert files() == 1
        assert tasks["b"].answer(1)
        assert files() == 1
        assert tasks["c"].answer(1)


@pytest.mark.covers("T8")
@STREAMS
def test_a_sites_own_filters_come_before_any_byte_leaves(tmp_path: Path, stream: tuple[str, ...]) -> None:
    """a drops its head and halves the rest, by the name of the task; the server's filter sees no more than that."""
    seen: dict[str, Any] = {}

    class Looking(Filter):
        def begin(self, update: Outgoing) -> None:
            about = update.about
            seen[about.site, about.task] = {name: update.tensor(name).tolist() for name in list(update.tensors)[:1]}
            seen["names", about.site, about.task] = sorted(update.tensors)

    came: dict[str, Any] = {}

    def main(controller: Any) -> None:
        controller.sites(at_least=2, timeout_s=30)
        for task in ("train", "measure"):
            results = controller.broadcast(task, None, min_responses=2, timeout_s=30)
            came[task] = {result.site: plain(result.payload["model"]) for result in results}

    def answer(_: Any) -> Any:
        return model()

    mine = {"a": {"train": [Drop("*.head"), Halved()]}}
    with serving(tmp_path, main, **{"workflow.streamed_tasks": stream}, filters=[Looking()]) as server:
        with sites(server, {"train": answer, "measure": answer}, **mine):
            assert server.wait(60)
    whole = {"w": [3.0, 4.0], "head": [0.0, 0.0]}
    assert came == {"train": {"a": {"w": [1.5, 2.0], "head": None}, "b": whole}, "measure": {"a": whole, "b": whole}}
    assert seen["names", "a", "train"] == ["model.w", "n"]
    assert seen["a", "train"] == {"model.w": [1.5, 2.0]}
    assert seen["names", "a", "measure"] == ["model.head", "model.w", "n"]


@pytest.mark.covers("T8", "T4")
def test_arrays_in_the_head_of_an_object_are_filtered_like_what_is_streamed(tmp_path: Path) -> None:
    """On all three ways: sent, answered, taken. 8 and 16 become 1 and 2."""
    came: dict[str, Any] = {}
    tree = {"w": torch.full((3,), 8.0), "b": np.full(2, 16.0), "n": np.arange(2)}

    def main(controller: Any) -> None:
        came["payload"] = controller.send("a", "train", tree, timeout_s=30).payload

    sizes = {"workflow.streamed_tasks": ("train",), "workflow.array_part_bytes": 0}
    with serving(tmp_path, main, data_filters=[Halved()], filters=[Halved()], **sizes) as server:
        with atoll.tasks(server.url, "a", filters=[Halved()]) as worker:
            worker.task("train")(lambda payload: payload)
            worker.run()
    assert plain(came["payload"]) == {"w": [1.0] * 3, "b": [2.0] * 2, "n": [0, 1]}
    assert isinstance(came["payload"]["b"], np.ndarray)
