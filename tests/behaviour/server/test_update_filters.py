"""Filters of updates at a site and at the server: how they are given, and what is aggregated."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from filter_world import START, Halved, State, become, join, play, serving
from harness.processes import Nursery
from kit.folders import open_paths
from kit.processes import Outcome, command
from kit.servers import new_server, plain_server
from kit.sites import diloco, finish
from safetensors.torch import load_file
from torch import Tensor, nn

import atoll
from atoll import Settings
from atoll.errors import ConfigError, UsageError
from atoll.filters import CHUNK_ELEMENTS, Drop, Filter, NormClip, Outgoing


def zero_linear() -> nn.Linear:
    model = nn.Linear(2, 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return model


@pytest.mark.covers("T8")
def test_diloco_has_filters_too(tmp_path: Path) -> None:
    """The gradient of x·w + b is x = (3, 4) and 1, which is dropped: a step of 1 moves w by −(3, 4), clipped to half.

    The outer step is SGD with a rate of 1.
    """
    model = zero_linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    settings = {
        "algorithm.name": "diloco",
        "diloco.sync_every": 1,
        "algorithm.outer_optimizer.lr": 1.0,
        "algorithm.outer_optimizer.momentum": 0.0,
        "aggregation.upload_codec.name": "none",
    }
    with plain_server(tmp_path, model, rounds=1, **settings) as server:
        with diloco(server, tmp_path, "a", model, optimizer, filters=[Drop("bias"), NormClip(2.5)]):
            model(torch.tensor([[3.0, 4.0]])).sum().backward()
            optimizer.step()
        assert server.wait(60)
        result = load_file(server.exports / "model.safetensors")
    assert (result["weight"].tolist(), result["bias"].tolist()) == ([[-1.5, -2.0]], [0.0])


@pytest.mark.covers("T8", "X3")
def test_scaffolds_control_follows_from_what_the_filters_left(tmp_path: Path) -> None:
    """The gradient at x = (3, 4) is x and 1. A step of η = ½: Δ = (1.5, 2) and ½, which is dropped; the norm 2.5 is
    clipped to 1.25, so Δ̂ = (0.75, 1).

    Δc = Δ̂/η − c = (1.5, 2), where the gradient is (3, 4); nothing of the bias is told. With one site c is c_i.
    """
    filters = [Drop("bias"), NormClip(1.25)]
    with plain_server(tmp_path, zero_linear(), algorithm="scaffold", rounds=2) as server:
        with atoll.join(server.url, "a", folder=tmp_path / "w", filters=filters) as worker:
            rounds = iter(worker)
            fl_round = next(rounds)
            model = fl_round.load_into(zero_linear())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
            with fl_round.correct(model, optimizer):
                model(torch.tensor([[3.0, 4.0]])).sum().backward()
                optimizer.step()
            fl_round.submit(model)
            fl_round = next(rounds)
            model = fl_round.load_into(zero_linear())
            assert model.weight.tolist() == [[-0.75, -1.0]]
            for controls in (fl_round.global_state("control"), fl_round.own_state("control")):
                assert controls["weight"].tolist() == [[1.5, 2.0]]
                assert controls["bias"].tolist() == [0.0]
            with pytest.raises(UsageError, match=r"would bypass this site's filters.*round\.correct"):
                fl_round.submit(model, steps=1, groups={"control": fl_round.own_state("control")})  # measured by hand


RUN_FILE = """
algorithm.name = "fedavg"
workflow.result_filters = [
    {path = "drop", args = ["n"]},
    {path = "drop", args = ["head"], sites = ["a"]},
    {path = "norm_clip", args = {max_norm = 5.0}, sites = ["b"]},
]
"""


@pytest.mark.covers("T8")
@pytest.mark.parametrize("given", ["at the site", "by the program", "in the run file"])
def test_filters_are_for_all_sites_or_for_a_named_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, given: str
) -> None:
    """a's head is dropped; b moved by (6, 8), of norm 10, and is clipped to 5; n stays at both.

    The mean: w = (1 + 3)/2, (1 + 4)/2. Integers are not averaged, so the 9 of b would have won.
    """
    caplog.set_level(logging.INFO, "atoll.server")
    (tmp_path / "run.toml").write_text(RUN_FILE)
    tables = Settings.read(tmp_path / "run.toml", environ={}).workflow.result_filters
    of_sites = {"a": [Drop("n"), Drop("head")], "b": [Drop("n"), NormClip(5.0)]}
    own = of_sites if given == "at the site" else {}
    options = {"by the program": {"filters": of_sites}, "in the run file": {"workflow.result_filters": tables}}
    with serving(tmp_path, **options.get(given, {})) as server:
        found = play(server, tmp_path, {"a": become([1.0, 1.0], 7.0), "b": become([6.0, 8.0], 0.0, n=9)}, own)
    assert (found["w"].tolist(), found["head"].tolist(), found["n"].item()) == ([2.0, 2.5], [0.0], 7)
    told = "Drop('n') of every site, Drop('head') of a, NormClip(5, noise=0) of b"
    assert (told in caplog.text) == (given == "in the run file")


@pytest.mark.covers("T8")
def test_buffers_are_filtered_too(tmp_path: Path) -> None:
    """a's change is (3, 4) and 12 in the buffer, of norm 13: half of it is left. b sends no change of the buffer."""
    filters = {"a": [NormClip(6.5)], "b": [Drop("*.running_mean")]}
    with serving(tmp_path, filters=filters) as server:
        found = play(server, tmp_path, {"a": become([3.0, 4.0], 0.0, 12.0), "b": become([0.0, 0.0], 0.0, 99.0)})
    assert found["w"].tolist() == [0.75, 1.0]  # (1.5 + 0)/2, (2 + 0)/2
    assert found["bn.running_mean"].item() == 3.0  # (6 + 0)/2


