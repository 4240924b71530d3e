"""SCAFFOLD over the real path: rounds as in the paper, sites with weights, and what it refuses.

p_i = w_i / W        W = the sum of the weights of the sites heard × (registered sites / sites heard)
c ← c · W_before / W + Σ_S p_i·Δc_i
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import ask_journal
from kit.models import Weights
from kit.world import World
from scaffold_world import ETA, STEPS, TARGETS, One, first_round, local_part, one_round, sgd, train

import atoll
from atoll.errors import UsageError


def by_itself(fl_round: Any, target: float) -> One:
    """A loop that does everything itself: the groups that the round gives, and the lines of the specification."""
    model = fl_round.load_into(One())
    c, own = fl_round.global_state("control")["w"], fl_round.own_state("control")["w"]
    x = model.w.detach().clone()
    with torch.no_grad():
        for _ in range(STEPS):
            model.w -= ETA * ((model.w - target) - own + c)
    plus = own - c + (x - model.w.detach()) / (STEPS * ETA)
    fl_round.submit(model, groups={"control": {"w": plus - own, "frozen": torch.zeros(2)}}, steps=STEPS)
    return model


def with_the_round(fl_round: Any, target: float, **told: Any) -> One:
    model = fl_round.load_into(One())
    optimizer = torch.optim.SGD([model.w], lr=ETA)
    with fl_round.correct(model, optimizer):
        train(model, optimizer, target)
    fl_round.submit(model, **told)
    return model


@pytest.mark.covers("S10", "S12")
@pytest.mark.parametrize("part", [by_itself, with_the_round])
def test_scaffold_rounds_match_the_paper(tmp_path: Path, part: Any) -> None:
    """SCAFFOLD's rounds give the numbers of algorithm 1, option II, of the paper, computed in plain Python."""
    # Two sites take part in all three rounds. Round 3 is the first round that starts with a c_i computed from a c_i
    # other than zero.
    x, c, own = 0.0, 0.0, dict.fromkeys(TARGETS, 0.0)
    with World(tmp_path, One(), "ab", algorithm="scaffold", rounds=3) as world:
        for number in (1, 2, 3):
            before = c
            x, c, own, y = one_round(x, c, own)
            world.ask(number=number)
            for name, target in TARGETS.items():
                fl_round = world.sites[name].round
                assert part(fl_round, target).w.item() == pytest.approx(y[name], rel=1e-5)
                assert fl_round.global_state("control")["w"].item() == pytest.approx(before, rel=1e-5)
        for site in world.sites.values():
            assert site.next_round() is None
            assert site.worker.load_into(One()).w.item() == pytest.approx(x, rel=1e-5)
        assert world.finish().keys() == {"w", "frozen", "count"}  # no controls


@pytest.mark.covers("S7", "S12")
def test_an_update_carries_its_number_of_steps(tmp_path: Path) -> None:
    """A site's update carries the number of local steps. A number of steps given by the script takes precedence."""
    with World(tmp_path, One(), "a", algorithm="scaffold", rounds=3) as world:
        for part, told in ((by_itself, {}), (with_the_round, {}), (with_the_round, {"steps": 70})):
            world.ask()
            part(world.sites["a"].round, 1.0, **told)
        world.finish()
    counted = "SELECT report ->> '$.steps' FROM tickets WHERE state = 'counted' ORDER BY ticket"
    assert ask_journal(tmp_path, counted) == [(STEPS,), (STEPS,), (70,)]


def test_scripts_receive_copies_of_the_controls(tmp_path: Path) -> None:
    """A script that overwrites the controls that it received changes only its own copies."""
    # By hand: y = 1 − 0.9³ = 0.271 and Δc = (0 − y)/(K·η). With N = 1, c = c_i = −0.271/0.3.
    with World(tmp_path, One(), "a", algorithm="scaffold", rounds=2) as world:
        world.ask()
        with_the_round(world.sites["a"].round, 1.0)
        world.pull()
        for _ in range(2):
            fl_round = world.sites["a"].round
            for state in (fl_round.global_state("control"), fl_round.own_state("control")):
                assert state["w"].item() == pytest.approx(-0.271 / 0.3)
                state["w"].fill_(7.0)


