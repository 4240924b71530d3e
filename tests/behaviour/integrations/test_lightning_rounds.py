"""Each fit is a round: what is received, what is trained, what travels, with real Trainers and a real server."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import ask_journal, tensors_digest
from kit.results import of_sites
from lightning_world import (
    PACKAGES,
    SAMPLES,
    Tiny,
    data,
    driver_of,
    fit_at_once,
    fit_rounds,
    package,
    patched,
    result,
    rounds_of,
    scaffold_by_hand,
    serve,
    trainer_of,
)
from torch import Tensor

import atoll
import atoll.integrations.lightning
from atoll.errors import NotTold, UsageError
from atoll.filters import NormClip

pytestmark = pytest.mark.usefixtures("each_package")
both_packages = pytest.mark.parametrize("each_package", PACKAGES, indirect=True)


def steps_of_updates(folder: Path) -> list[int]:
    return [steps for (steps,) in ask_journal(folder, "SELECT report ->> '$.steps' FROM tickets ORDER BY ticket")]


@pytest.mark.covers("S1")
@both_packages
@pytest.mark.parametrize("style", ["patch", "callback"])
def test_each_lightning_fit_is_a_round_until_the_run_ends(
    tmp_path: Path, style: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Each Lightning fit trains one round of FedAvg. After the last round, a fit trains nothing and gets the result."""
    # By hand, three steps w ← w − 0.1·(w − 1) per round lead to 1 − 0.9³ and then to 1 − 0.9⁶.
    with serve(tmp_path) as server:
        options: dict[str, Any] = {"server": server.url, "site": "a", "folder": tmp_path}
        if style == "patch":
            trainer = trainer_of()
            atoll.integrations.lightning.patch(trainer, **options)
        else:
            trainer = trainer_of(callbacks=[atoll.integrations.lightning.AtollCallback(**options)])
        module, epochs = Tiny(), []
        while atoll.integrations.lightning.is_running(trainer):
            trainer.fit(module, data())
            epochs.append(trainer.current_epoch)
            assert trainer.max_epochs == 1  # as the user wrote it
        trainer.fit(module, data())
        assert "finished: this fit trains nothing" in caplog.text
        assert (module.steps, epochs) == (6, [1, 2])
        assert module.w.item() == pytest.approx(1 - 0.9**6)
        assert torch.equal(module.w.detach(), result(server)["w"])
        assert of_sites(rounds_of(server), "weight") == [[SAMPLES], [SAMPLES]]
        assert steps_of_updates(tmp_path) == [3, 3]
        assert rounds_of(server)[0].metrics["train_loss"] == pytest.approx((0.81 - 1 + 0.19 + 0.81**2) / 2, abs=1e-6)


@pytest.mark.covers("S1", "S5")
@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [("fedprox", {"algorithm.mu": 0.1}), ("fedadam", {}), ("scaffold", {})],
)
def test_lightning_trains_with_the_servers_algorithm(tmp_path: Path, algorithm: str, settings: dict[str, Any]) -> None:
    """The same Lightning script trains with whichever algorithm the server has chosen."""
    # FedProx with μ = 0.1 from w = 0: w ← w − 0.1·((w − 1) + 0.1·w) = 0.89·w + 0.1. SCAFFOLD with one site has c = c_1,
    # so that it is plain SGD. FedAdam's first step has the length η·|g|/(|g| + τ) and raises w.
    with serve(tmp_path, algorithm, rounds=1, **settings) as server:
        trainer, module = patched(server, tmp_path), Tiny()
        for number in atoll.integrations.lightning.rounds(trainer):
            assert number == 1
            trainer.fit(module, data())
            local = module.w.item()
        expected = 0.1 * (1 + 0.89 + 0.89**2) if algorithm == "fedprox" else 1 - 0.9**3
        assert local == pytest.approx(expected)
        w = result(server)["w"].item()
        assert w == pytest.approx(module.w.item())
        assert (w > 0) if algorithm == "fedadam" else (w == pytest.approx(expected))


