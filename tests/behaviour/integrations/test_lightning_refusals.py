"""Fits that are refused, with the remedy, or fail: their round is not lost, and a better fit takes their place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness.processes import free_port
from lightning_world import (
    Tiny,
    data,
    driver_of,
    exchange_of,
    fit_rounds,
    global_control,
    package,
    patched,
    rounds_of,
    serve,
    trainer_of,
)
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
        optimizers = self.optimizers()
        optimizer = optimizers[0] if isinstance(optimizers, list) else optimizers
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class TwoOptimizers(Manual):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD([self.w], lr=0.1), torch.optim.SGD([self.frozen], lr=0.1)]


class TwoAutomatic(Tiny):
    configure_optimizers = TwoOptimizers.configure_optimizers


class Unequal(Tiny):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([{"params": [self.w], "lr": 0.1}, {"params": [self.frozen], "lr": 0.2}])


class Rate(Tiny):
    """Sets its learning rate before each step, where schedulers and hooks of users do."""

    def __init__(self, *rates: float) -> None:
        super().__init__()
        self.rates = rates

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.optimizers().param_groups[0]["lr"] = self.rates[batch_idx]


class Late(Tiny):
    """Its rate is set as late as can be: behind the closure, just before the weights move."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        optimizer.param_groups[0]["lr"] = -0.5


