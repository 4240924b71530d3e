"""A user's own store of models: where a run begins, and what it is handed as the run goes on."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import Mock

import pytest
import torch
from harness.processes import wait_until
from kit.folders import open_paths
from kit.models import TiedHead
from kit.sites import federated
from kit.world import World
from torch import Tensor, nn

import atoll
from atoll.errors import ConfigError, DiskFull, SchemaMismatch
from atoll.testing.run import failpoints

pytestmark = pytest.mark.covers("D14")

START = {"w": torch.arange(3.0), "bn.running_mean": torch.ones(1)}


class Shelf:
    """A persistor of a test; `Shelf.handed` is what it was given."""

    handed: ClassVar[list[tuple[dict[str, Tensor], dict[str, Any]]]] = []
    initial: Any = None
    loads = 0

    def load(self) -> Any:
        Shelf.loads += 1
        if isinstance(Shelf.initial, BaseException):
            raise Shelf.initial
        return Shelf.initial

    def save(self, state: dict[str, Tensor], info: dict[str, Any]) -> None:
        Shelf.handed.append((state, info))


@pytest.fixture(autouse=True)
def _empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Shelf, "handed", [])
    monkeypatch.setattr(Shelf, "initial", START)
    monkeypatch.setattr(Shelf, "loads", 0)
    monkeypatch.setattr(Slow, "handed", [])
    Slow.go.clear()


def shelved(folder: Path, model: Any = None, **options: Any) -> World:
    """A run of two rounds of one site with the persistor `Shelf`."""
    settings = {"rounds": 2, "disk.export_every": 1, "model.persistor.path": f"{__name__}:Shelf"}
    return World(folder, model, "a", **settings | options)


def two_rounds(world: World) -> None:
    """In each, every element grows by the number of the round."""
    with world:
        world.rounds(
            lambda _, number, state: {name: value + number for name, value in state.items()},
            1,
            2,
            metrics={"loss": 0.5},
        )
        world.finish()
        world.server.run()


def measure(world: World, first: int, *accuracies: float) -> None:
    """A round for each accuracy; every element grows by 1."""
    for number, accuracy in enumerate(accuracies, first):
        world.rounds(1, number, metrics={"accuracy": accuracy})


@pytest.mark.covers("D11")
def test_a_persistor_gets_every_version(tmp_path: Path) -> None:
    """A persistor gives the run's initial model, and gets every version as tensors with its round, its metrics, and
    whether it is final.
    """
    two_rounds(shelved(tmp_path))
    assert Shelf.loads == 1
    told = [(info["version"], info["round"], info["final"], info["metrics"]) for _, info in Shelf.handed]
    assert told == [(0, 0, False, {}), (1, 1, False, {"loss": 0.5}), (2, 2, True, {"loss": 0.5})]
    for (state, _), added in zip(Shelf.handed, (0, 1, 3), strict=True):
        assert state.keys() == START.keys()
        for name, tensor in state.items():
            assert isinstance(tensor, Tensor)
            assert torch.equal(tensor, START[name] + added)


def test_a_persistor_gets_tied_tensors_under_both_names(tmp_path: Path) -> None:
    """If two names share a tensor, the state that a persistor gets has both names. It has no controls of SCAFFOLD."""
    model = nn.ModuleDict({"one": nn.Linear(2, 2, bias=False), "two": nn.Linear(2, 2, bias=False)})
    model["two"].weight = model["one"].weight
    with shelved(tmp_path, model, algorithm="scaffold") as world:
        assert world.status.version == 0
        wait_until(lambda: Shelf.handed, "version 0")
    state, _ = Shelf.handed[-1]
    assert state.keys() == {"one.weight", "two.weight"}
    assert state["one.weight"] is state["two.weight"]
    assert Shelf.loads == 0  # the program gave a model


def as_a_file_has_it(model: nn.Module) -> dict[str, Tensor]:
    """In the alphabet's order, a tensor for each name."""
    return {name: tensor.clone() for name, tensor in sorted(model.state_dict().items())}


@pytest.mark.parametrize("left_out", ["", "head.weight", "table.weight"])
def test_a_named_model_keeps_loaded_tensors_tied(tmp_path: Path, left_out: str) -> None:
    """If `model.source` names a model with tied tensors, the tensors that the persistor loads are tied again, whichever
    name they are under.
    """
    # Guards against two tensors where the model has one, for which workers and a second start were refused.
    mine = TiedHead()
    Shelf.initial = as_a_file_has_it(mine)
    Shelf.initial.pop(left_out, None)
    named = {"model": "kit.models:TiedHead", "rounds": 1}
    with failpoints("slot.create=enospc"), pytest.raises(DiskFull):
        shelved(tmp_path, **named).start()
    with shelved(tmp_path, **named) as world:
        model = federated(world.server, tmp_path, lambda model: None, TiedHead)
        assert torch.equal(model.head.weight, mine.head.weight)
        assert model.head.weight is model.table.weight
        assert world.server.wait(30)
    with world:
        assert world.server.wait(30)
    assert Shelf.loads == 2  # again where the first start ended before its first version; the third found the run


def test_refuses_different_values_for_tied_tensors(tmp_path: Path) -> None:
    """If the persistor loads different values for two names of a tied tensor, the start is refused and writes no
    file.
    """
    Shelf.initial = as_a_file_has_it(TiedHead()) | {"table.weight": torch.zeros(5, 2)}
    with pytest.raises(ConfigError, match=r"different values for 'head\.weight' and 'table\.weight', which are tied"):
        shelved(tmp_path, model="kit.models:TiedHead").start()
    assert list(tmp_path.glob("state/slots/*")) == []