@pytest.mark.covers("S2", "S5", "S6", "S7", "S15")
@pytest.mark.parametrize("accumulate", [1, 3])
def test_scaffold_with_lightning_matches_the_paper(tmp_path: Path, accumulate: int) -> None:
    """SCAFFOLD with two Lightning sites gives the numbers of the paper, and averages buffers."""
    # With gradient accumulation, three batches make one step. The running means have momentum 0.1 and come from the
    # batch means 1.5, 5.5 and 9.5, which are 10 higher at site `b`. They are averaged after each round.
    targets, steps, rounds = {"a": 1.0, "b": -3.0}, 3 // accumulate, 3
    modules = {site: Tiny(target, norm=True) for site, target in targets.items()}
    mean = 0.0
    for _ in range(rounds):
        for batch in (1.5, 5.5, 9.5):
            mean = 0.9 * mean + 0.1 * (batch + 10.0 / 2)
    with serve(tmp_path, "scaffold", norm=True, rounds=rounds, sites=2) as server:
        fit_at_once(server, tmp_path, modules, {"b": 10.0}, accumulate_grad_batches=accumulate)
        _, x = scaffold_by_hand({site: (target, steps) for site, target in targets.items()}, rounds)
        final = result(server)
        assert final["w"].item() == pytest.approx(x, rel=1e-5)
        assert final["norm.running_mean"].item() == pytest.approx(mean, rel=1e-5)
        assert final["norm.num_batches_tracked"].item() == 3 * rounds
        for module in modules.values():
            assert tensors_digest(module.state_dict()) == tensors_digest(final)
        assert steps_of_updates(tmp_path) == [steps] * 2 * rounds


class Curved(Tiny):
    """Its loss is curvature/2·(w − target)²."""

    def __init__(self, curvature: float, target: float) -> None:
        super().__init__(target)
        self.curvature = curvature

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        return (self.curvature * (self.w - self.target) ** 2 / 2).sum()


@pytest.mark.covers("S11")
def test_scaffold_reaches_the_optimum_that_fedavg_misses(tmp_path: Path) -> None:
    """If the data of two sites differ, SCAFFOLD reaches the optimum of all data, and FedAvg misses it."""
    # The optimum is (1·1 + 4·0)/(1 + 4). A round of FedAvg has three steps: w ← ½·(1 + 0.9³·(w − 1)) + ½·0.6³·w, which
    # converges to 0.271/(2 − 0.945).
    for algorithm, end in (("fedavg", 0.271 / 1.055), ("scaffold", 0.2)):  # 0.271/1.055 = 0.2569
        folder = tmp_path / algorithm
        with serve(folder, algorithm, rounds=15, sites=2) as server:
            fit_at_once(server, folder, {"a": Curved(1.0, 1.0), "b": Curved(4.0, 0.0)})
            assert result(server)["w"].item() == pytest.approx(end, abs=1e-3)


@pytest.mark.covers("S7")
def test_lightning_sends_the_weight_and_steps_given(tmp_path: Path) -> None:
    """A Lightning site sends the weight and the number of steps that the user gives. If batches have no tensors, the
    user must give a weight.
    """
    words = torch.utils.data.DataLoader(["a", "b", "c"], batch_size=2)
    with serve(tmp_path, "scaffold", rounds=1) as server:
        with pytest.raises(UsageError, match=r"batch of type list.*patch\(trainer, weight="):
            patched(server, tmp_path).fit(Tiny(), words)
        patched(server, tmp_path, weight=lambda: 5.0, steps=7).fit(Tiny(), words)
        assert [each.weight for each in rounds_of(server)[0].sites] == [5.0]
        assert steps_of_updates(tmp_path) == [7]


@pytest.mark.covers("T8", "S1", "S5")
@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold", "diloco"])
def test_the_sites_filters_apply_to_a_lightning_fit(tmp_path: Path, algorithm: str) -> None:
    """A site's filters are applied to the update of a Lightning fit."""
    # Without the filter, three steps move w by 1 − 0.9³ = 0.271, and from 0.1 by 0.9 · 0.271. SCAFFOLD with one site
    # has c = c_1, so that both rounds train as FedAvg does. For DiLoCo, three steps make a round.
    with serve(tmp_path, algorithm) as server:
        module = Tiny()
        fit_rounds(patched(server, tmp_path, filters=[NormClip(0.1)]), module)
        assert result(server)["w"].item() == pytest.approx(0.2)
    assert module.w.item() == pytest.approx(0.2)
    assert module.steps == 6


@pytest.mark.covers("S1")
@pytest.mark.parametrize("sync_every", [2, 4])
def test_diloco_synchronises_across_fits(tmp_path: Path, sync_every: int) -> None:
    """A DiLoCo run synchronises within Lightning fits and across them, and ends in the middle of a fit."""
    # Two rounds have H steps each, and an epoch has three steps. The training ends in the fit with the last of these
    # steps, at that step.
    with serve(tmp_path, "diloco", H=sync_every) as server:
        trainer, module, fits = patched(server, tmp_path), Tiny(), 0
        while atoll.integrations.lightning.is_running(trainer):
            trainer.fit(module, data())
            fits += 1
        assert (module.steps, fits) == {2: (4, 2), 4: (8, 3)}[sync_every]
        assert module.w.item() == pytest.approx(1 - 0.9**module.steps)  # local steps across fits were kept
        assert result(server)["w"].item() == pytest.approx(module.w.item())
        # samples until the sync, whose batch has not ended: after steps 2 and 4 those of 1 and 2 batches more
        assert of_sites(rounds_of(server), "weight") == {2: [[4], [8]], 4: [[12], [16]]}[sync_every]


