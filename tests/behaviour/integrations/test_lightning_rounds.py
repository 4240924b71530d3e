"""Each fit is a round: what is received, what is trained, what travels, with real Trainers and a real server."""

from __future__ import annotations

import sqlite3
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.processes import wait_until
from lightning_world import (
    DILOCO,
    PACKAGES,
    SAMPLES,
    Tiny,
    data,
    fit_rounds,
    lines,
    module_class,
    patched,
    serve,
    trainer_of,
)
from safetensors.torch import load_file

import atoll
import atoll.integrations.lightning
from atoll.errors import UsageError

pytestmark = pytest.mark.usefixtures("each_package")


def accepted(server: atoll.Server, what: str) -> list[float]:
    """A column of the journal's tickets."""
    with closing(sqlite3.connect(server.settings.disk.state_dir / "journal.sqlite")) as journal:
        return [value for (value,) in journal.execute(f"SELECT {what} FROM tickets ORDER BY ticket")]


def result(server: atoll.Server) -> dict[str, torch.Tensor]:
    assert server.wait(60)
    return load_file(server.exports / "model.safetensors")


@pytest.mark.covers("S1")
@pytest.mark.parametrize("name", PACKAGES)
@pytest.mark.parametrize("style", ["patch", "callback"])
def test_two_rounds_of_fedavg(tmp_path: Path, name: str, style: str) -> None:
    """w ← w − 0.1·(w − 1), three steps a round: 1 − 0.9³, then 1 − 0.9⁶."""
    with serve(tmp_path) as server:
        options: dict[str, Any] = {"server": server.url, "site": "a", "folder": tmp_path}
        if style == "patch":
            trainer = trainer_of(name)
            atoll.integrations.lightning.patch(trainer, **options)
        else:
            trainer = trainer_of(name, callbacks=[atoll.integrations.lightning.AtollCallback(**options)])
        module, epochs = module_class(name)(), []
        while atoll.integrations.lightning.is_running(trainer):
            trainer.fit(module, data())
            epochs.append(trainer.current_epoch)
            assert trainer.max_epochs == 1  # as the user wrote it
        assert (module.steps, epochs) == (6, [1, 2])
        assert module.w.item() == pytest.approx(1 - 0.9**6)
        assert result(server)["w"].item() == pytest.approx(1 - 0.9**6)
        assert [line["weights"] for line in lines(server)] == [[SAMPLES], [SAMPLES]]
        assert accepted(server, "steps") == [3, 3]
        assert lines(server)[0]["metrics"]["train_loss"] == pytest.approx((0.81 - 1 + 0.19 + 0.81**2) / 2, abs=1e-6)


@pytest.mark.parametrize("algorithm", ["fedavg", "fedprox", "fedadam", "scaffold"])
@pytest.mark.covers("S1", "S5")
def test_the_same_script_runs_what_the_server_chose(tmp_path: Path, algorithm: str) -> None:
    """FedProx, μ = 0.1: e ← e − 0.1·e·… from w = 0: w ← w − 0.1·((w − 1) + 0.1·w) = 0.89·w + 0.1.

    SCAFFOLD of one site: c = c_1, so it is plain SGD. FedAdam's first step is η·g/(|g| + τ), with the sign of −w.
    """
    with serve(
        tmp_path, algorithm, **{"rounds.total": 1}, **({"algorithm.mu": 0.1} if algorithm == "fedprox" else {})
    ) as server:
        trainer = patched(server, tmp_path)
        module = Tiny()
        for number in atoll.integrations.lightning.rounds(trainer):
            assert number == 1
            trainer.fit(module, data())
            local = module.w.item()
        expected = 0.1 * (1 + 0.89 + 0.89**2) if algorithm == "fedprox" else 1 - 0.9**3
        assert local == pytest.approx(expected)
        w = result(server)["w"].item()
        assert w == pytest.approx(module.w.item())
        assert (w > 0) if algorithm == "fedadam" else (w == pytest.approx(expected))