MEAN = """
def mean(updates):
    for name in updates[0].tensors:
        yield name, sum(update.tensors[name].float() for update in updates) / len(updates)


class Arriving:
    def __init__(self):
        self.reset()

    def accept(self, update):
        self.updates.append(update)

    def aggregate(self):
        return mean(self.updates)

    def reset(self):
        self.updates = []
"""


@pytest.mark.covers("T8", "D7", "D13")
@pytest.mark.parametrize("how", ["mean", "median", "own", "arriving", "memory"])
def test_reducers_and_aggregators_see_what_the_filters_left(tmp_path: Path, how: str) -> None:
    """Of (2, 4) and (6, 8) half is left: the mean, and the median of two, is (2, 3)."""
    (tmp_path / "mine.py").write_text(MEAN)
    options: dict[str, dict[str, Any]] = {
        "median": {"aggregation.reducer.name": "median"},
        "own": {"aggregation.aggregator.path": f"{tmp_path}/mine.py:mean"},
        "arriving": {"aggregation.aggregator.path": f"{tmp_path}/mine.py:Arriving"},
        "memory": {"disk.in_files": False},
    }
    with serving(tmp_path, filters=[Halved()], **options.get(how, {})) as server:
        found = play(server, tmp_path, {"a": become([2.0, 4.0], 0.0), "b": become([6.0, 8.0], 0.0)})
        assert server._run is not None
        assert server._run.filtering._done == {}  # nothing is left of the round
    assert found["w"].tolist() == [2.0, 3.0]


@pytest.mark.covers("T8", "D13")
@pytest.mark.parametrize("to_disk", [True, False])
def test_what_filters_leave_is_a_file_without_a_name_or_memory(tmp_path: Path, to_disk: bool) -> None:
    """A machine without a disk has nothing of it in the state directory, not even nameless."""
    state, nameless = tmp_path / "state", set[bool]()

    class Looking(Filter):
        def apply(self, name: str, start: int, values: Tensor) -> Tensor:
            nameless.add(any(path.startswith(f"{state}/") and path.endswith("(deleted)") for path in open_paths()))
            return values

    with serving(tmp_path, sites=1, filters=[Looking()], **{"disk.in_files": to_disk}) as server:
        play(server, tmp_path, {"a": become([2.0, 4.0], 0.0)})
    assert nameless == {to_disk}


