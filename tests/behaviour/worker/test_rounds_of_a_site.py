"""Rounds of `atoll.join`: what a site may submit, arrays among it; what is refused by name; rounds that it missed."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness.processes import wait_until
from kit import build_model, tensors_digest, train_
from kit.manual_site import ManualSite
from kit.world import World
from torch import nn

import atoll
from atoll.errors import SchemaMismatch, UsageError


class Mixed(nn.Module):
    """A weight and its tied twin, a bf16 weight, and an integer buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        self.twin = self.wide
        self.small = nn.Parameter(torch.tensor([1.0, 1.0078125, -2.5], dtype=torch.bfloat16))
        self.register_buffer("count", torch.tensor(7))


@pytest.fixture
def client(tmp_path: Path) -> Iterator[ManualSite]:
    """A site in the first of two rounds of `Mixed`."""
    with World(tmp_path, Mixed(), "a", rounds=2) as world:
        world.ask()
        yield world.sites["a"]


@pytest.fixture
def round_of(client: ManualSite) -> Any:
    """The round of that site."""
    return client.round


# -- arrays of numpy and others against a torch model: what comes back is, bit for bit, what was given out


class Foreign:
    """An array of another library, as far as it can be seen: either protocol alone."""

    def __init__(self, array: Any) -> None:
        self.array = np.asarray(array)


class ByArray(Foreign):
    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray[Any, Any]:
        return self.array


class ByDLPack(Foreign):
    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


@pytest.mark.covers("P16")
@pytest.mark.parametrize("wrap", [np.asarray, ByArray, ByDLPack], ids=["numpy", "__array__", "dlpack"])
@pytest.mark.parametrize("tied", [("wide", "twin"), ("wide",)], ids=["both", "one"])
def test_a_worker_receives_and_submits_arrays(client: ManualSite, wrap: Any, tied: tuple[str, ...]) -> None:
    """A site can receive the model as NumPy arrays and submit arrays, also as objects with `__array__` or DLPack."""
    # The site adds 1 to `wide` and `count` and doubles `small`. The results are exact in each dtype, so the next
    # version has exactly these values.
    arrays, tensors = client.pull(framework="numpy"), client.pull()
    for name, array in arrays.items():
        assert torch.equal(torch.from_numpy(array).to(tensors[name].dtype), tensors[name])
    # numpy has no bf16; fp32 holds each of its values
    kinds = {"wide": "float32", "twin": "float32", "small": "float32", "count": "int64"}
    assert {name: str(array.dtype) for name, array in arrays.items()} == kinds
    assert arrays["small"].tolist() == [1.0, 1.0078125, -2.5]
    wide = wrap(arrays["wide"] + np.float32(1.0))
    client.submit(dict.fromkeys(tied, wide) | {"small": wrap(arrays["small"] * 2), "count": wrap(arrays["count"] + 1)})
    client.next_round()
    model = client.round.load_into(Mixed())
    assert model.wide.tolist() == model.twin.tolist() == [[2.0, 3.0], [4.0, 5.0]]
    assert model.small.dtype == torch.bfloat16
    assert model.small.tolist() == [2.0, 2.015625, -5.0]
    assert model.count.item() == 8


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.float32)[::-1],
        np.arange(6, dtype=">f4"),
        np.arange(6, dtype=np.float32).reshape(2, 3).T,
        np.broadcast_to(np.float32(2.0), (3,)),
        np.float32(5.0),
    ],
    ids=["reversed", "big-endian", "transposed", "read-only", "scalar"],
)
def test_arrays_of_any_layout_keep_their_values(tmp_path: Path, array: Any, recwarn: pytest.WarningsRecorder) -> None:
    """Reversed, big-endian, transposed, read-only and scalar arrays arrive with their values and cause no warning."""
    with World(tmp_path, {"x": torch.zeros(array.shape)}, "a", rounds=1) as world:
        world.rounds(lambda *_: {"x": array}, 1)
        assert world.sites["a"].next_round() is None
        loaded = world.sites["a"].worker.load_into({"x": torch.zeros(array.shape)})
        assert loaded["x"].tolist() == array.tolist()
    # sockets and files of an earlier test may be collected now
    assert [str(each.message) for each in recwarn if not issubclass(each.category, ResourceWarning)] == []


@pytest.mark.covers("P16")
@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("text", "'small' is of type str: not a tensor, nor an object with __dlpack__ or __array__"),
        ([1.0, 2.0, 3.0], "'small' is of type list: not a tensor"),
        (np.array(["a", "b", "c"]), "'small' is an array of <U1, which Atoll cannot send"),
        (np.array([{}, {}, {}]), "'small' is an array of object, which Atoll cannot send"),
        (np.ma.masked_array([1.0, 2.0, 3.0], [True, False, False]), "'small' is a masked array"),
    ],
    ids=["str", "list", "texts", "objects", "masked"],
)
def test_submitted_values_must_be_plain_number_arrays(round_of: Any, entry: Any, words: str) -> None:
    """If a submitted value is not a plain array of numbers, the error names the entry and its type. The round can still
    be submitted.
    """
    state = round_of.state_dict("numpy")
    with pytest.raises(UsageError, match=words):
        round_of.submit({**state, "small": entry})
    round_of.submit(state)


