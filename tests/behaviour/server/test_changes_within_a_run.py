"""`rounds.changes`: H and the outer rate change within a run, as the specification says, and as the journal records."""

from __future__ import annotations

import json
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import specification as spec
import torch
from kit import ask_journal
from kit.models import Weights
from kit.servers import new_simulation, plain_server
from kit.world import World
from safetensors.torch import load_file

import atoll
from atoll.cli.status import plain
from atoll.config import Settings
from atoll.errors import ConfigError
from atoll.store.reader import checked_audit
from atoll.testing.run import Threads, local_worker

START = {"w": torch.zeros(2)}
NESTEROV = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
OUTER: dict[str, Any] = {
    "algorithm.outer_optimizer.name": "sgd",
    "algorithm.outer_optimizer.lr": 0.5,
    "algorithm.outer_optimizer.momentum": 0.5,
}
RATES = [
    {"from_round": 2, "algorithm": {"outer_optimizer": {"lr": 0.25}}},
    {"from_round": 4, "algorithm.outer_optimizer.lr": 1.0},
]


def changed(rates: dict[int, float], **more: Any) -> dict[str, Any]:
    tables = [{"from_round": first, "algorithm.outer_optimizer.lr": rate} for first, rate in rates.items()]
    return OUTER | {"rounds.changes": tables} | more


def rates_by_hand(rates: list[float]) -> float:
    """SGD with momentum 0.5 along pseudo-gradients of −1: v ← v/2 − 1, w ← w − rate·v."""
    w = velocity = 0.0
    for rate in rates:
        velocity = 0.5 * velocity - 1.0
        w -= rate * velocity
    return w


def test_the_outer_rate_can_change_between_rounds(tmp_path: Path) -> None:
    """With `rounds.changes`, the outer learning rate changes from a given round on, and the momentum continues."""
    # 0.5, then 0.25 in rounds 2 and 3, then 1: as by hand. The status shows the rate of the round.
    with World(tmp_path, START, "a", rounds=4, **(OUTER | {"rounds.changes": RATES})) as world:
        shown = []
        for number in (1, 2, 3, 4):
            world.move("a", number, 1.0)
            world.wait(number)
            shown.append(world.status.outer)
        assert world.finish()["w"].tolist() == [rates_by_hand([0.5, 0.25, 0.25, 1.0])] * 2
    assert ["lr=0.25" in text for text in shown] == [True, True, False, False]
    assert any("lr=1.0" in line for line in plain(world.status, ""))


@pytest.mark.parametrize("restart", [False, True], ids=["undisturbed", "restarted"])
@pytest.mark.parametrize(
    "rules",
    [
        {},
        {"diloco.fragment_sync_delay": 1, "diloco.fragment_update_alpha": 0.5},
        {"diloco.num_fragments": 2},
        {"diloco.num_fragments": 2, "diloco.fragment_sync_delay": 1, "diloco.fragment_update_alpha": 0.25},
    ],
    ids=["whole", "delayed", "fragments", "both"],
)
def test_runs_with_changes_match_the_specification(tmp_path: Path, rules: dict[str, Any], restart: bool) -> None:
    """A DiLoCo run whose number of local steps and outer rate change between rounds has the bits of the specification,
    also after a restart.
    """
    # H = 4, then 2 from round 2 and 6 from round 4 on; the rate falls from round 3 on. The server is stopped and
    # started again between steps, which changes nothing.
    names = ("v", "w") if "diloco.num_fragments" in rules else ("w",)
    settings = {
        "algorithm.name": "diloco",
        "aggregation.upload_codec.name": "none",
        "diloco.sync_every": 4,
        "rounds.changes": [
            {"from_round": 2, "diloco.sync_every": 2},
            {"from_round": 3, "algorithm.outer_optimizer.lr": 0.1},
            {"from_round": 4, "diloco.sync_every": 6},
        ],
    }
    rounds = 5
    steps: dict[str, int] = {}
    models: dict[str, Weights] = {}
    with World(tmp_path, model_of(names), rounds=rounds, **(settings | rules)) as world:

        def train(site: str) -> None:
            model = models[site] = model_of(names)
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            with atoll.DiLoCo(model, optimizer, server=world.url, site=site, folder=world.workers) as loop:
                for k in range(200):
                    if loop.finished:
                        break
                    if restart and site == "a" and k == 5:
                        world.restart()
                    step(k, dict(model.named_parameters()), site)
                    optimizer.step()
                steps[site] = loop.step

        Threads(*(partial(train, site) for site in "ab")).join()
        assert world.server.wait(60)
        result = world.result
    taken: dict[str, int] = {}
    expected = specified(names, settings | rules, rounds, taken)
    assert result.keys() == expected.keys()
    assert steps == taken
    for name, value in expected.items():
        assert torch.equal(result[name], value), name
        for model in models.values():
            assert torch.equal(dict(model.named_parameters())[name].detach(), value)