def site(server: atoll.Server, name: str, folder: Path, target: float, module: Any, **options: Any) -> Any:
    """One site of several, to its end; in a thread of its own."""
    trainer = trainer_of(**options)
    atoll.integrations.lightning.patch(trainer, server.url, name, folder=folder)
    module.target = target
    fit_rounds(trainer, module)
    return module


@pytest.mark.covers("S2", "S5", "S7")
@pytest.mark.parametrize("accumulate", [1, 3])
def test_scaffold_of_two_sites_is_that_of_the_paper(tmp_path: Path, accumulate: int) -> None:
    """Algorithm 1, option II, written down plainly; with accumulation three batches are one step."""
    steps, rounds, eta = 3 // accumulate, 3, 0.1
    targets, own = {"a": 1.0, "b": -3.0}, {"a": 0.0, "b": 0.0}
    x = c = 0.0
    for _ in range(rounds):
        ends, deltas = [], []
        for name, target in targets.items():
            y = x
            for _ in range(steps):
                y -= eta * ((y - target) - own[name] + c)
            deltas.append(-c + (x - y) / (steps * eta))
            own[name] += deltas[-1]
            ends.append(y)
        x, c = sum(ends) / 2, c + sum(deltas) / 2
    with serve(tmp_path, "scaffold", **{"rounds.total": rounds, "rounds.sites": 2, "rounds.min_sites": 2}) as server:
        with ThreadPoolExecutor(2) as pool:
            sites = [
                pool.submit(site, server, name, tmp_path / name, target, Tiny(), accumulate_grad_batches=accumulate)
                for name, target in targets.items()
            ]
            modules = [site.result(100) for site in sites]
        assert [module.w.item() for module in modules] == pytest.approx([x, x], rel=1e-5)
        assert result(server)["w"].item() == pytest.approx(x, rel=1e-5)
        assert accepted(server, "steps") == [steps] * 2 * rounds


@pytest.mark.covers("S15", "S6")
def test_two_workers_two_rounds_with_batchnorm(tmp_path: Path) -> None:
    """Running means, momentum 0.1, of the batch means 1.5, 5.5, 9.5 (and 10 more at b), averaged after each round."""

    def local(mean: float, offset: float) -> float:
        for batch in (1.5, 5.5, 9.5):
            mean = 0.9 * mean + 0.1 * (batch + offset)
        return mean

    mean = 0.0
    for _ in range(2):
        mean = (local(mean, 0.0) + local(mean, 10.0)) / 2

    def take_part(name: str, offset: float) -> Any:
        trainer, module = trainer_of(), Tiny(norm=True)
        atoll.integrations.lightning.patch(trainer, server.url, name, folder=tmp_path / name)
        fit_rounds(trainer, module, data(offset=offset))
        return module

    with serve(tmp_path, "scaffold", norm=True, **{"rounds.sites": 2, "rounds.min_sites": 2}) as server:
        with ThreadPoolExecutor(2) as pool:
            modules = [
                site.result(100) for site in [pool.submit(take_part, "a", 0.0), pool.submit(take_part, "b", 10.0)]
            ]
        final = result(server)
        assert final["norm.running_mean"].item() == pytest.approx(mean, rel=1e-5)
        assert final["norm.num_batches_tracked"].item() == 6
        assert final["w"].item() == pytest.approx(1 - 0.9**6)  # both sites want 1
        for module in modules:
            assert all(torch.equal(value, final[name]) for name, value in module.state_dict().items())