def test_a_scaffold_loop_trains_plainly_without_a_server() -> None:
    """A loop that computes SCAFFOLD's steps itself makes plain gradient steps when it runs without a server."""
    # By hand, three steps at rate 0.1 towards 1 give w = 1 − 0.9³.
    with atoll.join() as worker:
        for fl_round in worker:
            assert by_itself(fl_round, 1.0).w.item() == pytest.approx(1 - 0.9**3)


# -- weights define the objective, for model and controls alike

POINTS = {"a": 1.0, "b": -3.0, "c": 5.0}
"""Site → its target."""
WEIGHTS = {"a": 1.0, "b": 3.0, "c": 8.0}


def point(size: int = 1) -> Weights:
    """A model of one vector, in fp64."""
    return Weights(x=torch.zeros(size, dtype=torch.float64))


def descend(fl_round: Any, curvature: torch.Tensor, target: torch.Tensor, steps: int, lr: float, weight: float) -> None:
    """Local steps on ½·Σ curvature·(x − target)²."""
    model = fl_round.load_into(point(len(target)))
    optimizer = sgd(model, lr)
    with fl_round.correct(model, optimizer):
        for _ in range(steps):
            model.x.grad = curvature * (model.x.detach() - target)
            optimizer.step()
    fl_round.submit(model, weight=weight)


def one_step(world: World, site: str, weight: float | None = None) -> tuple[float, float, float]:
    """Local part with one step at rate ½ on ½·(x − target)²; x, c and the site's c_i, as the round begins."""
    fl_round, one = world.sites[site].round, torch.ones(1, dtype=torch.float64)
    x = fl_round.load_into(point()).x.item()
    known = x, fl_round.global_state("control")["x"].item(), fl_round.own_state("control")["x"].item()
    descend(fl_round, one, POINTS[site] * one, 1, 0.5, WEIGHTS[site] if weight is None else weight)
    return known


def test_scaffold_converges_to_the_weighted_optimum(tmp_path: Path) -> None:
    """SCAFFOLD converges to the optimum of the weighted objective, though sites make unequal numbers of steps."""
    # The objective Σ w_i·f_i with f_i = ½·Σ a_i·(x − t_i)² is least at Σ w_i·a_i·t_i / Σ w_i·a_i. Every five rounds
    # divide the distance to the optimum by about 20.
    weights, steps = {"a": 739.0, "b": 463.0, "c": 60.0}, {"a": 8, "b": 12, "c": 5}
    generator = torch.Generator().manual_seed(3)
    curvatures = {site: 0.5 + torch.rand(6, generator=generator, dtype=torch.float64) for site in weights}
    targets = {site: torch.randn(6, generator=generator, dtype=torch.float64) for site in weights}
    with World(tmp_path, point(6), weights, algorithm="scaffold", rounds=25) as world:
        for _ in range(25):
            world.ask()
            for site, weight in weights.items():
                descend(world.sites[site].round, curvatures[site], targets[site], steps[site], 0.1, weight)
        x = world.finish()["x"]
    above = sum(weights[site] * curvatures[site] * targets[site] for site in weights)
    below = sum(weights[site] * curvatures[site] for site in weights)
    torch.testing.assert_close(x, above / below, rtol=0, atol=1e-6)