def model_of(names: tuple[str, ...]) -> Weights:
    return Weights(**{name: torch.zeros(3) for name in names})


def step(k: int, parameters: dict[str, Any], site: str) -> None:
    """Gradients that depend on the step, the site and the values."""
    for place, (_, each) in enumerate(sorted(parameters.items())):
        pull = torch.tensor([0.3, -0.2, 0.1]) * (1 + place) * (1.5 if site == "a" else -0.5) + 0.01 * k
        each.grad = 0.05 * (each.detach() - pull)


def specified(
    names: tuple[str, ...], settings: dict[str, Any], rounds: int, taken: dict[str, int]
) -> dict[str, torch.Tensor]:
    """The run by the specification; `taken` gets the local steps of each site."""
    outer, slower = (spec.of_torch(torch.optim.SGD, **NESTEROV | {"lr": lr}) for lr in (0.7, 0.1))
    rules = spec.Rules(outer, outer_from={3: slower})
    model = model_of(names)

    def site_of(name: str) -> spec.Site:
        def local_step(k: int, w: spec.Tensors, _: object) -> None:
            parameters = {key: torch.nn.Parameter(value) for key, value in w.items()}
            step(k, parameters, name)
            torch.optim.SGD(parameters.values(), lr=1.0).step()
            taken[name] = k + 1

        return spec.Site(
            rules, name, {key: value.detach().clone() for key, value in model.named_parameters()}, local_step
        )

    groups = [[name] for name in names] if settings.get("diloco.num_fragments") else [list(names)]
    fragments = [spec.Fragment(rules, {name: torch.zeros(3) for name in group}) for group in groups]
    spec.diloco(
        fragments,
        [site_of(site) for site in "ab"],
        rounds,
        4,
        tau=settings.get("diloco.fragment_sync_delay", 0),
        alpha=settings.get("diloco.fragment_update_alpha", 0.0),
        H_from={2: 2, 4: 6},
    )
    return {name: value for fragment in fragments for name, value in fragment.result().items()}


def test_a_loop_shows_the_present_sync_every(tmp_path: Path) -> None:
    """If `rounds.changes` changes the number of local steps, `sync_every` of the loop and the status show the present
    one.
    """
    tables = [{"from_round": 2, "diloco.sync_every": 3}]
    rules: dict[str, Any] = {"algorithm.name": "diloco", "diloco.sync_every": 2, "rounds.changes": tables}
    with plain_server(tmp_path, Weights(w=torch.zeros(2)), **rules, sites=1, rounds=3) as server:
        model = Weights(w=torch.zeros(2))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        told = list[int]()
        options: dict[str, Any] = {"server": server.url, "site": "a", "folder": tmp_path / "w"}
        with atoll.DiLoCo(model, optimizer, on_sync=lambda each: told.append(each.sync_every), **options) as loop:
            seen = []
            while not loop.finished:
                seen.append((loop.sync_every, server.status().sync_every))
                model.w.grad = torch.ones(2)
                optimizer.step()
        assert seen == [(2, 2)] * 2 + [(3, 3)] * 6
        assert told == [2, 3, 3, 3]
        assert [each.sites[0].steps for each in server.status().history] == [2, 3, 3]


