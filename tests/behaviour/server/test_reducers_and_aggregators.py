"""A run with another reducer than the mean, or with an aggregator of the user's own, over the real path."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.fork_server import fresh_processes
from harness.processes import wait_until
from kit.aggregators import MEAN
from kit.folders import open_paths
from kit.servers import plain_server
from kit.wire import WireSite
from kit.world import World, require_equal
from torch import nn

import atoll
from atoll.errors import ConfigError, RunFailed, UsageError
from atoll.reducers import NormalisedMean, RoundFacts
from atoll.testing.contracts import ReducerContract

ONE = {"w": torch.zeros(1), "bn.running_mean": torch.zeros(1)}
"""θ₀ = 0 and the outer step is w ← w − g, so the new model is the reduction of what the sites became."""


class TestNormalisedMean(ReducerContract):
    reducer = NormalisedMean()


def of_reducer(**options: Any) -> dict[str, Any]:
    return {f"aggregation.reducer.{key}": value for key, value in options.items()}


def after_one_round(
    folder: Path, values: dict[str, float], how: dict[str, dict[str, Any]] | None = None, **settings: Any
) -> tuple[float, float]:
    """What models of these values become together: a parameter and a buffer. `how` a site submits it."""
    with World(folder, ONE, values.keys(), **settings, rounds=1) as world:
        world.pull(number=1)
        for site, value in values.items():
            world.submit(site, value, **(how or {}).get(site, {}))
        model = world.finish()
    return model["w"].item(), model["bn.running_mean"].item()


@pytest.mark.parametrize(
    ("reducer", "parameter", "buffer"),
    [
        ({"name": "median"}, 2.0, 2.0),  # of −1e3, 1, 2, 3, 1e3
        ({"name": "trimmed_mean", "trim": 0.2}, 2.0, 2.0),  # one at each end goes, 1 + 2 + 3 over three is left
        # norms 1, 2, 3, 1e3, 1e3; C = 3: (1 + 2 + 3 + 3 − 3) / 5. Buffers are not clipped: the hostile two cancel
        ({"name": "clipped_mean"}, 6 / 5, pytest.approx(6 / 5, rel=1e-4)),  # fp32 beside a thousand
    ],
    ids=["median", "trimmed", "clipped"],
)
def test_robust_reducers_bound_two_hostile_sites(
    tmp_path: Path, reducer: dict[str, Any], parameter: float, buffer: float
) -> None:
    """Median, trimmed mean and clipped mean keep the result near the honest sites' values, although two of five sites
    are hostile.
    """
    values = {"a": 1.0, "b": 2.0, "c": 3.0, "d": 1e3, "e": -1e3}
    assert after_one_round(tmp_path, values, **of_reducer(**reducer)) == (pytest.approx(parameter), buffer)


@pytest.mark.covers("X43")
@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        # p = ¼, ¾; x = 0 and the sites end at −4 and −6, so u = 4, 6
        ((2, 6), -6.25),  # τ_eff = ¼·2 + ¾·6 = 5;  5 · (¼·4/2 + ¾·6/6)
        ((6, 2), -7.25),  # τ_eff = ¼·6 + ¾·2 = 3;  3 · (¼·4/6 + ¾·6/2) = ½ + 27/4
        ((3, 3), -5.5),  # FedAvg: ¼·4 + ¾·6
    ],
    ids=["few and many", "many and few", "equal"],
)
def test_fednova_normalises_updates_by_local_steps(tmp_path: Path, steps: tuple[int, int], expected: float) -> None:
    """FedNova divides each update by its number of local steps."""
    # With equal steps, the result is that of FedAvg. Buffers are averaged without this division.
    how = {"a": {"weight": 1.0, "steps": steps[0]}, "b": {"weight": 3.0, "steps": steps[1]}}
    found = after_one_round(tmp_path, {"a": -4.0, "b": -6.0}, how, algorithm="fednova")
    assert found == (pytest.approx(expected, rel=1e-6), -5.5)


def test_fedavg_may_use_fednovas_reducer(tmp_path: Path) -> None:
    """FedAvg with the reducer `normalised_mean` gives the update of its only site unchanged."""
    how = {"a": {"steps": 5}}
    assert after_one_round(tmp_path, {"a": -4.0}, how, **of_reducer(name="normalised_mean")) == (-4.0, -4.0)


NEEDS = {"aggregation.aggregator.path": "mine.py:Needs"}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "option": (of_reducer(name="median", trim=0.1), r"aggregation\.reducer"),
    "name": (of_reducer(name="medain"), "median"),
    "fednova": ({"algorithm": "fednova"} | of_reducer(name="median"), r"aggregation.reducer = 'median'.*fednova"),
    "argument": (NEEDS, r"mine.py:Needs' cannot be created: .* 'n'. Write its keyword arguments next to the path"),
    "both": (NEEDS | of_reducer(name="median"), "Set only one of them"),
}
"""Settings of reducers and aggregators, and why the start is refused."""


@pytest.mark.parametrize("case", REFUSED)
def test_refuses_a_wrong_reducer_or_aggregator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """The server refuses wrong names and options of a reducer or an aggregator, or both together, with a message that
    helps.
    """
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "class Needs:\n    def __init__(self, n): ...\n    def aggregate(self, updates): ...\n")
    settings, told = REFUSED[case]
    with pytest.raises(ConfigError, match=told):
        World(tmp_path, ONE, **settings).start()


@pytest.mark.covers("X43")
def test_refuses_a_fednova_update_without_steps(tmp_path: Path) -> None:
    """The server of a FedNova run refuses an update with 0 local steps, and makes the version from the other site's
    update.
    """
    settings = {"rounds.sites": 2, "rounds.total": 1, "rounds.min_sites": 1}
    with World(tmp_path, ONE, "a", algorithm="fednova", **settings) as world:
        world.join()
        b = WireSite(world.url, "b")
        world.pull(number=1)
        status, told = b.train(-100.0, steps=0).push().complete()
        assert (status, told["code"]) == (422, "update_refused")
        world.submit("a", -4.0, steps=2)
        assert world.finish()["w"].item() == -4.0
        assert (world.status.refused, world.status.history[-1].workers) == (1, ["a"])
    assert "b: update refused: it reports no number of local steps" in world.text
    assert "submit(model, steps=…)" in told["remedy"]


@pytest.mark.covers("X43")
@pytest.mark.parametrize("settings", [{"algorithm": "fednova"}, of_reducer(name="normalised_mean")], ids=str)
def test_a_site_must_submit_with_steps(tmp_path: Path, settings: dict[str, Any]) -> None:
    """If `submit` lacks the number of local steps that the run needs, it raises an error at once. The site can then
    submit the same round with the number.
    """
    with World(tmp_path, ONE, "a", rounds=1, **settings) as world:
        world.pull(number=1)
        with pytest.raises(UsageError, match=r"without a number of local steps.*submit\(model, steps=…\)"):
            world.submit("a", -4.0)
        world.submit("a", -4.0, steps=2)
        assert world.finish()["w"].item() == -4.0
        assert world.status.refused == 0


@pytest.mark.covers("X43", "X3")
@pytest.mark.parametrize(
    ("algorithm", "limit", "most", "above"),
    [
        ("fednova", "max_steps", {"steps": 50}, {"steps": 51}),
        ("fedavg", "max_weight", {"weight": 10.0}, {"weight": 10.5}),
        ("fednova", "max_weight", {"weight": 10.0, "steps": 1}, {"weight": 1e300, "steps": 1}),
    ],
    ids=str,
)
def test_submit_refuses_a_number_above_the_limit(
    tmp_path: Path, algorithm: str, limit: str, most: dict[str, Any], above: dict[str, Any]
) -> None:
    """If the number of steps or the weight is above the run's limit, `submit` raises an error. The site can then submit
    an allowed number.
    """
    value = most[limit.removeprefix("max_")]
    with World(tmp_path, ONE, "a", rounds=1, algorithm=algorithm, **{f"aggregation.{limit}": value}) as world:
        world.pull(number=1)
        with pytest.raises(UsageError, match=f"above aggregation.{limit} of the run, {value:g}.*raise aggregation"):
            world.submit("a", -4.0, **above)
        world.submit("a", -4.0, **most)
        assert world.finish()["w"].item() == -4.0
        assert world.status.refused == 0


@pytest.mark.covers("X43", "F31")
@pytest.mark.parametrize("steps", [100_001, 10**6, 2**62 - 1])
def test_refuses_steps_above_the_limit(tmp_path: Path, steps: int) -> None:
    """The server itself refuses an update with more than `aggregation.max_steps` steps, even if the site did not check
    the limit.
    """
    settings = {"rounds.sites": 3, "rounds.total": 1, "rounds.min_sites": 2}
    with World(tmp_path, ONE, "ab", algorithm="fednova", **settings) as world:
        world.join()
        c = WireSite(world.url, "c")
        world.pull(number=1)
        status, told = c.train(-1.0, steps=steps).push().complete()
        assert (status, told["code"]) == (422, "update_refused")
        world.submit("a", -1.0, steps=10)
        world.submit("b", -3.0, steps=10)
        assert world.finish()["w"].item() == -2.0  # (−1 − 3) / 2
        assert world.status.refused == 1
    assert f"it reports {steps} local steps, above aggregation.max_steps 100000" in world.text
    assert "report the number of optimizer steps, not samples or tokens" in told["remedy"]


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ({"steps": 1001}, "c reports 1001 local steps, more than 100 × the median of the other sites (10)"),
        ({"steps": 1000}, ""),
        ({"weight": 1001.0}, "c reports a weight of 1001, more than 1000 × the median of the other sites (1)"),
        ({"weight": 1000.0}, ""),
    ],
    ids=str,
)
def test_far_higher_steps_or_weights_cause_a_warning(tmp_path: Path, how: dict[str, Any], told: str) -> None:
    """If a site reports far more steps or weight than the median of the other sites, the status and the
    log warn once.
    """
    # The warning in the status ends when the number is usual again. The others report 9 and 11 steps, so their median
    # is 10.
    with World(tmp_path, ONE, "abc", algorithm="fednova", rounds=0, **{"limits.weight_share": 1.0}) as world:
        for number in (1, 2, 3):
            world.pull(number=number)
            for site, steps in (("c", 10), ("a", 9), ("b", 11)):
                world.submit(site, -1.0, **({"steps": steps} | (how if site == "c" else {})))
        world.wait(3)
        assert [text[: len(told)] for text in world.status.warnings] == ([told] if told else [])
        world.rounds(-1.0, 4, steps=10)  # the number of c is as the others' again
        world.wait(4)
        assert world.status.warnings == []
    assert world.text.count("the median of the other sites") == bool(told)


@pytest.mark.parametrize(
    ("settings", "weights", "told"),
    [
        ({}, [1e12, 2.5, 0.75], "a reports a weight of 1e+12, more than 1000 × the median of the other sites"),
        ({}, [1.5, 1.0, 0.5], ""),  # exactly half
        ({}, [1.6, 1.0, 0.5], "a has 52% of the weight of 3 sites (limits.weight_share = 0.5)"),
        ({"limits.weight_share": 0.6}, [1.6, 1.0, 0.5], ""),
        ({}, [9.0, 1.0], ""),  # of two sites, one has half or more
    ],
)
def test_a_large_share_of_the_weight_causes_a_warning(
    tmp_path: Path, settings: dict[str, Any], weights: list[float], told: str
) -> None:
    """If one of three or more sites has more than `limits.weight_share` of the weight of a round, status, events and
    log say so. The warning ends with a round in which no site has.
    """
    sites = "abc"[: len(weights)]
    with World(tmp_path, ONE, sites, rounds=0, **settings) as world:
        world.pull(number=1)
        for site, weight in zip(sites, weights, strict=True):
            world.submit(site, -1.0, weight=weight)
        world.wait(1)
        assert [text[: len(told)] for text in world.status.warnings] == ([told] if told else [])
        world.pull(number=2)
        for site in sites:
            world.submit(site, -1.0, weight=1.0)
        world.wait(2)
        assert world.status.warnings == []
    assert told in world.text


def test_ignored_steps_cause_no_warning(tmp_path: Path) -> None:
    """FedAvg does not use the number of steps, so that a very high number causes no warning and no refusal."""
    with World(tmp_path, ONE, "abc", rounds=1) as world:
        world.pull(number=1)
        for site in "abc":
            world.submit(site, 1.0, steps=10**6 if site == "c" else 10)
        world.wait(1)
        assert (world.status.warnings, world.status.refused) == ([], 0)


def test_correct_counts_the_steps(tmp_path: Path) -> None:
    """Inside `fl_round.correct`, the optimizer's steps are counted, so that a FedNova run accepts `submit` without a
    number of steps.
    """
    model = nn.Linear(1, 1, bias=False)
    with (
        plain_server(tmp_path, model, algorithm="fednova", rounds=1) as server,
        atoll.join(server.url, site="a", folder=tmp_path / "w") as worker,
    ):
        for fl_round in worker:
            fl_round.load_into(model)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with fl_round.correct(model, optimizer):
                for _ in range(7):
                    model(torch.ones(1, 1)).sum().backward()
                    optimizer.step()
            fl_round.submit(model)
        assert server.status().refused == 0
        assert server.status().fragments[0].version == 1


def test_the_normalised_mean_refuses_zero_steps() -> None:
    """The normalised mean raises an error if a site reports 0 steps."""
    with pytest.raises(UsageError, match=r"\[2, 0\]"):
        NormalisedMean().weigh(RoundFacts([1.0, 1.0], [1.0, 1.0], [2, 0]))


START = {"w": torch.zeros(2, 3), "v": torch.zeros(4), "bn.running_mean": torch.zeros(1)}


SITES = {"a": 1.0, "b": 3.0}
"""Site → weight of its updates."""


def write(folder: Path, text: str) -> None:
    (folder / "mine.py").write_text(f"import json, os, torch\nHERE = {str(folder)!r}\n{text}")


def aggregated(folder: Path, name: str, sites: Any = SITES, **options: Any) -> World:
    """A run of one round with the aggregator of this name in mine.py."""
    settings = {"rounds": 1, "run.threads": 1, "aggregation.aggregator.path": f"{folder / 'mine.py'}:{name}"}
    return World(folder, options.pop("start", START), sites, **settings | options)


def trained(site: str, number: int, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What a site's local training in a round comes to: a different number is added to each element."""
    scale = SITES[site] * number
    added = {name: scale * torch.linspace(0.1, 1, tensor.numel()).view_as(tensor) for name, tensor in state.items()}
    return {name: (tensor + added[name]).to(tensor.dtype) for name, tensor in state.items()}


