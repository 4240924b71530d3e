"""What a Lightning training cannot be corrected in is refused, with the remedy, and the run goes on with a next fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness.processes import free_port
from lightning_world import PACKAGES, Tiny, data, fit_rounds, lines, module_class, package, patched, serve, trainer_of
from torch.multiprocessing.spawn import ProcessRaisedException

import atoll
import atoll.integrations.lightning
from atoll.errors import UsageError

pytestmark = pytest.mark.usefixtures("each_package")


class Manual(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class TwoOptimizers(Manual):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD([self.w], lr=0.1), torch.optim.SGD([self.frozen], lr=0.1)]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer, _ = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(Tiny.training_step(self, batch, batch_idx))
        optimizer.step()


class OneOfTwo(TwoOptimizers):
    """Lightning refuses several under automatic optimization, so that is switched on behind its look at them."""

    def on_fit_start(self) -> None:
        self.automatic_optimization = True

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return Tiny.training_step(self, batch, batch_idx)


class Unequal(Tiny):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([{"params": [self.w], "lr": 0.1}, {"params": [self.frozen], "lr": 0.2}])


class Rate(Tiny):
    """Sets its learning rate before each step, where schedulers and hooks of users do."""

    rates = (0.1, 0.1, 0.1)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.optimizers().param_groups[0]["lr"] = self.rates[batch_idx]


class Negative(Rate):
    rates = (0.1, -0.5, 0.1)


class Infinite(Rate):
    rates = (0.1, float("inf"), 0.1)


class NotANumber(Rate):
    rates = (0.1, float("nan"), 0.1)


class Zero(Rate):
    rates = (0.0, 0.0, 0.0)


class Late(Tiny):
    """Its rate is set as late as can be: behind the closure, just before the weights move."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        optimizer.param_groups[0]["lr"] = -0.5


class NoStep(Tiny):
    """No batch has a loss."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        return None


REFUSED = [
    (Manual, "Manual uses manual optimization", "automatic_optimization = True"),
    (TwoOptimizers, "TwoOptimizers uses manual optimization", "automatic_optimization = True"),
    (Unequal, "learning rates 0.1, 0.2", "the same learning rate for all parameter groups"),
    (Negative, "learning rate is -0.5", "finite learning rate, at least 0"),
    (Infinite, "learning rate is inf", "finite learning rate, at least 0"),
    (NotANumber, "learning rate is nan", "finite learning rate, at least 0"),
    (Late, "learning rate is -0.5", "finite learning rate, at least 0"),
    (Zero, "3 steps is 0", "Use a learning rate above zero in at least one step"),
    (NoStep, "no optimizer step", "fl_round.correct"),
]


@pytest.mark.covers("S8")
@pytest.mark.parametrize(("kind", "words", "remedy"), REFUSED, ids=[kind.__name__ for kind, _, _ in REFUSED])
def test_scaffold_refuses_it_and_a_better_fit_takes_its_place(
    tmp_path: Path, kind: Any, words: str, remedy: str
) -> None:
    with serve(tmp_path, "scaffold", **{"rounds.total": 1}) as server:
        trainer = patched(server, tmp_path)
        with pytest.raises(UsageError, match=words) as caught:
            trainer.fit(kind(), data())
        assert remedy in str(caught.value)
        assert server.status().fragments[0].version == 0
        retry(server, tmp_path)


def retry(server: atoll.Server, folder: Path) -> None:
    """The site's next fit counts; an update that was refused has not reached anybody."""
    trainer, module = trainer_of(), Tiny()
    atoll.integrations.lightning.patch(trainer, server.url, "a", folder=folder)
    fit_rounds(trainer, module)
    assert module.w.item() == pytest.approx(1 - 0.9**3)
    assert len(lines(server)) == 1