def test_dynamic_local_steps_follow_a_changed_number(tmp_path: Path) -> None:
    """In an asynchronous run with dynamic local steps, the fastest site makes as many steps as the
    present round has.
    """
    rules: dict[str, Any] = {
        "algorithm.name": "diloco",
        "async.enabled": True,
        "diloco.dynamic_local_steps": True,
        "diloco.sync_every": 2,
        "rounds.changes": [{"from_round": 2, "diloco.sync_every": 5}],
    }
    with plain_server(tmp_path, Weights(w=torch.zeros(2)), **rules, sites=1, rounds=2) as server:
        model = Weights(w=torch.zeros(2))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with atoll.DiLoCo(model, optimizer, server=server.url, site="a", folder=tmp_path / "w") as loop:
            while not loop.finished:
                model.w.grad = torch.ones(2)
                optimizer.step()
        assert [each.sites[0].steps for each in server.status().history] == [2, 5]


# -- a start with other changes


def test_a_restart_may_change_later_rounds(tmp_path: Path) -> None:
    """A restart may add changes for rounds that have not begun. The round that is open keeps its settings."""
    # After round 1, the rate of round 2 is open and stays; that of round 3 comes with a restart, and is recorded.
    with World(tmp_path, START, "a", rounds=4, **changed({4: 0.125})) as world:
        world.move("a", 1, 1.0)
        world.ask("a", number=2)
        world.restart(**changed({3: 0.25}))
        assert "from round 3 on: algorithm.outer_optimizer.lr = 0.25" in world.text
        for number in (2, 3):
            world.move("a", number, 1.0)
        world.wait(3)
        world.restart(**changed({3: 0.25}))
        world.move("a", 4, 1.0)
        assert world.finish()["w"].tolist() == [rates_by_hand([0.5, 0.5, 0.25, 0.25])] * 2
    (row,) = ask_journal(tmp_path, "SELECT settings_json FROM run")
    assert json.loads(row[0])["rounds.changes"] == [[3, {"algorithm.outer_optimizer.lr": 0.25}]]
    entries = [
        json.loads(row[0]) for row in ask_journal(tmp_path, "SELECT detail_json FROM audit WHERE what = 'changes'")
    ]
    assert entries == [{"changes": [[3, {"algorithm.outer_optimizer.lr": 0.25}]]}]
    checked_audit(tmp_path / "state", 1)


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (
            {},
            "has in rounds.changes: from round 2 on: algorithm.outer_optimizer.lr = 0.25; but this start leaves",
        ),
        (
            {2: 0.125},
            "has in rounds.changes: from round 2 on: algorithm.outer_optimizer.lr = 0.25; but this start leaves",
        ),
        (
            {2: 0.25, 3: 1.0},
            "does not have in rounds.changes: from round 3 on: algorithm.outer_optimizer.lr = 1.0; but",
        ),
    ],
)
def test_a_restart_cannot_change_a_round_that_has_begun(tmp_path: Path, other: dict[int, float], told: str) -> None:
    """If a restart changes `rounds.changes` for a round that has begun, the server refuses, and names the difference
    and what may still be added.
    """
    with World(tmp_path, START, "a", rounds=5, **changed({2: 0.25})) as world:
        for number in (1, 2):
            world.move("a", number, 1.0)
        world.ask("a", number=3)
        world.stop()
        with pytest.raises(ConfigError, match=re.escape(told)) as refused:
            world.start(**changed(other))
        assert "round 3 has begun" in refused.value.message
        assert "add a table from round 4 or later on" in refused.value.remedy
        world.start(**changed({2: 0.25, 4: 0.125}))
        for number in (3, 4, 5):
            world.move("a", number, 1.0)
        assert world.finish()["w"].tolist() == [rates_by_hand([0.5, 0.25, 0.25, 0.125, 0.125])] * 2