def require_updates_in_use(server: atoll.Server, count: int) -> None:
    """The aggregator comes to use so many updates; the others are given back."""
    run = server._require_served().run

    def in_use() -> int:
        found: dict[str, dict[str, int]] = run.store.slots.pool("spool", 0).holds()
        return sum(each.get("aggregator", 0) for each in found.values())

    wait_until(lambda: in_use() == count, "that other updates are given back")


@pytest.mark.covers("D7", "D12")
@pytest.mark.parametrize(
    ("codec", "dtype", "in_files"), [("none", "bfloat16", True), ("bf16", "float32", True), ("none", "float32", False)]
)
def test_a_users_mean_matches_the_built_in_mean(tmp_path: Path, codec: str, dtype: str, in_files: bool) -> None:
    """A user's aggregator that takes the mean gives the same bits as the built-in mean."""
    # With updates in files and in memory. The aggregator reads each element as the codec decodes it, and no rounding is
    # added to a bf16 model.
    write(tmp_path, MEAN)
    start = {name: tensor.to(getattr(torch, dtype)) for name, tensor in START.items()}
    results = []
    for folder, extra in ((tmp_path / "own", {}), (tmp_path / "built-in", {"aggregation.aggregator.path": None})):
        options: dict[str, Any] = {
            "aggregation.upload_codec.name": codec,
            "rounds.total": 2,
            "disk.state_dir": folder / "state",
            "disk.in_files": in_files,
        }
        with aggregated(tmp_path, "mean", start=start, **(options | extra)) as world:
            world.rounds(trained, 1, 2)
            require_updates_in_use(world.server, 0)
            results.append((world.finish(), world.status.history[-1].grad_norm))
    (own, own_norm), (built_in, built_in_norm) = results
    require_equal(own, built_in)
    assert all(bool((tensor != 0).all()) for tensor in own.values())
    assert own_norm == built_in_norm