@pytest.mark.covers("S4")
@pytest.mark.parametrize("name", PACKAGES)
def test_validation_inside_fit_receives_nothing(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sanity validation sees the global model, the validation after each epoch what training made of it."""
    from atoll.worker.training.federated_loop import Round

    received = spy(monkeypatch, Round, "load_into")
    with serve(tmp_path, **{"rounds.total": 2}) as server:
        trainer = patched(server, tmp_path, name, max_epochs=2, num_sanity_val_steps=1)
        module = module_class(name)()
        with torch.no_grad():
            module.w.fill_(7.0)  # what it was before is of no account
        trainer.fit(module, data(), data())
        assert module.seen == [0.0, round(1 - 0.9**3, 6), round(1 - 0.9**6, 6)]
        assert len(received) == 1


@pytest.mark.covers("S4", "S13")
@pytest.mark.parametrize("name", PACKAGES)
@pytest.mark.parametrize("other", [False, True])
def test_a_validation_before_fit_receives_for_it(
    tmp_path: Path, name: str, other: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from atoll.worker.exchange.exchange import Exchange

    pulled = spy(monkeypatch, Exchange, "ask_and_resend")
    with serve(tmp_path, **{"rounds.total": 2}) as server:
        trainer = trainer_of(name)
        callback = atoll.integrations.lightning.patch(trainer, server.url, "a", folder=tmp_path)
        module = module_class(name)()
        with torch.no_grad():
            module.w.fill_(7.0)
        for number, w in enumerate([0.0, 1 - 0.9**3]):
            trainer.validate(module, data(), verbose=False)
            assert module.seen[-1] == pytest.approx(w, abs=1e-6)
            assert len(pulled) == number + 1
            if other:
                module = module_class(name)()
                with torch.no_grad():
                    module.w.fill_(-5.0)
            trainer.fit(module, data(), data())
            assert len(pulled) == number + 1  # one receive a round
            assert module.w.item() == pytest.approx(1 - 0.9 ** (3 * number + 3))
        model_bytes = 3 * 4  # w and frozen in fp32
        assert callback.driver.worker is not None
        assert callback.driver.worker.bytes_down < 2 * (model_bytes + 4096)
        assert not atoll.integrations.lightning.is_running(trainer)
        metrics = [line["metrics"] for line in lines(server)]
        assert [line["global_val_w"] for line in metrics] == pytest.approx([0.0, 1 - 0.9**3])
        assert [line["val_w"] for line in metrics] == pytest.approx([1 - 0.9**3, 1 - 0.9**6])


class Measured(Tiny):
    """Says what it is told to say, validation by validation."""

    def __init__(self, losses: list[float]) -> None:
        super().__init__()
        self.losses = iter(losses)

    def on_validation_epoch_end(self) -> None:
        self.log("val_loss", next(self.losses))


@pytest.mark.covers("S13", "X41")
@pytest.mark.parametrize(
    ("metric", "version", "least"), [("val_loss", 2, 0.2), ("global_val_loss", 1, 0.1)], ids=["in-fit", "before-fit"]
)
def test_what_validation_measures_decides_which_version_is_best(
    tmp_path: Path, metric: str, version: int, least: float
) -> None:
    """A round is credited to the version that it began with, the first to version 0. w of version v is 1 − 0.9³ᵛ."""
    before, inside = [0.5, 0.1, 0.4, 0.3], [0.6, 0.7, 0.2, 0.5]
    with serve(tmp_path, **{"rounds.total": 4, "rounds.best_metric": metric, "rounds.best_mode": "min"}) as server:
        trainer = patched(server, tmp_path)
        module = Measured([loss for both in zip(before, inside, strict=True) for loss in both])
        for _ in atoll.integrations.lightning.rounds(trainer):
            trainer.validate(module, data(), verbose=False)
            trainer.fit(module, data(), data())
        metrics = [line["metrics"] for line in lines(server)]
        assert [line["global_val_loss"] for line in metrics] == pytest.approx(before)
        assert [line["val_loss"] for line in metrics] == pytest.approx(inside)
        wait_until(lambda: (now := server.status().best) and now.file, "the best version is written")
        best = server.status().best
        assert best is not None
        assert (best.metric, best.version, best.round) == (metric, version, version + 1)
        assert best.value == pytest.approx(least)
        assert load_file(best.file)["w"].item() == pytest.approx(1 - 0.9 ** (3 * version))


def spy(monkeypatch: pytest.MonkeyPatch, kind: type, name: str) -> list[str]:
    """Calls of a method, which happen as before."""
    calls: list[str] = []
    real = getattr(kind, name)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return real(self, *args, **kwargs)

    monkeypatch.setattr(kind, name, call)
    return calls


@pytest.mark.covers("S7")
def test_weight_and_steps_of_the_user_win(tmp_path: Path) -> None:
    with serve(tmp_path, "scaffold", **{"rounds.total": 1}) as server:
        trainer = trainer_of()
        atoll.integrations.lightning.patch(trainer, server.url, "a", weight=lambda: 5.0, steps=7, folder=tmp_path)
        trainer.fit(Tiny(), data())
        assert server.wait(60)
        assert lines(server)[0]["weights"] == [5.0]
        assert accepted(server, "steps") == [7]


@pytest.mark.covers("S7")
def test_a_metric_that_takes_our_name_is_an_error(tmp_path: Path) -> None:
    class Logs(Tiny):
        def on_train_epoch_end(self) -> None:
            self.log("global_val_w", 1.0)

    with serve(tmp_path) as server:
        trainer = patched(server, tmp_path)
        trainer.validate(Logs(), data(), verbose=False)
        with pytest.raises(UsageError, match=r"logs 'global_val_w'.*Log it under another name"):
            trainer.fit(Logs(), data())


@pytest.mark.covers("S1")
@pytest.mark.parametrize("sync_every", [2, 4])
def test_a_run_of_diloco_synchronises_inside_of_fits_and_across_them(tmp_path: Path, sync_every: int) -> None:
    """Two rounds of H steps, three steps an epoch: training ends in the fit that has the last of them, at that step."""
    with serve(tmp_path, "diloco", **DILOCO | {"diloco.sync_every": sync_every}) as server:
        trainer = patched(server, tmp_path)
        module, fits = Tiny(), 0
        while atoll.integrations.lightning.is_running(trainer):
            trainer.fit(module, data())
            fits += 1
        assert (module.steps, fits) == {2: (4, 2), 4: (8, 3)}[sync_every]
        assert module.w.item() == pytest.approx(1 - 0.9**module.steps)  # local steps across fits were kept
        assert result(server)["w"].item() == pytest.approx(module.w.item())
        # samples until the sync, whose batch has not ended: after steps 2 and 4 those of 1 and 2 batches more
        assert [line["weights"] for line in lines(server)] == {2: [[4], [8]], 4: [[12], [16]]}[sync_every]


@pytest.mark.parametrize("name", PACKAGES)
@pytest.mark.covers("S1")
def test_without_a_server_the_script_trains_alone(tmp_path: Path, name: str) -> None:
    plain, patched = module_class(name)(), module_class(name)()
    trainer_of(name).fit(plain, data())
    trainer = trainer_of(name)
    atoll.integrations.lightning.patch(trainer)
    fits = 0
    while atoll.integrations.lightning.is_running(trainer):
        trainer.fit(patched, data(), data())
        fits += 1
    assert fits == 1
    assert torch.equal(plain.w, patched.w)


def test_a_fit_after_the_last_round_trains_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with serve(tmp_path, **{"rounds.total": 1}) as server:
        trainer = patched(server, tmp_path)
        module = Tiny()
        for _ in range(3):
            trainer.fit(module, data())
        assert module.steps == 3
        assert "finished: this fit trains nothing" in caplog.text
        assert torch.equal(module.w.detach(), result(server)["w"])


def test_each_fit_trains_max_steps_further_ones(tmp_path: Path) -> None:
    with serve(tmp_path) as server:
        trainer = patched(server, tmp_path, max_epochs=-1, max_steps=2)
        module = Tiny()
        for number in atoll.integrations.lightning.rounds(trainer):
            trainer.fit(module, data())
            assert (module.steps, trainer.global_step, trainer.max_steps) == (2 * number, 2 * number, 2)
        assert number == 2
