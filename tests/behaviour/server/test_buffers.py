"""How a buffer's next value is made: the rules of `model.buffers`, those without a setting, and what a site keeps."""

from __future__ import annotations

import copy
import logging
import math
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.processes import wait_until
from kit import Threads, ask_journal, exported, together
from kit.damage import damage_head
from kit.filters import Hanging
from kit.manual_site import ManualSite
from kit.servers import new_simulation
from kit.sites import logged
from kit.world import World
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import atoll
from atoll import Settings
from atoll.cli.export import from_directory
from atoll.errors import ConfigError, SchemaMismatch
from atoll.filters import NormClip
from atoll.store.reader import checked_audit
from atoll.tensors.buffer_rules import run_schema
from atoll.tensors.module_tensors import Marked

pytestmark = pytest.mark.covers("X10")


class Holder(nn.Module):
    """A parameter `w`, and the given buffers."""

    def __init__(self, **buffers: Tensor) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(3))
        for name, value in buffers.items():
            self.register_buffer(name, value.clone())


def result(
    folder: Path, build: Callable[[], nn.Module], train: Callable[[nn.Module, str, int], object], **settings: Any
) -> dict[str, Tensor]:
    """What a run of two sites with equal weights exports."""
    world = World(folder, build(), **{"rounds": 1} | settings)
    world.run(build=build, train=train)
    return world.result


def setting(values: dict[str, dict[str, Tensor]]) -> Callable[[nn.Module, str, int], None]:
    """Training that sets buffers: site → name → value."""

    def train(model: nn.Module, site: str, _: int) -> None:
        for name, value in values[site].items():
            model.get_buffer(name).copy_(value)

    return train


# -- without a setting


def generator_state(seed: int) -> Tensor:
    return torch.Generator().manual_seed(seed).get_state()


KINDS: dict[str, tuple[Any, Any, Any, Any]] = {
    "float flag": ([0.0], [1.0], [0.0], [1.0]),
    "mask": ([1.0, 1, 1], [0.0, 1, 1], [1.0, 1, 1], [0.0, 1, 1]),
    "statistic": ([0.0, 0], [0.5, 1], [1.5, 1], [1.0, 1]),
    "statistic with zeros and ones": ([0.0, 0, 0], [0.0, 4, 1], [1.0, 6, 1], [0.5, 5, 1]),
    "statistic of flags at one site": ([0.0, 0, 0], [1.0, 0, 0], [0.0, 0.5, 0.5], [0.5, 0.25, 0.25]),
    "bool": (False, False, True, False),
    "counter": (0, 5, 8, 8),
    "counter of one element": ([0], [5], [8], [8]),
    "queue of labels": ([-1, -1, -1, -1], [9, 1, 9, 1], [2, 5, 2, 5], [9, 1, 9, 1]),
    "generator": tuple(map(generator_state, (0, 1, 2, 1))),
    "best loss": (math.inf, 3.0, 1.0, 3.0),
    "unit": ([0.6, 0.8], [1.0, 0], [0.0, 1], [1.0, 0]),
    "column": ([[-1.0]] * 3, [[0.0]] * 3, [[4.0]] * 3, [[2.0]] * 3),
    "codebook": ([2.0, 3], [4.0, 3], [6.0, 3], [5.0, 3]),
    "8-bit flag": tuple(torch.full((2,), value).to(torch.float8_e4m3fn) for value in (1.0, 0.0, 1.0, 0.0)),
}
"""Kind → its initial value, what each of two sites makes of it, and the next value."""
UNITS = {
    "all dimensions": torch.full((1, 4, 2, 2), 0.25),
    "a middle dimension": torch.tensor([0.6, 0.8]).view(1, 2, 1).repeat(2, 1, 3),
    "two dimensions": torch.tensor([[0.5, 0.7], [0.1, 0.5]]).view(2, 1, 2).repeat(1, 3, 1),
    "a vector of bfloat16": torch.tensor([0.6, 0.8]).to(torch.bfloat16),
}
KINDS |= {f"unit along {name}": (start, start, -start, start) for name, start in UNITS.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_the_kind_of_a_buffer_decides_its_rule(tmp_path: Path, kind: str) -> None:
    """The kind of a buffer decides how its next value is made. Flags, masks and vectors come from the first site,
    counters take the maximum, other buffers the mean.
    """
    # Several integers, unit vectors and Inf are taken from the first site, too.
    start, a, b, expected = map(torch.as_tensor, KINDS[kind])
    found = result(tmp_path, partial(Holder, x=start), setting({"a": {"x": a}, "b": {"x": b}}))["x"]
    assert torch.equal(found.float(), expected.float())


@pytest.mark.parametrize("norm", [parametrizations.spectral_norm, nn.utils.spectral_norm], ids=["new", "legacy"])
def test_spectral_norm_vectors_come_from_one_site(tmp_path: Path, norm: Callable[[Any], Any]) -> None:
    """The singular vectors of spectral norm come from one site, since a mean of opposite signs would be zero."""
    # The sites have the pairs (u, v) and (−u, −v) of the same weight, whose mean would be zero.

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(norm(nn.Linear(8, 8, bias=False)))

    def train(model: nn.Module, site: str, _: int) -> None:
        model(torch.ones(1, 8))
        for buffer in model.buffers():
            buffer.mul_(1 if site == "a" else -1)

    x, trained, found = torch.eye(8), build(), build()
    train(trained, "a", 1)
    found.load_state_dict(result(tmp_path, build, train))
    assert torch.allclose(found.eval()(x), trained.eval()(x))


@pytest.mark.parametrize(
    ("buffers", "rules"),
    [
        ({"bn.num_batches_tracked": torch.zeros(2, dtype=torch.int64)}, ["max"]),
        ({"bn.batches": torch.zeros(2, dtype=torch.int64)}, ["first"]),
        ({"weight_u": torch.tensor([-1.0]), "norm._v": torch.zeros(3)}, ["first", "first"]),
        (
            {
                "q.fake_quant_enabled": torch.ones(1, dtype=torch.uint8),
                "q.scale": torch.ones(0),
                "q.activation_post_process.min_val": torch.zeros(1),
                "q.activation_post_process.max_val": torch.zeros(1),
            },
            ["keep"] * 4,
        ),
    ],
    ids=["counters", "indices", "singular vectors", "quantiser and observer"],
)
def test_the_name_of_a_buffer_decides_its_rule(buffers: dict[str, Tensor], rules: list[str]) -> None:
    """Buffers with known names have a rule of their own: counters of batches take the maximum, and spectral norm's
    vectors come from one site.
    """
    # Singular vectors with one element or with zeros are taken from one site. An observer has the rule of its fake
    # quantiser, whose scale gets its shape from the data.
    schema = run_schema(Marked(buffers, dict.fromkeys(buffers, True)), {})
    assert {spec.name: spec.rule for spec in schema.tensors} == dict(zip(buffers, rules, strict=True))


def test_logs_the_rules_of_unusual_buffers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The server logs how it combines unusual buffers, but not batch normalisation's statistics and counter."""
    caplog.set_level(logging.INFO, "atoll.server")
    model = Holder(rng=torch.zeros(4, dtype=torch.uint8), table=torch.full((2,), 0.3), range=torch.zeros(0))
    model.bn = nn.BatchNorm1d(2)
    with World(tmp_path, model):
        pass
    assert [line for line in logged(caplog) if "buffers" in line] == [
        "rules that differ from those of running statistics (mean) and counters (max): first: rng; keep: range; "
        "mean: table. To change a rule, set model.buffers in a new run."
    ]


# -- the setting


@pytest.mark.parametrize(
    ("rule", "expected"),
    [("mean", [4.0, 6.5]), ("max", [7.0, 8.0]), ("sum", [7.0, 11.0]), ("first", [7.0, 5.0]), ("keep", [1.0, 2.0])],
)
@pytest.mark.parametrize("reducer", ["mean", "median"])
def test_a_pattern_sets_the_rule_of_a_buffer(tmp_path: Path, rule: str, expected: list[float], reducer: str) -> None:
    """A pattern in `model.buffers` sets the rule of a buffer, whichever reducer the run has."""
    # From (1, 2), site `a` goes to (7, 5) and site `b` to (1, 8). The sum is 1 + 6 + 0 and 2 + 3 + 6.
    values = {"a": {"x": torch.tensor([7.0, 5])}, "b": {"x": torch.tensor([1.0, 8])}}
    settings = {"model.buffers": {"x": rule}, "aggregation.reducer": {"name": reducer}}
    assert (
        result(tmp_path, partial(Holder, x=torch.tensor([1.0, 2])), setting(values), **settings)["x"].tolist()
        == expected
    )


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint16, torch.float16])
def test_a_sum_counts_over_sites_and_rounds(tmp_path: Path, dtype: torch.dtype) -> None:
    """A buffer with the rule `sum` adds up the changes of all sites in all rounds, and keeps its dtype."""
    # From 5, each of three rounds adds 1 and 10: 5 + 3 · 11 = 38.

    def train(model: nn.Module, site: str, _: int) -> None:
        seen = model.get_buffer("seen")
        seen.copy_(torch.tensor([seen.item() + (1 if site == "a" else 10)]))

    build = partial(Holder, seen=torch.tensor([5]).to(dtype))
    found = result(tmp_path, build, train, **{"rounds": 3, "model.buffers": {"seen": "sum"}})
    assert found["seen"].item() == 38
    assert found["seen"].dtype == dtype