def test_refusing_a_changed_codec_leaves_the_run_unchanged(tmp_path: Path) -> None:
    """If a start is refused because it changes the codec of a round that has begun, the open ticket and the run stay as
    they were.
    """
    late = {"rounds.changes": [{"from_round": 2, "aggregation.upload_codec": {"name": "int8"}}]}
    with World(tmp_path, START, "a", rounds=2) as world:
        world.move("a", 1, 1.0)
        world.ask("a", number=2)
        world.stop()
        with pytest.raises(ConfigError, match="round 2 has begun"):
            world.start(**late)
        world.start(**{"rounds.changes": []})
        world.move("a", 2, 1.0)
        assert world.finish()["w"].tolist() == [2.0] * 2


def test_the_error_recommends_rounds_changes(tmp_path: Path) -> None:
    """If a restart changes `diloco.sync_every`, the error recommends a table in `rounds.changes`."""
    rules: dict[str, Any] = {"algorithm.name": "diloco", "diloco.sync_every": 4}
    with plain_server(tmp_path, START, **rules):
        pass
    with pytest.raises(ConfigError, match=r"has diloco\.sync_every = 4, but this start sets 2") as refused:
        plain_server(tmp_path, START, **(rules | {"diloco.sync_every": 2})).start()
    assert "a table in rounds.changes can set another one for later rounds" in refused.value.remedy


@pytest.mark.parametrize(
    ("tables", "more", "told"),
    [
        ([{"diloco.sync_every": 2}], {}, "rounds.changes: from_round is None"),
        ([{"from_round": 1, "diloco.sync_every": 2}], {}, "rounds.changes: from_round is 1"),
        ([{"from_round": 3, "diloco.sync_every": 2}] * 2, {}, "rounds.changes: from_round is 3"),
        ([{"from_round": 3}], {}, "rounds.changes sets nothing from round 3 on"),
        (
            [{"from_round": 3, "diloco": {"num_fragments": 2}}],
            {},
            "rounds.changes sets diloco.num_fragments from round 3",
        ),
        (
            [{"from_round": 3, "diloco": {"sync_every": 0}}],
            {},
            r"rounds.changes from round 3 on: diloco.sync_every = 0: ",
        ),
        (
            [{"from_round": 3, "diloco": {"sync_every": "2"}}],
            {},
            r"diloco.sync_every = '2', but it must be a whole number",
        ),
        (
            [{"from_round": 3, "diloco": {"sync_every": 5}}],
            {"diloco.num_fragments": 4, "diloco.sync_every": 8},
            "from round 3 on: diloco.sync_every = 5: diloco.sync_every is 5 and diloco.num_fragments is 4",
        ),
        (
            [{"from_round": 3, "algorithm.outer_optimizer.lr": 0.5}],
            {"swarm.enabled": True, "rounds.sites": 2},
            "rounds.changes sets algorithm.outer_optimizer.lr, but swarm.enabled is true",
        ),
    ],
)
def test_a_wrong_change_of_rounds_is_refused_at_once(
    tables: list[dict[str, Any]], more: dict[str, Any], told: str
) -> None:
    """Wrong tables in `rounds.changes` are refused when the settings are read, with the reason."""
    with pytest.raises(ConfigError, match=told):
        Settings.build({"algorithm.name": "diloco", "rounds.changes": tables} | more)