class NoStep(Tiny):
    """No batch has a loss."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        return None


class Fails(Tiny):
    """In the third step, once."""

    fails = True

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 2 and self.fails:
            self.fails = False
            raise RuntimeError("the data are broken")
        return super().training_step(batch, batch_idx)


def require_a_next_fit_to_count(server: atoll.Server, folder: Path) -> None:
    """An update that was refused has not arrived anywhere."""
    trainer, module = patched(server, folder), Tiny()
    fit_rounds(trainer, module)
    assert module.w.item() == pytest.approx(1 - 0.9**3)
    assert len(rounds_of(server)) == 1


RATE = r"finite learning rate, at least 0"
REFUSED = {
    "manual": (Manual, "Manual uses manual optimization.*automatic_optimization = True"),
    "two optimizers": (TwoOptimizers, "TwoOptimizers uses manual optimization.*automatic_optimization = True"),
    "unequal": (Unequal, "learning rates 0.1, 0.2.*the same learning rate for all parameter groups"),
    "negative": (lambda: Rate(0.1, -0.5, 0.1), f"learning rate is -0.5.*{RATE}"),
    "infinite": (lambda: Rate(0.1, float("inf"), 0.1), f"learning rate is inf.*{RATE}"),
    "not a number": (lambda: Rate(0.1, float("nan"), 0.1), f"learning rate is nan.*{RATE}"),
    "late": (Late, f"learning rate is -0.5.*{RATE}"),
    "zero": (lambda: Rate(0.0, 0.0, 0.0), r"\(3 steps\) is 0.*Use a learning rate above zero in at least one step"),
    "no step": (NoStep, "no optimizer step.*fl_round.correct"),
}


@pytest.mark.covers("S8")
@pytest.mark.parametrize(("module", "words"), REFUSED.values(), ids=REFUSED)
def test_a_correct_fit_may_follow_one_that_scaffold_refused(tmp_path: Path, module: Any, words: str) -> None:
    """SCAFFOLD refuses a fit that it cannot correct. A correct fit can then train in the same round."""
    with serve(tmp_path, "scaffold", rounds=1) as server:
        with pytest.raises(UsageError, match=f"(?s){words}"):
            patched(server, tmp_path).fit(module(), data())
        assert server.status().fragments[0].version == 0
        require_a_next_fit_to_count(server, tmp_path)


@pytest.mark.covers("S8")
@pytest.mark.parametrize("algorithm", ["scaffold", "diloco"])
def test_lightning_refuses_two_optimizers(tmp_path: Path, algorithm: str) -> None:
    """Lightning refuses two optimizers under automatic optimization before the fit trains. The round is not lost."""
    with serve(tmp_path, algorithm, rounds=1) as server:
        with pytest.raises(RuntimeError, match="multiple optimizers is only supported with manual optimization"):
            patched(server, tmp_path).fit(TwoAutomatic(), data())
        require_a_next_fit_to_count(server, tmp_path)


@pytest.mark.covers("S8")
@pytest.mark.parametrize("algorithm", ["scaffold", "fedprox"])
def test_a_gradient_scaler_is_refused(tmp_path: Path, algorithm: str) -> None:
    """SCAFFOLD and FedProx refuse a fit with a gradient scaler, and recommend the precision `bf16-mixed`."""
    plugin = package().plugins.MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))
    with serve(tmp_path, algorithm, rounds=1) as server:
        with pytest.raises(UsageError, match=rf"precision 16-mixed.*{algorithm}.*Use precision='bf16-mixed'"):
            patched(server, tmp_path, plugins=[plugin]).fit(Tiny(), data())
        assert server.status().fragments[0].version == 0


@pytest.mark.covers("S8")
def test_a_fit_without_a_step_is_refused(tmp_path: Path) -> None:
    """A fit without an optimizer step is refused, also under FedAvg."""
    with serve(tmp_path) as server:
        with pytest.raises(UsageError, match=r"no optimizer step.*limit_train_batches"):
            patched(server, tmp_path, limit_train_batches=0).fit(Tiny(), data())


@pytest.mark.covers("S8")
def test_strategies_that_split_the_model_are_refused(tmp_path: Path) -> None:
    """A Lightning strategy that splits the model is refused before the site joins."""
    # Lightning's own strategies of this kind need several devices or GPUs. The test uses a user's strategy with the
    # methods that a Trainer needs.

    class ShardedStrategy(package().strategies.Strategy):
        root_device, is_global_zero = torch.device("cpu"), True
        all_gather = reduce = model_to_device = None

        def barrier(self, name: str | None = None) -> None: ...

        def broadcast(self, obj: Any, src: int = 0) -> Any:
            return obj

    with serve(tmp_path) as server:
        trainer = patched(server, tmp_path, strategy=ShardedStrategy())
        for attempt in (trainer.validate, trainer.fit):
            with pytest.raises(UsageError, match=r"strategy ShardedStrategy.*strategy='ddp'"):
                attempt(Tiny(), data())
        assert server.status().workers == []


@pytest.mark.covers("S8")
def test_processes_that_the_trainer_forks_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Lightning strategy that forks processes is refused before the site joins.

    The error is raised in the forked process, and Lightning passes it on as text.
    """
    monkeypatch.setenv("MASTER_PORT", str(free_port()))  # Lightning sets it, for good
    with serve(tmp_path) as server:
        with pytest.raises(ProcessRaisedException, match=r"UsageError: .*spawns or forks.*strategy='ddp'"):
            patched(server, tmp_path, strategy="ddp_fork").fit(Tiny(), data())
        assert server.status().workers == []


@pytest.mark.covers("T8", "X3")
def test_an_object_that_is_no_filter_is_refused_at_once(tmp_path: Path) -> None:
    """A filter argument that is not a filter is refused before the Trainer trains."""
    with pytest.raises(UsageError, match="'drop' is not a filter"):
        patched(None, tmp_path, filters=["drop"])


