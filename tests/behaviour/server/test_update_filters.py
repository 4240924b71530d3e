"""Filters of updates at a site and at the server: what is aggregated, and what becomes of filters that fail or hang."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import Mock

import pytest
import torch
from harness.processes import Nursery, wait_until
from kit import Threads
from kit.aggregators import MEAN
from kit.filters import Broken, Halved, Hanging, Infinite, Leaving, Shorter, Undecided
from kit.folders import nameless_files
from kit.processes import Outcome, command
from kit.servers import PLAIN_DILOCO, new_server, plain_server
from kit.sites import diloco
from kit.wire import WireSite
from kit.world import World, require_equal
from safetensors.torch import load_file
from torch import Tensor, nn

import atoll
from atoll import Settings
from atoll.errors import ConfigError, RunFailed, UsageError
from atoll.filters import CHUNK_ELEMENTS, Drop, Filter, NormClip, Outgoing
from atoll.server.coordinator.update_filters import HOLDER, Filtering
from atoll.testing.run import failpoints

pytestmark = pytest.mark.covers("T8")

START = {"w": torch.zeros(2), "head": torch.zeros(1), "bn.running_mean": torch.zeros(1), "n": torch.tensor(7)}
State = dict[str, Tensor]


def become(w: list[float], head: float = 0.0, mean: float = 0.0, n: int = 7) -> State:
    return {
        "w": torch.tensor(w),
        "head": torch.tensor([head]),
        "bn.running_mean": torch.tensor([mean]),
        "n": torch.tensor(n),
    }


def filtered(folder: Path, start: State = START, sites: str = "ab", **options: Any) -> World:
    """A run of one round; `filters` among the options are the server's."""
    return World(folder, start, sites, **{"rounds": 1, "run.threads": 1} | options)


def after_one_round(world: World, **updates: State) -> State:
    """The model that these updates of sites lead to."""
    world.pull(number=1)
    for site, state in updates.items():
        world.sites[site].submit(state)
    return world.finish()


