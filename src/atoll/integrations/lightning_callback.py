"""The Lightning callback that makes each `trainer.fit` a round. Importing this file imports Lightning.

    on_fit_start           load the global model into the module, on the module's device
    on_train_start         hook the optimizer if the algorithm needs it, after callbacks that tune the learning rate
    on_train_batch_end     count the samples
    on_fit_end             submit the update with its weight, steps and metrics
    on_validation_start    in `trainer.validate`: load the global model; the next fit starts from the same one

Only rank 0 communicates with the server. The other ranks get the model, and the tensors for a correction of local
steps, from rank 0.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import Tensor

from atoll.algorithms.optimizer_hooks import StepHooks
from atoll.algorithms.resolve import local_rule
from atoll.algorithms.weight_copies import WeightCopies
from atoll.errors import ConfigError, UsageError, public_api
from atoll.integrations.trainer_driver import SiteOptions, TrainerDriver, require_alone, value_of
from atoll.registry import ReceivedName
from atoll.runtime import ensure_lines
from atoll.tensors.module_tensors import named_tensors
from atoll.worker.exchange.script_state import WorkerState
from atoll.worker.log_lines import ALONE, LOG
from atoll.worker.session.ranks import RankGroup

NOTHING_LEFT = "The run is finished: this fit trains nothing."

GLOBAL_PREFIX = "global_"
"""Prefix of the names of metrics that `trainer.validate` measured on the global model."""

STRATEGIES = {"SingleDeviceStrategy", "DDPStrategy"}
"""Supported strategies, including their subclasses. With these, every rank has the whole model."""


def callback_class() -> type:
    """Return Lightning's class `Callback`, if possible from the package that is imported already.

    There are two packages, `lightning.pytorch` and `pytorch_lightning`. The Trainer of each package accepts the
    callbacks of both.

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


if TYPE_CHECKING:
    from lightning.pytorch import Callback
else:
    Callback = callback_class()


