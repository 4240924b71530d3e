"""The snapshot of the global model that a fit begins with: no copy of the module, and nobody else's to change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning_world import Tiny, data, lines, package, serve, trainer_of

import atoll.integrations.lightning

pytestmark = pytest.mark.usefixtures("each_package")


@pytest.mark.covers("S14", "S3")
def test_the_snapshot_of_the_global_model_cannot_be_changed_from_outside(tmp_path: Path) -> None:
    """Whoever writes into the module, its state dict or what state_dict() gave has changed local training, no more."""

    class Meddles(package().Callback):  # type: ignore[misc]
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            for value in callback.driver.round.state_dict().values():
                value.fill_(99.0)
            for value in pl_module.state_dict().values():
                value.fill_(3.0)

    with serve(tmp_path, **{"rounds.total": 1}) as server:
        trainer, module = trainer_of(callbacks=[Meddles()]), Tiny()
        callback = atoll.integrations.lightning.patch(trainer, server.url, "a", folder=tmp_path)
        trainer.fit(module, data())
        local = module.w.item()
        assert local == pytest.approx(1 + 2 * 0.9**3)
        assert not atoll.integrations.lightning.is_running(trainer)
        assert module.w.item() == pytest.approx(local)  # 0 − (0 − local): the base was 0, whatever was written


@pytest.mark.covers("S3")
@pytest.mark.parametrize("algorithm", ["fedavg", "fedprox", "scaffold"])
def test_nothing_of_a_module_is_deep_copied_in_its_rounds(
    tmp_path: Path, algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither it, nor one of its parameters and buffers: what a round began with are tensors of their own.

    FedProx with μ = 0 and SCAFFOLD of one site train as FedAvg does.
    """
    taken: list[dict[str, torch.Tensor]] = []
    copy_of = torch.Tensor.__deepcopy__

    def refuse(self: Any, memo: Any) -> Any:
        raise AssertionError(f"a deep copy of a {type(self).__name__}")

    def refuse_own(self: torch.Tensor, memo: Any) -> torch.Tensor:
        """Others are none of ours: each metric that is logged copies one."""
        return refuse(self, memo) if self.data_ptr() in own else copy_of(self, memo)

    class Uncopied(Tiny):
        __deepcopy__ = refuse

        def on_train_start(self) -> None:
            taken.append(callback.driver.round.state_dict())

    with serve(tmp_path, algorithm, norm=True, **({"algorithm.mu": 0.0} if algorithm == "fedprox" else {})) as server:
        trainer, module = trainer_of(), Uncopied(norm=True)
        callback = atoll.integrations.lightning.patch(trainer, server.url, "a", folder=tmp_path)
        own = {value.data_ptr() for value in module.state_dict().values()}
        monkeypatch.setattr(torch.Tensor, "__deepcopy__", refuse_own)
        for kind in (torch.nn.Parameter, torch.nn.BatchNorm1d):
            monkeypatch.setattr(kind, "__deepcopy__", refuse, raising=False)
        for _ in atoll.integrations.lightning.rounds(trainer):
            trainer.validate(module, data(), verbose=False)
            trainer.fit(module, data(), data())
        assert len(lines(server)) == 2
    assert module.w.item() == pytest.approx(1 - 0.9**6)
    assert [state["w"].item() for state in taken] == pytest.approx([0.0, 1 - 0.9**3])
    for value in (value for state in taken for value in state.values()):
        assert type(value) is torch.Tensor
        assert (value.device.type, value.requires_grad, value.grad_fn) == ("cpu", False, None)