def test_unequal_weights_match_a_calculation_by_hand(tmp_path: Path) -> None:
    """SCAFFOLD with unequal weights of the sites gives the numbers of a calculation by hand."""
    # Each site makes one step at rate η = ½: c_i⁺ = g_i(x), y_i = x − ½·(g_i − c_i + c), g_i = x − target. Round 1 has
    # sites `a` and `b`: W = 1 + 3 = 4. g = −1, 3; y = 0.5, −1.5. Then x = 0 − (¼·(−0.5) + ¾·1.5) = −1 and c = ¼·(−1) +
    # ¾·3 = 2. In round 2, site `c` has registered, but has not submitted: W = (1 + 3)·3/2 = 6. g = −2, 2; Δ = −1, −1; y
    # = −1.5, −1.5. Then x = −1 − (¼·½ + ¾·½) = −1.5 and c = 2·4/6 + (1·(−1) + 3·(−1))/6 = 2/3. Round 3 has all three
    # sites: W = 12. g = −2.5, 1.5, −6.5; Δ = −0.5, −0.5, −6.5; x − y = 1/12, 1/12, −35/12. Then x = −1.5 − (1/12 + 3/12
    # − 8·35/12)/12 = 5/12 and c = 2/3·6/12 + (−0.5 − 3·0.5 − 8·6.5)/12 = −25/6.
    with World(tmp_path, point(), "ab", algorithm="scaffold", rounds=4) as world:
        world.ask(number=1)
        assert [one_step(world, site) for site in "ab"] == [(0.0, 0.0, 0.0)] * 2
        world.ask(number=2)
        world.join("c")  # the second round is open, for two
        assert one_step(world, "a") == (-1.0, 2.0, -1.0)
        assert one_step(world, "b") == (-1.0, 2.0, 3.0)
        world.ask(number=3)
        for site, own in (("a", -2.0), ("b", 2.0), ("c", 0.0)):
            assert one_step(world, site) == pytest.approx((-1.5, 2 / 3, own), abs=1e-15)
        world.ask("a")
        assert one_step(world, "a")[:2] == pytest.approx((5 / 12, -25 / 6), abs=1e-15)


def test_the_total_keeps_the_weight_of_an_absent_site(tmp_path: Path) -> None:
    """The total weight W keeps the weight of a site that sits out a round."""
    # The weights from round 1 stay: 1, 2 and 4, with the sum 7. In round 2, without site `c`, W is (1 + 2 + 4)·3/3, not
    # 3·3/2. The new weights that sites `a` and `b` report change nothing. Site `d` joins in round 3 and never submits.
    # From then on N is 4, and W is 7·4/3.
    with World(tmp_path, One(), "abc", algorithm="scaffold", rounds=3, **{"rounds.min_sites": 2}) as world:
        for number, weights in enumerate([{"a": 1.0, "b": 2.0, "c": 4.0}, {"a": 8.0, "b": 8.0}, {"a": 1.0, "b": 1.0}]):
            for site, weight in weights.items():
                world.ask(site)
                if (site, number) == ("a", 2):
                    world.join("d")
                    world.sites.pop("d").close()
                with_the_round(world.sites[site].round, 1.0, weight=weight)
            if number == 0:
                world.sites.pop("c").close()
        world.finish()
        history = world.status.history
    assert [(len(each.workers), each.population) for each in history] == [(3, 3), (2, 3), (2, 4)]
    assert [each.total_weight for each in history] == pytest.approx([7.0, 7.0, 28 / 3])