def test_the_first_matching_pattern_counts(tmp_path: Path) -> None:
    """If several patterns in `model.buffers` match a buffer, the first one sets its rule."""
    values = {
        "a": {"x": torch.tensor([2.0]), "y": torch.tensor([2.0])},
        "b": {"x": torch.tensor([6.0]), "y": torch.tensor([6.0])},
    }
    build = partial(Holder, x=torch.tensor([3.0]), y=torch.tensor([3.0]))
    found = result(tmp_path, build, setting(values), **{"model.buffers": {"x": "first", "*": "max"}})
    assert (found["x"].item(), found["y"].item()) == (2.0, 6.0)


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (
            ["bn.*", "ema"],
            r"settings: model\.buffers: .* are patterns without their rules.*"
            r'model\.buffers = \{"bn\.\*" = "mean", "ema" = "mean"\}',
        ),
        ({"bn.*": "average"}, r"model\.buffers.*'mean', 'max', 'sum', 'first' or 'keep'"),
    ],
)
def test_refuses_a_list_and_an_unknown_rule(value: object, told: str) -> None:
    """`model.buffers` refuses a list of patterns without rules, and an unknown rule."""
    with pytest.raises(ConfigError, match=told):
        Settings.build({"algorithm.name": "diloco", "model.buffers": value})


@pytest.mark.parametrize(
    ("buffer", "rule", "told"),
    [
        (torch.tensor([True]), "sum", "its dtype BOOL is too small for a sum"),
        (torch.tensor([1], dtype=torch.uint8), "sum", "its dtype U8 is too small for a sum"),
        (torch.tensor([1], dtype=torch.int8), "sum", "its dtype I8 is too small for a sum"),
        (torch.tensor([math.inf]), "mean", "it contains NaN or Inf"),
        (torch.tensor([math.nan]), "sum", "it contains NaN or Inf"),
    ],
)
def test_refuses_a_rule_that_a_buffer_cannot_have(tmp_path: Path, buffer: Tensor, rule: str, told: str) -> None:
    """A server refuses a rule that a buffer cannot have: a sum of a small dtype, or a sum or mean of NaN or Inf."""
    with pytest.raises(ConfigError, match=f"model.buffers sets \"{rule}\" for 'x', but {told}"):
        World(tmp_path, Holder(x=buffer), **{"model.buffers": {"x": rule}}).start()


