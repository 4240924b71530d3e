"""SCAFFOLD over the real path, against the paper's algorithm written down plainly."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.servers import plain_server
from scaffold_world import ETA, TARGETS, One, controls, first_round, one_round, train

import atoll
from atoll.errors import UsageError

ROUNDS = 3


def reference(rounds: int, eta_g: float = 1.0) -> tuple[float, float, dict[str, float]]:
    """x, c and every c_i after so many rounds of both sites."""
    x, c, own = 0.0, 0.0, dict.fromkeys(TARGETS, 0.0)
    for _ in range(rounds):
        x, c, own, _ = one_round(x, c, own, eta_g)
    return x, c, own


@pytest.fixture
def server(tmp_path: Path) -> Iterator[atoll.Server]:
    with plain_server(
        tmp_path, One(), algorithm="scaffold", sites=2, rounds=ROUNDS, **{"rounds.min_sites": 2}
    ) as server:
        yield server


def rounds_of(server: atoll.Server, folder: Path, count: int) -> dict[str, Any]:
    """Both sites take part in so many rounds, in turn; what their workers know at the end."""
    workers = {site: atoll.join(server.url, site=site, folder=folder / site) for site in TARGETS}
    loops = {site: iter(worker) for site, worker in workers.items()}
    for _ in range(count):
        for site, target in TARGETS.items():
            step(loops[site], target)
    return {"workers": workers, "loops": loops}


def leave(known: dict[str, Any]) -> None:
    for worker in known["workers"].values():
        worker.leave()


def test_a_third_site_that_joins_rescales_c(server: atoll.Server, tmp_path: Path) -> None:
    """c is the mean of all c_i; the newcomer's is 0, so c shrinks to 2/3 before the round's Δ/3 are added."""
    known = rounds_of(server, tmp_path, 1)
    second = next(known["loops"]["a"])  # the round is open, for two
    late = atoll.join(server.url, site="c", folder=tmp_path / "c")
    take_part(second, TARGETS["a"])
    step(known["loops"]["b"], TARGETS["b"])
    _, c_before, own = reference(2)
    # N = 3 when round 2 closed: c = 2/3·c₁ + (Δa + Δb)/3, which is the mean of all three c_i
    loops = {**known["loops"], "c": iter(late)}
    for site, target in {**TARGETS, "c": 5.0}.items():
        round_ = step(loops[site], target)
        assert round_.global_state("control")["w"].item() == pytest.approx((own["a"] + own["b"] + 0.0) / 3, rel=1e-5)
    assert c_before == pytest.approx((own["a"] + own["b"]) / 2)  # as it would have been with two
    leave(known)
    late.leave()


def test_a_site_that_sits_out_a_round_keeps_its_weight_in_the_total(tmp_path: Path) -> None:
    """Weights 1, 2 and 4, Σ = 7. Round 2 is without c: W stays (1 + 2 + 4)·3/3, whatever a and b say anew; not 3·3/2.

    A site d joins later and is never heard: from round 3 on, N is 4, and W = 7·4/3.
    """
    with plain_server(tmp_path, One(), algorithm="scaffold", sites=3, rounds=3, **{"rounds.min_sites": 2}) as server:
        workers = {site: atoll.join(server.url, site=site, folder=tmp_path / site) for site in "abc"}
        loops = {site: iter(worker) for site, worker in workers.items()}
        for site, weight in {"a": 1.0, "b": 2.0, "c": 4.0}.items():
            take_part(next(loops[site]), 1.0, weight)
        workers["c"].leave()
        for site in "ab":
            take_part(next(loops[site]), 1.0, weight=8.0)
        third = next(loops["a"])
        atoll.join(server.url, site="d", folder=tmp_path / "d").leave()
        take_part(third, 1.0)
        take_part(next(loops["b"]), 1.0)
        assert all(next(loops[site], None) is None for site in "ab")
        workers["a"].leave()
        workers["b"].leave()
        history = server.status().history
    assert [(len(each.workers), each.population) for each in history] == [(3, 3), (2, 3), (2, 4)]
    assert [each.total_weight for each in history] == pytest.approx([7.0, 7.0, 28 / 3])


def step(loop: Any, target: float) -> Any:
    """One round of one site."""
    round_ = next(loop)
    take_part(round_, target)
    return round_


def take_part(round_: Any, target: float, weight: float = 1.0) -> None:
    model = round_.load_into(One())
    optimizer = torch.optim.SGD([model.w], lr=ETA)
    round_.correct(model, optimizer)
    train(model, optimizer, target)
    round_.submit(model, weight=weight)


def test_a_refused_update_leaves_the_control_as_it_was(tmp_path: Path) -> None:
    own = []
    with plain_server(tmp_path, One(), algorithm="scaffold", sites=1, rounds=2) as server:
        with atoll.join(server.url, site="a", folder=tmp_path / "a") as worker:
            for number, round_ in enumerate(worker):
                model = round_.load_into(One())
                optimizer = torch.optim.SGD([model.w], lr=ETA)
                with round_.correct(model, optimizer):
                    train(model, optimizer, 1.0, steps=1)
                if number == 0:
                    with torch.no_grad():
                        model.w.fill_(float("nan"))
                round_.submit(model)
                own.append(round_.own_state("control")["w"].item())
        assert server.status().refused == 1
    # the first attempt is forgotten: x = 0, y = 0.1, Δc = c⁺ = (0 − 0.1)/0.1 = −1
    assert own == [0.0, 0.0, pytest.approx(-1.0)]


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda round_, model: None, "without the algorithm's correction"),
        (lambda round_, model: round_.correct(model, torch.optim.SGD([model.w], lr=ETA)), "no optimizer step"),
        (lambda round_, model: with_rate(round_, model, 0.0), "steps is 0"),
        (lambda round_, model: with_rate(round_, model, -0.1), "at least 0"),
        (lambda round_, model: with_rate(round_, model, float("inf")), "finite"),
        (lambda round_, model: unequal(round_, model), "learning rates 0.1, 0.2"),
    ],
)
def test_what_scaffold_cannot_use_is_refused_with_a_remedy(tmp_path: Path, spoil: Any, words: str) -> None:
    with first_round(tmp_path) as round_:
        model = round_.load_into(One())

        def take_part() -> None:
            spoil(round_, model)
            round_.submit(model)

        with pytest.raises(UsageError, match=words):
            take_part()


def with_rate(round_: Any, model: One, rate: float) -> None:
    optimizer = torch.optim.SGD([model.w], lr=ETA)
    optimizer.param_groups[0]["lr"] = rate
    round_.correct(model, optimizer)
    train(model, optimizer, 1.0, steps=1)


def unequal(round_: Any, model: One) -> None:
    optimizer = torch.optim.SGD([{"params": [model.w], "lr": 0.1}, {"params": [model.frozen], "lr": 0.2}])
    round_.correct(model, optimizer)
    train(model, optimizer, 1.0, steps=1)


def test_a_schedule_is_followed() -> None:
    """Rates 0, 0.1, 0.2: Δc = (x − y)/0.3; the warm-up step without a rate does no harm."""
    model = One()
    optimizer = torch.optim.SGD([model.w], lr=0.0)
    scaffold = atoll.Scaffold(model, controls(0.0), controls(0.0))
    with scaffold.correct(optimizer):
        for rate in (0.0, 0.1, 0.2):
            optimizer.param_groups[0]["lr"] = rate
            train(model, optimizer, 1.0, steps=1)
    assert scaffold.steps == 3
    assert scaffold.finish()["w"].item() == pytest.approx(-(1 - 0.9 * 0.8) / 0.3)


def test_a_round_is_corrected_once(tmp_path: Path) -> None:
    """Guards against hooks of an earlier call that go on: each step was corrected twice."""
    with first_round(tmp_path) as round_:
        model = round_.load_into(One())
        optimizer = torch.optim.SGD([model.w], lr=ETA)
        round_.correct(model, optimizer)
        with pytest.raises(UsageError, match="already corrected"):
            round_.correct(model, optimizer)


@pytest.mark.covers("X3")
def test_a_models_own_names_do_not_collide_with_those_of_controls(tmp_path: Path) -> None:
    model = {"w": torch.zeros(2), "atoll.control.v": torch.zeros(2)}
    with pytest.raises(UsageError, match=r"'atoll\.control\.v', but names that begin with 'atoll\.control\.' are"):
        plain_server(tmp_path, model, algorithm="scaffold").start()
    with plain_server(tmp_path / "other", model):  # there are none here
        pass


def test_a_step_without_gradients_is_none() -> None:
    """Nothing is corrected where the optimizer moved nothing; behind one with them, w ← w − η·g − η·(c − c_i).

    Δc = (0 − w)/η − c = 3/0.5 − 4: the first step adds no rate.
    """
    model = One()
    optimizer = torch.optim.SGD([model.w], lr=0.5)
    scaffold = atoll.Scaffold(model, controls(4.0), controls(0.0))
    with scaffold.correct(optimizer):
        optimizer.step()
        assert (model.w.item(), scaffold.steps) == (0.0, 0)
        model.w.grad = torch.tensor([2.0])
        optimizer.step()
    assert (model.w.item(), scaffold.steps) == (-3.0, 1)  # 0 − 0.5·2 − 0.5·4
    assert scaffold.finish()["w"].item() == pytest.approx(2.0)