class AtollCallback(Callback):
    """A Lightning callback that makes a Trainer a site: each `trainer.fit` is a round.

    Without a server, the script trains alone.

    Args:
        server: address of the server, `http://host:8512`; by default `ATOLL_SERVER`.
        site: this site's name; by default `ATOLL_SITE`, else made from host and process.
        weight: weight of this site's updates: a number, or a function that is called after each fit. By default the
            number of samples that the fit trained on.
        steps: number of optimizer steps to report for a round, or a function that returns it. By default the steps that
            the fit made.
        folder: the folder for Atoll's files of this site, each about as large as the model; by default `ATOLL_DIR`,
            else `.atoll`.
        labels: texts to show in the server's status, by name.
        filters: filters that are applied, in this order, to each update of this site before it is sent.
        require_server: whether to raise an error if no server is configured, instead of training alone.
        swarm: whether this site may take part in a swarm, in which other sites connect to it and it connects to them;
            `ATOLL_SWARM` and `ATOLL_PEER_*` can allow it, too.
        allow_partial: whether the optimizer may hold only a part of the trainable parameters, in a DiLoCo run or under
            an algorithm that corrects steps.

    Attributes:
        driver: this site's connection to the run.

    Raises:
        UsageError: an element of `filters` is not a filter.
        ConfigError: `require_server` is set but no server is configured; or the name of an ATOLL_ variable is misspelt.
    """

    @public_api
    def __init__(
        self,
        server: str | None = None,
        site: str | None = None,
        *,
        steps: int | Callable[[], int] | None = None,
        **options: Unpack[SiteOptions],
    ) -> None:
        super().__init__()
        self.driver = TrainerDriver(server, site, **options)
        self._steps = steps
        self._limits = Limits()
        self._schedule = Schedule(self.driver.warn)
        self._validations = Validations()
        self._correction: StepHooks | None = None
        self._module: Any = None
        self._fits = 0
        self._in_round, self.measuring, self._samples = False, False, 0  # measuring: in cross-site evaluation
        self._first_step: int | None = None  # the Trainer's global_step when training started; None: not started
        self._open_step: int | None = None  # the optimizer step during an unfinished batch
        self._global_metrics: dict[str, float] = {}

    @property
    def site(self) -> str:
        """This site's name."""
        return self.driver.site

    @property
    def state_key(self) -> str:
        """The callback's key in a checkpoint. It contains the site's name, because keys must be unique in a Trainer."""
        return f"{AtollCallback.__name__}[{self.site}]"

    @public_api
    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Load another site's state, if the checkpoint has one, so that joining the run raises an error.

        The Trainer itself would ignore such a state, since its key contains the other site's name.
        """
        for key, state in checkpoint.get("callbacks", {}).items():
            if key.startswith(f"{AtollCallback.__name__}[") and key != self.state_key:
                self.driver.load_state_dict(state)

    @property
    def worker_state(self) -> WorkerState:
        """What this site keeps for itself with its updates, as `Worker.state`: use it within a fit of a federated run.

        Raises:
            UsageError: no round of a federated run has begun.
        """
        return self.driver.worker_state

    def state_dict(self) -> dict[str, Any]:
        """Return the state to store in the Trainer's checkpoint: the run, the site, and the versions it trains from."""
        return self.driver.state_dict()

    @public_api
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the state from a checkpoint. It is compared with the run and the site's folder when the site joins."""
        self.driver.load_state_dict(state_dict)

    # -- for the script

    @public_api
    def is_running(self, trainer: Any) -> bool:
        """Wait for the next round, and return whether there is one; see `atoll.integrations.lightning.is_running`."""
        ranks = _ranks(trainer)
        if trainer.world_size > 1 and not ranks.is_distributed:
            return not self.driver.finished  # the ranks are only connected in the first fit: there rank 0 asks
        running = bool(ranks.from_rank0(self._is_running))
        if not running and self.driver.takes_part:
            self._finish(ranks, self._module)
        return running

    @public_api
    def skip(self, trainer: Any) -> None:
        """Sit out the round; see `atoll.integrations.lightning.skip`."""
        ranks = _ranks(trainer)
        if trainer.world_size > 1 and not ranks.is_distributed:
            raise UsageError(
                f"The Trainer has {trainer.world_size} ranks, which are connected only in its first fit.",
                "Call skip after the first fit, or pass weight=0 to sit out every round.",
            )
        self._fits += 1
        self._in_round = False
        ranks.from_rank0(self.driver.skip)
        self._let_go()

    def _is_running(self) -> bool:
        state = self.driver.state()
        return self._fits == 0 if state == "alone" else state != "finished"

    # -- hooks

    @public_api
    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Check that the Trainer can take part. Before a fit, set the module's `atoll_round` and so on."""
        require_alone([callback for callback in trainer.callbacks if isinstance(callback, AtollCallback)])
        if self.driver.takes_part and stage in ("fit", "validate"):
            require_whole_model(trainer)
        if self.driver.takes_part and stage == "fit":
            require_own_weights(trainer)
            if _ranks(trainer).from_rank0(self.driver.state) != "diloco":  # DiLoCo can resume from a checkpoint
                require_fresh(trainer)
        if stage == "fit":  # before configure_optimizers, which may use the round's number for its schedule
            position = _ranks(trainer).from_rank0(self._position)
            pl_module.atoll_round, pl_module.atoll_rounds, pl_module.atoll_config = position

    @public_api
    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Wait for the next round and load its model.

        In a DiLoCo run, start or continue DiLoCo. Without a server, train alone. After the last round, load the result
        and train nothing.
        """
        self._limits.extend(trainer)
        self._fits, self._module = self._fits + 1, pl_module
        self._in_round = False
        self._first_step = self._open_step = None
        ranks = _ranks(trainer)
        state = ranks.from_rank0(self.driver.state)
        if state == "alone" and self._fits == 1 and ranks.is_first:
            ensure_lines()
            LOG.info("%s", ALONE)
        elif state == "finished":
            self._finish(ranks, pl_module)
            self._train_nothing(trainer)
        elif state == "diloco":
            self._go_on_with_diloco(trainer, pl_module, ranks)
        elif state == "round":
            self._receive(ranks, pl_module, trainer.optimizers)
            self._in_round, self._samples = True, 0

    @public_api
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Hook the optimizer if the run's algorithm corrects local steps, and remember the Trainer's step count."""
        self._first_step = trainer.global_step
        if self._in_round:  # not in on_fit_start: the trial steps of a LearningRateFinder are not part of the round
            self._correct(trainer, pl_module, _ranks(trainer))
            self._schedule.update(trainer)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Remember that a step has begun. If its batch does not end, `on_fit_end` raises an error."""
        self._open_step = trainer.global_step + 1

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Remember that the step's batch has ended, and count its samples. If a DiLoCo run is over, stop the fit."""
        self._open_step = None
        diloco = self.driver.diloco
        if self.driver.weight is None and (self._in_round or diloco is not None):
            self._samples += samples_of(batch)
        if diloco is not None and diloco.over:
            trainer.should_stop = True

    @public_api
    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Restore the user's limits for epochs and steps. In a round, submit the update from rank 0, for all ranks."""
        self._limits.restore(trainer)
        if self.driver.diloco is not None and self.driver.diloco.over:
            self.driver.stop_diloco()
        if not self._in_round:
            return
        self._in_round = False
        ranks = _ranks(trainer)
        steps = self._require_steps(trainer)
        require_averaged(trainer)
        samples = ranks.total(self._samples)
        ranks.from_rank0(lambda: self._submit(trainer, pl_module, steps, samples))
        self._let_go()

    @public_api
    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """In `trainer.validate` without a checkpoint, load the global model (after the last round, the result)."""
        self._validations.begin(trainer)
        if is_validating(trainer) and self.driver.takes_part and not self.measuring:
            self._module = pl_module
            ranks = _ranks(trainer)
            state = ranks.from_rank0(self.driver.state)
            if state == "round":
                self._receive(ranks, pl_module)
            elif state == "finished":
                self._finish(ranks, pl_module)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Keep the metrics of `trainer.validate` for the next update.

        In a DiLoCo run, keep those of every validation, also within a fit, if it measured the global model.
        """
        if self.measuring:
            return
        if self.driver.diloco is not None:
            self.driver.credit(self._validations.end(trainer), "val_check_interval")
        elif is_validating(trainer):
            self._global_metrics = metrics_of(trainer)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Leave the run without submitting an update. A further fit joins again and repeats the round."""
        self._limits.restore(trainer)
        self._let_go()
        self._in_round, self._global_metrics = False, {}
        self.driver.leave(exception)

    # -- rounds

    def _position(self) -> list[Any]:
        """Return [number of the fit's round, number of rounds of the run, configuration of the round].

        The second number is 0 if it is not known. In DiLoCo runs and after the end, the numbers are 1 and 0; without a
        server, 1 and 1.
        """
        if self.driver.state() == "round" and self.driver.round and self.driver.info:
            return [self.driver.round.number, self.driver.info.rounds, self.driver.config]
        return [1, 0 if self.driver.takes_part else 1, self.driver.config]

    def _receive(self, ranks: RankGroup, module: Any, optimizers: Sequence[Any] = ()) -> bool:
        """Load the global model into the module at all ranks. Return whether there is a global model.

        The model is downloaded once per round; later calls read it from the site's file.

        Args:
            ranks: the Trainer's processes.
            module: the module; None: there is none yet.
            optimizers: optimizers that are there already; their copies of the weights are loaded, too.
        """
        if module is None:
            return False
        copies = WeightCopies(self.driver.warn)
        for optimizer in optimizers:
            copies.watch(optimizer)
        tensors = named_tensors(module)[0]
        with torch.inference_mode(mode=False), copies.loading(module, tensors):
            found = bool(ranks.from_rank0(lambda: self.driver.load_into(module)))
            if found:
                ranks.spread_(tensors.values())
        return found

    def _finish(self, ranks: RankGroup, module: Any) -> None:
        """Load the run's result into the module, if there is one, and leave the run."""
        self.driver.finished = True
        self._receive(ranks, module)
        self._global_metrics = {}
        ranks.from_rank0(self.driver.leave)
        self.driver.finished = True

    def _train_nothing(self, trainer: Any) -> None:
        LOG.warning(NOTHING_LEFT)
        self._limits.train_nothing(trainer)

    def _correct(self, trainer: Any, module: Any, ranks: RankGroup) -> None:
        """Hook the optimizer at every rank, if the run's algorithm corrects local training."""

        def facts() -> list[Any]:
            assert self.driver.info is not None
            info = self.driver.info
            return [info.algorithm.text, info.local, info.local_package]

        algorithm, options, package = ranks.from_rank0(facts)
        rule = local_rule(ReceivedName(algorithm), options, package)
        if rule is None:
            return
        if rule.one_rate:
            require_own_weights(trainer, algorithm)
        require_unscaled(trainer, algorithm)
        optimizer = the_optimizer(trainer, module, algorithm)

        def correct() -> None:
            assert self.driver.round is not None
            self._correction = self.driver.round.correct(module, optimizer, allow_partial=self.driver.allow_partial)

        ranks.from_rank0(correct)
        if not ranks.is_first:
            self._correction = StepHooks(module, algorithm, rule).attach(optimizer)
        if self._correction is not None and self._correction.shared:
            ranks.spread_(value for _, value in sorted(self._correction.shared.items()))

    def _require_steps(self, trainer: Any) -> int:
        """Return the number of optimizer steps of this fit.

        Raises:
            UsageError: the fit made no optimizer step, or was interrupted in the batch of its last step.
        """
        if self._open_step is not None:
            raise UsageError(
                f"The Trainer did not call on_train_batch_end after optimizer step {self._open_step}, for "
                "example because a hook raised StopIteration. The results of that batch are incomplete.",
                "Do not raise in a batch hook. To stop early, set trainer.should_stop = True.",
            )
        steps = trainer.global_step - self._first_step if self._first_step is not None else 0
        if not steps:
            raise UsageError(
                "This fit made no optimizer step, so the round has no update.",
                "Check max_epochs, limit_train_batches and the data. A site without data for a round calls "
                "atoll.integrations.lightning.skip(trainer) in place of trainer.fit.",
            )
        return int(steps)

    def _submit(self, trainer: Any, module: Any, steps: int, samples: int) -> None:
        metrics = joined_metrics(metrics_of(trainer), self._global_metrics)
        counted = self._correction.steps if self._correction is not None else steps
        self.driver.submit(module, samples=samples, metrics=metrics, steps=value_of(self._steps) or counted)
        self._global_metrics = {}

    def _let_go(self) -> None:
        correction, self._correction = self._correction, None
        if correction is not None:
            correction.close()

    # -- DiLoCo

    def _go_on_with_diloco(self, trainer: Any, module: Any, ranks: RankGroup) -> None:
        """Start or continue DiLoCo, which synchronises every H optimizer steps. These steps can span several fits."""
        if ranks.is_distributed:
            raise UsageError(
                "The run uses DiLoCo, but the Trainer has several ranks.", "Give each DiLoCo worker one device."
            )
        require_own_weights(trainer, "diloco")
        optimizer = the_optimizer(trainer, module, "diloco")
        if self.driver.diloco is not None and self.driver.diloco.model is module:
            self.driver.diloco.follow(optimizer)
            return
        self.driver.stop_diloco()

        def weight() -> float:
            samples, self._samples = self._samples, 0
            return self.driver.weight_of(max(samples, 1))

        diloco = self.driver.start_diloco(module, optimizer, weight)
        diloco.local_metrics = lambda: self._validations.of_training(trainer)
        weakref.finalize(trainer, diloco.stop)
        if diloco.over:
            self._train_nothing(trainer)