def test_a_restart_refuses_another_buffer_rule(tmp_path: Path) -> None:
    """A restart may leave out the rules of buffers, but may not change them."""
    build = partial(Holder, x=torch.tensor([3.0]))
    with World(tmp_path, build(), **{"model.buffers": {"x": "max"}}):
        pass
    with World(tmp_path, build()):
        pass
    with pytest.raises(ConfigError, match=r"has the rule 'max' for 'x', but this start sets model\.buffers to 'first'"):
        World(tmp_path, build(), **{"model.buffers": {"x": "first"}}).start()


def test_the_error_shows_a_flags_present_rule(tmp_path: Path) -> None:
    """If a restart sets another rule for a flag, the error describes the flag's present rule."""
    build = partial(Holder, x=torch.tensor([1.0, 1.0, 0.0]))
    with World(tmp_path, build()):
        pass
    with pytest.raises(
        ConfigError, match=r"has the rule .first \(mean if a site has a value that is neither 0 nor 1\). for"
    ):
        World(tmp_path, build(), **{"model.buffers": {"x": "mean"}}).start()


@pytest.mark.parametrize(
    ("rules", "told"),
    [
        ({"w*": "sum"}, ['"sum" for \'w\', which is a parameter; a parameter can only have "keep"']),
        ({"m*": "mean"}, ["\"mean\" for 'mask', but BOOL has no mean: it keeps the rule first"]),
        (
            {"*": "mean"},
            [
                "\"mean\" for 'seen', but I64 has no mean: it keeps the rule max",
                "\"mean\" for 'mask', but BOOL has no mean: it keeps the rule first",
                "\"mean\" for 'u8', but U8 has no mean: it keeps the rule first",
            ],
        ),
        ({"[mus]*": "first", "*": "max"}, []),
        ({"*": "max", "seen": "sum"}, ["\"sum\" for 'seen', but earlier patterns match all its tensors"]),
    ],
    ids=str,
)
def test_warns_of_a_rule_without_effect(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, rules: dict[str, str], told: list[str]
) -> None:
    """The server warns of a rule that has no effect.

    A parameter can only be kept, integers and booleans have no mean, and only the first matching pattern counts.
    """
    model = Holder(mask=torch.tensor([True]), u8=torch.tensor([3], dtype=torch.uint8), seen=torch.tensor([5]))
    with World(tmp_path, model, **{"model.buffers": rules}):
        pass
    warnings = [each.getMessage() for each in caplog.records if each.getMessage().startswith("model.buffers")]
    assert warnings == [f"model.buffers sets {text}" for text in told]


@pytest.mark.parametrize(
    ("rules", "told"),
    [
        (
            {"haed.weight": "keep"},
            "\"keep\" for 'haed.weight', which matches no tensor of the model. Did you mean 'head.",
        ),
        ({"*": "mean", "head.*": "keep"}, "\"keep\" for 'head.*', but earlier patterns match all its tensors"),
    ],
    ids=["no tensor", "earlier pattern"],
)
def test_refuses_a_keep_pattern_without_effect(tmp_path: Path, rules: dict[str, str], told: str) -> None:
    """A server refuses a pattern with the rule `keep` that matches nothing, since the tensor meant to stay private
    would be sent.
    """
    with pytest.raises(ConfigError) as refused:
        World(tmp_path, Tied(), **{"model.buffers": rules}).start()
    assert told in str(refused.value)


class Tied(nn.Module):
    """A head that is tied to the embedding, and a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.head = nn.Embedding(2, 2), nn.Linear(2, 2)
        self.head.weight = self.emb.weight
        for parameter in self.parameters():
            nn.init.zeros_(parameter)


def test_a_pattern_matches_tied_names(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A pattern with either name of a tied weight applies to this weight."""
    # It stays at each site. The mean of 1 and 3 is 2, for the bias alone.

    def train(model: nn.Module, site: str, _: int) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1 if site == "a" else 3)

    found = result(tmp_path, Tied, train, **{"model.buffers": {"head.weight": "keep"}})
    assert (found["emb.weight"].unique().tolist(), found["head.bias"].tolist()) == ([0.0], [2.0, 2.0])
    assert not [line for line in logged(caplog) if line.startswith("model.buffers")]


# -- in every kind of run


def shared_model() -> Holder:
    return Holder(flag=torch.zeros(1), seen=torch.tensor([5]), best=torch.tensor([-math.inf]), own=torch.zeros(1))


RULES = {"seen": "sum", "best": "max", "own": "keep"}
EXPECTED = {"flag": 1.0, "seen": 5 + 3 * 11, "best": 4.0, "own": 0.0}
"""After three rounds: flag of a; 1 + 10 more in each round; the largest; the initial value."""


@torch.no_grad()
def count(model: nn.Module, site: str, *_: object) -> None:
    """One round or local step at a site."""
    is_a = site.endswith(("a", "0"))
    model.get_buffer("flag").fill_(1.0 if is_a else 0.0)
    model.get_buffer("seen").add_(1 if is_a else 10)
    model.get_buffer("best").copy_(model.get_buffer("best").clamp_min(3.0 if is_a else 4.0))
    model.get_buffer("own").add_(1)