@pytest.mark.covers("D7")
def test_an_aggregator_may_keep_updates_for_later_rounds(tmp_path: Path) -> None:
    """An aggregator may keep updates and read them again in a later round."""
    # With θ₀ = 0, the pseudo-gradient of round 1 is −local. The aggregator reads its values again in round 2.
    write(
        tmp_path,
        """
class Keeper:
    def __init__(self, factor):
        self.kept, self.factor = [], factor

    def aggregate(self, updates):
        told = [[u.site, u.round, u.weight, u.steps, u.metrics, sorted(u.tensors), sorted(u.buffers)] for u in updates]
        self.kept.extend(updates)
        lazy = type(updates[0].tensors.ref("w")).__name__
        again = [[u.site, u.round, u.tensors["w"].sum().item(), u.buffers["bn.running_mean"].item()] for u in self.kept]
        with open(os.path.join(HERE, "told.json"), "a") as file:
            file.write(json.dumps([told, lazy, again]) + "\\n")
        return {name: -self.factor * torch.ones(updates[0].tensors.ref(name).shape) for name in updates[0].tensors}
""",
    )
    b_first = dict(reversed(SITES.items()))
    with aggregated(tmp_path, "Keeper", b_first, rounds=2, **{"aggregation.aggregator.factor": 2.0}) as world:
        for number in (1, 2):
            world.rounds(trained, number, metrics={"loss": 1.0 / number})
        require_updates_in_use(world.server, 4)
        model = world.finish()
    require_updates_in_use(world.server, 0)  # the pins went with the process
    first, second = (json.loads(line) for line in (tmp_path / "told.json").read_text().splitlines())
    # in the frozen order, by site; what was added sums to 0.55 · 6 = 3.3 for "w", and the buffer has its first, 0.1
    assert first[0] == [
        ["a", 1, 1.0, 0, {"loss": 1.0}, ["v", "w"], ["bn.running_mean"]],
        ["b", 1, 3.0, 0, {"loss": 1.0}, ["v", "w"], ["bn.running_mean"]],
    ]
    assert first[1] == "LazyTensor"
    assert [entry[:2] for entry in second[2]] == [["a", 1], ["b", 1], ["a", 2], ["b", 2]]
    assert [entry[2] for entry in second[2][:2]] == pytest.approx([-3.3, -9.9])
    assert [entry[3] for entry in second[2][:2]] == pytest.approx([0.1, 0.3])
    # w ← w − (−2), twice; the buffer is the server's: the weighted mean
    assert torch.equal(model["w"], torch.full((2, 3), 4.0))
    # (1·0.1 + 3·0.3) / 4 = 0.25 in round 1; then (0.25 + 0.2 + 3·(0.25 + 0.6)) / 4 = 0.75
    assert model["bn.running_mean"].item() == pytest.approx(0.75)


