"""Access to a Lightning Trainer for the callback: limits of a fit, checks of the Trainer, samples, metrics.

Apart from `callback_class`, this file does not import Lightning: it works with the Trainers of `lightning.pytorch` and
`pytorch_lightning`, which have equal names but are different classes.
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
"""Prefix of the names of metrics that `trainer.validate` measured on the global model."""

STRATEGIES = {"SingleDeviceStrategy", "DDPStrategy"}
"""Supported strategies, including their subclasses. With these, every rank has the whole model."""


def callback_class() -> type:
    """Return Lightning's class `Callback`, if possible from the Lightning package that is already imported.

    Both packages' callbacks work with both packages' Trainers.

    Raises:
        ConfigError: no Lightning package is installed.
    """
    names = ["lightning.pytorch", "pytorch_lightning"]
    for name in sorted(names, key=lambda name: name not in sys.modules):
        try:
            found: type = import_module(name).Callback
            return found
        except ImportError:
            continue
    raise ConfigError("Neither lightning nor pytorch_lightning is installed.", "pip install 'atoll[lightning]'")


class Limits:
    """The limits of a fit: makes `max_epochs`, `max_steps` and their minima count from the start of each fit.

    After the fit, the Trainer has the user's limits again.
    """

    def __init__(self) -> None:
        self._given: tuple[Any, Any, Any, Any] | None = None

    def extend(self, trainer: Any) -> None:
        """Raise the limits by the epochs and steps of earlier fits, so that the starting fit trains the full amount."""
        loop, epochs, steps = trainer.fit_loop, trainer.current_epoch, trainer.global_step
        self.restore(trainer)
        self._given = (loop.min_epochs, loop.max_epochs, loop.epoch_loop.min_steps, loop.epoch_loop.max_steps)
        loop.min_epochs, loop.max_epochs = _further(loop.min_epochs, epochs), _further(loop.max_epochs, epochs)
        loop.epoch_loop.min_steps = _further(loop.epoch_loop.min_steps, steps)
        loop.epoch_loop.max_steps = _further(loop.epoch_loop.max_steps, steps)

    def train_nothing(self, trainer: Any) -> None:
        """Make the starting fit end without training."""
        trainer.fit_loop.max_epochs = trainer.current_epoch

    def restore(self, trainer: Any) -> None:
        """Set the Trainer's limits back to the user's values."""
        if self._given is not None:
            loop = trainer.fit_loop
            loop.min_epochs, loop.max_epochs, loop.epoch_loop.min_steps, loop.epoch_loop.max_steps = self._given
            self._given = None


class Schedule:
    """A check for learning rate schedules that restart in each round."""

    def __init__(self) -> None:
        self._first: list[float] | None = None
        self._warned = False

    def look_at(self, trainer: Any) -> None:
        """Warn once if a per-epoch schedule starts a later round with the first round's learning rates."""
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
    """Return `limit` + `done`. Keep None and −1, which mean no limit."""
    return limit if limit is None or limit < 0 else limit + done


def require_whole_model(trainer: Any) -> None:
    """Refuse strategies in which a rank may not have the whole model, or that train in spawned or forked processes.

    Raises:
        UsageError: the strategy is not supported. The message names supported ones.
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
    """Refuse a fit that resumes from a checkpoint: a round must start from the global model.

    Raises:
        UsageError: the fit resumes from a checkpoint. The message names the checkpoint.
    """
    if trainer.ckpt_path:
        raise UsageError(
            f"This fit resumes from the checkpoint {str(trainer.ckpt_path)!r}, and a round begins with the global "
            "model.",
            "Leave ckpt_path out: the run goes on from the server's state. Under Slurm, "
            "plugins=[SLURMEnvironment(auto_requeue=False)].",
        )


def the_optimizer(trainer: Any, module: Any, algorithm: str) -> Any:
    """Return the Trainer's only optimizer, for an algorithm that hooks its steps.

    Args:
        trainer: the Lightning Trainer.
        module: the module that is fitted.
        algorithm: the algorithm's name, for messages.

    Raises:
        UsageError: the module optimizes manually, or there is not exactly one optimizer.
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
    """Refuse a gradient scaler: it skips steps, and a correction must not be added to scaled gradients.

    Raises:
        UsageError: the Trainer has a gradient scaler.
    """
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        raise UsageError(
            f"The Trainer scales gradients (precision {trainer.precision}), and {algorithm} corrects steps.",
            "Use precision='bf16-mixed' or '32-true', or run fedavg.",
        )


def require_own_weights(trainer: Any, algorithm: str = "") -> None:
    """Refuse callbacks that replace the module's weights by an average that the run must not use.

    `StochasticWeightAveraging` is always refused. `WeightAveraging` is refused if `algorithm` is given.

    Args:
        trainer: the Lightning Trainer.
        algorithm: name of an algorithm that needs the weights after the last step; empty for other algorithms.

    Raises:
        UsageError: the Trainer has such a callback. The message names it.
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
    """Refuse a fit in which a `WeightAveraging` callback averaged nothing: then it restored the weights before the fit.

    Raises:
        UsageError: there is such a callback. The message names it.
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
    """Return the number of samples in a batch: the first dimension of its first tensor.

    Raises:
        UsageError: the batch has no tensor.
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
    """Return the Trainer's logged metrics as numbers, without tensors of several elements."""
    return {
        name: float(value)
        for name, value in trainer.callback_metrics.items()
        if not isinstance(value, Tensor) or value.numel() == 1
    }


class Validations:
    """A record of the metrics that validations log, to separate them from those that training logs in the same fit."""

    def __init__(self) -> None:
        self._before: dict[str, Any] = {}
        self._names: set[str] = set()  # names of metrics that validations have logged

    def begin(self, trainer: Any) -> None:
        """Store the metrics at the start of a validation, for the comparison in `end`."""
        self._before = dict(trainer.callback_metrics)

    def end(self, trainer: Any) -> dict[str, float]:
        """Return the metrics that this validation logged; none for the sanity check, which uses only a few batches."""
        if trainer.sanity_checking:
            return {}
        logged = {name for name, value in trainer.callback_metrics.items() if value is not self._before.get(name)}
        self._names |= logged
        return {name: value for name, value in metrics_of(trainer).items() if name in logged}

    def of_training(self, trainer: Any) -> dict[str, float]:
        """Return the logged metrics, without those that validations log."""
        return {name: value for name, value in metrics_of(trainer).items() if name not in self._names}


def joined_metrics(of_fit: Mapping[str, float], of_global: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of a fit, and those of the global model with `GLOBAL_PREFIX` before their names.

    Raises:
        UsageError: the fit itself logged a metric under one of the prefixed names.
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
    """Return whether `trainer.validate` runs, without a checkpoint: then it validates the global model."""
    return trainer.state.fn is not None and trainer.state.fn.value == "validate" and not trainer.ckpt_path
