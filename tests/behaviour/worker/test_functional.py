"""The loop over rounds as functions, `atoll.functional`; and scripts without a server, which train by themselves."""

from __future__ import annotations

import gc
import logging
import math
import re
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness.processes import Nursery
from kit import atoll_worker, diloco, take_steps
from kit.manual_site import ManualSite
from kit.processes import command
from kit.servers import plain_server
from kit.sites import logged
from safetensors.torch import load_file
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import atoll
from atoll.errors import AtollError, ConfigError, SchemaMismatch, UpdateRefused, UsageError
from atoll.filters import Drop

ROUNDS = 2


@pytest.fixture
def server(tmp_path: Path) -> Iterator[atoll.Server]:
    with plain_server(tmp_path, ones(), rounds=ROUNDS) as server:
        yield server


@pytest.fixture
def to_the_end(server: atoll.Server) -> Iterator[None]:
    """After a test its run goes to the end: this process takes part in one run at a time."""
    yield
    while atoll.functional.receive(into=(model := ones())) is not None:
        atoll.functional.send(model)


@pytest.fixture
def take_part(server: atoll.Server, to_the_end: None, tmp_path: Path) -> Callable[..., None]:
    """Takes part as site a."""
    return lambda **options: atoll.functional.init(server.url, "a", folder=tmp_path / "a", **options)


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What goes, goes with its last user: no cycle is found later on."""
    gc.disable()
    yield
    gc.enable()


def ones() -> nn.Linear:
    model = nn.Linear(3, 2)
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    return model


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.covers("P15")
def test_the_loop_runs_every_round(server: atoll.Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With settings from the environment, a loop of `receive` and `send` runs every round, with its weights and
    metrics.
    """
    # Each round adds 1 to what was received: the values are 1, then 2, and 3 at the end.
    monkeypatch.setenv("ATOLL_SERVER", server.url)
    monkeypatch.setenv("ATOLL_SITE", "clinic-a")
    monkeypatch.setenv("ATOLL_DIR", str(tmp_path / "files"))
    atoll.functional.init()
    seen = []
    while atoll.functional.is_running():
        assert atoll.functional.is_running()  # asking does not take a round
        received = atoll.functional.receive()
        assert atoll.functional.receive() is received
        seen.append((received.number, received.params["weight"][0, 0].item()))
        changed = {name: value + 1 for name, value in received.params.items()}
        atoll.functional.send(changed, weight=3, metrics={"loss": 0.5})
    assert seen == [(1, 1.0), (2, 2.0)]
    assert atoll.functional.receive() is None
    assert server.wait(30)
    status = server.status()
    rows = [(row.workers, [each.weight for each in row.sites], row.metrics) for row in status.history]
    assert rows == [(["clinic-a"], [3.0], {"loss": 0.5})] * ROUNDS
    assert [worker.state for worker in status.workers] == ["left"]  # the loop's end is the run's
    assert (tmp_path / "files" / "clinic-a").is_dir()


@pytest.mark.covers("P15", "P6", "T6")
@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("clear_cache", [True, False])
def test_clear_cache_frees_the_rounds_tensors(take_part: Callable[..., None], clear_cache: bool) -> None:
    """With `clear_cache=True`, `send` frees the sent and the received tensors."""
    # With `clear_cache=False`, it keeps them.
    take_part()
    received = atoll.functional.receive()
    assert received is not None
    model = ones()
    optimizer = sgd(model)
    received.correct(model, optimizer)
    pulled, sent = weakref.ref(received.params["weight"]), weakref.ref(model.weight)
    atoll.functional.send(model, clear_cache=clear_cache)
    del model, optimizer
    assert (pulled() is None) == clear_cache
    assert (sent() is None) == clear_cache
    assert (received.params == {}) == clear_cache


@pytest.mark.covers("T6")
@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("filters", [[], [Drop("bias")]], ids=["plain", "filtered"])
@pytest.mark.parametrize("call", ["send", "submit"])
def test_sent_tensors_are_freed_at_once(
    server: atoll.Server, tmp_path: Path, request: pytest.FixtureRequest, call: str, filters: list[Drop]
) -> None:
    """After `send` or `submit`, Atoll keeps neither the sent tensors nor any view of their memory."""
    tensor, array = torch.full((2, 3), 2.0), np.full(2, 2.0, dtype=np.float32)
    seen = StorageWeakRef(tensor.untyped_storage()), weakref.ref(array)
    sent: dict[str, Any] = {"weight": tensor, "bias": array}
    submit: Callable[..., None]
    if call == "send":
        request.getfixturevalue("take_part")(filters=filters)
        atoll.functional.receive(into=ones())
        submit = atoll.functional.send
    else:
        client = ManualSite(server.url, "a", folder=tmp_path / "a", filters=filters)
        request.addfinalizer(client.close)
        client.next_round()
        client.pull(into=ones())
        submit = client.round.submit
    submit(sent)
    del tensor, array, sent
    assert seen[0].expired()
    assert seen[1]() is None