def test_finished_rounds_leave_no_files_open(tmp_path: Path) -> None:
    """After twelve rounds, the server and the aggregator have about as many update files open as after two rounds."""
    write(tmp_path, MEAN)
    with aggregated(tmp_path, "mean", rounds=12) as world:
        server = world.server
        world.rounds(trained, 1, 2)

        def spools_open() -> list[int]:
            pid = server._require_served().place._aggregator._process.pid
            return [sum("/slots/spool-" in path for path in open_paths(each)) for each in ("self", str(pid))]

        require_updates_in_use(server, 0)
        after_two = spools_open()
        world.rounds(trained, *range(3, 13))
        require_updates_in_use(server, 0)
        for before, now in zip(after_two, spools_open(), strict=True):
            assert now <= before + 4  # of the next round, which may begin before the last files are given back
        world.finish()


@pytest.mark.covers("D13")
def test_an_aggregator_accepts_updates_as_they_arrive(tmp_path: Path) -> None:
    """The server gives each update to an aggregator with the method `accept` as it arrives, before the
    round is full.
    """
    # Older updates than `aggregation.max_kept_updates` are released, and reading them raises an error.
    write(
        tmp_path,
        """
class AsTheyArrive:
    def __init__(self):
        self.order, self.kept = [], []

    def say(self, *words):
        with open(os.path.join(HERE, "said.json"), "a") as file:
            file.write(json.dumps(words) + "\\n")

    def accept(self, update):
        self.order.append(update)
        self.kept.append(update)
        self.say("accept", update.site, update.round)

    def aggregate(self):
        readable = []
        for update in self.kept:
            try:
                readable.append(update.tensors["v"].sum().item())
            except Exception as error:
                readable.append(error.message)
        self.say("aggregate", readable)
        return [(name, -torch.ones(ref.shape)) for name, ref in ((n, self.order[0].tensors.ref(n)) for n in ("v", "w"))]

    def reset(self):
        self.order.clear()
        self.say("reset")
""",
    )

    def said() -> list[list[Any]]:
        path = tmp_path / "said.json"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    with aggregated(tmp_path, "AsTheyArrive", rounds=2, **{"aggregation.max_kept_updates": 1}) as world:
        for number in (1, 2):
            world.pull(number=number)
            world.submit("b", trained)
            first = ["accept", "b", number]
            wait_until(lambda: first in said(), "the first update, before there is another")  # noqa: B023
            assert ["accept", "a", number] not in said()
            world.submit("a", trained)
        world.finish()
        require_updates_in_use(world.server, 1)
    log = said()
    assert [entry[0] for entry in log] == 2 * ["accept", "accept", "aggregate", "reset"]
    # 0.1 … 1 over four elements sums to 2.2; of round 1 one update may be kept, so the older, b's, was taken back
    lost = "A lazy tensor was read after its file was released."
    assert log[2][1] == pytest.approx([-6.6, -2.2])
    assert log[6][1] == [lost, pytest.approx(-2.2), pytest.approx(-13.2), pytest.approx(-4.4)]


