"""Other callbacks beside ours: what averages weights, stops early, keeps checkpoints; and a second one of Atoll."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kit.results import of_sites
from lightning_world import (
    Tiny,
    data,
    fit_rounds,
    global_control,
    package,
    patched,
    result,
    rounds_of,
    serve,
    trainer_of,
)

import atoll.integrations.lightning
from atoll.errors import UsageError

pytestmark = pytest.mark.usefixtures("each_package")


def callbacks() -> Any:
    return package().callbacks


@pytest.mark.covers("S1", "X3")
@pytest.mark.parametrize("workers", [1, 2])
def test_refuses_two_sites_on_one_trainer(tmp_path: Path, workers: int) -> None:
    """Two sites on one Lightning Trainer are refused before either of them joins."""
    # Otherwise the first site would wait in its hook for ever for the update of the second site.
    ours = atoll.integrations.lightning.AtollCallback
    with serve(tmp_path, sites=workers) as server:
        trainer = trainer_of(callbacks=[ours(server.url, site, folder=tmp_path / site) for site in ("a", "b")])
        words = r"The Trainer has 2 Atoll callbacks, for the sites 'a', 'b', but a Trainer is one site"
        for attempt in (trainer.validate, trainer.fit):
            with pytest.raises(UsageError, match=words):
                attempt(Tiny(), data())
        with pytest.raises(UsageError, match=words):
            atoll.integrations.lightning.is_running(trainer)
        with pytest.raises(UsageError, match="already takes part in a run"):
            atoll.integrations.lightning.patch(trainer, server.url, "c")
        assert server.status().workers == []


def test_a_trainer_takes_part_once() -> None:
    """A Lightning Trainer that was patched once refuses a second patch or a second callback, also without a server."""
    trainer = trainer_of()
    with pytest.raises(UsageError, match=r"has no AtollCallback\. Call atoll\.integrations\.lightning\.patch"):
        atoll.integrations.lightning.is_running(trainer)
    with pytest.raises(UsageError, match="patch"):
        atoll.integrations.lightning.evaluates(trainer, Tiny())
    atoll.integrations.lightning.patch(trainer)
    with pytest.raises(UsageError, match="already"):
        atoll.integrations.lightning.patch(trainer)
    trainer.callbacks.append(atoll.integrations.lightning.AtollCallback(site="b"))
    with pytest.raises(UsageError, match="has 2 Atoll callbacks"):
        trainer.fit(Tiny(), data())
    with pytest.raises(UsageError, match="dict is not a Lightning Trainer"):
        atoll.integrations.lightning.patch({})


@pytest.mark.covers("S5", "S7")
def test_steps_before_training_do_not_count(tmp_path: Path) -> None:
    """Steps that another Lightning callback tries and undoes before the training do not count."""
    # A LearningRateFinder takes steps with the same optimizer and undoes them. Three steps remain: c = −0.271/0.3.
    finder = callbacks().LearningRateFinder(
        num_training_steps=5, min_lr=0.05, max_lr=0.1, early_stop_threshold=None, update_attr=False
    )
    with serve(tmp_path, "scaffold") as server:
        trainer, module = patched(server, tmp_path, callbacks=[finder], default_root_dir=tmp_path), Tiny()
        trainer.fit(module, data())
        assert module.steps > 3
        assert atoll.integrations.lightning.is_running(trainer)
        trainer.validate(module, data(), verbose=False)  # pulls the second version
        assert module.w.item() == pytest.approx(0.271)
        assert global_control(trainer) == pytest.approx([-0.271 / 0.3])


class LBFGS(Tiny):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS([self.w], line_search_fn="strong_wolfe")


@pytest.mark.covers("S1", "S5")
def test_line_searches_use_the_loss_of_fedprox(tmp_path: Path) -> None:
    """In a Lightning fit, a line search uses the loss with FedProx's proximal term."""
    # (w − 1)²/2 + w²/4 is least at 2/3. Then (w − 1)²/2 + (w − 2/3)²/4 is least at (1 + 1/3)/(3/2) = 8/9.
    with serve(tmp_path, "fedprox", **{"algorithm.mu": 0.5}) as server:
        trainer, module = patched(server, tmp_path), LBFGS()
        for number in atoll.integrations.lightning.rounds(trainer):
            trainer.fit(module, data())
            assert module.w.item() == pytest.approx((2 / 3, 8 / 9)[number - 1], abs=1e-5)
        assert len(rounds_of(server)) == 2