@pytest.mark.covers("S8")
@pytest.mark.parametrize("name", PACKAGES)
@pytest.mark.parametrize("algorithm", ["scaffold", "fedprox"])
def test_a_gradient_scaler_is_refused(tmp_path: Path, name: str, algorithm: str) -> None:
    plugin = package(name).plugins.MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))
    with serve(tmp_path, algorithm, **{"rounds.total": 1}) as server:
        trainer = patched(server, tmp_path, name, plugins=[plugin])
        with pytest.raises(UsageError, match=rf"precision 16-mixed.*{algorithm}.*Use precision='bf16-mixed'"):
            trainer.fit(module_class(name)(), data())
        assert server.status().fragments[0].version == 0


@pytest.mark.covers("S8")
def test_several_optimizers_are_refused(tmp_path: Path) -> None:
    with serve(tmp_path, "scaffold", **{"rounds.total": 1}) as server:
        trainer, module = patched(server, tmp_path), OneOfTwo()
        with pytest.raises(UsageError, match=r"OneOfTwo has 2 optimizers, but scaffold supports only one\. Put all"):
            trainer.fit(module, data())
        assert module.steps == 0
        retry(server, tmp_path)


@pytest.mark.parametrize("kind", [Manual, TwoOptimizers], ids=lambda kind: kind.__name__)
@pytest.mark.covers("S1")
def test_fedavg_takes_what_it_need_not_correct(tmp_path: Path, kind: Any) -> None:
    with serve(tmp_path, **{"rounds.total": 1}) as server:
        trainer, module = patched(server, tmp_path), kind()
        fit_rounds(trainer, module)
        assert module.w.item() == pytest.approx(1 - 0.9**3)
        assert len(lines(server)) == 1


@pytest.mark.covers("S5")
def test_warm_up_steps_without_a_rate_do_no_harm(tmp_path: Path) -> None:
    """Rates 0, 0.1, 0.2 from w = 0: e = 1 → 0.9 → 0.72. c_1 = (0 − 0.28)/0.3, and the one site's c is the same."""

    class WarmUp(Rate):
        rates = (0.0, 0.1, 0.2)

    with serve(tmp_path, "scaffold", **{"rounds.total": 2}) as server:
        trainer, module = trainer_of(), WarmUp()
        callback = atoll.integrations.lightning.patch(trainer, server.url, "a", folder=tmp_path)
        trainer.fit(module, data())
        assert module.w.item() == pytest.approx(0.28)
        trainer.fit(module, data())
        assert callback.driver.worker is not None
        c = callback.driver.worker._backend.place.exchange.base.values_of("atoll.control.w", 0, 1)
        assert c.item() == pytest.approx(-0.28 / 0.3)


@pytest.mark.covers("S8", "S2")
@pytest.mark.parametrize("spoil", ["not-finite", "missing"])
def test_controls_that_are_malformed_in_a_later_round_are_refused(tmp_path: Path, spoil: str) -> None:
    with serve(tmp_path, "scaffold", **{"rounds.total": 3}) as server:
        trainer, module = trainer_of(), Tiny()
        callback = atoll.integrations.lightning.patch(trainer, server.url, "a", folder=tmp_path)
        trainer.fit(module, data())
        assert atoll.integrations.lightning.is_running(trainer)
        assert callback.driver.worker is not None
        exchange = callback.driver.worker._backend.place.exchange
        if spoil == "missing":
            exchange.local.kept = None
        else:
            controls = exchange.local.kept
            assert controls is not None
            controls._files[controls.note.current].write(0, memoryview(bytes(b"\xff" * 4 * 3)))
        expected = (
            "this site has none" if spoil == "missing" else r"control variate of 'w' is not finite.*Remove this site"
        )
        with pytest.raises(UsageError, match=expected):
            trainer.fit(module, data())
        assert server.status().fragments[0].version == 1