@pytest.mark.covers("S1")
def test_a_new_module_starts_from_the_newest_version(tmp_path: Path) -> None:
    """In a DiLoCo run, a Lightning fit with another module starts from the newest version, whatever the
    module holds.
    """
    # With H = 3, each fit is a round. The second module starts where the first one ended.
    with serve(tmp_path, "diloco") as server:
        trainer = patched(server, tmp_path)
        for steps in (3, 6):
            module = Tiny(w=7.0)
            trainer.fit(module, data())
            assert module.w.item() == pytest.approx(1 - 0.9**steps)
        assert len(rounds_of(server)) == 2


class Told(Tiny):
    """Its rate is what the run tells it for the round."""

    def configure_optimizers(self) -> Any:
        self.lr = self.atoll_config["lr"]
        return super().configure_optimizers()


def test_a_lightning_module_has_the_rounds_configuration(tmp_path: Path) -> None:
    """A Lightning module reads its learning rate from the configuration of the round."""
    # Rates 0.1 and 0 of a schedule: the second round changes nothing.
    rates = {"rounds.config": {"lr": {"1": 0.1, "2": 0.0}}}
    with serve(tmp_path, **rates) as server:
        module = Told()
        fit_rounds(patched(server, tmp_path), module)
    first, second = rounds_of(server)
    assert first.grad_norm > 0
    assert second.grad_norm == 0
    assert module.w.item() == pytest.approx(1 - 0.9**3, abs=1e-6)


@pytest.mark.parametrize("algorithm", ["fedavg", "diloco"])
def test_a_fit_says_once_that_frozen_parameters_travel(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, algorithm: str
) -> None:
    """With their bytes: 2 of 3 floats; at the site, and at the server, to which the site reports it."""
    with serve(tmp_path, algorithm) as server:
        fit_rounds(patched(server, tmp_path), Tiny())
    said = [line for line in caplog.messages if "8 B of the 12 B that travel each way in a round" in line]
    assert [line.partition("8 B")[0] for line in said] == ["a: ", "a reports: "]
    assert "give Atoll only the trained ones" in said[0]


@both_packages
@pytest.mark.covers("S1")
def test_a_lightning_script_trains_alone_without_a_server(tmp_path: Path) -> None:
    plain, module = Tiny(), Tiny()
    trainer_of().fit(plain, data())
    trainer, fits = patched(None, tmp_path), 0
    while atoll.integrations.lightning.is_running(trainer):
        trainer.fit(module, data(), data())
        fits += 1
    assert fits == 1
    assert torch.equal(plain.w, module.w)
    assert (module.atoll_round, module.atoll_rounds, module.atoll_config) == (1, 1, {})
    with pytest.raises(NotTold, match=r"has no 'lr': without a server.* config.get\('lr', …\)"):
        patched(None, tmp_path / "told").fit(Told(), data())


@pytest.mark.parametrize(
    ("limits", "steps"), [({"max_epochs": -1, "max_steps": 2}, 2), ({"min_epochs": 2, "max_epochs": 5}, 6)]
)
def test_each_fit_trains_the_requested_steps(tmp_path: Path, limits: dict[str, int], steps: int) -> None:
    """Each Lightning fit trains as many further steps or epochs as `max_steps` or `min_epochs` say, even if a callback
    asks for an early end.
    """
    # Each fit with `min_epochs` = 2 has two epochs of three steps.

    class Stops(package().Callback):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            trainer.should_stop = True

    with serve(tmp_path) as server:
        trainer, module = patched(server, tmp_path, callbacks=[Stops()], **limits), Tiny()
        for number in atoll.integrations.lightning.rounds(trainer):
            trainer.fit(module, data())
            assert (module.steps, trainer.global_step) == (steps * number, steps * number)
            assert {name: getattr(trainer, name) for name in limits} == limits  # as the user wrote them
        assert len(rounds_of(server)) == 2


# -- schedules of the learning rate