def _ranks(trainer: Any) -> RankGroup:
    return RankGroup(trainer.global_rank, trainer.world_size, trainer.strategy.root_device)


# -- what the callback reads from a Trainer, and changes in it


class Limits:
    """Makes `max_epochs`, `max_steps`, `min_epochs` and `min_steps` count from the start of each fit.

    Lightning counts them from the first fit, so a second fit would end at once. After each fit, the Trainer has the
    user's limits again.
    """

    def __init__(self) -> None:
        self._limits: tuple[Any, Any, Any, Any] | None = None

    def extend(self, trainer: Any) -> None:
        """Raise the limits by the epochs and steps of earlier fits, so that the coming fit trains in full."""
        loop, epochs, steps = trainer.fit_loop, trainer.current_epoch, trainer.global_step
        self.restore(trainer)
        self._limits = (loop.min_epochs, loop.max_epochs, loop.epoch_loop.min_steps, loop.epoch_loop.max_steps)
        loop.min_epochs, loop.max_epochs = _further(loop.min_epochs, epochs), _further(loop.max_epochs, epochs)
        loop.epoch_loop.min_steps = _further(loop.epoch_loop.min_steps, steps)
        loop.epoch_loop.max_steps = _further(loop.epoch_loop.max_steps, steps)

    def train_nothing(self, trainer: Any) -> None:
        """Make the fit that is about to start end without training."""
        trainer.fit_loop.max_epochs = trainer.current_epoch

    def restore(self, trainer: Any) -> None:
        """Set the Trainer's limits back to the user's values."""
        if self._limits is not None:
            loop = trainer.fit_loop
            loop.min_epochs, loop.max_epochs, loop.epoch_loop.min_steps, loop.epoch_loop.max_steps = self._limits
            self._limits = None


