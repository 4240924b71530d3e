"""Cross-site evaluation with Lightning: each model is measured by `trainer.validate`, within `is_running`."""

from __future__ import annotations

from pathlib import Path

import pytest
from lightning_world import PACKAGES, Tiny, data, module_class, patched, serve, trainer_of

import atoll
from atoll.errors import UsageError

pytestmark = pytest.mark.usefixtures("each_package")
WORKFLOWS = ({"kind": "train"}, {"kind": "cross_site_evaluation", "versions": ["latest", 0]})


@pytest.mark.covers("P9", "S1")
@pytest.mark.parametrize("name", PACKAGES)
def test_models_are_validated_when_training_is_over(tmp_path: Path, name: str) -> None:
    """w ← w − 0.1·(w − 1), three steps: 1 − 0.9³; version 0 is w = 0. `val_w` is w itself."""
    with serve(tmp_path, **{"rounds.total": 1, "workflow.steps": WORKFLOWS}) as server:
        trainer, module = patched(server, tmp_path, name), module_class(name)()
        atoll.integrations.lightning.evaluates(trainer, module, data())
        with pytest.raises(UsageError, match="already started or evaluates"):
            atoll.integrations.lightning.evaluates(trainer, module)
        while atoll.integrations.lightning.is_running(trainer):
            trainer.fit(module, data(), data())
        assert module.w.item() == pytest.approx(1 - 0.9**3)  # the result, not what was evaluated last
        server.run()
    assert server.evaluation is not None
    found = {cell.model: cell.metrics.get("val_w", cell.error) for cell in server.evaluation.cells}
    w = pytest.approx(1 - 0.9**3, abs=1e-6)
    assert found == {"version 1": w, "version 0": 0.0, "a": w}
    assert server.status().history[0].metrics["val_w"] == w  # of the fit; an evaluation adds nothing to a round


def test_a_trainer_that_takes_no_part_is_told_so() -> None:
    with pytest.raises(UsageError, match="patch"):
        atoll.integrations.lightning.evaluates(trainer_of(), Tiny())