def test_a_site_without_samples_adds_no_weight(tmp_path: Path) -> None:
    """A site that submits with weight 0 adds nothing to the total weight W until it first trains."""
    # The sites `a` and `b` have the weights 2 and 6. In round 1, site `b` submits weight 0: W = 2, and c is the control
    # of site `a` alone. In round 2 both sites train: W = 8. In round 3, site `b` submits weight 0 again: its earlier
    # weight and its control stay, and W = 8.
    weights, x, c, total = {"a": 2.0, "b": 6.0}, 0.0, 0.0, 2.0
    own = dict.fromkeys(TARGETS, 0.0)
    with World(tmp_path, One(), "ab", algorithm="scaffold", rounds=4) as world:
        for number, (trains, total_now) in enumerate([("a", 2.0), ("ab", 8.0), ("a", 8.0)], 1):
            y, change = {}, {}
            world.ask(number=number)
            for site, client in world.sites.items():
                if site in trains:
                    y[site], plus = local_part(x, c, own[site], TARGETS[site])
                    change[site] = plus - own[site]
                with_the_round(client.round, TARGETS[site], weight=weights[site] if site in trains else 0)
            c = c * total / total_now + sum(weights[site] / total_now * change[site] for site in trains)
            x = sum(weights[site] * y[site] for site in trains) / sum(weights[site] for site in trains)
            total, own = total_now, {site: own[site] + change.get(site, 0.0) for site in own}
        world.ask(number=4)
        for site, client in world.sites.items():
            assert client.round.load_into(One()).w.item() == pytest.approx(x, rel=1e-5)
            assert client.round.global_state("control")["w"].item() == pytest.approx(c, rel=1e-5)
            assert client.round.own_state("control")["w"].item() == pytest.approx(own[site], rel=1e-5)
        assert [each.total_weight for each in world.status.history] == [2.0, 8.0, 8.0]


def test_the_log_reports_a_changed_weight_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A site's first weight stays in force. The log says once that the site has reported another weight."""
    # The expected numbers are those of two sites with the weights 1 and 3. After a restart, the server reads the
    # weights from its journal.
    with World(tmp_path, point(), "ab", algorithm="scaffold", rounds=3) as world:
        world.ask()
        for site in "ab":
            one_step(world, site)
        world.ask(number=2)
        world.restart()
        assert one_step(world, "a") == (-1.0, 2.0, -1.0)
        assert one_step(world, "b", 500.0) == (-1.0, 2.0, 3.0)
        world.ask(number=3)
        # W = 4:  x = −1 − ½ = −1.5;  c = 2 + ¼·(−1) + ¾·(−1) = 1
        assert one_step(world, "a") == (-1.5, 1.0, -2.0)
        assert one_step(world, "b", 500.0) == (-1.5, 1.0, 2.0)
        world.finish()
    said = [record.getMessage() for record in caplog.records if "500" in record.getMessage()]
    assert len(said) == 1  # once a site
    assert {"b", "500", "3"} <= set(re.findall(r"\w+", said[0]))


def test_equal_weights_give_the_papers_bits(tmp_path: Path) -> None:
    """If all sites have equal weights, the server's control c has the bits of the paper's formula."""
    # With weight 1, c is Σ Δc_i·(1/N) in the order of the sites' names, with one rounding per site. Δc_i = g_i(0) =
    # −target.
    with World(tmp_path, point(), "abc", algorithm="scaffold", rounds=2) as world:
        world.ask()
        for site in "abc":
            one_step(world, site, 1.0)
        world.ask("a")
        _, c, _ = one_step(world, "a", 1.0)
    wanted = -torch.tensor([POINTS["a"]], dtype=torch.float64) * (1 / 3)
    for site in "bc":
        wanted.add_(-torch.tensor([POINTS[site]], dtype=torch.float64), alpha=1 / 3)
    assert c == wanted.item()


# -- what is refused, before anything is sent

GOOD = {"w": torch.zeros(1), "frozen": torch.zeros(2)}