@pytest.mark.covers("F30")
def test_a_worker_reports_missing_ties(tmp_path: Path) -> None:
    """If the persistor loads two separate tensors that the worker's module ties, the worker ends with an error about
    the ties.
    """
    # No model is named.
    Shelf.initial = as_a_file_has_it(TiedHead())
    with shelved(tmp_path) as world, atoll.join(world.url, site="a", folder=world.workers) as worker:
        with pytest.raises(SchemaMismatch, match=r"a ties head\.weight to table\.weight, but the run has two"):
            next(iter(worker)).load_into(TiedHead())


@pytest.mark.parametrize(
    ("error", "told"),
    [(OSError("the shelf is full"), "OSError: the shelf is full"), (SystemExit(3), "SystemExit: 3")],
    ids=["raises", "exits"],
)
def test_a_failing_persistor_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, told: str
) -> None:
    """If the persistor's `save` raises or exits, only that call fails: the log says so and the run continues to its
    end.
    """
    save = Mock(side_effect=error)
    monkeypatch.setattr(Shelf, "save", save)
    two_rounds(world := shelved(tmp_path))
    assert save.call_count == 3
    assert "save() of the persistor" in world.text
    assert f"failed at version 2: {told}. The run continues." in world.text


@pytest.mark.parametrize(
    ("initial", "options", "words"),
    [
        (ValueError("no shelf"), {}, "load.. of the persistor .*Shelf' failed: ValueError: no shelf"),
        (SystemExit(4), {}, "Shelf' failed: SystemExit: 4"),
        ([1, 2], {}, "must return a dict of tensors, but returned an object of type list"),
        ({"w": 1}, {}, "must return a dict of tensors, but returned an object of type dict"),
        (None, {}, "The run has no initial model"),
        (START, {"model.persistor.shelves": 3}, "Write its keyword arguments next to the path in model.persistor"),
        (START, {"model.persistor.path": "json:loads"}, "is of type function with none of load, save and save_best"),
    ],
)
def test_refuses_an_unusable_persistor(tmp_path: Path, initial: Any, options: dict[str, Any], words: str) -> None:
    """The server refuses to start with a persistor that fails to load, loads no dict of tensors, or has the wrong
    arguments or methods.
    """
    Shelf.initial = initial
    with pytest.raises(ConfigError, match=words):
        shelved(tmp_path, **options).start()


def test_a_persistor_may_only_save(tmp_path: Path) -> None:
    """A persistor may have only a `save` method. The settings then name the initial model."""
    file = tmp_path / "only_saves.py"
    file.write_text("class Store:\n    def save(self, state, info): ...\n")
    with World(tmp_path, START, **{"model.persistor.path": f"{file}:Store"}) as world:
        assert torch.equal(world.model["w"], START["w"])


class Slow:
    """Its first `save_best` lasts until the test lets it go; each test begins anew."""

    begun, go, handed = threading.Event(), threading.Event(), list[tuple[int, list[float], dict[str, Any]]]()
    busy = 0

    def __init__(self) -> None:
        Slow.begun.clear()

    def save_best(self, state: dict[str, Tensor], info: dict[str, Any]) -> None:
        Slow.busy += 1
        assert Slow.busy == 1  # one at a time
        Slow.begun.set()
        assert Slow.go.wait(60)
        Slow.handed.append((info["version"], state["w"].tolist(), info["best"]))
        Slow.busy -= 1


def slow(folder: Path, rounds: int) -> World:
    settings = {"rounds.best_metric": "accuracy", "disk.export_every": 0}
    return shelved(folder, START, rounds=rounds, **settings, **{"model.persistor.path": f"{__name__}:Slow"})


@pytest.mark.covers("X41")
def test_only_the_runs_end_waits_for_save_best(tmp_path: Path) -> None:
    """A slow `save_best` of the persistor delays only the end of the run, not its rounds."""
    # Versions 0, 1 and 2 are each the best so far. While 0 is being saved, version 2 overtakes version 1, which is
    # skipped. Version 2 is saved when the run is at version 5 and keeps only two versions.
    with slow(tmp_path, rounds=5) as world:
        measure(world, 1, 0.5)
        assert Slow.begun.wait(30)
        measure(world, 2, 0.7, 0.9, 0.1, 0.1)
        site = world.sites.pop("a")
        assert site.next_round() is None
        site.close()
        assert not world.server.finished
        assert Slow.handed == []
        Slow.go.set()
        assert world.server.wait(30)
        world.server.run()
    assert Slow.handed == [(0, [0.0, 1.0, 2.0], {"accuracy": 0.5}), (2, [2.0, 3.0, 4.0], {"accuracy": 0.9})]
    assert [link for link in open_paths() if "best.safetensors" in link] == []  # nor that of the one passed over


@pytest.mark.covers("X41")
def test_a_restart_saves_a_pending_best_version(tmp_path: Path) -> None:
    """If the server stops before the persistor got the best version, the next start gives this version to `save_best`.

    By then, the run keeps version 1 only in `best.safetensors`.
    """
    world = slow(tmp_path, rounds=9).start()
    measure(world, 1, 0.5)
    assert Slow.begun.wait(30)
    measure(world, 2, 0.9, 0.1, 0.1, 0.1)
    stopping = threading.Thread(target=world.close)
    stopping.start()
    persistor = world.server._require_served().background.persistor
    wait_until(lambda: persistor._thread._shutdown, "that the server ends the persistor")
    Slow.go.set()
    stopping.join()
    assert [version for version, _, _ in Slow.handed] == [0]
    with world:
        assert Slow.begun.wait(30)
    assert Slow.handed[1:] == [(1, [1.0, 2.0, 3.0], {"accuracy": 0.9})]