@pytest.mark.covers("S8", "S2")
@pytest.mark.parametrize("spoil", ["not-finite", "missing"])
def test_malformed_controls_are_refused_in_a_later_round(tmp_path: Path, spoil: str) -> None:
    """If a site's control is missing or not finite in a later round, the fit is refused."""
    with serve(tmp_path, "scaffold", rounds=3) as server:
        trainer, module = patched(server, tmp_path), Tiny()
        trainer.fit(module, data())
        assert atoll.integrations.lightning.is_running(trainer)
        local = exchange_of(trainer).local
        if spoil == "missing":
            local.algorithm_state, expected = None, "this site has none"
        else:
            local.algorithm_state._files[local.algorithm_state.note.current].write(
                0, memoryview(bytes(b"\xff" * 4 * 3))
            )
            expected = r"control variate of 'w' is not finite.*Remove this site"
        with pytest.raises(UsageError, match=expected):
            trainer.fit(module, data())
        assert server.status().fragments[0].version == 1


@pytest.mark.covers("S14")
@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold"])
def test_a_batch_without_its_end_is_an_error(tmp_path: Path, algorithm: str) -> None:
    """A fit is refused if its data loader raises StopIteration in the middle of a batch. Lightning would take this for
    the end of the epoch.
    """

    class Stops(Tiny):
        def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            super().optimizer_step(*args, **kwargs)
            if self.steps == 2:
                raise StopIteration

    words = r"did not call on_train_batch_end after optimizer step 2.*should_stop = True"
    with serve(tmp_path, algorithm, rounds=1) as server:
        with pytest.raises(UsageError, match=words):
            patched(server, tmp_path).fit(Stops(), data())
        require_a_next_fit_to_count(server, tmp_path)


# -- fits that fail by a mistake of the script


@pytest.mark.covers("S14")
@pytest.mark.parametrize(
    ("algorithm", "settings"), [("scaffold", {}), ("fedprox", {"algorithm.mu": 0.0})], ids=["scaffold", "fedprox"]
)
def test_a_failed_fit_can_be_repeated(tmp_path: Path, algorithm: str, settings: dict[str, Any]) -> None:
    """After a fit has failed, its optimizer has no hooks left, and a new fit trains the same round."""
    # The site's script has caught the error. The second fit starts from the same global model and is corrected once per
    # step. FedProx with μ = 0 gives the same result as SCAFFOLD.
    with serve(tmp_path, algorithm, rounds=1, **settings) as server:
        trainer, module = patched(server, tmp_path), Fails()
        with pytest.raises(RuntimeError, match="the data are broken"):
            trainer.fit(module, data())
        (optimizer,) = trainer.optimizers
        assert not optimizer._optimizer_step_pre_hooks  # a script that goes on by hand trains plainly
        assert not optimizer._optimizer_step_post_hooks
        assert trainer.max_epochs == 1
        assert driver_of(trainer).worker is None  # it left; the server knows why
        trainer.fit(module, data())
        assert module.w.item() == pytest.approx(1 - 0.9**3)
        assert len(rounds_of(server)) == 1


@pytest.mark.covers("S1")
def test_a_failed_fit_of_diloco_leaves_the_run(tmp_path: Path) -> None:
    """If a fit of DiLoCo fails, the site leaves the run with the error."""
    # The next fit starts at the newest version. With H = 2, the first round counts and the error comes in the second
    # one: w = 1 − 0.9², twice.
    with serve(tmp_path, "diloco", H=2) as server:
        trainer, module = patched(server, tmp_path), Fails()
        with pytest.raises(RuntimeError, match="the data are broken"):
            trainer.fit(module, data())
        assert [worker.error for worker in server.status().workers] == ["RuntimeError: the data are broken"]
        while atoll.integrations.lightning.is_running(trainer):
            trainer.fit(module, data())
        assert module.w.item() == pytest.approx(1 - 0.9**4)
        assert len(rounds_of(server)) == 2