@pytest.mark.covers("P16")
def test_a_wrong_dtype_or_shape_is_refused(round_of: Any) -> None:
    """If a submitted array has a wrong dtype or shape, the error names the tensor."""
    # An unknown framework is refused by its name. The round can still be submitted.
    state = round_of.state_dict("numpy")
    for spoilt in (state["wide"].astype(np.float64), state["wide"][:1]):
        with pytest.raises(SchemaMismatch, match="wide"):
            round_of.submit({**state, "wide": spoilt, "twin": spoilt})
    with pytest.raises(UsageError, match="'jax'"):
        round_of.state_dict(framework="jax")
    round_of.submit(state)


# -- numbers beside an update, and what is no model


@pytest.mark.covers("L15", "X3")
@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"steps": -1}, "steps is -1"),
        ({"steps": 1.5}, "steps is 1.5"),
        ({"steps": 2**62}, "steps is 4611686018427387904"),
        ({"weight": 10**400}, "The weight is 10{78}…\\. Give"),
        ({"steps": 2.0}, "steps is 2.0"),
        ({"metrics": 0}, "The metrics are of type int, not a dict"),
        ({"groups": 5}, "groups is 5. Give a dict"),
        ({"weight": "3"}, "The weight is '3'. Give a positive, finite number"),
        *(({"weight": weight}, "The weight is") for weight in (-1.0, -1e-300, math.inf, -math.inf, math.nan)),
        *(({"weight": weight}, "The weight is") for weight in (True, np.bool_(True), torch.tensor(True), "inf")),
        ({"steps": True}, "steps is True"),
        *(({"metrics": {"loss": text}}, "The metric 'loss' is") for text in ("0.5", b"1", True, torch.tensor(False))),
        ({"metrics": [0.5]}, "The metrics are of type list, not a dict"),
        ({"metrics": {"loss": "low"}}, "The metric 'loss' is 'low'"),
        ({"metrics": {1: 0.5}}, "'1' cannot be the name of a metric"),
        ({"metrics": {"\ud800": 0.5}}, r"'\\ud800' cannot be the name of a metric"),
        ({"metrics": {129 * "m": 0.5}}, "'m+' cannot be the name of a metric"),
        (
            {"metrics": {str(number): 0.5 for number in range(257)}},
            "There are 257 metrics; an update may have at most 256",
        ),
    ],
    ids=str,
)
def test_impossible_weights_steps_and_metrics_are_refused(tmp_path: Path, told: dict[str, Any], words: str) -> None:
    """`submit` refuses an impossible weight, number of steps or metric before it forms the update. The round can still
    be submitted with valid numbers.
    """
    with World(tmp_path, nn.Linear(2, 1), "a", rounds=1) as world:
        world.pull()
        with pytest.raises(UsageError, match=words):
            world.submit("a", 0.0, **told)
        assert not list(tmp_path.rglob("outbox.json")), "refused before anything is formed"
        most = {64 * "m": 10**400} | {str(number): 0.5 for number in range(63)}
        world.submit("a", 0.0, steps=2**62 - 1, metrics=most)
        world.finish()
        assert len(world.status.history[0].metrics) == 63


@pytest.mark.covers("X3")
def test_an_object_that_is_no_model_is_refused(tmp_path: Path, round_of: Any) -> None:
    """If a function gets an object that is no model, such as a class, an optimizer or a list, the error names its type.
    The round can still be submitted.
    """
    for builds, said in ((nn.Linear, "the class Linear"), (lambda: nn.Linear(2, 2), "of type function")):
        with pytest.raises(UsageError, match=f"The model is {said}.*Call a function that builds it: build"):
            World(tmp_path / "other", builds).start()
    model = round_of.load_into(Mixed())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UsageError, match="The model is of type SGD"):
        round_of.load_into(optimizer)
    with pytest.raises(UsageError, match="The model is of type SGD"):
        round_of.correct(optimizer, model)
    for other in ([torch.ones(2)], None):
        with pytest.raises(UsageError, match=f"The model is of type {type(other).__name__}"):
            round_of.submit(other)
    round_of.submit(model)
    with pytest.raises(UsageError, match="The model is of type OrderedDict"):
        atoll.DiLoCo(model.state_dict(), optimizer)


# -- a worker that has left its run: every call says so at once, and a new worker can join