@pytest.mark.covers("S8")
def test_a_fit_without_a_step_is_refused_for_every_algorithm(tmp_path: Path) -> None:
    with serve(tmp_path) as server:
        trainer = patched(server, tmp_path, limit_train_batches=0)
        with pytest.raises(UsageError, match=r"no optimizer step.*limit_train_batches"):
            trainer.fit(Tiny(), data())


@pytest.mark.covers("S14")
@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold"])
def test_a_step_without_the_end_of_its_batch_is_an_error(tmp_path: Path, algorithm: str) -> None:
    """Lightning takes a StopIteration for the end of the epoch, wherever it comes from."""

    class Stops(Tiny):
        def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            super().optimizer_step(*args, **kwargs)
            if self.steps == 2:
                raise StopIteration

    with serve(tmp_path, algorithm, **{"rounds.total": 1}) as server:
        trainer = patched(server, tmp_path)
        with pytest.raises(
            UsageError, match=r"did not call on_train_batch_end after optimizer step 2.*should_stop = True"
        ):
            trainer.fit(Stops(), data())
        retry(server, tmp_path)


@pytest.mark.covers("S14")
def test_a_fit_that_failed_is_begun_anew(tmp_path: Path) -> None:
    """The site's script caught the error: same round, same global model, hooks only once."""

    class Fails(Tiny):
        fails = True

        def on_train_batch_end(self, *args: Any) -> None:
            if self.fails:
                raise RuntimeError("the data are broken")

    with serve(tmp_path, "scaffold", **{"rounds.total": 1}) as server:
        trainer, module = trainer_of(), Fails()
        callback = atoll.integrations.lightning.patch(trainer, server.url, "a", folder=tmp_path)
        with pytest.raises(RuntimeError, match="the data are broken"):
            trainer.fit(module, data())
        assert trainer.max_epochs == 1
        assert callback.driver.worker is None  # it left; the server knows why
        module.fails = False
        trainer.fit(module, data())
        assert module.w.item() == pytest.approx(1 - 0.9**3)
        assert len(lines(server)) == 1


@pytest.mark.covers("S6", "S8")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("name", PACKAGES)
def test_these_precisions_work(tmp_path: Path, name: str, precision: str) -> None:
    with serve(tmp_path, "scaffold") as server:
        trainer, module = patched(server, tmp_path, name, precision=precision), module_class(name)()
        fit_rounds(trainer, module)
        assert module.w.dtype == torch.float32
        assert module.w.item() == pytest.approx(1 - 0.9**6, rel=1e-2 if precision == "bf16-mixed" else 1e-6)
        assert len(lines(server)) == 2


@pytest.mark.covers("S6")
def test_a_parameter_that_is_unfrozen_later_is_corrected_from_then_on(tmp_path: Path) -> None:
    """Round 1: frozen, without a control. Round 2: gradient 1 each, so it moves by −0.3, and c = 0.3/0.3."""

    class Thaws(Tiny):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) + self.frozen.sum()

    with serve(tmp_path, "scaffold", **{"rounds.total": 3}) as server:
        trainer, module = trainer_of(), Thaws()
        callback = atoll.integrations.lightning.patch(trainer, server.url, "a", folder=tmp_path)
        kept = {name: value.data_ptr() for name, value in module.named_parameters()}
        trainer.fit(module, data())
        assert module.frozen.tolist() == [1.0, 1.0]
        module.frozen.requires_grad_(True)
        trainer.fit(module, data())
        assert module.frozen.tolist() == pytest.approx([0.7, 0.7])
        assert atoll.integrations.lightning.is_running(trainer)
        trainer.fit(module, data())
        assert callback.driver.worker is not None
        base = callback.driver.worker._backend.place.exchange.base
        assert base.values_of("atoll.control.frozen", 0, 2).tolist() == pytest.approx([1.0, 1.0])
        assert module.frozen.tolist() == pytest.approx([0.4, 0.4])  # one site: c = c_1 corrects nothing
        assert {name: value.data_ptr() for name, value in module.named_parameters()} == kept  # in place
        assert server.wait(60)