@pytest.mark.covers("S1")
def test_a_fit_after_a_failed_one_asks_the_server_again(tmp_path: Path) -> None:
    """After a fit has failed, the next fit asks the server which run and which algorithm it has."""
    # Otherwise the rounds of a new run at the same address would go uncorrected.
    trainer, module, port = trainer_of(), Tiny(), free_port()
    atoll.integrations.lightning.patch(trainer, f"http://127.0.0.1:{port}", "a", folder=tmp_path)
    with serve(tmp_path / "first", **{"network.port": port}):
        trainer.fit(module, data())
        module.target = "one"  # a mistake of the script
        with pytest.raises(TypeError):
            trainer.fit(module, data())
        module.target = 1.0
    with serve(tmp_path / "second", "scaffold", rounds=1, **{"network.port": port}) as server:
        trainer.fit(module, data())
        assert module.w.item() == pytest.approx(1 - 0.9**3)
        assert len(rounds_of(server)) == 1


# -- what is not refused


@pytest.mark.parametrize("kind", [Manual, TwoOptimizers], ids=lambda kind: kind.__name__)
@pytest.mark.covers("S1")
def test_fedavg_accepts_manual_optimization(tmp_path: Path, kind: Any) -> None:
    """FedAvg accepts manual optimization with one or two optimizers, because it corrects no steps."""
    with serve(tmp_path, rounds=1) as server:
        module = kind()
        fit_rounds(patched(server, tmp_path), module)
        assert module.w.item() == pytest.approx(1 - 0.9**3)
        assert len(rounds_of(server)) == 1


@pytest.mark.covers("S5")
def test_warm_up_steps_at_rate_zero_count_nothing(tmp_path: Path) -> None:
    """Warm-up steps at a learning rate of zero move no weight and leave SCAFFOLD's controls correct."""
    # The rates 0, 0.1, 0.2 from w = 0 lead to e = 1 → 0.9 → 0.72. c_1 = (0 − 0.28)/0.3, and c is the same with one
    # site.
    with serve(tmp_path, "scaffold") as server:
        trainer, module = patched(server, tmp_path), Rate(0.0, 0.1, 0.2)
        trainer.fit(module, data())
        assert module.w.item() == pytest.approx(0.28)
        trainer.fit(module, data())
        assert global_control(trainer) == pytest.approx([-0.28 / 0.3])


@pytest.mark.covers("S6", "S8")
@pytest.mark.parametrize(("precision", "rel"), [("32-true", 1e-6), ("bf16-mixed", 1e-2)])
def test_scaffold_works_in_fp32_and_bf16_mixed_precision(tmp_path: Path, precision: str, rel: float) -> None:
    with serve(tmp_path, "scaffold") as server:
        module = Tiny()
        fit_rounds(patched(server, tmp_path, precision=precision), module)
        assert module.w.dtype == torch.float32
        assert module.w.item() == pytest.approx(1 - 0.9**6, rel=rel)
        assert len(rounds_of(server)) == 2


@pytest.mark.covers("S6")
def test_unfrozen_parameters_are_corrected(tmp_path: Path) -> None:
    """SCAFFOLD corrects a parameter from the round on in which it is unfrozen."""
    # In round 1, the parameter is frozen and has no control. In round 2, its gradient is 1 in each step, so that it
    # moves by −0.3 and c = 0.3/0.3.

    class Thaws(Tiny):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) + self.frozen.sum()

    with serve(tmp_path, "scaffold", rounds=3) as server:
        trainer, module = patched(server, tmp_path), Thaws()
        kept = {name: value.data_ptr() for name, value in module.named_parameters()}
        trainer.fit(module, data())
        assert module.frozen.tolist() == [1.0, 1.0]
        module.frozen.requires_grad_(True)
        trainer.fit(module, data())
        assert module.frozen.tolist() == pytest.approx([0.7, 0.7])
        assert atoll.integrations.lightning.is_running(trainer)
        trainer.fit(module, data())
        assert global_control(trainer, "frozen", 2) == pytest.approx([1.0, 1.0])
        assert module.frozen.tolist() == pytest.approx([0.4, 0.4])  # one site: c = c_1 corrects nothing
        assert {name: value.data_ptr() for name, value in module.named_parameters()} == kept  # in place
        assert server.wait(60)