@pytest.mark.covers("T8")
def test_a_reducer_that_clips_knows_the_norm_behind_the_filters(tmp_path: Path) -> None:
    """Halves of (6, 8) and (0, 4): norms 5 and 2. Clipped to 2.5: (1.5, 2) and (0, 2); the mean is (0.75, 2).

    The norm is that of parameters: a's buffer, which moves by 24, does not count.
    """
    options = {"aggregation.reducer.name": "clipped_mean", "aggregation.reducer.max_norm": 2.5}
    with serving(tmp_path, filters=[Halved()], **options) as server:
        found = play(server, tmp_path, {"a": become([6.0, 8.0], 0.0, 24.0), "b": become([0.0, 4.0], 0.0)})
    assert found["w"].tolist() == [0.75, 2.0]


class Spy(Filter):
    """Changes nothing; its lists are shared with the test."""

    seen: ClassVar[list[tuple[str, int, int]]] = []
    told: ClassVar[list[tuple[Any, ...]]] = []

    def begin(self, update: Outgoing) -> None:
        about = update.about
        whole = update.tensor("scalar").item()
        self.told.append((about.site, about.round, about.version, about.weight, dict(about.metrics), whole))

    def apply(self, name: str, start: int, values: Tensor) -> Tensor:
        self.seen.append((name, start, len(values)))
        return values


@pytest.mark.covers("T8")
@pytest.mark.parametrize("codec", ["none", "bf16"])
def test_a_filter_that_changes_nothing_changes_no_bit(tmp_path: Path, codec: str) -> None:
    """It may look at the lazy whole of the update, and at its metadata."""
    Spy.seen.clear()
    Spy.told.clear()
    generator = torch.Generator().manual_seed(0)
    start: State = {
        "large": torch.randn(CHUNK_ELEMENTS + 5, generator=generator),
        "half": torch.randn(7, generator=generator).half(),
        "double": torch.randn(7, generator=generator).double(),
        "x.running_var": torch.rand(9, generator=generator),
        "x.num_batches_tracked": torch.tensor(3),
        "scalar": torch.tensor(1.5),
    }
    results = []
    for folder, filters in ((tmp_path / "plain", []), (tmp_path / "filtered", [Spy()])):
        with serving(folder, start, codec=codec, filters=filters) as server:
            sites = join(server, folder, "ab")
            for number, client in enumerate(sites.values(), 1):
                moved = {name: (value + number * 0.5).to(value.dtype) for name, value in start.items()}
                client.submit(moved, weight=float(number), metrics={"loss": 0.5})
            results.append(finish(server, sites))
    assert [name for name in start if not torch.equal(results[0][name], results[1][name])] == []
    assert Spy.seen.count(("large", 0, CHUNK_ELEMENTS)) == 2  # once a site, and never more at a time
    assert Spy.seen.count(("large", CHUNK_ELEMENTS, 5)) == 2
    assert sorted(Spy.told) == [("a", 1, 0, 1.0, {"loss": 0.5}, -0.5), ("b", 1, 0, 2.0, {"loss": 0.5}, -1.0)]


@pytest.mark.covers("T8")
def test_scaffolds_controls_pass_as_they_came(tmp_path: Path) -> None:
    """c is the mean of what sites hold as c_i, and a site does not know what the server does to its update."""
    with serving(tmp_path, algorithm="scaffold", sites=1, rounds=2, filters=[Halved()]) as server:
        client = join(server, tmp_path, "a")["a"]
        controls = {"w": torch.tensor([1.0, 2.0]), "head": torch.tensor([3.0])}
        client.submit(become([2.0, 4.0]), steps=1, groups={"control": controls})
        assert client.next_round() == 2
        assert client.pull()["w"].tolist() == [1.0, 2.0]
        assert client.round.global_state("control")["w"].tolist() == [1.0, 2.0]
        assert client.round.own_state("control")["w"].tolist() == [1.0, 2.0]
        client.close()