def simulated(worker: Any) -> None:
    model = shared_model()
    for fl_round in worker:
        fl_round.load_into(model)
        assert model.get_buffer("own").item() == fl_round.number - 1  # kept from round to round
        count(model, worker.site)
        fl_round.submit(model)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"aggregation.upload_codec.name": "int8", "aggregation.download_codec.name": "int8"},
        {"aggregation.reducer.name": "median"},
    ],
    ids=["plain", "codecs", "robust"],
)
def test_buffer_rules_hold_in_federated_rounds(tmp_path: Path, settings: dict[str, Any]) -> None:
    """The rules of `model.buffers` hold in federated rounds."""
    found = result(tmp_path, shared_model, count, **{"rounds": 3, "model.buffers": RULES}, **settings)
    assert {name: found[name].item() for name in EXPECTED} == EXPECTED


@pytest.mark.parametrize(
    "settings",
    [{}, {"K": 1, "tau": 1, "alpha": 0.5}, {"aggregation.download_codec.name": "int8"}, {"async.enabled": True}],
    ids=["plain", "merged", "codec", "async"],
)
def test_buffer_rules_hold_in_diloco_runs(tmp_path: Path, settings: dict[str, Any]) -> None:
    """The rules of buffers hold in DiLoCo runs, also with fragments, a codec or asynchronous updates."""
    # Each round has one local step. In an asynchronous run, the sites' rounds alternate, so that each site has made one
    # and a half.

    def inner(model: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([model.w], lr=0.0)

    def step(model: Any, optimizer: torch.optim.Optimizer, site: str, _: int) -> None:
        model.w.grad = torch.ones(3)
        count(model, site)
        optimizer.step()

    given = {"algorithm": "diloco", "H": 2 if "tau" in settings else 1, "model.buffers": RULES, "rounds": 3}
    world = World(tmp_path, shared_model(), **given, **settings)
    world.run(steps=100, build=shared_model, inner=inner, step=step)
    found = {name: world.result[name].item() for name in EXPECTED}
    if "async.enabled" in settings:
        assert (found["seen"] - 5) in {3, 12, 21, 30}  # three updates, each of one site
    else:
        assert found["flag"] == 1.0
        assert found["best"] == 4.0
    assert found["own"] == 0.0


def test_buffer_rules_hold_in_a_simulation(tmp_path: Path) -> None:
    """The rules of buffers hold in a simulation. Any process may train a site, and the tensors that the site keeps go
    with it.
    """
    done = new_simulation(
        shared_model(),
        script=simulated,
        sites=2,
        processes=2,
        **{"algorithm.name": "fedavg", "rounds.total": 3, "rounds.sites": 2, "model.buffers": RULES},
        **{"disk.state_dir": tmp_path / "state", "disk.min_free_bytes": 0},
    ).run()
    assert done.failed == {}
    found = exported(tmp_path)
    assert {name: found[name].item() for name in EXPECTED} == EXPECTED


# -- what a site keeps for itself


class Normed(nn.Module):
    """A linear layer and batch normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.bn = nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2)


FED_BN: dict[str, Any] = {"model.buffers": {"bn.*": "keep"}}


def shift_norm(model: nn.Module, site: str, *_: object) -> None:
    """Add 1 (site a) or 10 to the linear layer and to all of batch normalisation."""
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.add_(1 if site == "a" else 10)


@pytest.mark.parametrize("algorithm", ["fedavg", "fedprox", "scaffold"])
def test_batch_normalisation_stays_at_each_site(tmp_path: Path, algorithm: str) -> None:
    """With the rule `keep`, each site keeps its own batch normalisation, both its parameters and its statistics."""
    # A site that is started again in each round, with a new model, continues with the values that it kept.
    met: dict[tuple[str, int], list[float]] = {}

    def work(site: str) -> None:
        for number in (1, 2, 3):
            model = Normed()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with world.worker(site) as worker:
                fl_round = worker.next_round()
                assert fl_round is not None
                fl_round.load_into(model)
                met[site, number] = [
                    value[0].item() for value in (model.bn.weight, model.bn.bias, model.bn.running_mean)
                ]
                with fl_round.correct(model, optimizer):
                    for parameter in model.parameters():
                        parameter.grad = torch.zeros_like(parameter)
                    optimizer.step()
                shift_norm(model, site)
                fl_round.submit(model)

    with World(tmp_path, Normed(), algorithm=algorithm, rounds=3, **FED_BN) as world:
        start = world.model
        together(*(partial(work, site) for site in "ab"))
        world.server.run()
    for site, each in (("a", 1), ("b", 10)):  # weights begin as 1, biases and means as 0
        assert [met[site, number] for number in (1, 2, 3)] == [[1 + n * each, n * each, n * each] for n in range(3)]
    assert torch.allclose(world.result["linear.weight"], start["linear.weight"] + 3 * 5.5)
    assert all(torch.equal(world.result[name], start[name]) for name in start if name.startswith("bn."))


def test_tensors_that_a_site_keeps_are_never_sent(tmp_path: Path) -> None:
    """Tensors with the rule `keep` are in no update."""
    # The update has the size of the linear layer, 16 bytes in a segment of 64.
    world = World(tmp_path, Normed(), rounds=1, **FED_BN)
    world.run(build=Normed, train=shift_norm)
    (outbox,) = (world.workers / "a").glob("*/outbox.bin")
    assert outbox.stat().st_size == 64


def test_a_refused_update_leaves_kept_tensors_unchanged(tmp_path: Path) -> None:
    """If a site's update is refused, the tensors that the site keeps for itself go back to their values before the
    round.
    """
    # The first update has NaN in the linear layer, and its batch normalisation with the bias 100 is dropped.
    met = []
    with World(tmp_path, Normed(), "a", rounds=2, **FED_BN) as world, world.worker() as worker:
        for fl_round in worker:
            model = fl_round.load_into(Normed())
            met.append(model.bn.bias[0].item())
            nn.init.constant_(model.bn.bias, 100.0 if len(met) == 1 else 7.0)
            if len(met) == 1:
                nn.init.constant_(model.linear.weight, math.nan)
            fl_round.submit(model)
        assert worker.load_into(Normed()).bn.bias.tolist() == [7.0, 7.0]
    assert met == [0.0, 0.0, 7.0]


def test_a_restarted_diloco_site_continues_with_its_kept_tensors(tmp_path: Path) -> None:
    """A DiLoCo site that starts again with a new model continues with the tensors that it kept.

    Before that, it has made two rounds of one step.
    """

    with World(tmp_path, Normed(), "a", algorithm="diloco", H=1, rounds=0, **FED_BN) as world:
        for kept in (0.0, 2.0):
            model = Normed()
            with world.diloco(model, torch.optim.SGD(model.parameters(), lr=0.0)) as loop:
                assert model.bn.bias.tolist() == [kept, kept]
                for _ in range(2):
                    with torch.no_grad():
                        model.bn.bias += 1
                    for parameter in model.parameters():
                        parameter.grad = torch.zeros_like(parameter)
                    loop.optimizer.step()  # type: ignore[union-attr]


def test_a_rounds_state_dict_has_the_kept_tensors(tmp_path: Path) -> None:
    """The state dict of a round has the tensors that the site keeps, also after an update that lacked one of them."""
    met = []

    def train(_: str, number: int, state: dict[str, Tensor]) -> dict[str, Tensor]:
        met.append(state["bn.bias"][0].item())
        if number == 2:
            del state["bn.bias"]
        else:
            state["bn.bias"] += 1
        return state

    with World(tmp_path, Normed(), "a", rounds=3, **FED_BN) as world:
        world.rounds(train, 1, 2, 3)
    assert met == [0.0, 1.0, 1.0]


def test_filters_do_not_see_kept_tensors(tmp_path: Path) -> None:
    """A site's filters do not see the tensors that the site keeps for itself."""
    # The change of the linear layer, 4 ones, has the norm 2. With batch normalisation the norm would be larger.
    start = Normed()
    world = World(tmp_path, start, "a", rounds=1, **FED_BN)
    world.run(build=Normed, train=shift_norm, filters=[NormClip(1.0)])
    assert torch.allclose(world.result["linear.weight"], start.linear.weight + 0.5)


def test_evaluation_uses_each_sites_kept_tensors(tmp_path: Path) -> None:
    """A cross-site evaluation measures each model together with the tensors that the evaluating site keeps."""
    # Site `a` trains the linear layer to 1 and keeps the bias 100. Site `b` trains it to 3 and keeps 200. No bias is
    # sent.
    seen: dict[str, list[tuple[float, float]]] = {"a": [], "b": []}

    def work(site: str) -> None:
        def measure(model: Any) -> dict[str, float]:
            seen[site].append((model.linear.weight[0, 0].item(), model.bn.bias[0].item()))
            return {"loss": 0.0}

        def train(model: Normed) -> None:
            nn.init.constant_(model.linear.weight, 1.0 if site == "a" else 3.0)
            nn.init.constant_(model.bn.bias, 100.0 if site == "a" else 200.0)

        with world.worker(site) as worker:
            worker.evaluates(measure, model=Normed())
            for fl_round in worker:
                model = fl_round.load_into(Normed())
                train(model)
                fl_round.submit(model)

    steps = ({"kind": "train"}, {"kind": "cross_site_evaluation"})
    with World(tmp_path, Normed(), rounds=1, **{"workflow.steps": steps}, **FED_BN) as world:
        together(*(partial(work, site) for site in "ab"))
        world.server.run()
    rounded = {site: sorted((round(weight, 5), bias) for weight, bias in values) for site, values in seen.items()}
    assert rounded == {  # of a, of the run, of b
        site: [(1.0, own), (2.0, own), (3.0, own)] for site, own in (("a", 100.0), ("b", 200.0))
    }
    assert b"bn.bias" not in (next((tmp_path / "workers" / "a").glob("*/local.safetensors"))).read_bytes()


# -- Inf, and shapes that come from the data


def test_filters_accept_buffers_with_inf(tmp_path: Path) -> None:
    """A filter accepts buffers that contain Inf; values that have not changed add nothing to the norm."""
    # The change of a mask of −Inf is 0, so only the three ones of `w` are clipped to the norm 1.

    def train(model: nn.Module, *_: object) -> None:
        nn.init.ones_(model.w)  # type: ignore[arg-type]
        model.get_buffer("best").fill_(2.0)

    build = partial(Holder, mask=torch.tensor([-math.inf, 0.0]), best=torch.tensor(math.inf))
    world = World(tmp_path, build(), "a", rounds=1)
    world.run(build=build, train=train, filters=[NormClip(1.0)])
    found = world.result
    assert torch.allclose(found["w"], torch.full((3,), 1 / math.sqrt(3)))
    assert (found["mask"].tolist(), found["best"].item()) == ([-math.inf, 0.0], 2.0)


@pytest.mark.parametrize("name", ["w", "table", "running_mean"])
def test_refuses_an_update_with_new_inf_values(tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture) -> None:
    """An update with Inf in a tensor that had none is refused, and the error names the tensor."""
    # The update of site `b` is refused once. Then the site submits finite values.
    seen = []

    def train(model: nn.Module, site: str, _: int) -> None:
        seen.append(site)
        with torch.no_grad():
            model.state_dict()[name].fill_(math.inf if seen.count("b") == 1 and site == "b" else 2.0)

    build = partial(Holder, table=torch.full((2,), 0.3), running_mean=torch.zeros(2))
    assert result(tmp_path, build, train)[name][0].item() == 2.0
    assert f"b: this update does not count: The update of b was refused: {name} contains Inf" in caplog.text


class ByData(nn.Module):
    """Buffers that get their shape in the first batch, as those of observers of quantisation."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("low", torch.zeros(0))
        self.register_buffer("seen", torch.zeros(0, dtype=torch.int64))


def test_buffers_may_get_their_shape_from_the_data(tmp_path: Path) -> None:
    """Lazy buffers that get their shape from the data may have another shape at each site, with the rule `keep`."""
    # Site `b` keeps its shape from before the run. An exported model fits a new model.
    met: dict[str, list[list[float]]] = {"a": [], "b": []}

    with World(tmp_path, ByData(), rounds=3) as world:
        for number in (1, 2, 3):
            world.ask(number=number)
            for site in "ab":
                model = ByData()
                if (site, number) == ("b", 1):
                    model.low = torch.full((2,), 7.0)
                world.sites[site].pull(into=model)
                met[site].append(model.low.tolist())
                model.low = torch.full((number if site == "a" else 4,), float(number))
                model.seen = torch.zeros(2, dtype=torch.int64)
                world.sites[site].submit(model)
        found = world.finish()
    assert met == {"a": [[], [1.0], [2.0, 2.0]], "b": [[7.0, 7.0], [1.0] * 4, [2.0] * 4]}
    ByData().load_state_dict(found)


def test_a_diloco_site_keeps_shapes_from_its_data(tmp_path: Path) -> None:
    """In a DiLoCo run, too, a buffer with the rule `keep` may have the shape that the site's data gives it."""
    model = ByData()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        model.low = model.linear(torch.ones(1, 2)).detach()[0]
        model.linear(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    World(tmp_path, ByData(), "a", algorithm="diloco", H=1, rounds=2).train_steps(model, optimizer, step)
    assert model.low.shape == (2,)


def test_refuses_a_changed_shape_of_an_average(tmp_path: Path) -> None:
    """If a buffer that is averaged has another shape at a site, the site's update is refused, and the error proposes
    `keep`.
    """
    model = Holder(x=torch.ones(1))
    with World(tmp_path, model, "a", **{"model.buffers": {"x": "mean"}}) as world:
        world.ask()
        world.sites["a"].pull(into=model)
        model.x = torch.ones(3)
        with pytest.raises(atoll.AtollError, match=r"has x F32\[3\].*model\.buffers = \{\"x\" = \"keep\"\}"):
            world.sites["a"].submit(model)


FIRST: dict[str, Any] = {"model.buffers": {"low": "first", "seen": "first"}}


@pytest.mark.parametrize("key", ["", "aggregation.download_codec.name", "aggregation.upload_codec.name"])
def test_the_first_update_decides_the_shapes_of_buffers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, key: str
) -> None:
    """With the rule `first`, the first update decides the shapes of buffers that depend on the data, and all sites get
    them.
    """
    # Both sites have 3 elements after the first batch. From version 1 on, both have the values of site `a`.
    met: dict[str, list[list[float]]] = {"a": [], "b": []}

    def train(model: Any, site: str, number: int) -> None:
        met[site].append(model.low.tolist())
        model.low = torch.full((3,), number + (0.25 if site == "a" else 0.5))
        model.seen = torch.full((2,), number)
        nn.init.constant_(model.linear.weight, number * (1.0 if site == "a" else 3.0))

    world = World(tmp_path, ByData(), rounds=3, **FIRST, **{key: "int8"} if key else {})
    world.run(build=ByData, train=train)
    said = [line for line in caplog.messages if "shapes" in line]  # a pause while they are taken over is no outage
    assert not any("keeps trying" in line for line in said)
    assert met == {site: [[], [1.25] * 3, [2.25] * 3] for site in "ab"}
    found = world.result
    assert (found["low"].tolist(), found["seen"].tolist()) == ([3.25] * 3, [3, 3])
    torch.testing.assert_close(found["linear.weight"], torch.full((2, 2), 6.0), rtol=0, atol=0.05 if key else 1e-6)


def by_data(site: ManualSite, elements: int) -> nn.Module:
    """A site's model of this round, after a batch that has given the buffer so many elements."""
    model = site.round.load_into(ByData())
    model.low = torch.full((elements,), float(site.round.number))  # type: ignore[assignment]
    return model


def test_refuses_buffers_far_larger_than_the_model(tmp_path: Path) -> None:
    """A site's update is refused if its buffers are far larger than the model."""
    # One buffer of 68 MB exceeds 2²⁶ bytes, which are 67.1 MB, and the size of the model.
    with World(tmp_path, ByData(), "a", **FIRST) as world:
        site = world.sites["a"]
        world.ask()
        told = r"a has 68\.0 MB of buffers .*low \[17000000\].* at most 67\.1 MB are allowed.* Set \"keep\" for them"
        with pytest.raises(SchemaMismatch, match=told) as caught:
            site.submit(by_data(site, 17_000_000))
        site.close(caught.value)
        assert "Start a again after mending its error" in world.status.warnings[0]


def test_refuses_shapes_that_differ_from_the_first_update(tmp_path: Path) -> None:
    """After the first update has decided the shapes of buffers, a site with other shapes is refused before it sends."""
    # Site `b` has 4 elements where the earlier site `a` has 3. Site `c` also has 3, and changes them in round 2.
    with World(tmp_path, ByData(), "abc", rounds=2, **{"rounds.min_sites": 2}, **FIRST) as world:
        world.ask(number=1)
        sites = world.sites
        sites["a"].submit(by_data(sites["a"], 3))
        wrong = by_data(sites["b"], 4)
        sent = sites["b"].worker.bytes_up
        told = r"b has the buffer 'low' with the shape \[4\], but the run has \[3\].* first update.*\"low\" = \"keep\""
        with pytest.raises(SchemaMismatch, match=told) as caught:
            sites["b"].submit(wrong)
        assert sites["b"].worker.bytes_up == sent
        sites.pop("b").close(caught.value)
        sites["c"].submit(by_data(sites["c"], 3))
        world.ask(number=2)
        assert sites["a"].pull()["low"].tolist() == [1.0] * 3
        with pytest.raises(SchemaMismatch, match=r"with the shape \[5\], but the run has \[3\].*before version 1"):
            sites["c"].submit(by_data(sites["c"], 5))
        sites["c"].submit(by_data(sites["c"], 3))
        sites["a"].submit(by_data(sites["a"], 3))
        assert world.finish()["low"].tolist() == [2.0] * 3


def test_an_unfinished_update_with_old_shapes_expires(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If another site's update decides the buffer shapes first, an unfinished update with the old shapes no longer
    counts, and its site trains again.
    """
    # The update of site `a`, without elements, hangs in the server's filter when site `b` comes with 3 elements. Site
    # `a` then trains once more. Version 0 has no values in these shapes, so the model of site `a` keeps its own.
    caplog.set_level(logging.INFO)
    go, begun = threading.Event(), threading.Event()
    with World(tmp_path, ByData(), rounds=1, filters={"a": [Hanging(go, begun.set)]}, **FIRST) as world:
        world.ask(number=1)
        sites = world.sites

        def submit_a() -> None:
            sites["a"].submit(by_data(sites["a"], 0))
            assert sites["a"].next_round() == 1
            model = by_data(sites["a"], 3)
            assert sites["a"].round.load_into(model).low.tolist() == [1.0] * 3
            sites["a"].submit(model)

        first = Threads(submit_a)
        assert begun.wait(60)
        second = Threads(lambda: sites["b"].submit(by_data(sites["b"], 3)))
        wait_until(lambda: "b has the first update, which decides the shapes" in caplog.text, "the shapes of b")
        go.set()
        first.join()
        second.join()
        assert world.finish()["low"].tolist() == [1.0] * 3
    tickets = ask_journal(tmp_path, "SELECT site, state FROM tickets ORDER BY site, ticket")
    assert [tuple(row) for row in tickets] == [("a", "expired"), ("a", "counted"), ("b", "expired"), ("b", "counted")]


def ask_with(site: ManualSite, elements: int, **how: Any) -> None:
    """The site asks for its ticket again, with the shape that its buffer has by now."""
    site._place.exchange.ask(shapes={"low": [elements]}, **how)


def test_shapes_are_decided_before_their_update_arrives(tmp_path: Path) -> None:
    """The first site that announces its buffer shapes decides them, even before its update has arrived."""
    # Site `a` announces 3 elements. Site `b`, which announces 4 elements next, is refused.
    refused = r"\[4\], but the run has \[3\], and another site had the first update"
    with World(tmp_path, ByData(), **FIRST) as world:
        world.ask(number=1)
        ask_with(world.sites["a"], 3)
        with pytest.raises(SchemaMismatch, match=refused):
            ask_with(world.sites["b"], 4)


def test_a_lost_version_1_keeps_the_shapes(tmp_path: Path) -> None:
    """The buffer shapes that the first update decided stay, even if version 1 is damaged and the run goes back to
    version 0.
    """
    # The first update had no elements.
    world = World(tmp_path, f"{__name__}:ByData", "a", **FIRST)
    with world:
        world.ask(number=1)
        world.sites["a"].submit(by_data(world.sites["a"], 0))
        world.ask(number=2)
    damage_head(tmp_path)
    with world:
        assert world.version == 0
        world.join("b")
        with pytest.raises(SchemaMismatch, match=r"the first update has decided the shapes before version 1"):
            ask_with(world.sites["b"], 3, retries=0)


@pytest.mark.parametrize("settings", [{"disk.in_files": False}, {"model.ranks": 2}], ids=str)
def test_some_runs_keep_the_shapes_of_the_initial_model(tmp_path: Path, settings: dict[str, Any]) -> None:
    """Runs with `disk.in_files = false` or with several ranks refuse new shapes of buffers."""
    with World(tmp_path, ByData(), "a", **FIRST, **settings) as world:
        with pytest.raises(SchemaMismatch, match=r"those of the initial model in a swarm, .*disk\.in_files = false"):
            ask_with(world.sites["a"], 3)


def test_shapes_of_the_first_update_outlive_restarts(tmp_path: Path) -> None:
    """The buffer shapes of the first update stay after restarts of the server and the site, for new sites, and in a
    saved state.
    """
    world = World(tmp_path, f"{__name__}:ByData", "a", rounds=4, **FIRST)
    for last in (1, 2):
        with world:
            world.pull(number=last)
            assert world.sites["a"].pull()["low"].tolist() == [last - 1.0] * (3 if last > 1 else 0)
            world.sites["a"].submit(by_data(world.sites["a"], 3))
            world.wait(last)
    path = world.server.save_state(tmp_path / "state.safetensors")
    given = {"disk.state_dir": tmp_path / "other", "network.port": 0}
    with atoll.Server.load_state(path, settings=given) as server:
        with ManualSite(server.url, site="n", folder=world.workers) as site:
            assert site.next_round() == 3
            assert by_data(site, 3).linear.weight.shape == (2, 2)
            assert site.pull()["low"].tolist() == [2.0] * 3
    for folder in (tmp_path / "state", tmp_path / "other"):
        assert checked_audit(folder, 50).entries >= 5
        out = tmp_path / "out.safetensors"
        assert from_directory(folder, out) == 2
        assert load_file(out)["low"].tolist() == [2.0] * 3


@pytest.mark.parametrize("streams", [False, True])
def test_diloco_takes_the_first_updates_shapes(tmp_path: Path, streams: bool) -> None:
    """In a DiLoCo run, the first update decides the shapes of buffers.

    This holds for whole synchronisations, and for two fragments while an update is in flight.
    """
    settings: dict[str, Any] = {"algorithm": "diloco", "H": 2, "rounds": 2} | ({"K": 2, "tau": 1} if streams else {})

    def build() -> nn.Module:
        return nn.Sequential(ByData(), ByData())

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, site: str, number: int) -> None:
        for each in model:
            each.low = torch.full((3,), float(number))
            each.linear(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    settings["model.buffers"] = {"*.low": "first", "*.seen": "first"}
    world = World(tmp_path, build(), **settings)
    sites = world.run(steps=12, build=build, step=step)
    found = world.result
    assert found["0.low"].shape == found["1.low"].shape == (3,)
    assert all(torch.equal(tensor, found[name]) for name, tensor in sites.models["a"].state_dict().items())


def test_a_simulation_refuses_buffers_shaped_by_data(tmp_path: Path) -> None:
    """A simulation refuses buffers whose shape depends on the data of each site."""
    settings = {"rounds.total": 1, "rounds.sites": 1, "disk.state_dir": tmp_path / "state", "algorithm.name": "fedavg"}
    script = f"{__name__}:shaped_by_data"
    simulation = new_simulation(ByData(), script=script, sites=1, processes=1, **settings, **FIRST)
    with pytest.raises(atoll.AtollError, match=r"has the buffer 'low' with the shape \[3\], but the run has \[0\]"):
        simulation.run()


def shaped_by_data(worker: atoll.Worker) -> None:
    for fl_round in worker:
        model = fl_round.load_into(ByData())
        model.low = torch.ones(3)  # type: ignore[assignment]
        fl_round.submit(model)


class Noisy(nn.Module):
    """A module that makes a new tensor of its extra state at each request."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.draws = nn.Linear(2, 2), 0

    def get_extra_state(self) -> Tensor:
        return torch.tensor([self.draws], dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        self.draws = int(state)


def test_warns_once_of_extra_state_that_is_no_tensor(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If `get_extra_state` returns something that is not a tensor, the log warns once and names the entry."""

    class Remembering(nn.Module):
        def get_extra_state(self) -> dict[str, int]:
            return {"seen": 1}

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(2, 1), Remembering())

    result(tmp_path, build, lambda *_: None)
    told = [each.getMessage() for each in caplog.records if "get_extra_state" in each.getMessage()]
    assert [text.split()[0] for text in told] == ["1._extra_state"]


def test_extra_state_is_taken_from_the_first_site(tmp_path: Path) -> None:
    """Extra state that is a tensor is taken from the first site, and each site gets it by `set_extra_state`."""
    # The tensor from `get_extra_state` is a copy, so that writing into it would not be enough.
    met: list[int] = []

    def train(model: nn.Module, site: str, number: int) -> None:
        met.append(model.draws)  # type: ignore[arg-type]
        model.draws = number * (3 if site == "a" else 7)  # type: ignore[assignment]

    found = result(tmp_path, Noisy, train, rounds=2)
    assert met == [0, 0, 3, 3]
    assert found["_extra_state"].tolist() == [6]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("rules", [{}, {"*": "first"}], ids=["usual", "first"])
@pytest.mark.parametrize("mode", ["eager", "fx"])
def test_models_with_fake_quantisers_train(tmp_path: Path, mode: str, rules: dict[str, str]) -> None:
    """A model for quantisation-aware training trains in a run, and the exported model can be converted to int8."""
    # Some fake quantisers have one scale per channel, and some have one scale. With the rule `first`, the scales of the
    # channels are those of the first site, in the shapes of the first update.
    from torch.ao import quantization

    def prepared() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).train()
        if mode == "fx":
            from torch.ao.quantization import quantize_fx

            mapping = quantization.get_default_qat_qconfig_mapping("fbgemm")
            return quantize_fx.prepare_qat_fx(model, mapping, (torch.ones(1, 4),))
        model = nn.Sequential(quantization.QuantStub(), *model, quantization.DeQuantStub())
        model.qconfig = quantization.get_default_qat_qconfig("fbgemm")  # type: ignore[assignment]
        return quantization.prepare_qat(model.train())

    def train(model: nn.Module, site: str, number: int) -> None:
        generator = torch.Generator().manual_seed(10 * number + ord(site))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(8, 4, generator=generator)).square().mean().backward()
            optimizer.step()

    model = prepared()
    build = partial(copy.deepcopy, prepared())  # torch cannot trace two models at once
    found = result(tmp_path, build, train, **{"rounds": 3, "model.buffers": rules})
    scales = [tensor.shape for name, tensor in found.items() if name.endswith("weight_fake_quant.scale")]
    assert scales == ([(8,), (2,)] if rules else [(1,), (1,)])
    model.load_state_dict(found)
    model(torch.ones(1, 4))  # computes the scales of the weights from the global model
    model.eval().apply(quantization.disable_observer)
    x = torch.full((3, 4), 0.3)
    before = model(x)
    if mode == "fx":
        from torch.ao.quantization import quantize_fx

        converted = quantize_fx.convert_fx(model)
    else:
        converted = quantization.convert(model)
    assert torch.allclose(converted(x), before, atol=0.02)