class Restarting(Tiny):
    """Halves the rate after each epoch: with one epoch in a fit, never."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class ByRound(Restarting):
    """Halves the rate in each round, and has a schedule within the round, too."""

    def configure_optimizers(self) -> Any:
        self.lr = 0.1 * 0.5 ** (self.atoll_round - 1)
        return super().configure_optimizers()


@pytest.mark.covers("L14")
@pytest.mark.parametrize(
    ("kind", "rates", "warned"), [(Restarting, [0.05] * 3, 1), (ByRound, [0.05, 0.025, 0.0125], 0)]
)
def test_warns_once_of_a_schedule_restarted_in_each_fit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: type[Tiny], rates: list[float], warned: int
) -> None:
    """If a Lightning module's schedule restarts in each fit, the site and the server warn of it once."""
    # A module that builds its schedule from the number of the round causes no warning. Each fit has one epoch, so that
    # the first rate ends at 0.1 · 0.5.
    found, module = [], kind()
    with serve(tmp_path, rounds=3) as server, caplog.at_level(logging.WARNING, "atoll"):
        trainer = patched(server, tmp_path)
        while atoll.integrations.lightning.is_running(trainer):
            trainer.fit(module, data())
            found.append(trainer.optimizers[0].param_groups[0]["lr"])
            assert (module.atoll_round, module.atoll_rounds) == (len(found), 3)
    assert found == rates
    warnings = [record.getMessage() for record in caplog.records if "rate schedule" in record.getMessage()]
    assert len(warnings) == 2 * warned  # at the site and at the server
    assert all("atoll_round" in warning for warning in warnings)


# -- the snapshot of the global model that a fit begins with


@pytest.mark.covers("S14", "S3")
def test_a_script_cannot_change_the_global_snapshot(tmp_path: Path) -> None:
    """A Lightning script that writes into its module or the round's copy of the global model changes only its own
    training, not the update's base.
    """

    class Meddles(package().Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            for value in driver_of(trainer).round.state_dict().values():
                value.fill_(99.0)
            for value in pl_module.state_dict().values():
                value.fill_(3.0)

    with serve(tmp_path, rounds=1) as server:
        trainer, module = patched(server, tmp_path, callbacks=[Meddles()]), Tiny()
        trainer.fit(module, data())
        local = module.w.item()
        assert local == pytest.approx(1 + 2 * 0.9**3)
        assert not atoll.integrations.lightning.is_running(trainer)
        assert module.w.item() == pytest.approx(local)  # 0 − (0 − local): the base was 0, whatever was written


@pytest.mark.covers("S3")
@pytest.mark.parametrize(
    ("algorithm", "settings"), [("fedavg", {}), ("fedprox", {"algorithm.mu": 0.0}), ("scaffold", {})]
)
def test_no_module_is_deep_copied(
    tmp_path: Path, algorithm: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds of a Lightning site make no deep copy of the module, of a parameter or of a buffer."""
    # The snapshots of the global model are tensors of their own. FedProx with μ = 0 and SCAFFOLD with one site train as
    # FedAvg does.
    taken: list[dict[str, Tensor]] = []
    copy_of = Tensor.__deepcopy__

    def refuse(self: Any, memo: Any) -> Any:
        raise AssertionError(f"a deep copy of a {type(self).__name__}")

    def refuse_own(self: Tensor, memo: Any) -> Tensor:
        """Others are none of ours: each metric that is logged copies one."""
        return refuse(self, memo) if self.data_ptr() in own else copy_of(self, memo)

    class Remembers(Tiny):
        def on_train_start(self) -> None:
            taken.append(driver_of(trainer).round.state_dict())

    with serve(tmp_path, algorithm, norm=True, **settings) as server:
        trainer, module = patched(server, tmp_path), Remembers(norm=True)
        own = {value.data_ptr() for value in module.state_dict().values()}
        monkeypatch.setattr(Tensor, "__deepcopy__", refuse_own)
        monkeypatch.setattr(torch.nn.Parameter, "__deepcopy__", refuse)
        for _ in atoll.integrations.lightning.rounds(trainer):
            trainer.validate(module, data(), verbose=False)
            trainer.fit(module, data(), data())
        assert len(rounds_of(server)) == 2
    assert module.w.item() == pytest.approx(1 - 0.9**6)
    assert [state["w"].item() for state in taken] == pytest.approx([0.0, 1 - 0.9**3])
    for value in (value for state in taken for value in state.values()):
        assert type(value) is Tensor
        assert (value.device.type, value.requires_grad, value.grad_fn) == ("cpu", False, None)


class Forgetful(Tiny):
    """Begins each fit with its own last weights."""

    def on_train_start(self) -> None:
        self.load_state_dict(getattr(self, "old", self.state_dict()))

    def on_train_end(self) -> None:
        self.old = {name: value.clone() for name, value in self.state_dict().items()}


@pytest.mark.covers("X11")
def test_a_module_that_puts_weights_back_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If a module puts its own weights back before each fit's first step, the log says so once."""
    with serve(tmp_path, "fedadam", rounds=3) as server:
        fit_rounds(patched(server, tmp_path), Forgetful())
    told = [each for each in caplog.records if "put weights from before the load back" in each.getMessage()]
    assert [each.name for each in told if each.name == "atoll"] == ["atoll"]
