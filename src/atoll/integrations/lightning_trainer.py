"""What the callback asks and tells a Lightning Trainer: limits of a fit, what it refuses, samples, metrics.

Nothing is imported from Lightning: `lightning.pytorch` and `pytorch_lightning` have the same names and other classes.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from torch import Tensor

from atoll.errors import ConfigError, UsageError
from atoll.worker.log_lines import LOG

GLOBAL_PREFIX = "global_"
"""Before the names of metrics that `trainer.validate` gave of the global model."""

STRATEGIES = {"SingleDeviceStrategy", "DDPStrategy"}
"""And what derives from them: every rank holds the whole model."""


def callback_class() -> type:
    """Return Lightning's `Callback`, of the package that is imported already; either works with both Trainers."""
    names = ["lightning.pytorch", "pytorch_lightning"]
    for name in sorted(names, key=lambda name: name not in sys.modules):
        try:
            found: type = import_module(name).Callback
            return found
        except ImportError:
            continue
    raise ConfigError("Neither lightning nor pytorch_lightning is installed.", "pip install 'atoll[lightning]'")


class Limits:
    """Lets `max_epochs`, `max_steps` and their minima count from where a fit begins; afterwards they are the user's."""

    def __init__(self) -> None:
        self._given: tuple[Any, Any, Any, Any] | None = None

    def extend(self, trainer: Any) -> None:
        """Let the fit that begins train as much as the Trainer says, however much earlier fits trained."""
        loop, epochs, steps = trainer.fit_loop, trainer.current_epoch, trainer.global_step
        self.restore(trainer)
        self._given = (loop.min_epochs, loop.max_epochs, loop.epoch_loop.min_steps, loop.epoch_loop.max_steps)
        loop.min_epochs, loop.max_epochs = _further(loop.min_epochs, epochs), _further(loop.max_epochs, epochs)
        loop.epoch_loop.min_steps = _further(loop.epoch_loop.min_steps, steps)
        loop.epoch_loop.max_steps = _further(loop.epoch_loop.max_steps, steps)

    def train_nothing(self, trainer: Any) -> None:
        """Let the fit that begins end at once."""
        trainer.fit_loop.max_epochs = trainer.current_epoch

    def restore(self, trainer: Any) -> None:
        """Set the limits to what the user wrote."""
        if self._given is not None:
            loop = trainer.fit_loop
            loop.min_epochs, loop.max_epochs, loop.epoch_loop.min_steps, loop.epoch_loop.max_steps = self._given
            self._given = None


