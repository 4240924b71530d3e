"""What happens around a fit by accident: callbacks that train on their own, errors, another run at the same address."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness.processes import free_port
from lightning_world import DILOCO, Tiny, data, lines, package, patched, serve, trainer_of

import atoll
import atoll.integrations.lightning

pytestmark = pytest.mark.usefixtures("each_package")


@pytest.mark.covers("S5", "S7")
def test_steps_that_another_callback_tries_before_training_are_none_of_the_round(tmp_path: Path) -> None:
    """A LearningRateFinder takes steps with the same optimizer, and undoes them: three are left, c = −0.271/0.3."""
    finder = package().callbacks.LearningRateFinder(
        num_training_steps=5, min_lr=0.05, max_lr=0.1, early_stop_threshold=None, update_attr=False
    )
    with serve(tmp_path, "scaffold") as server:
        trainer, module = trainer_of(callbacks=[finder], default_root_dir=tmp_path), Tiny()
        callback = atoll.integrations.lightning.patch(trainer, server.url, "a", folder=tmp_path)
        trainer.fit(module, data())
        assert module.steps > 3
        assert atoll.integrations.lightning.is_running(trainer)
        trainer.validate(module, data(), verbose=False)  # pulls the second version
        assert callback.driver.worker is not None
        assert module.w.item() == pytest.approx(0.271)
        c = callback.driver.worker._backend.place.exchange.base.values_of("atoll.control.w", 0, 1)
        assert c.item() == pytest.approx(-0.271 / 0.3)


@pytest.mark.covers("S1")
def test_a_fit_behind_an_error_asks_what_the_server_runs_now(tmp_path: Path) -> None:
    """Guards against the earlier run's algorithm in another run at the same address: its rounds went uncorrected."""
    trainer, module, port = trainer_of(), Tiny(), free_port()
    atoll.integrations.lightning.patch(trainer, f"http://127.0.0.1:{port}", "a", folder=tmp_path)
    with serve(tmp_path / "first", **{"network.port": port}):
        trainer.fit(module, data())
        module.target = "one"  # a mistake of the script
        with pytest.raises(TypeError):
            trainer.fit(module, data())
        module.target = 1.0
    with serve(tmp_path / "second", "scaffold", **{"rounds.total": 1, "network.port": port}) as server:
        trainer.fit(module, data())
        assert module.w.item() == pytest.approx(1 - 0.9**3)
        assert len(lines(server)) == 1


class Fails(Tiny):
    """In the third step, as often as it is told to."""

    times = 1

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 2 and self.times:
            self.times -= 1
            raise RuntimeError("the data are broken")
        return super().training_step(batch, batch_idx)


@pytest.mark.covers("S14")
@pytest.mark.parametrize("algorithm", ["scaffold", "fedprox"])
def test_a_fit_that_failed_lets_go_of_its_optimizer(tmp_path: Path, algorithm: str) -> None:
    """Who goes on with that optimizer by hand trains plainly."""
    with serve(tmp_path, algorithm, **({"algorithm.mu": 0.1} if algorithm == "fedprox" else {})) as server:
        trainer, module = patched(server, tmp_path), Fails()
        with pytest.raises(RuntimeError, match="the data are broken"):
            trainer.fit(module, data())
        (optimizer,) = trainer.optimizers
        assert not optimizer._optimizer_step_pre_hooks
        assert not optimizer._optimizer_step_post_hooks


@pytest.mark.covers("S1")
def test_a_fit_of_diloco_that_failed_leaves_and_the_next_begins_at_the_head(tmp_path: Path) -> None:
    """H = 2: the first round counts, and the error behind it ends in the second: w = 1 − 0.9², twice."""
    with serve(tmp_path, "diloco", **DILOCO | {"diloco.sync_every": 2}) as server:
        trainer, module = patched(server, tmp_path), Fails()
        with pytest.raises(RuntimeError, match="the data are broken"):
            trainer.fit(module, data())
        assert [worker.error for worker in server.status().workers] == ["RuntimeError: the data are broken"]
        while atoll.integrations.lightning.is_running(trainer):
            trainer.fit(module, data())
        assert module.w.item() == pytest.approx(1 - 0.9**4)
        assert len(lines(server)) == 2


@pytest.mark.covers("S1")
def test_a_fit_of_diloco_with_another_module_begins_at_the_head(tmp_path: Path) -> None:
    """H = 3, a fit each: what the first module came to is where the second begins, whatever it holds."""
    with serve(tmp_path, "diloco", **DILOCO) as server:
        trainer = patched(server, tmp_path)
        for steps in (3, 6):
            module = Tiny()
            module.w.data.fill_(7.0)
            trainer.fit(module, data())
            assert module.w.item() == pytest.approx(1 - 0.9**steps)
        assert len(lines(server)) == 2


def test_each_fit_trains_min_epochs_further_ones(tmp_path: Path) -> None:
    """Somebody asks for the end in every epoch; each fit has two all the same."""

    class Stops(package().Callback):  # type: ignore[misc]
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            trainer.should_stop = True

    with serve(tmp_path) as server:
        trainer, module = patched(server, tmp_path, min_epochs=2, max_epochs=5, callbacks=[Stops()]), Tiny()
        for number in atoll.integrations.lightning.rounds(trainer):
            trainer.fit(module, data())
            assert (module.steps, trainer.min_epochs) == (6 * number, 2)
        assert len(lines(server)) == 2