@pytest.mark.covers("T8")
def test_send_applies_the_sites_filters(take_part: Callable[..., None]) -> None:
    """`send` applies the site's filters: the dropped weights keep their value, and the biases become 6."""
    model = ones()
    take_part(filters=[Drop("weight")])
    atoll.functional.receive(into=model)
    with torch.no_grad():
        model.weight += 5
        model.bias += 5
    atoll.functional.send(model)
    atoll.functional.receive(into=model)
    assert (model.weight.unique().tolist(), model.bias.unique().tolist()) == ([1.0], [6.0])


@pytest.mark.covers("P15")
def test_an_error_keeps_the_round(take_part: Callable[..., None]) -> None:
    """If `send` raises, the round stays open, and the model can be sent again."""
    take_part()
    received = atoll.functional.receive()
    with pytest.raises(UsageError, match="'weight' is of type str"):
        atoll.functional.send({**received.params, "weight": "ones"})
    atoll.functional.send(received.params)
    assert atoll.functional.is_running()
    with pytest.raises(UsageError, match=r"atoll\.functional\.receive\(\) once in each round"):
        atoll.functional.send(ones())


@pytest.mark.covers("P15", "X3")
@pytest.mark.usefixtures("to_the_end")
@pytest.mark.parametrize("alone", [True, False])
def test_a_loop_that_never_sends_is_refused(request: pytest.FixtureRequest, alone: bool) -> None:
    """If a loop receives a round and sends nothing, the next `is_running` raises an error that says so.

    This also holds after several `receive` in the round, and after a `send` that failed.
    """
    atoll.functional.init() if alone else request.getfixturevalue("take_part")()
    told = "Round 1 was received, but nothing was sent. Call atoll.functional.send(model) once in each round."
    for _ in range(2):
        assert atoll.functional.is_running()
        for _ in range(2):
            atoll.functional.receive(into=ones())
        with pytest.raises(UsageError, match=re.escape(told)):
            atoll.functional.is_running()
        with pytest.raises(UsageError, match="'weight' is of type str"):
            atoll.functional.send({"weight": "ones"})


BEFORE_INIT = """
import atoll

for call in (atoll.functional.is_running, atoll.functional.receive, lambda: atoll.functional.send({})):
    try:
        call()
    except atoll.errors.UsageError as error:
        print(error)
"""


def test_functional_calls_before_init_are_refused(nursery: Nursery, tmp_path: Path) -> None:
    """If a script calls a function of `atoll.functional` before `init`, the error says to call `init` first."""
    (tmp_path / "script.py").write_text(BEFORE_INIT)
    ended = command(nursery, tmp_path, program=str(tmp_path / "script.py"))
    assert ended.returncode == 0
    assert ended.stdout.count("atoll.functional.init() first") == 3


def test_wrong_functional_calls_are_refused(take_part: Callable[..., None]) -> None:
    """A second `init` and an unknown framework are refused with an error that says the mistake."""
    take_part()
    with pytest.raises(UsageError, match="twice"):
        take_part()
    with pytest.raises(UsageError, match="'jax'"):
        atoll.functional.receive(framework="jax")


SCRIPT = """
import atoll

atoll.functional.init()
while atoll.functional.is_running():
    received = atoll.functional.receive(framework="numpy")
    print("round", received.number, flush=True)
    atoll.functional.send({name: value + 1 for name, value in received.params.items()})
    LAST
"""


@pytest.mark.slow
@pytest.mark.covers("P6", "P15")
@pytest.mark.parametrize("last", ["", "raise ValueError('no more records')"], ids=["well", "fails"])
def test_a_failing_functional_script_reports_its_error(server: atoll.Server, tmp_path: Path, last: str) -> None:
    """If a script under `atoll worker` fails, the status shows its error. A script that does not fail finishes all
    rounds.
    """
    with atoll_worker(tmp_path, server.url, SCRIPT.replace("LAST", last)) as process:
        out, said = process.communicate(timeout=100)
    assert process.returncode == bool(last), said
    if last:
        assert [worker.error for worker in server.status().workers] == ["ValueError: no more records"]
        return
    assert out.split() == ["round", "1", "round", "2"]
    assert server.wait(30)
    assert load_file(server.exports / "model.safetensors")["weight"].unique().tolist() == [3.0]