@pytest.mark.covers("T8")
def test_sites_do_not_share_their_noise(tmp_path: Path) -> None:
    """Without a change only the noise is left; the same noise twice would not become smaller in the mean."""
    moved: list[Tensor] = []

    class Noted(Filter):
        def apply(self, name: str, start: int, values: Tensor) -> Tensor:
            if name == "w":
                moved.append(values.clone())
            return values

    with serving(tmp_path, filters=[NormClip(1.0, noise=1.0), Noted()]) as server:
        play(server, tmp_path, {"a": dict(START), "b": dict(START)})
    assert len(moved) == 2
    assert not torch.equal(*moved)


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        ({"path": "norm_clip", "args": {"norm": 1.0}}, "norm_clip.*with args"),
        ({"path": "nrom_clip"}, "not one of the filters.*Did you mean 'norm_clip'"),
        ({"name": "drop"}, "is not a valid filter table"),
        ({"path": "drop", "args": ["w"], "site": "a"}, "is not a valid filter table"),
        ({"path": "drop", "args": ["w"], "sites": "a"}, "is not a valid filter table"),
        ({"path": "math:sqrt", "args": [4.0]}, "creates a float"),
    ],
)
def test_an_entry_that_is_wrong_is_refused_at_the_start(entry: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        new_server(START, **{"workflow.result_filters": [entry]})


CAST = [{"path": "cast", "args": ["bf16"]}]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"filters": ["drop"]}, "is not a filter"),
        ({"filters": [Halved()], "workflow.result_filters": CAST}, "Use one of them"),
        (
            {"data_filters": [Halved()], "workflow.payload_filters": CAST},
            r"Server got data_filters, but its settings have workflow\.payload_filters",
        ),
    ],
    ids=["no filter", "updates", "payloads"],
)
def test_what_a_program_gives_wrongly_is_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        new_server(START, **options)


@pytest.mark.covers("T8", "X3")
def test_rounds_refuse_filters_that_only_tasks_can_have() -> None:
    for options in ({"data_filters": [Halved()]}, {"workflow.payload_filters": CAST}):
        told = r"workflow.payload_filters is set \(.* of every site\), but the run has rounds.*Leave them out"
        with pytest.raises(ConfigError, match=told):
            new_server(START, **options)  # type: ignore[arg-type]
    with pytest.raises(
        ConfigError, match=r"contains the tasks train, but a run with rounds sends no tasks.*Remove the key tasks"
    ):
        new_server(START, filters={"a": {"train": [Halved()]}})


def test_a_filter_in_a_file_beside_the_run_file_and_in_a_variable(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("from atoll.filters import Filter\nclass Mine(Filter): ...\n")
    (tmp_path / "run.toml").write_text(
        'algorithm.name = "diloco"\nworkflow.result_filters = [{path = "own.py:Mine"}]\n'
    )
    (filter_,) = atoll.Server(START, Settings.read(tmp_path / "run.toml", environ={}))._filters.results.of("a")
    assert repr(filter_) == "Mine()"
    text = '[{path = "cast", args = ["bf16"]}]'
    settings = Settings.read(environ={"ATOLL_WORKFLOW__RESULT_FILTERS": text})
    assert settings.workflow.result_filters == ({"path": "cast", "args": ["bf16"]},)


def test_set_takes_a_list_of_tables(nursery: Nursery, tmp_path: Path) -> None:
    def shown(value: str) -> Outcome:
        chosen = ("--set", "algorithm.name=fedavg", "--set", f"workflow.result_filters={value}")
        return command(nursery, tmp_path, "config", "show", *chosen)

    tables = '[{path = "drop", args = ["w"]}]'
    assert f"result_filters = {tables}  # command line" in shown(tables).stdout
    refused = shown("drop")
    assert refused.returncode == ConfigError.exit_code
    assert "workflow.result_filters" in refused.stderr