@pytest.mark.covers("D7")
def test_a_repaired_aggregator_continues_the_run(tmp_path: Path) -> None:
    """If an aggregator raises, the run ends. After the code is repaired, the next start aggregates the same updates."""
    write(tmp_path, MEAN.replace("yield name, result", 'raise ValueError("no such luck")'))
    world = aggregated(tmp_path, "mean").start()
    world.rounds(trained, 1)
    with pytest.raises(RunFailed) as raised:
        world.server.wait(60)
    line = (tmp_path / "mine.py").read_text().splitlines().index('        raise ValueError("no such luck")') + 1
    assert raised.value.message == (
        f"The aggregator '{tmp_path / 'mine.py'}:mean' failed in round 1: ValueError: no such luck "
        f"({tmp_path / 'mine.py'}, line {line})."
    )
    assert "start the run again" in raised.value.remedy
    world.stop()  # before its sites are told: else they would end, too
    assert world.version == 0
    write(tmp_path, MEAN)
    with fresh_processes(), world:
        assert world.server.wait(60)  # no site submits again
        model = world.finish()
    # (1·1 + 3·3) / 4 = 2.5 times what a site of scale 1 adds
    assert torch.allclose(model["v"], 2.5 * torch.linspace(0.1, 1, 4))


@pytest.mark.covers("D7")
@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "its process was killed from outside, by SIGKILL"),
        ("os._exit(3)", "its process ended with exit code 3"),
        ("import threading; threading.Event().wait()", "neither read nor returned a tensor for 1 s"),
        ("return {'w': torch.zeros(3, 2)}", "the aggregator returned 'w' in the shape [3, 2], not [2, 3]"),
    ],
    ids=["killed", "exits", "hangs", "shape"],
)
def test_an_aggregator_without_a_result_ends_the_run(tmp_path: Path, body: str, words: str) -> None:
    """If an aggregator is killed, exits, hangs or returns a wrong shape, the run fails and says why. No version is
    made.
    """
    write(tmp_path, f"def bad(updates):\n    {body}\n")
    world = aggregated(tmp_path, "bad", "a", **{"aggregation.aggregator_timeout_s": 1.0}).start()
    world.rounds(trained, 1)
    with pytest.raises(RunFailed) as raised:
        world.server.wait(60)
    assert "mine.py:bad' failed" in raised.value.message
    assert words in raised.value.message
    world.stop()  # before its sites are told: else they would end, too
    assert world.version == 0
    assert not list((tmp_path / "state").glob("tmp*"))