# -- alone: one round, or plain steps; at the end the script hears that nothing was sent

BEGIN = "no server is set in ATOLL_SERVER: training alone"
END = "training alone: nothing was sent or saved by Atoll; save the model in the script"


@pytest.mark.usefixtures("to_the_end")
@pytest.mark.covers("P15")
def test_a_functional_script_alone_has_one_round() -> None:
    """Without a server, a functional script trains one round with its own model."""
    # The gradient of a weight is its input, 1.
    atoll.functional.init()
    with pytest.raises(UsageError, match="there is no global model to use"):
        atoll.functional.receive()
    model, rounds = ones(), 0
    while atoll.functional.is_running():
        received = atoll.functional.receive(into=model)
        optimizer = sgd(model)
        with received.correct(model, optimizer):
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
        atoll.functional.send(model, metrics={"loss": 1.0})
        rounds += 1
    assert rounds == 1
    assert model.weight.unique().tolist() == pytest.approx([0.9])


@pytest.mark.covers("P6")
def test_join_without_a_server_gives_one_round(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a server, `join` gives one round. The log says at the end that nothing was sent, and no file is
    written.
    """
    caplog.set_level(logging.INFO, "atoll")
    monkeypatch.chdir(tmp_path)
    model, numbers = ones(), []
    with atoll.join() as worker:
        for fl_round in worker:
            fl_round.load_into(model)
            numbers.append(fl_round.number)
            nn.init.zeros_(model.weight)
            fl_round.submit(model, weight=3, metrics={"loss": 0.5})
        worker.load_into(model)
    assert numbers == [1]
    assert model.weight.unique().tolist() == [0.0]
    assert logged(caplog) == [BEGIN, "alone: trained without a server (loss 0.5)", END]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.covers("P6")
@pytest.mark.parametrize(
    ("given", "variable", "site"),
    [("north", "south", "north"), (None, "south", "south"), (None, None, "alone")],
    ids=["argument", "variable", "neither"],
)
def test_a_script_alone_keeps_its_site_name(
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    given: str | None,
    variable: str | None,
    site: str,
) -> None:
    """Without a server, the site has the name of the argument, else that of `ATOLL_SITE`, else `alone`."""
    caplog.set_level(logging.INFO, "atoll")
    monkeypatch.setenv("ATOLL_SITE", variable or "")
    with atoll.join(site=given) as worker:
        for fl_round in worker:
            model = fl_round.load_into(ones())
            nn.init.zeros_(model.bias)
            fl_round.submit(model)
    assert worker.site == site
    assert logged(caplog) == [BEGIN, f"{site}: trained without a server", END]


@pytest.mark.covers("X3")
@pytest.mark.parametrize("start", [atoll.join, atoll.functional.init, lambda site: diloco("", Path(), site).start()])
def test_training_alone_refuses_invalid_site_names(start: Callable[..., object]) -> None:
    """A script without a server refuses a site name that no server accepts."""
    with pytest.raises(ConfigError, match="'ward 7' is not a site name"):
        start(site="ward 7")


def test_training_alone_refuses_wrong_updates() -> None:
    """A script without a server refuses wrong tensors and rounds without an update, as a run does, and gives tied
    tensors under both names.

    So the script does not fail for the first time in a run.
    """
    model = nn.ModuleList([nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)])
    model[1].weight = model[0].weight
    with atoll.join() as worker:
        loop = iter(worker)
        fl_round = next(loop)
        fl_round.load_into(model)
        held = fl_round.state_dict()
        assert held.keys() == {"0.weight", "1.weight"}
        assert all(torch.equal(value, model[0].weight) for value in held.values())
        with pytest.raises(UsageError, match=r"'0\.weight' is of type str"):
            fl_round.submit({"0.weight": "heavy"})
        with pytest.raises(UsageError, match="Site alone submitted no update in round 1"):
            next(loop)


SPOILT: dict[str, tuple[Callable[[nn.Linear, atoll.Round], object], type[AtollError], str]] = {
    "nan": (
        lambda model, fl_round: fl_round.submit({**model.state_dict(), "bias": torch.full((2,), math.nan)}),
        UpdateRefused,
        r"The update of a was refused: bias contains NaN or Inf\..* [Cc]heck the learning rate, the data and the loss",
    ),
    "missing tensor": (
        lambda model, fl_round: fl_round.submit({"weight": model.weight}),
        SchemaMismatch,
        r"The model of worker a .* is not the model of the run .* the run has bias F32\[2\]",
    ),
    "another model": (lambda _, fl_round: fl_round.submit(nn.Linear(3, 3)), SchemaMismatch, "not the model of the run"),
    "another optimizer": (
        lambda model, fl_round: fl_round.correct(model, sgd(ones())),
        UsageError,
        "The optimizer SGD holds none of the model's parameters",
    ),
}


@pytest.mark.covers("X3")
@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize(("spoil", "kind", "words"), SPOILT.values(), ids=SPOILT)
def test_errors_of_a_run_also_occur_alone(
    tmp_path: Path, spoil: Callable[..., object], kind: type[AtollError], words: str, alone: bool
) -> None:
    """A wrong update raises the same error without a server as with one."""
    # A server refuses an update that is not finite five times before the script ends.

    def train(url: str) -> None:
        with atoll.join(url, "a", folder=tmp_path / "a") as worker:
            for fl_round in worker:
                spoil(fl_round.load_into(ones()), fl_round)

    with plain_server(tmp_path, ones()) as server, pytest.raises(kind, match=words):
        train("" if alone else server.url)


def test_training_alone_requires_a_loaded_model() -> None:
    """A script without a server that submits before it loads the model is refused."""
    with atoll.join() as worker, pytest.raises(UsageError, match="The global model of round 1 was not downloaded"):
        next(iter(worker)).submit(ones())


@pytest.mark.covers("L14")
def test_training_alone_warns_of_an_unchanged_model(caplog: pytest.LogCaptureFixture) -> None:
    """If a script without a server submits the model unchanged, the log warns of a zero pseudo-gradient, as in a
    run.
    """
    with atoll.join() as worker:
        for fl_round in worker:
            fl_round.submit(fl_round.load_into(ones()), steps=3)
    assert "alone: the update is all zero after 3 steps. Check that the optimizer has this" in caplog.text


def test_training_alone_accepts_mappings_and_modules() -> None:
    """A script without a server may load a mapping of tensors and submit a module, or the other way round.

    A mapping does not say that `mask` is a buffer.
    """
    model = ones()
    model.register_buffer("mask", torch.ones(2))
    with atoll.join() as worker:
        for fl_round in worker:
            fl_round.load_into(model.state_dict())
            nn.init.zeros_(model.weight)
            fl_round.submit(model)
    with atoll.join() as worker:
        for fl_round in worker:
            fl_round.submit({name: value + 1 for name, value in fl_round.load_into(model).state_dict().items()})


@pytest.mark.covers("L14", "X3")
def test_diloco_alone_refuses_broken_models(tmp_path: Path) -> None:
    """A DiLoCo loop without a server refuses an optimizer of another model, and a model that becomes NaN."""
    model = ones()
    with pytest.raises(UsageError, match="holds none of the model's parameters"):
        atoll.DiLoCo(model, sgd(ones()), server="").start()
    with pytest.raises(UpdateRefused, match="The update of a was refused: weight contains NaN or Inf"):
        with atoll.DiLoCo(model, sgd(model), server="", site="a"):
            nn.init.constant_(model.weight, math.nan)


@pytest.mark.covers("L14", "X3")
def test_training_alone_refuses_an_initial_nan() -> None:
    """A script without a server refuses an initial model with NaN before it trains. A constant mask with infinities is
    accepted.
    """
    model = ones()
    model.register_buffer("mask", torch.tensor([-math.inf, 0.0]))
    with atoll.join() as worker:  # a constant mask is only copied
        next(iter(worker)).load_into(model)
    model.register_buffer("mean", torch.tensor([math.nan, 0.0]))
    told = "initial model's tensor 'mean' contains NaN or Inf"
    with atoll.join() as worker, pytest.raises(ConfigError, match=told):
        next(iter(worker)).load_into(model)
    with pytest.raises(ConfigError, match=told):
        atoll.DiLoCo(model, sgd(model), server="", site="a").start()


@pytest.mark.covers("L2")
def test_diloco_alone_leaves_the_loop_unchanged(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """A DiLoCo loop without a server changes nothing in the training. The log says so at its start and once at its
    end.
    """
    caplog.set_level(logging.INFO, "atoll")
    with diloco("", tmp_path) as loop:
        take_steps(loop, 1)
    loop.stop()
    assert logged(caplog) == [BEGIN, END]


def test_a_failed_script_alone_logs_no_ending(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """If a script without a server ends with an error, the log does not say that the training has ended."""
    caplog.set_level(logging.INFO, "atoll")
    for place in (atoll.join(), diloco("", tmp_path)):
        with pytest.raises(ZeroDivisionError), place:
            raise ZeroDivisionError
    assert logged(caplog) == [BEGIN, BEGIN]