class Schedule:
    """Notices a learning rate schedule that begins anew in each round."""

    def __init__(self) -> None:
        self._first: list[float] | None = None
        self._warned = False

    def look_at(self, trainer: Any) -> None:
        """Warn once of a schedule by epochs that begins a later round at the rates of the first one."""
        if not any(config.interval == "epoch" for config in trainer.lr_scheduler_configs):
            return
        rates = [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
        if self._first is None:
            self._first = rates
        elif rates == self._first and not self._warned:
            self._warned = True
            LOG.warning(
                "the learning rate schedule begins anew in each round, so it stays at its first epochs: build it from "
                "self.atoll_round and self.atoll_rounds in configure_optimizers (docs/tutorial-lightning.md, Epochs)"
            )


def _further(limit: int | None, done: int) -> int | None:
    """Return `limit` beyond `done`; None and −1 are no limit."""
    return limit if limit is None or limit < 0 else limit + done


def require_whole_model(trainer: Any) -> None:
    """Refuse strategies under which no rank holds the whole model, or that train in a process of their own.

    Raises:
        UsageError: the strategy, and which do.
    """
    strategy = trainer.strategy
    launcher = type(strategy.launcher).__name__
    if launcher == "_MultiProcessingLauncher":
        raise UsageError(
            "The Trainer trains in processes that it spawns or forks, which cannot be joined with this one's run.",
            "Use strategy='ddp'.",
        )
    if not STRATEGIES & {kind.__name__ for kind in type(strategy).__mro__}:
        raise UsageError(
            f"Atoll does not know the Trainer's strategy {type(strategy).__name__}.",
            "Use one device, or strategy='ddp': every rank must hold the whole model.",
        )


def require_fresh(trainer: Any) -> None:
    """Refuse a fit that resumes from a checkpoint: its epochs count as trained, and its weights are not the round's.

    Raises:
        UsageError: the checkpoint is named.
    """
    if trainer.ckpt_path:
        raise UsageError(
            f"This fit resumes from the checkpoint {str(trainer.ckpt_path)!r}, and a round begins with the global "
            "model.",
            "Leave ckpt_path out: the run goes on from the server's state. Under Slurm, "
            "plugins=[SLURMEnvironment(auto_requeue=False)].",
        )


def the_optimizer(trainer: Any, module: Any, algorithm: str) -> Any:
    """Return the one optimizer that an algorithm follows.

    Raises:
        UsageError: the steps of this training cannot be followed; the remedy is named.
    """
    if not module.automatic_optimization:
        raise UsageError(
            f"{type(module).__name__} optimizes manually, and {algorithm} follows the steps that the Trainer makes.",
            "Set automatic_optimization = True, or run fedavg.",
        )
    if len(trainer.optimizers) != 1:
        raise UsageError(
            f"{type(module).__name__} has {len(trainer.optimizers)} optimizers, and {algorithm} follows one.",
            "Put all parameters into one optimizer, or run fedavg.",
        )
    return trainer.optimizers[0]


def require_unscaled(trainer: Any, algorithm: str) -> None:
    """Refuse a gradient scaler: it skips steps, and the gradients that it scaled are not those to correct.

    Raises:
        UsageError: the Trainer has one.
    """
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        raise UsageError(
            f"The Trainer scales gradients (precision {trainer.precision}), and {algorithm} corrects steps.",
            "Use precision='bf16-mixed' or '32-true', or run fedavg.",
        )


def require_own_weights(trainer: Any, algorithm: str = "") -> None:
    """Refuse callbacks that put an average of weights into the module which the run would take for its training.

    Args:
        algorithm: one that reads where the optimizer's steps led; empty for any other.

    Raises:
        UsageError: the callback is named, and the remedy.
    """
    for callback in trainer.callbacks:
        if _is_a(callback, "StochasticWeightAveraging"):
            raise UsageError(
                "StochasticWeightAveraging keeps its average and its start from fit to fit: after the first round it "
                "would submit a mean over earlier rounds' models.",
                "Use EMAWeightAveraging or WeightAveraging, which begin anew in each fit, or none: the server averages "
                "already.",
            )
        if algorithm and _is_a(callback, "WeightAveraging"):
            raise UsageError(
                f"{type(callback).__name__} replaces the weights by an average at the end of each fit, and {algorithm} "
                "reads where the optimizer's steps led.",
                "Leave it out, or run fedavg.",
            )


def require_averaged(trainer: Any) -> None:
    """Refuse the weights from before the round, which a callback that averaged nothing has put back into the module.

    Raises:
        UsageError: the callback is named.
    """
    for callback in trainer.callbacks:
        average = getattr(callback, "_average_model", None)
        if _is_a(callback, "WeightAveraging") and not int(getattr(average, "n_averaged", 1)):
            raise UsageError(
                f"{type(callback).__name__} averaged nothing in this fit, and has put back the weights from before "
                "the round.",
                "Let it average in every fit: lower update_starting_at_step or update_starting_at_epoch, or look at "
                "should_update.",
            )


def _is_a(callback: Any, name: str) -> bool:
    return any(kind.__name__ == name for kind in type(callback).__mro__)


def samples_of(batch: Any) -> int:
    """Return the samples of a batch: the first dimension of the first tensor in it.

    Raises:
        UsageError: it has no tensor.
    """
    count = _first_dimension(batch)
    if count is None:
        raise UsageError(
            f"How many samples a batch of {type(batch).__name__} has is not known.",
            "Give the weight: atoll.integrations.lightning.patch(trainer, weight=number_of_samples).",
        )
    return count


def _first_dimension(value: Any) -> int | None:
    if isinstance(value, Tensor):
        return value.shape[0] if value.ndim else 1
    if isinstance(value, Mapping):
        value = list(value.values())
    elif not isinstance(value, list | tuple):
        value = list(vars(value).values()) if hasattr(value, "__dict__") else []
    found = (_first_dimension(item) for item in value)
    return next((count for count in found if count is not None), None)


def metrics_of(trainer: Any) -> dict[str, float]:
    """Return what was logged, as numbers."""
    return {
        name: float(value)
        for name, value in trainer.callback_metrics.items()
        if not isinstance(value, Tensor) or value.numel() == 1
    }


class Validations:
    """Tells what validations log apart from what training logs, within one fit."""

    def __init__(self) -> None:
        self._before: dict[str, Any] = {}
        self._names: set[str] = set()  # that validations log

    def begin(self, trainer: Any) -> None:
        """Note what was logged when a validation begins."""
        self._before = dict(trainer.callback_metrics)

    def end(self, trainer: Any) -> dict[str, float]:
        """Return what this validation logged; nothing for the sanity check, which sees a few batches."""
        if trainer.sanity_checking:
            return {}
        logged = {name for name, value in trainer.callback_metrics.items() if value is not self._before.get(name)}
        self._names |= logged
        return {name: value for name, value in metrics_of(trainer).items() if name in logged}

    def of_training(self, trainer: Any) -> dict[str, float]:
        """Return what was logged, without what validations log."""
        return {name: value for name, value in metrics_of(trainer).items() if name not in self._names}


def joined_metrics(of_fit: Mapping[str, float], of_global: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of local training, and those of the global model with `GLOBAL_PREFIX`.

    Raises:
        UsageError: the fit logged such a name itself.
    """
    named = {GLOBAL_PREFIX + name: value for name, value in of_global.items()}
    for name in named:
        if name in of_fit:
            raise UsageError(
                f"The module logs {name!r}, which is Atoll's name for {name.removeprefix(GLOBAL_PREFIX)!r} of the "
                "global model.",
                "Log it under another name.",
            )
    return {**of_fit, **named}


def is_validating(trainer: Any) -> bool:
    """Return whether this is `trainer.validate` of the global model: not within fit, and not of a checkpoint."""
    return trainer.state.fn is not None and trainer.state.fn.value == "validate" and not trainer.ckpt_path