def write_once(folder: Path, end: str, times: int) -> None:
    """An aggregator `once` that comes to an end as often as this, and then works."""
    write(
        folder,
        f"import os, signal\ndef once(updates):\n"
        f"    with open({str(folder / 'begun')!r}, 'a+') as file:\n        file.write('x')\n"
        f"        if file.tell() <= {times}:\n            file.flush()\n            {end}\n"
        "    return dict(updates[0].tensors)\n",
    )


KILL = "os.kill(os.getpid(), signal.SIGKILL)"


@pytest.mark.covers("X9")
@pytest.mark.parametrize(("end", "times"), [(KILL, 3), ("raise MemoryError", 1)], ids=["killed", "memory"])
def test_an_aggregator_out_of_memory_ends_the_server(tmp_path: Path, end: str, times: int) -> None:
    """If an aggregator is killed again and again or lacks memory, the server ends with an error. The next start uses
    the same updates.
    """
    write_once(tmp_path, end, times)
    world = aggregated(tmp_path, "once", "a").start()
    world.rounds(trained, 1)
    with pytest.raises(RunFailed) as raised:
        world.server.run()
    assert not raised.value.is_final
    assert "mine.py:once' failed" in raised.value.message
    assert (tmp_path / "begun").read_text() == times * "x"
    assert "Start the run again: it continues with the same updates." in raised.value.remedy
    with world:
        world.finish()
        world.server.run()