@pytest.mark.covers("S1")
@pytest.mark.parametrize(("algorithm", "settings"), [("fedavg", {}), ("fedprox", {"algorithm.mu": 0.0})])
def test_a_round_submits_averaged_weights(tmp_path: Path, algorithm: str, settings: dict[str, Any]) -> None:
    """If a Lightning callback averages the weights, the site submits the average."""
    # Validation measures the average, too. Each fit has its own average. Steps lead from e = 1 − w to 0.9·e, 0.81·e and
    # 0.729·e. With decay ½ the mean is w = 1 − 0.792·e, since 0.25·0.9 + 0.25·0.81 + 0.5·0.729 = 0.792. FedProx with μ
    # = 0 gives the same result.
    with serve(tmp_path, algorithm, **settings) as server:
        trainer, module = patched(server, tmp_path, callbacks=[callbacks().EMAWeightAveraging(decay=0.5)]), Tiny()
        fit_rounds(trainer, module, data(), data())
        assert [row.metrics["val_w"] for row in rounds_of(server)] == pytest.approx([1 - 0.792, 1 - 0.792**2])
        assert result(server)["w"].item() == pytest.approx(1 - 0.792**2)
        assert module.w.item() == pytest.approx(1 - 0.792**2)


@pytest.mark.covers("S8")
def test_a_fit_without_an_average_submits_nothing(tmp_path: Path) -> None:
    """If an averaging callback has averaged nothing in a fit, the update is refused.

    At the end of the fit, the callback puts back the weights from before the round, 7 here, and they must not be
    submitted.
    """
    average = callbacks().EMAWeightAveraging(decay=0.5, update_starting_at_step=100)
    with serve(tmp_path, rounds=1) as server:
        with pytest.raises(UsageError, match=r"EMAWeightAveraging averaged nothing in this fit.*update_starting_at"):
            patched(server, tmp_path, callbacks=[average]).fit(Tiny(w=7.0), data())
        assert server.status().fragments[0].version == 0


SWA = "StochasticWeightAveraging keeps its average from one fit to the next.*Remove this callback.*EMAWeightAveraging"
AVERAGE = "WeightAveraging replaces the weights with an average at the end of each fit, but {}.*Remove this callback"
REFUSED = [
    ("fedavg", "StochasticWeightAveraging", {"swa_lrs": 0.05}, SWA),
    ("diloco", "StochasticWeightAveraging", {"swa_lrs": 0.05}, SWA),
    ("scaffold", "WeightAveraging", {}, AVERAGE.format("scaffold")),
    ("diloco", "EMAWeightAveraging", {}, "EMA" + AVERAGE.format("diloco")),
]


@pytest.mark.covers("S8")
@pytest.mark.parametrize(
    ("algorithm", "kind", "given", "words"), REFUSED, ids=[f"{kind}-{algorithm}" for algorithm, kind, _, _ in REFUSED]
)
def test_averaging_with_another_model_is_refused(
    tmp_path: Path, algorithm: str, kind: str, given: dict[str, Any], words: str
) -> None:
    """A fit is refused if an averaging callback would make the site submit the weights of another model."""
    # Without this callback, the site can train in the same round.
    with serve(tmp_path, algorithm, rounds=1) as server:
        trainer, module = patched(server, tmp_path, callbacks=[average := getattr(callbacks(), kind)(**given)]), Tiny()
        with pytest.raises(UsageError, match=words):
            trainer.fit(module, data())
        assert module.steps == 0
        trainer.callbacks.remove(average)  # the remedy; the same round
        trainer.fit(module, data())
        assert rounds_of(server)[0].workers == ["a"]
        assert module.w.item() == pytest.approx(1 - 0.9**3)


@pytest.mark.covers("S1")
def test_early_stopping_carries_over_to_the_next_fit(tmp_path: Path) -> None:
    """Early stopping shortens a Lightning fit, and its patience carries over to the next fit.

    w grows, while the monitor wants it small: the first fit has two epochs of three steps, each further fit has one.
    """
    stopping = callbacks().EarlyStopping("val_w", patience=1, mode="min")
    with serve(tmp_path, rounds=3) as server:
        trainer, module = patched(server, tmp_path, max_epochs=4, callbacks=[stopping]), Tiny()
        fit_rounds(trainer, module, data(), data())
        assert of_sites(rounds_of(server), "weight") == [[24.0], [12.0], [12.0]]
        assert module.w.item() == pytest.approx(1 - 0.9**12)


@pytest.mark.covers("S1", "D11")
def test_best_checkpoints_are_chosen_from_all_rounds(tmp_path: Path) -> None:
    """Lightning's ModelCheckpoint keeps the best checkpoints of all rounds together.

    w grows with each epoch of both rounds: the last one is best, 1 − 0.9¹², and the second best is 1 − 0.9⁹.
    """
    keeps = callbacks().ModelCheckpoint(dirpath=tmp_path / "kept", monitor="val_w", mode="max", save_top_k=2)
    with serve(tmp_path) as server:
        trainer, module = patched(server, tmp_path, max_epochs=2, callbacks=[keeps], enable_checkpointing=True), Tiny()
        fit_rounds(trainer, module, data(), data())
        assert len(rounds_of(server)) == 2
    kept = sorted(value.item() for value in keeps.best_k_models.values())
    assert kept == pytest.approx([1 - 0.9**9, 1 - 0.9**12])
    assert type(module).load_from_checkpoint(keeps.best_model_path).w.item() == pytest.approx(1 - 0.9**12)