@pytest.mark.parametrize(("rate", "told"), [(-1.0, "lr is -1.0"), ("fast", "lr is 'fast'")])
def test_a_wrong_changed_rate_is_refused_before_the_start(tmp_path: Path, rate: Any, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        plain_server(tmp_path, START, rounds=3, sites=1, **changed({2: rate})).start()


def without_rate(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0)


def test_changing_the_rate_needs_an_optimizer_with_lr(tmp_path: Path) -> None:
    """`rounds.changes` cannot change the rate of an outer optimizer that has no option `lr`: the server refuses to
    start.
    """
    tables = [{"from_round": 2, "algorithm.outer_optimizer.lr": 0.5}]
    with pytest.raises(ConfigError, match="does not take its learning rate from the option lr"):
        plain_server(
            tmp_path, START, rounds=3, sites=1, outer_optimizer=without_rate, **{"rounds.changes": tables}
        ).start()


def test_a_run_file_may_have_tables_of_changes(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        '[algorithm]\nname = "diloco"\n[[rounds.changes]]\nfrom_round = 10\ndiloco.sync_every = 250\n'
        "algorithm.outer_optimizer.lr = 0.35\n"
    )
    (change,) = Settings.read(file, environ={}).changes
    assert str(change) == "from round 10 on: diloco.sync_every = 250, algorithm.outer_optimizer.lr = 0.35"


SCRIPT = """
import atoll

with atoll.join() as worker:
    for fl_round in worker:
        fl_round.submit({"w": fl_round.state_dict()["w"] + 1.0})
"""


@pytest.mark.slow
def test_a_simulation_changes_the_outer_rate_too(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    settings = changed({2: 0.25, 4: 1.0}, **{"algorithm.name": "fedavg", "rounds.total": 4, "disk.min_free_bytes": 0})
    result = new_simulation(
        START,
        script=str(tmp_path / "train.py"),
        sites=2,
        processes=1,
        **settings,
        **{"disk.state_dir": tmp_path / "s"},
    ).run()
    assert load_file(result.model)["w"].tolist() == [rates_by_hand([0.5, 0.25, 0.25, 1.0])] * 2


# -- another codec: the server writes its files again when the round begins

CODECS = [
    {"from_round": 2, "aggregation": {"upload_codec": {"name": "int8"}}},
    {"from_round": 4, "aggregation.upload_codec": {"name": "topk", "density": 0.25}},
    {"from_round": 5, "aggregation.upload_codec.name": "none"},
]
SPECIFIED = {2: (spec.quantized(127), True), 4: (spec.topk(0.25), True), 5: (spec.none, False)}
SIZE = 5000


def train_step(k: int, w: torch.Tensor, site: str) -> None:
    """A change of the weights that depends on the step, the site and the values, with small and large elements."""
    noise = torch.randn(SIZE, generator=torch.Generator().manual_seed(100 * k + ord(site)))
    w.add_(noise * noise.abs() * 0.01 - 0.05 * w)


def with_codecs(rounds: int) -> torch.Tensor:
    """The model of the sites a and b after these rounds of FedAvg, by the specification."""
    mean = spec.of_torch(torch.optim.SGD, lr=1.0, momentum=0.0)
    rules = spec.Rules(mean, up=spec.none, up_from=SPECIFIED)

    def site_of(name: str) -> spec.Site:
        def local_step(k: int, w: spec.Tensors, _: object) -> None:
            train_step(k + 1, w["w"], name)

        return spec.Site(rules, name, {"w": torch.zeros(SIZE)}, local_step)

    fragment = spec.Fragment(rules, {"w": torch.zeros(SIZE)})
    spec.federated(fragment, [site_of(site) for site in "ab"], rounds)
    return fragment.result()["w"]


@pytest.mark.parametrize("how", ["undisturbed", "restarted", "sites restarted"])
def test_the_upload_codec_can_change_between_rounds(tmp_path: Path, how: str) -> None:
    """With `rounds.changes`, the upload codec changes between rounds, with the bits of the specification, also after
    restarts.
    """
    # none, int8 with feedback, topk with feedback and the same errors, none.
    with World(tmp_path, {"w": torch.zeros(SIZE)}, rounds=6, **{"rounds.changes": CODECS}) as world:
        shown = []
        for number in range(1, 7):
            world.pull(number=number)
            shown.append(world.status.codec)
            if how == "restarted" and number in (2, 4):
                world.restart()
            for site in "ab":
                if how == "sites restarted" and number in (3, 4):
                    world.sites[site].close()
                    world.join(site)
                    world.pull(site, number=number)

                def change(name: str, k: int, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
                    train_step(k, state["w"], name)
                    return state

                world.submit(site, change)
        result = world.finish()["w"]
        nbytes = [each.bytes_up for each in world.status.history]
    assert shown == ["none", "int8", "int8", "topk", "none", "none"]
    assert nbytes[0] == nbytes[4] > 3 * nbytes[1] > 3 * nbytes[3]
    assert torch.equal(result, with_codecs(6))
    checked_audit(tmp_path / "state", 1)


def test_a_restored_server_goes_back_to_the_earlier_codec(tmp_path: Path) -> None:
    """A server restored to before a change of the codec goes back to the earlier codec, and changes again in the same
    round.
    """
    with World(tmp_path, {"w": torch.zeros(SIZE)}, rounds=4, **{"rounds.changes": CODECS[:1]}) as world:
        backup = None

        def change(name: str, k: int, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            train_step(k, state["w"], name)
            return state

        world.pull(number=1)
        for site in "ab":
            world.submit(site, change)
            if site == "a":
                world.stop()
                backup = world.backup()
                world.start()
        world.rounds(change, 2)
        assert backup is not None
        world.stop()
        world.put_back(backup)
        while world.sites:
            world.sites.popitem()[1].close()
        shutil.rmtree(world.workers)  # else they would submit round 2 again by themselves
        world.start()
        assert world.status.codec == "none"
        world.pull("b", number=1)
        world.submit("b", change)
        for number in (2, 3, 4):
            world.rounds(change, number)
        assert world.status.codec == "int8"
        assert world.finish()["w"].isfinite().all()


def test_a_diloco_loop_follows_a_changed_codec(tmp_path: Path) -> None:
    """A DiLoCo loop encodes its updates with the codec of the present round."""
    # H = 2, in bf16, then in int8: the update of round 2 has half the bytes, and the loop goes on by itself.
    rules: dict[str, Any] = {
        "algorithm.name": "diloco",
        "diloco.sync_every": 2,
        "rounds.changes": [{"from_round": 2, "aggregation.upload_codec": {"name": "int8"}}],
    }
    with plain_server(tmp_path, Weights(w=torch.zeros(SIZE)), **rules, sites=1, rounds=3) as server:
        model = Weights(w=torch.zeros(SIZE))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with atoll.DiLoCo(model, optimizer, server=server.url, site="a", folder=tmp_path / "w") as loop:
            while not loop.finished:
                model.w.grad = torch.ones(SIZE)
                optimizer.step()
        assert loop.skipped == 0
        first, second, third = (each.bytes_up for each in server.status().history)
        assert 2 * SIZE <= first < 2.1 * SIZE
        assert second == third < 0.6 * first


@pytest.mark.parametrize(
    "other",
    [
        {"async.enabled": True},
        {"swarm.enabled": True, "rounds.sites": 2},
        {"algorithm.name": "diloco", "diloco.num_fragments": 2},
        {"model.ranks": 2},
        {"disk.in_files": False},
        {"aggregation.aggregator.path": "mine:sum"},
    ],
    ids=lambda other: max(other),
)
def test_some_kinds_of_runs_refuse_a_changed_codec(other: dict[str, Any]) -> None:
    """Asynchronous, swarm and streaming runs refuse `rounds.changes` with another codec."""
    with pytest.raises(ConfigError, match=r"but rounds\.changes sets aggregation\.upload_codec"):
        Settings.build({"algorithm.name": "fedavg", "rounds.changes": CODECS[:1]} | other)


def test_a_wrong_changed_codec_is_refused_before_the_start(tmp_path: Path) -> None:
    tables = [{"from_round": 2, "aggregation.upload_codec": {"name": "int9"}}]
    with pytest.raises(ConfigError, match="int9"):
        plain_server(tmp_path, START, rounds=3, sites=1, **{"rounds.changes": tables}).start()


def test_a_simulation_refuses_a_changed_codec(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the processes of a simulation know one codec"):
        new_simulation(
            START,
            script=partial(print),
            **{"algorithm.name": "fedavg", "rounds.total": 3, "rounds.changes": CODECS[:1]},
        )


def test_a_local_worker_refuses_a_changed_codec(tmp_path: Path) -> None:
    """A worker in the server's process is refused if `rounds.changes` changes the upload codec."""
    with World(tmp_path, START, "a", rounds=3, **{"rounds.changes": CODECS[:1]}) as world:
        with pytest.raises(ConfigError, match="rounds of whole models with one codec can"):
            local_worker(world.server, "a")