def zero_linear() -> nn.Linear:
    model = nn.Linear(2, 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return model


def test_diloco_applies_a_sites_filters(tmp_path: Path) -> None:
    """A DiLoCo loop applies its filters to the update: `Drop` removes the bias, and `NormClip` clips the weight."""
    # The gradient of x·w + b is x = (3, 4) for w and 1 for b. A step of 1 moves w by −(3, 4), which is clipped to half.
    # The outer step is SGD with a rate of 1.
    model = zero_linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with plain_server(tmp_path, model, rounds=1, H=1, **PLAIN_DILOCO) as server:
        with diloco(server, tmp_path, "a", model, optimizer, filters=[Drop("bias"), NormClip(2.5)]):
            model(torch.tensor([[3.0, 4.0]])).sum().backward()
            optimizer.step()
        assert server.wait(60)
        result = load_file(server.exports / "model.safetensors")
    assert (result["weight"].tolist(), result["bias"].tolist()) == ([[-1.5, -2.0]], [0.0])


@pytest.mark.covers("X3")
def test_scaffolds_control_follows_from_the_filtered_update(tmp_path: Path) -> None:
    """SCAFFOLD computes a site's control from the filtered update, so that the control does not bypass the filters."""
    # The gradient at x = (3, 4) is x and 1. A step of η = ½ gives Δ = (1.5, 2) and ½, which is dropped. The norm 2.5 is
    # clipped to 1.25, so Δ̂ = (0.75, 1), and Δc = Δ̂/η − c = (1.5, 2). With one site, c is c_i.
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


@pytest.mark.parametrize("given", ["at the site", "by the program", "in the run file"])
def test_filters_apply_to_all_sites_or_one(tmp_path: Path, caplog: pytest.LogCaptureFixture, given: str) -> None:
    """Filters may apply to all sites or to one, whether the site, the program or the run file gives them."""
    # The head of `a` is dropped. The change (6, 8) of `b` has norm 10 and is clipped to 5. The integer `n` is dropped
    # for both. The mean is w = (1 + 3)/2, (1 + 4)/2. Integers are not averaged, so without the filter, the 9 of `b`
    # would be the result.
    caplog.set_level(logging.INFO, "atoll.server")
    (tmp_path / "run.toml").write_text(RUN_FILE)
    tables = Settings.read(tmp_path / "run.toml", environ={}).workflow.result_filters
    of_sites = {"a": [Drop("n"), Drop("head")], "b": [Drop("n"), NormClip(5.0)]}
    own = of_sites if given == "at the site" else {}
    options = {"by the program": {"filters": of_sites}, "in the run file": {"workflow.result_filters": tables}}
    with filtered(tmp_path, **options.get(given, {})) as world:
        for site in "ab":
            world.join(site, filters=own.get(site, ()))
        found = after_one_round(world, a=become([1.0, 1.0], 7.0), b=become([6.0, 8.0], 0.0, n=9))
    assert (found["w"].tolist(), found["head"].tolist(), found["n"].item()) == ([2.0, 2.5], [0.0], 7)
    told = "Drop('n') of every site, Drop('head') of a, NormClip(5, noise=0) of b"
    assert (told in caplog.text) == (given == "in the run file")


def test_filters_apply_to_buffers(tmp_path: Path) -> None:
    """Filters apply to the changes of buffers and of parameters."""
    # The change of `a` is (3, 4), and 12 in the buffer, of norm 13: half of it is left. Site `b` sends no change of the
    # buffer.
    filters = {"a": [NormClip(6.5)], "b": [Drop("*.running_mean")]}
    with filtered(tmp_path, filters=filters) as world:
        found = after_one_round(world, a=become([3.0, 4.0], 0.0, 12.0), b=become([0.0, 0.0], 0.0, 99.0))
    assert found["w"].tolist() == [0.75, 1.0]  # (1.5 + 0)/2, (2 + 0)/2
    assert found["bn.running_mean"].item() == 3.0  # (6 + 0)/2


ARRIVING = """
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


@pytest.mark.covers("D7", "D13")
@pytest.mark.parametrize("how", ["mean", "median", "own", "arriving", "memory"])
def test_reducers_and_aggregators_see_filtered_updates(tmp_path: Path, how: str) -> None:
    """Reducers and aggregators get the filtered updates."""
    # The filter halves (2, 4) and (6, 8), so that mean and median are (2, 3).
    (tmp_path / "mine.py").write_text(MEAN + ARRIVING)
    options: dict[str, dict[str, Any]] = {
        "median": {"aggregation.reducer.name": "median"},
        "own": {"aggregation.aggregator.path": f"{tmp_path}/mine.py:mean"},
        "arriving": {"aggregation.aggregator.path": f"{tmp_path}/mine.py:Arriving"},
        "memory": {"disk.in_files": False},
    }
    with filtered(tmp_path, filters=[Halved()], **options.get(how, {})) as world:
        found = after_one_round(world, a=become([2.0, 4.0], 0.0), b=become([6.0, 8.0], 0.0))
        assert world.server._require_served().updates._filtering._done == {}  # nothing is left of the round
    assert found["w"].tolist() == [2.0, 3.0]


@pytest.mark.covers("D13")
@pytest.mark.parametrize("to_disk", [True, False])
def test_filtered_updates_are_nameless_files_or_memory(tmp_path: Path, to_disk: bool) -> None:
    """The server writes filtered updates to files without a name, or keeps them in memory if `disk.in_files` is
    false.
    """
    nameless = set[bool]()

    class Looking(Filter):
        def apply(self, name: str, start: int, values: Tensor) -> Tensor:
            nameless.add(bool(nameless_files(tmp_path / "state")))
            return values

    with filtered(tmp_path, sites="a", filters=[Looking()], **{"disk.in_files": to_disk}) as world:
        after_one_round(world, a=become([2.0, 4.0], 0.0))
    assert nameless == {to_disk}


def test_a_clipping_reducer_uses_the_filtered_norm(tmp_path: Path) -> None:
    """A clipping reducer clips by the norm of the filtered update, counting only parameters, not the buffer of `a` that
    moves by 24.
    """
    # Halves of (6, 8) and (0, 4) have norms 5 and 2. Clipped to 2.5, they are (1.5, 2) and (0, 2). The mean is (0.75,
    # 2).
    options = {"aggregation.reducer.name": "clipped_mean", "aggregation.reducer.max_norm": 2.5}
    with filtered(tmp_path, filters=[Halved()], **options) as world:
        found = after_one_round(world, a=become([6.0, 8.0], 0.0, 24.0), b=become([0.0, 4.0], 0.0))
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


@pytest.mark.parametrize("codec", ["none", "bf16"])
def test_a_filter_that_changes_nothing_changes_no_bit(tmp_path: Path, codec: str) -> None:
    """A filter that only reads the update and its metadata does not change a bit of the result."""
    # The filter reads each tensor in chunks, once for each site.
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
        with filtered(folder, start, codec=codec, filters=filters) as world:
            world.pull(number=1)
            for number, site in enumerate("ab", 1):
                moved = {name: (value + number * 0.5).to(value.dtype) for name, value in start.items()}
                world.sites[site].submit(moved, weight=float(number), metrics={"loss": 0.5})
            results.append(world.finish())
    require_equal(*results)
    assert Spy.seen.count(("large", 0, CHUNK_ELEMENTS)) == 2  # once a site, and never more at a time
    assert Spy.seen.count(("large", CHUNK_ELEMENTS, 5)) == 2
    assert sorted(Spy.told) == [("a", 1, 0, 1.0, {"loss": 0.5}, -0.5), ("b", 1, 0, 2.0, {"loss": 0.5}, -1.0)]


def test_server_filters_do_not_change_scaffold_controls(tmp_path: Path) -> None:
    """A filter of the server that halves the parameters leaves the controls of SCAFFOLD as the site sent them.

    The control c is the mean of the sites' c_i, and a site does not know of the server's filter.
    """
    with filtered(tmp_path, sites="a", algorithm="scaffold", rounds=2, filters=[Halved()]) as world:
        world.pull(number=1)
        client = world.sites["a"]
        controls = {"w": torch.tensor([1.0, 2.0]), "head": torch.tensor([3.0])}
        client.submit(become([2.0, 4.0]), steps=1, groups={"control": controls})
        assert client.next_round() == 2
        assert client.pull()["w"].tolist() == [1.0, 2.0]
        assert client.round.global_state("control")["w"].tolist() == [1.0, 2.0]
        assert client.round.own_state("control")["w"].tolist() == [1.0, 2.0]


def test_each_site_gets_its_own_noise(tmp_path: Path) -> None:
    """A filter with noise gives each site different noise. Equal noise would not get smaller in the mean."""
    moved: list[Tensor] = []

    class Noted(Filter):
        def apply(self, name: str, start: int, values: Tensor) -> Tensor:
            if name == "w":
                moved.append(values.clone())
            return values

    with filtered(tmp_path, filters=[NormClip(1.0, noise=1.0), Noted()]) as world:
        after_one_round(world, a=dict(START), b=dict(START))
    assert len(moved) == 2
    assert not torch.equal(*moved)


CAST = [{"path": "cast", "args": ["bf16"]}]
OF_TASKS = r"workflow.payload_filters is set \(.* of every site\), but the run has only rounds.*Remove the filters"
REFUSED: list[tuple[type[atoll.AtollError], dict[str, Any], str]] = [
    (ConfigError, {"entry": {"path": "norm_clip", "args": {"norm": 1.0}}}, "norm_clip.*with args"),
    (ConfigError, {"entry": {"path": "nrom_clip"}}, "not one of the filters.*Did you mean 'norm_clip'"),
    (ConfigError, {"entry": {"name": "drop"}}, "is not a valid filter table"),
    (ConfigError, {"entry": {"path": "drop", "args": ["w"], "site": "a"}}, "is not a valid filter table"),
    (ConfigError, {"entry": {"path": "drop", "args": ["w"], "sites": "a"}}, "is not a valid filter table"),
    (ConfigError, {"entry": {"path": "math:sqrt", "args": [4.0]}}, "creates an object of type float"),
    (UsageError, {"filters": ["drop"]}, "is not a filter"),
    (UsageError, {"filters": [Halved()], "workflow.result_filters": CAST}, "Use one of them"),
    (
        UsageError,
        {"data_filters": [Halved()], "workflow.payload_filters": CAST},
        r"Server got data_filters, but its settings have workflow\.payload_filters",
    ),
    # only tasks have filters of payloads, and names
    (ConfigError, {"data_filters": [Halved()]}, OF_TASKS),
    (ConfigError, {"workflow.payload_filters": CAST}, OF_TASKS),
    (
        ConfigError,
        {"filters": {"a": {"train": [Halved()]}}},
        r"has filters for the tasks train, but this run has only rounds, .*Remove the key 'tasks'",
    ),
]
"""Arguments of a server; `entry` is one of its `workflow.result_filters`."""


@pytest.mark.covers("X3")
@pytest.mark.parametrize(("error", "options", "told"), REFUSED, ids=str)
def test_refuses_wrong_filters(error: type[atoll.AtollError], options: dict[str, Any], told: str) -> None:
    """The server refuses filters that are wrong in the settings or in the program's arguments, with a message that says
    the mistake.
    """
    if "entry" in options:
        options = {"workflow.result_filters": [options["entry"]]}
    with pytest.raises(error, match=told):
        new_server(START, **options)


def test_filters_come_from_files_and_variables(tmp_path: Path) -> None:
    """A run file can name a filter in a file beside it. An environment variable can give a list of filters."""
    (tmp_path / "own.py").write_text("from atoll.filters import Filter\nclass Mine(Filter): ...\n")
    (tmp_path / "run.toml").write_text(
        'algorithm.name = "diloco"\nworkflow.result_filters = [{path = "own.py:Mine"}]\n'
    )
    (filter_,) = atoll.Server(START, Settings.read(tmp_path / "run.toml", environ={}))._filters.results.of("a")
    assert repr(filter_) == "Mine()"
    text = '[{path = "cast", args = ["bf16"]}]'
    settings = Settings.read(environ={"ATOLL_WORKFLOW__RESULT_FILTERS": text})
    assert settings.workflow.result_filters == ({"path": "cast", "args": ["bf16"]},)


def test_set_accepts_a_list_of_filters(nursery: Nursery, tmp_path: Path) -> None:
    """`--set` accepts a list of filters with their arguments. A value that is no list is refused."""

    def shown(value: str) -> Outcome:
        chosen = ("--set", "algorithm.name=fedavg", "--set", f"workflow.result_filters={value}")
        return command(nursery, tmp_path, "config", "show", *chosen)

    tables = '[{path = "drop", args = ["w"]}]'
    assert f"result_filters = {tables}  # command line" in shown(tables).stdout
    refused = shown("drop")
    assert refused.returncode == ConfigError.exit_code
    assert "workflow.result_filters" in refused.stderr


@pytest.mark.covers("F14")
def test_the_server_asks_again_for_an_unfinished_part(tmp_path: Path) -> None:
    """If a late request restarts part 0 while the filter works, the server answers that the update lacks this part."""

    class Undone(Filter):
        def begin(self, update: Outgoing) -> None:
            world.server._require_served().run.store.tickets.spool(1).begin_part(0)

    with filtered(tmp_path, sites="a", filters=[Undone()]) as world:
        status, reply = WireSite(world.url).train(1.0).push().complete()
    assert (status, reply["message"]) == (409, "The update for ticket 1 lacks 1 of 1 part (first: part 0).")


@pytest.mark.covers("F25")
def test_filters_are_retried_after_a_full_disk(tmp_path: Path) -> None:
    """If the disk is full while the filter writes, the server answers `disk_full`. The site completes the update again
    and is accepted.
    """
    with filtered(tmp_path, sites="a", filters=[Halved()]) as world:
        update = WireSite(world.url).train(lambda tensors: tensors["w"].copy_(torch.tensor([2.0, 4.0]))).push()
        with failpoints("filters.write=enospc"):
            assert update.complete()[1]["code"] == "disk_full"
            assert update.complete()[0] == 200
        world.server.wait(30)
        assert world.model["w"].tolist() == [1.0, 2.0]


@pytest.mark.covers("T7", "X3")
@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (Leaving, r"a filter of the server called sys.exit\(3\)"),
        (Broken, r"the server's filter Broken\(\) failed at 'head': KeyError: 'salt'"),
        (Undecided, r"the server's filter Undecided\(\) failed at '\w+': KeyError: '\w+'"),
        (Shorter, r"the server's filter Shorter\(\) changed '\w+' from torch.float32 \[\d\] to torch"),
        (Infinite, r"the values of '\w+' after the server's filter Infinite\(\) are not finite"),
        (lambda: Drop("haed"), r".*no tensor of the model matches 'haed'"),
    ],
    ids=["exits", "raises", "keeps", "shape", "infinite", "name"],
)
def test_an_update_is_refused_if_its_filter_fails(tmp_path: Path, kind: Any, told: str) -> None:
    """If a filter of the server fails or changes a tensor's shape or values wrongly, this update is refused."""
    # The round goes on without it. The files of the refused update, which is as large as the model, are gone at once,
    # without a garbage collection.
    with filtered(tmp_path, **{"rounds.min_sites": 1}, filters={"b": [kind()]}) as world:
        world.pull(number=1)
        world.sites["a"].submit(become([1.0, 2.0], 3.0))
        before = nameless_files(tmp_path / "state")  # not spools, which the closed round removes
        gc.disable()
        try:
            world.sites["b"].submit(become([9.0, 9.0], 9.0))
            assert nameless_files(tmp_path / "state") <= before
        finally:
            gc.enable()
        assert re.search(f"update of b was refused: {told}", world.text)  # the site is told
        world.sites.pop("b").close()
        found, status = world.finish(), world.status
    assert (found["w"].tolist(), found["head"].tolist()) == ([1.0, 2.0], [3.0])
    assert status.refused == 1
    assert status.history[-1].workers == ["a"]


@pytest.mark.covers("X3")
def test_a_failing_filter_excludes_its_site(tmp_path: Path) -> None:
    """If a site's own filter raises, the site ends with an error, and the round continues with the other sites."""
    with filtered(tmp_path, **{"rounds.min_sites": 1}) as world:
        world.join("a")
        world.join("b", filters=[Broken()])
        world.pull(number=1)
        world.sites["a"].submit(become([1.0, 2.0], 3.0))
        with pytest.raises(UsageError, match=r"Broken\(\) failed at 'head': KeyError: 'salt'") as caught:
            world.sites["b"].submit(become([9.0, 9.0], 9.0))
        world.sites.pop("b").close(caught.value)
        found = world.finish()
    assert (found["w"].tolist(), found["head"].tolist()) == ([1.0, 2.0], [3.0])


def test_a_failing_filter_keeps_the_previous_outbox(tmp_path: Path) -> None:
    """If a site's filter fails in round 2, its outbox still has the update of round 1. A server that lost power may ask
    for it again.
    """

    class Second(Filter):
        def begin(self, update: Outgoing) -> None:
            if update.about.round == 2:
                raise KeyError("salt")

    with filtered(tmp_path, sites="a", rounds=2) as world:
        world.join(filters=[Second()])
        world.rounds(0, 1)
        world.pull(number=2)
        with pytest.raises(UsageError, match=r"Second\(\) failed at the start of the update: KeyError: 'salt'"):
            world.submit("a", 0)
        (note,) = world.workers.glob("a/*/outbox.json")
        assert json.loads(note.read_text())["round"] == 1


@pytest.mark.covers("X3")
def test_a_filter_may_fail_on_accepted_updates(tmp_path: Path) -> None:
    """If a filter of the server fails on an accepted update, the run ends."""
    # A start with a repaired filter filters the received update again. The received update is kept unchanged: it is
    # halved once, not twice.
    with filtered(tmp_path, filters=[Halved()]) as world:
        world.pull(number=1)
        world.sites["a"].submit(become([2.0, 4.0]))
        world.restart(filters={"a": [Broken()]})
        world.sites["b"].submit(become([6.0, 8.0]))
        told = r"update of a for round 1 .*Broken\(\) failed at 'head'.*it continues with the same updates"
        with pytest.raises(RunFailed, match=told):
            world.server.wait(60)
        world.restart(filters=[Halved()])  # mended
        assert world.finish()["w"].tolist() == [2.0, 3.0]


@pytest.fixture
def go() -> Iterator[threading.Event]:
    """Lets what hangs end; behind every test, however it ends."""
    event = threading.Event()
    yield event
    event.set()


def test_a_server_ends_while_a_filter_hangs(tmp_path: Path, go: threading.Event) -> None:
    """The server can stop while its filter hangs at an update that was accepted before a restart."""
    begun, world = threading.Event(), filtered(tmp_path).start()
    world.pull(number=1)
    world.sites["a"].submit(become([1.0, 1.0]))
    world.restart(filters={"a": [Hanging(go, begun.set)]})
    world.sites["b"].submit(become([1.0, 1.0]))
    assert begun.wait(30)
    world.stop()
    assert not go.is_set()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The ticket of each update that the server's filters are asked about."""
    refusal, tickets = Filtering.refusal, list[int]()

    async def noted(filtering: Filtering, row: Any, number: int) -> str:
        tickets.append(row.ticket)
        return await refusal(filtering, row, number)

    monkeypatch.setattr(Filtering, "refusal", noted)
    return tickets


def move(w: float) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors["w"].fill_(w)


def test_an_update_completed_twice_counts_once(tmp_path: Path, go: threading.Event, asked: list[int]) -> None:
    """If a site sends the completion of its update again while the filter still works, both requests get the same
    receipt.
    """
    # The filter, which keeps state, works once. Until it ends, no other update takes the place of the one it reads.

    class Noted(Hanging):
        def begin(self, update: Outgoing) -> None:
            begins.append(update.about.site)

    begins, hangs = list[str](), threading.Event()
    with filtered(tmp_path, sites="a", filters=[Noted(go, hangs.set)]) as world, ThreadPoolExecutor() as threads:
        update = WireSite(world.url).train(move(2.0)).push()
        answers = [threads.submit(update.complete) for _ in range(2)]
        assert hangs.wait(30)
        wait_until(lambda: len(asked) == 2, "that both wait")
        slot = world.server._require_served().run.store.tickets.spool(update.ticket).slot
        held = slot.holds[HOLDER]
        go.set()
        (status, receipt), again = (answer.result(30) for answer in answers)
    assert (begins, held, HOLDER in slot.holds) == (["a"], 1, False)
    assert (status, receipt["digest"]) == (200, update.message["digest"])
    assert again == (status, receipt)


def test_a_superseded_process_has_no_filtered_update_accepted(
    tmp_path: Path, go: threading.Event, asked: list[int]
) -> None:
    """If a site is started again elsewhere while the filter works at its update, the update of the older process is
    refused.
    """
    # The newer process sends (3, 3) under the same ticket, and this is the run's result.
    hangs = threading.Event()
    filters = {"a": [Hanging(go, hangs.set)]}
    with filtered(tmp_path, sites="a", filters=filters) as world, ThreadPoolExecutor() as threads:
        before = threads.submit(WireSite(world.url, process="one").train(move(1.0)).push().complete)
        assert hangs.wait(30)
        after = threads.submit(WireSite(world.url, process="two").train(move(3.0)).push().complete)
        wait_until(lambda: len(asked) == 2, "that the second update is there")
        go.set()
        assert before.result(30)[1]["code"] == "superseded"
        assert after.result(30)[0] == 200
        assert asked[0] == asked[1]
        assert world.server.wait(30)
        assert world.result["w"].tolist() == [3.0, 3.0]


def test_a_part_replaced_during_filtering_is_refused(tmp_path: Path, go: threading.Event) -> None:
    """If a site sends other parts while the filter works at its update, the server answers `conflict` and counts only
    the new update.
    """
    # Otherwise, a site could have one update filtered and another one counted.
    hangs = threading.Event()
    with filtered(tmp_path, sites="a", filters={"a": [Hanging(go, hangs.set)]}) as world:
        site = WireSite(world.url)
        with ThreadPoolExecutor() as threads:
            answer = threads.submit(site.train(move(1.0)).push().complete)
            assert hangs.wait(30)
            other = site.train(move(3.0)).push()  # under the same ticket
            go.set()
            assert answer.result(30)[1].get("code") == "conflict"
        assert other.complete()[0] == 200
        assert world.server.wait(30)
        assert world.result["w"].tolist() == [3.0, 3.0]


def test_a_hanging_filter_excludes_its_site_from_rounds(
    tmp_path: Path, go: threading.Event, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the server's filter for a site hangs, the round closes at its deadline without this site, and its request is
    answered then.
    """
    # The filter does not begin the site's next update. The server ends as usual.
    begun: list[int] = []
    monkeypatch.setattr("atoll.server.coordinator.user_code.SAY_S", 0.05)
    filters = {"a": [Hanging(go, lambda: begun.append(1))], "b": [Filter()]}
    options = {"rounds.total": 2, "rounds.quorum": 1, "rounds.min_sites": 1, "rounds.deadline_s": 0.3}
    with filtered(tmp_path, filters=filters, **options) as world:
        world.join()
        stuck, other = world.sites.values()
        for number in (1, 2):
            world.pull(number=number)
            submitting = Threads(lambda: stuck.submit(become([1.0, 1.0])))
            wait_until(lambda: begun, "the filter")
            other.submit(become([1.0, 1.0]))
            submitting.join(30)
        assert (stuck.next_round(), other.next_round()) == (None, None)
        assert begun == [1]
        assert [entry.workers for entry in world.status.history] == [["b"], ["b"]]
    assert not go.is_set()
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "The server's filters for the update of a in round 1: not finished after 0.05 s. Check their code." in told


@pytest.mark.covers("X3")
async def test_a_failed_thread_start_frees_its_place(go: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a call is given up while it waits for a thread, or its thread cannot start, the next call gets its place."""
    # There is one place, and `a` has it. Site `b` is given up once while it waits, then no thread can start, then it
    # succeeds.
    from atoll.server.coordinator import user_code

    monkeypatch.setattr(user_code, "AT_ONCE", 1)
    beside = user_code.UserThreads()
    first = asyncio.ensure_future(beside.run(lambda: go.wait(60), "It", "a"))
    await asyncio.sleep(0)  # it has the place
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await beside.run(lambda: None, "It", "b")
    go.set()
    assert await first
    with monkeypatch.context() as broken:
        broken.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
        with pytest.raises(RuntimeError, match="can't start new thread"):
            await beside.run(lambda: None, "It", "b")
    async with asyncio.timeout(30):
        assert await beside.run(lambda: "b", "It", "b") == "b"