LATER: dict[str, Callable[[Any], object]] = {
    "enter": lambda worker: worker.__enter__(),
    "iterate": lambda worker: next(iter(worker)),
    "load_into": lambda worker: worker.load_into(build_model()),
    "run": lambda worker: (worker.task("any")(print), worker.run()),
    "tasks": lambda worker: next(worker.tasks()),
}


@pytest.mark.parametrize(
    ("join", "call"), [*(("join", call) for call in LATER), *(("tasks", call) for call in ("enter", "run", "tasks"))]
)
def test_a_worker_that_left_refuses_calls(tmp_path: Path, join: str, call: str) -> None:
    """After a worker has left, its calls raise a usage error. A new worker of the same site can join."""
    how = {"folder": tmp_path / "workers"} if join == "join" else {}
    with World(tmp_path, build_model(), "a") as world:
        with getattr(atoll, join)(world.url, site="a", **how) as worker:
            pass
        with pytest.raises(UsageError):
            LATER[call](worker)
        with world.worker() as again:
            again.load_into(build_model())


@pytest.mark.parametrize("call", ["load_into", "submit", "state_dict"])
def test_a_round_refuses_calls_after_leaving(client: ManualSite, round_of: Any, call: str) -> None:
    """After a worker has left, calls of its round raise a usage error."""
    model = round_of.load_into(Mixed())
    client.close()
    with pytest.raises(UsageError):
        getattr(round_of, call)(*([] if call == "state_dict" else [model]))


# -- missed rounds


def test_a_late_site_may_continue(tmp_path: Path) -> None:
    """A site that is still training when its round closes may load the newest model, submit its update, and go on in a
    later round.
    """
    # Site `b` trains in round 1 while two rounds close without it. Loading the newest model does not change the model
    # that `b` trains.
    settings = {"rounds.min_sites": 1, "rounds.quorum": 1, "rounds.deadline_s": 0.2, "rounds.total": 4}
    model, seen = build_model(), build_model()
    with World(tmp_path, build_model(), **settings) as world:
        world.ask(number=1)
        b = world.sites["b"]
        b.pull(into=model)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        for number in (1, 2):
            world.move("a", number, 1)
        world.ask("a", number=3)
        b.worker.load_into(seen)
        assert not torch.equal(seen.state_dict()["0.weight"], before["0.weight"])
        assert tensors_digest(model.state_dict()) == tensors_digest(before)
        train_(model, "b", 1)
        b.submit(model)
        assert (b.next_round() or 0) >= 3


@pytest.mark.covers("X4")
def test_a_restarted_site_knows_its_update(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If a restarted site finds that the server already has its update, the log says that an earlier process sent this
    update.
    """
    caplog.set_level("INFO", "atoll")
    with World(tmp_path, build_model(), "a", rounds=2) as world:
        for number in (1, 2):
            world.move("a", number, 0)
            world.sites.pop("a").close()
    assert "a: the server has the update of round 1 that an earlier process sent" in caplog.messages
    assert "that an earlier process left" not in caplog.text


def test_a_round_can_start_from_the_newest_model(tmp_path: Path) -> None:
    """A site may load the model of its round with `worker.load_into` and submit it after training."""
    model = build_model()
    with World(tmp_path, build_model(), "a", rounds=2) as world:
        with world.worker() as worker:
            for fl_round in worker:
                worker.load_into(model)
                train_(model, "a", fl_round.number)
                fl_round.submit(model)
        world.server.run()


def test_a_round_left_without_update_causes_no_warning(tmp_path: Path, warned: Callable[[], list[str]]) -> None:
    """If a site leaves a round before it forms an update, it does not warn of a lost update when it joins again."""
    with World(tmp_path, build_model(), **{"rounds.min_sites": 1}) as world:
        world.ask(number=1)
        world.sites.pop("b").close()  # as a script that breaks off while it trains
        world.move("a", 1, 1)
        world.ask("a", number=2)
        world.join("b")
        world.move("a", 2, 1)
        world.ask("b", number=3)  # it came when round 2 was open already
    assert warned() == []


def test_a_site_draws_no_random_numbers(tmp_path: Path) -> None:
    """A site's calls and heartbeats draw no random numbers from PyTorch, NumPy or Python.

    So a script with fixed seeds gets the same numbers with a server as without one.
    """

    def await_a_heartbeat() -> None:
        for is_silent in (True, False):
            wait_until(lambda expected=is_silent: (world.status.workers[0].last_heartbeat_s > 0.3) == expected, "it")

    with World(tmp_path, build_model(), "a", rounds=1, **{"network.heartbeat_interval_s": 0.5}) as world:
        before = torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()
        world.pull()
        for _ in range(2):
            await_a_heartbeat()
        world.submit("a", 0)
        assert (torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()) == before