@pytest.mark.covers("S12")
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([torch.zeros(1)], r"groups\['control'\] is of type list"),
        ({"w": torch.zeros(1)}, r"groups\['control'\] has no entry for 'frozen'"),
        ({**GOOD, "v": torch.zeros(1)}, r"groups\['control'\] has an entry for 'v', which is not a parameter"),
        ({**GOOD, "w": torch.zeros(3)}, r"groups\['control'\]\['w'\] has the shape \[3\], but the parameter has \[1\]"),
        ({**GOOD, "w": torch.zeros(1, dtype=torch.int64)}, r"groups\['control'\]\['w'\] is torch.int64"),
        ({**GOOD, "w": torch.tensor([float("nan")])}, r"groups\['control'\]\['w'\] contains NaN or Inf"),
        ({**GOOD, "w": "zero"}, r"groups\['control'\]\['w'\].? is of type str: not a tensor"),
        (None, "trained without the algorithm's correction"),
    ],
    ids=["list", "missing", "unknown", "shape", "integers", "nan", "text", "none"],
)
def test_submit_refuses_a_malformed_control_difference(tmp_path: Path, given: Any, words: str) -> None:
    """A site's `submit` refuses a malformed control difference and says what is wrong with it. The round goes on."""
    with first_round(tmp_path) as fl_round:
        model = fl_round.load_into(One())
        with pytest.raises(UsageError, match=words):
            fl_round.submit(model, groups=None if given is None else {"control": given}, steps=1)
        fl_round.submit(model, groups={"control": {name: value.numpy() for name, value in GOOD.items()}}, steps=1)
        assert fl_round.done


@pytest.mark.covers("S7")
def test_submit_refuses_incomplete_or_repeated_corrections(tmp_path: Path) -> None:
    """A site's `submit` refuses a control difference without a number of steps, or after a call of `correct`. A second
    call of `correct` in one round is refused, because it would correct each step twice.
    """
    with first_round(tmp_path) as fl_round:
        model = fl_round.load_into(One())
        with pytest.raises(UsageError, match="steps=0"):
            fl_round.submit(model, groups={"control": GOOD})
        fl_round.correct(model, optimizer := sgd(model))
        # once: hooks of an earlier call would correct each step twice
        with pytest.raises(UsageError, match="already corrects"):
            fl_round.correct(model, optimizer)
        with pytest.raises(UsageError, match="has already computed the groups"):
            fl_round.submit(model, groups={"control": GOOD}, steps=1)


def test_fedavg_has_no_controls(tmp_path: Path) -> None:
    """A FedAvg run has no controls, and a site's `submit` refuses a control difference."""
    with first_round(tmp_path, "fedavg") as fl_round:
        model = fl_round.load_into(One())
        assert fl_round.global_state("control") == fl_round.own_state("control") == {}
        with pytest.raises(UsageError, match="needs no tensors besides the model"):
            fl_round.submit(model, groups={"control": GOOD}, steps=1)


@pytest.mark.parametrize(
    ("rates", "steps", "words"),
    [
        ([ETA, ETA], 0, "no optimizer step"),
        ([0.0, 0.0], 1, r"\(1 step\) is 0"),
        ([-0.1, -0.1], 1, "at least 0"),
        ([float("inf")] * 2, 1, "finite"),
        ([0.1, 0.2], 1, "learning rates 0.1, 0.2"),
    ],
)
def test_scaffold_refuses_unusable_rates_and_no_steps(
    tmp_path: Path, rates: list[float], steps: int, words: str
) -> None:
    """SCAFFOLD refuses a round without steps, and learning rates that are zero, negative, infinite or unequal."""
    with first_round(tmp_path) as fl_round:
        model = fl_round.load_into(One())
        optimizer = torch.optim.SGD([{"params": [model.w]}, {"params": [model.frozen]}], lr=ETA)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        fl_round.correct(model, optimizer)

        def take_part() -> None:
            train(model, optimizer, 1.0, steps)
            fl_round.submit(model)

        with pytest.raises(UsageError, match=words):
            take_part()


@pytest.mark.covers("X3")
def test_names_of_controls_are_reserved(tmp_path: Path) -> None:
    """SCAFFOLD refuses a model with a tensor whose name begins with `atoll.control.`.

    A run whose algorithm has no controls accepts this name.
    """
    model = {"w": torch.zeros(2), "atoll.control.v": torch.zeros(2)}
    with pytest.raises(UsageError, match=r"'atoll\.control\.v', but names that begin with 'atoll\.control\.' are"):
        World(tmp_path, model, algorithm="scaffold").start()
    with World(tmp_path / "other", model):  # there are none here
        pass
