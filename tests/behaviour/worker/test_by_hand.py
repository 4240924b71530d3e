"""Loops written by hand: SCAFFOLD's control metadata read and given back by their names, over a real server."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit import ask_journal
from kit.servers import plain_server
from safetensors.torch import load_file
from scaffold_world import ETA, STEPS, TARGETS, One, one_round, train

import atoll
from atoll.errors import UsageError


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., atoll.Server]]:
    with ExitStack() as stack:
        common = {"algorithm": "scaffold", "sites": 1, "rounds": 2}
        yield lambda **options: stack.enter_context(plain_server(tmp_path, One(), **common | options))


def plainly(fl_round: Any, target: float) -> One:
    """SCAFFOLD's worker without any helper: only what the round gives, and the paper's two lines."""
    model = fl_round.load_into(One())
    c, own = fl_round.global_state("control")["w"], fl_round.own_state("control")["w"]
    x = model.w.detach().clone()
    with torch.no_grad():
        for _ in range(STEPS):
            model.w -= ETA * ((model.w - target) - own + c)
    plus = own - c + (x - model.w.detach()) / (STEPS * ETA)
    fl_round.submit(model, groups={"control": {"w": plus - own, "frozen": torch.zeros(2)}}, steps=STEPS)
    return model


def with_the_helper(fl_round: Any, target: float) -> One:
    model = fl_round.load_into(One())
    scaffold = atoll.Scaffold(model, fl_round.global_state("control"), fl_round.own_state("control"))
    optimizer = torch.optim.SGD([model.w], lr=ETA)
    with scaffold.correct(optimizer):
        train(model, optimizer, target)
    difference = scaffold.finish()
    assert scaffold.steps == STEPS
    assert difference["frozen"].tolist() == [0.0, 0.0]
    next_own = fl_round.own_state("control")["w"] + difference["w"]
    for _ in range(2):  # asked once more
        assert torch.equal(scaffold.own_controls["w"], next_own)
        assert torch.equal(scaffold.finish()["w"], difference["w"])
    fl_round.submit(model, groups={"control": difference}, steps=scaffold.steps)
    return model


def with_the_round(fl_round: Any, target: float) -> One:
    model = fl_round.load_into(One())
    optimizer = torch.optim.SGD([model.w], lr=ETA)
    with fl_round.correct(model, optimizer):
        train(model, optimizer, target)
    fl_round.submit(model)
    return model


@pytest.mark.covers("S10", "S12")
@pytest.mark.parametrize("part", [plainly, with_the_helper, with_the_round])
def test_rounds_by_hand_are_those_of_the_paper(serve: Any, tmp_path: Path, part: Any) -> None:
    """Algorithm 1, option II, in Python's own numbers; two sites, both take part in every round.

    Three rounds: the third is the first that begins with a c_i which was made from another one than zero.
    """
    server = serve(sites=2, rounds=3)
    workers = {site: atoll.join(server.url, site=site, folder=tmp_path / site) for site in TARGETS}
    loops = {site: iter(worker) for site, worker in workers.items()}
    x, c, own = 0.0, 0.0, dict.fromkeys(TARGETS, 0.0)
    for _ in range(3):
        before = c
        x, c, own, y = one_round(x, c, own)
        for site, target in TARGETS.items():
            fl_round = next(loops[site])
            assert part(fl_round, target).w.item() == pytest.approx(y[site], rel=1e-5)
            assert fl_round.global_state("control")["w"].item() == pytest.approx(before, rel=1e-5)
    for site, loop in loops.items():
        assert next(loop, None) is None
        assert workers[site].load_into(One()).w.item() == pytest.approx(x, rel=1e-5)
        workers[site].leave()
    assert server.wait(60)
    assert load_file(server.exports / "model.safetensors").keys() == {"w", "frozen", "count"}  # no controls


@pytest.mark.covers("S7", "S12")
def test_the_update_carries_the_step_count_and_the_scripts_own_wins(serve: Any, tmp_path: Path) -> None:
    server = serve(rounds=3)
    with atoll.join(server.url, site="a", folder=tmp_path / "a") as worker:
        rounds = iter(worker)
        with_the_helper(next(rounds), 1.0)
        with_the_round(next(rounds), 1.0)
        fl_round = next(rounds)
        model = fl_round.load_into(One())
        optimizer = torch.optim.SGD([model.w], lr=ETA)
        with fl_round.correct(model, optimizer):
            train(model, optimizer, 1.0)
        fl_round.submit(model, steps=70)
    assert server.wait(30)
    assert ask_journal(tmp_path, "SELECT steps FROM tickets WHERE state = 'counted' ORDER BY ticket") == [
        (STEPS,),
        (STEPS,),
        (70,),
    ]


GOOD = {"w": torch.zeros(1), "frozen": torch.zeros(2)}


@pytest.mark.covers("S12")
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([torch.zeros(1)], r"groups\['control'\] is a list"),
        ({"w": torch.zeros(1)}, r"groups\['control'\] has no entry for 'frozen'"),
        ({**GOOD, "v": torch.zeros(1)}, r"groups\['control'\] has an entry for 'v', which is not a parameter"),
        ({**GOOD, "w": torch.zeros(3)}, r"groups\['control'\]\['w'\] has the shape \[3\], but the parameter has \[1\]"),
        ({**GOOD, "w": torch.zeros(1, dtype=torch.int64)}, r"groups\['control'\]\['w'\] is torch.int64"),
        ({**GOOD, "w": torch.tensor([float("nan")])}, r"groups\['control'\]\['w'\] contains NaN or Inf"),
        ({**GOOD, "w": "zero"}, r"groups\['control'\]\['w'\].? is a str: neither a tensor"),
        (None, "trained without the algorithm's correction"),
    ],
    ids=["list", "missing", "unknown", "shape", "integers", "nan", "text", "none"],
)
def test_a_malformed_difference_is_refused_by_name_and_the_round_goes_on(
    serve: Any, tmp_path: Path, given: Any, words: str
) -> None:
    server = serve(rounds=1)
    with atoll.join(server.url, site="a", folder=tmp_path / "a") as worker:
        fl_round = next(iter(worker))
        model = fl_round.load_into(One())
        with pytest.raises(UsageError, match=words):
            fl_round.submit(model, groups=None if given is None else {"control": given}, steps=1)
        fl_round.submit(model, groups={"control": {name: value.numpy() for name, value in GOOD.items()}}, steps=1)
        assert fl_round.done
    assert server.wait(30)
    assert server.status().refused == 0


@pytest.mark.covers("S7")
def test_a_difference_without_steps_or_beside_correct_is_refused(serve: Any, tmp_path: Path) -> None:
    server = serve(rounds=1)
    with atoll.join(server.url, site="a", folder=tmp_path / "a") as worker:
        fl_round = next(iter(worker))
        model = fl_round.load_into(One())
        with pytest.raises(UsageError, match="steps=0"):
            fl_round.submit(model, groups={"control": GOOD})
        fl_round.correct(model, torch.optim.SGD([model.w], lr=ETA))
        with pytest.raises(UsageError, match="has already computed the groups"):
            fl_round.submit(model, groups={"control": GOOD}, steps=1)


def test_a_run_without_controls_has_none_and_refuses_a_difference(serve: Any, tmp_path: Path) -> None:
    server = serve(algorithm="fedavg")
    with atoll.join(server.url, site="a", folder=tmp_path / "a") as worker:
        fl_round = next(iter(worker))
        model = fl_round.load_into(One())
        assert fl_round.global_state("control") == fl_round.own_state("control") == {}
        with pytest.raises(UsageError, match="has no groups besides the model"):
            fl_round.submit(model, groups={"control": GOOD}, steps=1)
        with pytest.raises(UsageError, match="global_controls has no entry for 'w'"):
            atoll.Scaffold(model, fl_round.global_state("control"), fl_round.own_state("control"))


def test_the_controls_given_out_are_copies(serve: Any, tmp_path: Path) -> None:
    server = serve()
    with atoll.join(server.url, site="a", folder=tmp_path / "a") as worker:
        loop = iter(worker)
        with_the_round(next(loop), 1.0)
        fl_round = next(loop)
        fl_round.load_into(One())
        first = fl_round.global_state("control")["w"], fl_round.own_state("control")["w"]
        # Δc = (0 − y)/(K·η) with y = 1 − 0.9³ = 0.271; N = 1, so c = c_i = −0.271/0.3
        assert [value.item() for value in first] == [pytest.approx(-0.271 / 0.3)] * 2
        for value in first:
            value.fill_(7.0)
        assert fl_round.global_state("control")["w"].item() == pytest.approx(-0.271 / 0.3)
        assert fl_round.own_state("control")["w"].item() == pytest.approx(-0.271 / 0.3)


def test_alone_a_loop_written_for_scaffold_trains_plainly() -> None:
    """Rate 0.1 towards 1, three steps: w = 1 − 0.9³."""
    with atoll.join() as worker:
        for fl_round in worker:
            assert with_the_helper(fl_round, 1.0).w.item() == pytest.approx(1 - 0.9**3)


def test_fedprox_by_hand_pulls_towards_where_it_began() -> None:
    """w_t = 2; g = w − 1, μ = 0.5, η = 0.1: 2 → 1.9 → 1.9 − 0.1·(0.9 + 0.5·(1.9 − 2)) = 1.815; then plain again."""
    model = One(2.0)
    optimizer = torch.optim.SGD([model.w], lr=0.1)
    prox = atoll.FedProx(model, mu=0.5)
    prox.correct(optimizer)
    train(model, optimizer, 1.0, steps=2)
    prox.finish()
    assert model.w.item() == pytest.approx(1.815)
    train(model, optimizer, 1.0, steps=1)
    assert model.w.item() == pytest.approx(1.815 - 0.1 * 0.815)
    assert prox.steps == 2
    with pytest.raises(UsageError, match="mu is -1"):
        atoll.FedProx(model, mu=-1)


def test_scaffold_takes_arrays_and_refuses_a_round_without_steps() -> None:
    """c = 0.5, c_i = 0.2, η = 0.1, target 1: y = 0 + 0.1·1 − 0.1·0.3 = 0.07; Δc = (0 − 0.07)/0.1 − 0.5 = −1.2."""
    model = One()
    c = {"w": np.array([0.5], dtype=np.float32), "frozen": np.zeros(2, dtype=np.float32)}
    own = {"w": np.array([0.2], dtype=np.float32), "frozen": np.zeros(2, dtype=np.float32)}
    scaffold = atoll.Scaffold(model, c, own)
    with pytest.raises(UsageError, match="no optimizer step"):
        scaffold.finish()
    optimizer = torch.optim.SGD([model.w], lr=ETA)
    scaffold = atoll.Scaffold(model, c, own)
    scaffold.correct(optimizer)
    train(model, optimizer, 1.0, steps=1)
    assert model.w.item() == pytest.approx(0.07)
    assert scaffold.finish()["w"].item() == pytest.approx(-1.2)
    assert scaffold.own_controls["w"].item() == pytest.approx(-1.0)
    assert c["w"].item() == pytest.approx(0.5)