class Schedule:
    """Warns about a learning rate schedule that restarts in each round.

    Args:
        warn: called with the warning.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._first: list[float] | None = None
        self._warned = False

    def update(self, trainer: Any) -> None:
        """Warn once if a schedule with one step per epoch begins a later round with the rates of the first round."""
        if not any(config.interval == "epoch" for config in trainer.lr_scheduler_configs):
            return
        rates = [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
        if self._first is None:
            self._first = rates
        elif rates == self._first and not self._warned:
            self._warned = True
            self._warn(
                "the learning rate schedule starts again in each round, so it never gets beyond its first epochs. In "
                "configure_optimizers, let it depend on self.atoll_round and self.atoll_rounds "
                "(docs/tutorial-lightning.md, Epochs)"
            )


def _further(limit: int | None, done: int) -> int | None:
    """Return `limit` + `done`. Return None and −1, which mean no limit, unchanged."""
    return limit if limit is None or limit < 0 else limit + done


def require_whole_model(trainer: Any) -> None:
    """Raise an error for strategies that shard the model, or that train in spawned or forked processes.

    Raises:
        UsageError: the strategy is not supported. The message names supported ones.
    """
    strategy = trainer.strategy
    launcher = type(strategy.launcher).__name__
    if launcher == "_MultiProcessingLauncher":
        raise UsageError(
            "The Trainer trains in processes that it spawns or forks; they cannot take part in this process's run.",
            "Use strategy='ddp'.",
        )
    if not STRATEGIES & {kind.__name__ for kind in type(strategy).__mro__}:
        raise UsageError(
            f"Atoll does not support the Trainer's strategy {type(strategy).__name__}.",
            "Use one device or strategy='ddp', because every rank must have the whole model.",
        )


def require_fresh(trainer: Any) -> None:
    """Raise an error if a fit resumes from a checkpoint, since a round must start from the global model.

    Raises:
        UsageError: the fit resumes from a checkpoint. The message names the checkpoint.
    """
    if trainer.ckpt_path:
        raise UsageError(
            f"This fit resumes from the checkpoint {str(trainer.ckpt_path)!r}, but a round must start from "
            "the global model.",
            "Leave ckpt_path out: the run continues from the server's state. Under Slurm, also set "
            "plugins=[SLURMEnvironment(auto_requeue=False)].",
        )


def the_optimizer(trainer: Any, module: Any, algorithm: str) -> Any:
    """Return the Trainer's only optimizer, for an algorithm that hooks its steps.

    Args:
        trainer: the Lightning Trainer.
        module: the module that is fitted.
        algorithm: the algorithm's name, for messages.

    Raises:
        UsageError: the module uses manual optimization.
    """
    if not module.automatic_optimization:
        raise UsageError(
            f"{type(module).__name__} uses manual optimization, but {algorithm} needs the Trainer's steps.",
            "Set automatic_optimization = True, with one optimizer for all parameters, or use fedavg.",
        )
    return trainer.optimizers[0]  # Lightning refuses several under automatic optimization


def require_unscaled(trainer: Any, algorithm: str) -> None:
    """Raise an error if gradients are scaled, for an algorithm that adds a correction to each local step.

    A scaler skips steps, and the correction must not be added to scaled gradients.

    Args:
        trainer: the Lightning Trainer.
        algorithm: the algorithm's name, for the message.

    Raises:
        UsageError: the Trainer has a gradient scaler.
    """
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        raise UsageError(
            f"The Trainer scales gradients (precision {trainer.precision}), but {algorithm} needs unscaled gradients.",
            "Use precision='bf16-mixed' or '32-true', or use fedavg.",
        )


def require_own_weights(trainer: Any, algorithm: str = "") -> None:
    """Raise an error for callbacks that replace the module's weights with an average that must not be submitted.

    `StochasticWeightAveraging` is never allowed. `WeightAveraging` is allowed only if `algorithm` is empty.

    Args:
        trainer: the Lightning Trainer.
        algorithm: name of an algorithm that needs the weights after the last step; empty for other algorithms.

    Raises:
        UsageError: the Trainer has such a callback. The message names it.
    """
    for callback in trainer.callbacks:
        if _is_a(callback, "StochasticWeightAveraging"):
            raise UsageError(
                "StochasticWeightAveraging keeps its average from one fit to the next: after the first "
                "round, it would submit a mean over the models of earlier rounds.",
                "Remove this callback: the server averages already. With fedavg, EMAWeightAveraging and "
                "WeightAveraging work, too: they start again in each fit.",
            )
        if algorithm and _is_a(callback, "WeightAveraging"):
            raise UsageError(
                f"{type(callback).__name__} replaces the weights with an average at the end of each fit, but "
                f"{algorithm} needs the weights after the last optimizer step.",
                "Remove this callback, or use fedavg.",
            )


def require_averaged(trainer: Any) -> None:
    """Raise an error if a `WeightAveraging` callback averaged no weights in a fit, and so undid the fit's training.

    Raises:
        UsageError: there is such a callback. The message names it.
    """
    for callback in trainer.callbacks:
        average = getattr(callback, "_average_model", None)
        if _is_a(callback, "WeightAveraging") and not int(getattr(average, "n_averaged", 1)):
            raise UsageError(
                f"{type(callback).__name__} averaged nothing in this fit, and restored the weights from "
                "before the round.",
                "Make it average in every fit: lower update_starting_at_step or update_starting_at_epoch, or "
                "check should_update.",
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
            f"The number of samples in a batch of type {type(batch).__name__} is unknown.",
            "Pass the update's weight: atoll.integrations.lightning.patch(trainer, weight=number_of_samples).",
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
    """Return the metrics that the Trainer has logged, as numbers. Tensors of several elements are left out."""
    return {
        name: float(value)
        for name, value in trainer.callback_metrics.items()
        if not isinstance(value, Tensor) or value.numel() == 1
    }


class Validations:
    """Separates the metrics that validations log from those that training logs in the same fit."""

    def __init__(self) -> None:
        self._before: dict[str, Any] = {}
        self._names: set[str] = set()  # names of metrics that validations have logged

    def begin(self, trainer: Any) -> None:
        """Remember the metrics at the start of a validation, so that `end` finds those that the validation logs."""
        self._before = dict(trainer.callback_metrics)

    def end(self, trainer: Any) -> dict[str, float]:
        """Return the metrics that this validation logged; none for the sanity check, which uses only a few batches."""
        if trainer.sanity_checking:
            return {}
        logged = {name for name, value in trainer.callback_metrics.items() if value is not self._before.get(name)}
        self._names |= logged
        return {name: value for name, value in metrics_of(trainer).items() if name in logged}

    def of_training(self, trainer: Any) -> dict[str, float]:
        """Return the logged metrics, without those that a validation has ever logged."""
        return {name: value for name, value in metrics_of(trainer).items() if name not in self._names}


def joined_metrics(of_fit: Mapping[str, float], of_global: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of a fit, and those of the global model under names with the prefix `GLOBAL_PREFIX`.

    Raises:
        UsageError: the fit itself logged a metric under one of the prefixed names.
    """
    named = {GLOBAL_PREFIX + name: value for name, value in of_global.items()}
    for name in named:
        if name in of_fit:
            raise UsageError(
                f"The module logs {name!r}, a name that Atoll uses for {name.removeprefix(GLOBAL_PREFIX)!r} "
                "of the global model.",
                "Log it under another name.",
            )
    return {**of_fit, **named}


def is_validating(trainer: Any) -> bool:
    """Return whether `trainer.validate` runs without a checkpoint, and so validates the global model."""
    return trainer.state.fn is not None and trainer.state.fn.value == "validate" and not trainer.ckpt_path