@pytest.mark.covers("X9")
def test_a_killed_aggregator_is_started_again(tmp_path: Path) -> None:
    """If an aggregator is killed from outside, in a round or between rounds, the server starts it again and goes on."""
    write_once(tmp_path, KILL, 2)
    with aggregated(tmp_path, "once", "a", rounds=2) as world:
        world.rounds(trained, 1)
        world.wait(1)
        said = "was killed from outside, by SIGKILL. It is started again"
        assert world.text.count(said) == 2
        os.kill(world.server._require_served().place._aggregator._process.pid, signal.SIGKILL)
        wait_until(lambda: world.text.count(said) == 3, "the end of the process")
        world.rounds(trained, 2)
        world.finish()
    assert (tmp_path / "begun").read_text() == 4 * "x"


def test_a_stopped_server_ends_its_aggregator(tmp_path: Path) -> None:
    """When the server stops, its aggregator's process ends, even in the middle of a round. The next start runs the
    round again.
    """
    write(
        tmp_path,
        """
import time
def waits(updates):
    with open(os.path.join(HERE, "pid"), "w") as file:
        file.write(str(os.getpid()))
    while not os.path.exists(os.path.join(HERE, "go")):
        time.sleep(0.01)
    return updates[0].tensors
""",
    )
    world = aggregated(tmp_path, "waits", "a").start()
    world.rounds(trained, 1)
    pid = tmp_path / "pid"
    wait_until(lambda: pid.exists() and pid.read_text(), "the aggregation")
    world.stop()
    assert not Path(f"/proc/{pid.read_text()}").exists()
    assert world.version == 0
    (tmp_path / "go").write_text("")
    with world:
        world.finish()
    assert world.version == 1


def test_a_path_in_a_run_file_is_relative_to_it(tmp_path: Path) -> None:
    """Relative paths of an aggregator or a persistor in a run file start from the folder of that file."""
    (tmp_path / "run.toml").write_text(
        'aggregation.aggregator.path = "mine.py:mean"\nmodel.persistor.path = "store.py:Store"\n'
    )
    settings = atoll.Settings.read(tmp_path / "run.toml", environ={})
    assert settings.aggregation.aggregator.path == f"{tmp_path / 'mine.py'}:mean"
    assert settings.model.persistor.path == f"{tmp_path / 'store.py'}:Store"