def test_a_trainer_takes_part_once(tmp_path: Path) -> None:
    trainer = trainer_of()
    with pytest.raises(UsageError, match=r"has no AtollCallback\. Call atoll\.integrations\.lightning\.patch"):
        atoll.integrations.lightning.is_running(trainer)
    atoll.integrations.lightning.patch(trainer)
    with pytest.raises(UsageError, match="already"):
        atoll.integrations.lightning.patch(trainer)
    with pytest.raises(UsageError, match="dict is not a Lightning Trainer"):
        atoll.integrations.lightning.patch({})


@pytest.mark.covers("S8")
def test_strategies_that_split_the_model_are_refused(tmp_path: Path) -> None:
    """Lightning's own ones need several devices or GPUs, so this is a user's, with what a Trainer asks of it."""

    class ShardedStrategy(package().strategies.Strategy):  # type: ignore[misc]
        root_device, is_global_zero = torch.device("cpu"), True
        all_gather = reduce = model_to_device = None

        def barrier(self, name: str | None = None) -> None: ...

        def broadcast(self, obj: Any, src: int = 0) -> Any:
            return obj

    with serve(tmp_path) as server:
        trainer, module = patched(server, tmp_path, strategy=ShardedStrategy()), Tiny()
        for attempt in (trainer.validate, trainer.fit):
            with pytest.raises(UsageError, match=r"strategy ShardedStrategy.*strategy='ddp'"):
                attempt(module, data())
        assert server.status().workers == []


@pytest.mark.covers("S8")
def test_processes_that_the_trainer_forks_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the forked process, whose error Lightning tells as text."""
    monkeypatch.setenv("MASTER_PORT", str(free_port()))  # Lightning sets it, for good
    with serve(tmp_path) as server:
        trainer = patched(server, tmp_path, strategy="ddp_fork")
        with pytest.raises(ProcessRaisedException, match=r"UsageError: .*spawns or forks.*strategy='ddp'"):
            trainer.fit(Tiny(), data())
        assert server.status().workers == []


def test_a_batch_without_tensors_needs_a_weight(tmp_path: Path) -> None:
    words = torch.utils.data.DataLoader(["a", "b", "c"], batch_size=2)
    with serve(tmp_path, **{"rounds.total": 1}) as server:
        trainer = patched(server, tmp_path)
        with pytest.raises(UsageError, match=r"batch of type list.*patch\(trainer, weight="):
            trainer.fit(Tiny(), words)
        trainer = trainer_of()
        atoll.integrations.lightning.patch(trainer, server.url, "a", folder=tmp_path, weight=3)
        trainer.fit(Tiny(), words)
        assert lines(server)[0]["weights"] == [3.0]


@pytest.mark.parametrize("name", PACKAGES)
def test_a_fit_from_a_checkpoint_is_refused_and_a_validation_of_one_stays_here(tmp_path: Path, name: str) -> None:
    """Guards against a fit whose restored epochs left it without a step, and a checkpoint measured as the global model.

    One epoch alone: w = 1 − 0.9³ = 0.271, which is the checkpoint; the run's first version has w = 0.
    """
    kind, file = module_class(name), tmp_path / "alone.ckpt"
    alone = trainer_of(name)
    alone.fit(kind(), data())
    alone.save_checkpoint(file)
    with serve(tmp_path, **{"rounds.total": 1}) as server:
        trainer, module = patched(server, tmp_path, name), kind()
        assert trainer.validate(module, data(), ckpt_path=file)[0]["val_w"] == pytest.approx(0.271)
        with pytest.raises(UsageError, match=r"resumes from the checkpoint '.*alone.ckpt'.*Leave ckpt_path out"):
            trainer.fit(module, data(), ckpt_path=file)
        assert trainer.validate(module, data())[0]["val_w"] == 0.0
        trainer.fit(module, data())
        assert lines(server)[0]["metrics"]["global_val_w"] == 0.0
