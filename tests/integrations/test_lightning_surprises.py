"""What happens around a fit by accident: callbacks that train on their own, errors, another run at the same address."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from lightning_world import data, lines, module_class, package, serve, trainer_of

import atoll
import atoll.lightning

Tiny = module_class()


@pytest.mark.covers("S5", "S7")
def test_steps_that_another_callback_tries_before_training_are_none_of_the_round(tmp_path: Path) -> None:
    """A LearningRateFinder takes steps with the same optimizer, and undoes them: three are left, c = −0.271/0.3."""
    finder = package().callbacks.LearningRateFinder(
        num_training_steps=5, min_lr=0.05, max_lr=0.1, early_stop_threshold=None, update_attr=False
    )
    with serve(tmp_path, "scaffold") as server:
        trainer, module = trainer_of(callbacks=[finder], default_root_dir=tmp_path), Tiny()
        callback = atoll.lightning.patch(trainer, server.url, "a", folder=tmp_path)
        trainer.fit(module, data())
        assert module.steps > 3
        assert atoll.lightning.is_running(trainer)
        trainer.validate(module, data(), verbose=False)  # pulls the second version
        assert callback._worker is not None
        assert module.w.item() == pytest.approx(0.271)
        c = callback._worker._session.base.values_of("atoll.control.w", 0, 1)
        assert c.item() == pytest.approx(-0.271 / 0.3)


@pytest.mark.covers("S1")
def test_a_fit_behind_an_error_asks_what_the_server_runs_now(tmp_path: Path) -> None:
    """Guards against the earlier run's algorithm in another run at the same address: its rounds went uncorrected."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    trainer, module = trainer_of(), Tiny()
    atoll.lightning.patch(trainer, f"http://127.0.0.1:{port}", "a", folder=tmp_path)
    with serve(tmp_path / "first", port=port):
        trainer.fit(module, data())
        module.target = "one"  # a mistake of the script
        with pytest.raises(TypeError):
            trainer.fit(module, data())
        module.target = 1.0
    with serve(tmp_path / "second", "scaffold", rounds=1, port=port) as server:
        trainer.fit(module, data())
        assert module.w.item() == pytest.approx(1 - 0.9**3)
        assert len(lines(server)) == 1
