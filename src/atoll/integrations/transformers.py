"""Hugging Face's Trainer as a worker: `Trainer(..., callbacks=[AtollCallback()])`.

One `trainer.train()` spans all rounds of the run. The optimizer's state and the learning rate schedule continue from
round to round. The global model is loaded into the parameters in place. The server chooses the algorithm:

    FedAvg, FedProx, …             submit and load the next model, every `sync_every` steps or after each epoch
    DiLoCo                         use `atoll.DiLoCo` with the model and the Trainer's optimizer
"""

from __future__ import annotations

import inspect
import json
import math
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, Unpack

from torch import nn
from torch.optim import Optimizer

from atoll.algorithms.optimizer_hooks import StepHooks, layers_of
from atoll.errors import UsageError, public_api
from atoll.format_text import number_of
from atoll.integrations.trainer_driver import SiteOptions, TrainerDriver, require_alone
from atoll.runtime import ensure_lines
from atoll.worker.arguments import finite_metrics, require_counts
from atoll.worker.exchange.script_state import WorkerState
from atoll.worker.log_lines import ALONE, ALONE_ENDED, LOG

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_callback import CallbackHandler
except ImportError as error:
    raise UsageError("Hugging Face transformers is not installed.", "pip install 'atoll[transformers]'.") from error

_BEGUN = threading.local()
"""The attribute `callback` is a weak reference to the last callback that started training in this thread."""


class AtollCallback(TrainerCallback):
    """A callback that makes Hugging Face's Trainer a worker of a run. Without a server, it changes nothing.

    Args:
        server: address of the server, `http://host:8512`; by default `ATOLL_SERVER`.
        site: this site's name; by default `ATOLL_SITE`, else made from host and process.
        sync_every: optimizer steps per round; by default a round is an epoch. A DiLoCo run has its own number of steps
            between synchronisations, and a value given here must equal it.
        weight: weight of this site's updates: a number, or a function that is called once per round. By default the
            round's number of samples; in a DiLoCo run 1.
        module: the model to train across sites, if it is only a part of the Trainer's model:
            `atoll.integrations.peft.adapter(model)`.
        folder: the folder for Atoll's files of this site, each about as large as the model; by default `ATOLL_DIR`,
            else `.atoll`.
        labels: texts to show in the server's status, by name.
        filters: filters that are applied, in this order, to each update of this site before it is sent.
        require_server: whether to raise an error if no server is configured, instead of training alone.
        swarm: whether this site may take part in a swarm, in which other sites connect to it and it connects to them;
            `ATOLL_SWARM` and `ATOLL_PEER_*` can allow it, too.
        allow_partial: whether the optimizer may hold only a part of the trainable parameters, in a DiLoCo run or under
            an algorithm that corrects steps.

    Raises:
        UsageError: an element of `filters` is not a filter, or `sync_every` is below 1.
        ConfigError: `require_server` is set but no server is configured; or the name of an ATOLL_ variable is misspelt.

    Attributes:
        rounds: number of rounds to which this site has submitted an update.
        finished: whether the run is over. If so, the Trainer stops, and its model has the run's result.
    """

    @public_api
    def __init__(
        self,
        server: str | None = None,
        site: str | None = None,
        *,
        sync_every: int | None = None,
        module: nn.Module | None = None,
        **options: Unpack[SiteOptions],
    ) -> None:
        require_counts(sync_every=sync_every)
        self.driver = TrainerDriver(server, site, **options)
        self._sync_every, self._module = sync_every, module
        self._taking_part = False
        self._model: nn.Module | None = None  # the model that is trained across sites
        self._optimizer: Optimizer | None = None
        self._correction: StepHooks | None = None
        self._metrics: dict[str, float] = {}
        self._steps = self._samples = 0  # of this round
        self._is_scaled = False

    @property
    def site(self) -> str:
        """This site's name."""
        return self.driver.site

    @property
    def rounds(self) -> int:
        """Number of rounds to which this site has submitted an update; 0 before training starts."""
        return self.driver.diloco.rounds if self.driver.diloco is not None else self.driver.rounds

    @property
    def finished(self) -> bool:
        """Whether the run is over; False before training starts."""
        return self.driver.diloco.over if self.driver.diloco is not None else self.driver.finished

    @property
    def config(self) -> dict[str, Any]:
        """What the run tells this site for the open round, such as a learning rate; empty before training starts."""
        return self.driver.config

    @property
    def worker_state(self) -> WorkerState:
        """What this site keeps for itself with its updates, as `Worker.state`: use it within `train()`.

        Raises:
            UsageError: no round of a federated run has begun.
        """
        return self.driver.worker_state

    def leave(self, error: BaseException | None = None) -> None:
        """Leave the run. Call this if your program continues after `trainer.train()` has failed. Idempotent.

        Args:
            error: the error that ended training; the server gets its text. None: training ended well.
        """
        was_taking_part, self._taking_part = self._taking_part, False
        driver = self.driver
        if was_taking_part and not driver.takes_part and error is None:
            LOG.info("%s", ALONE_ENDED)
        whole = "a whole epoch" if self._sync_every is None else number_of(self._sync_every, "step")
        if driver.round is not None and self._steps and error is None:
            driver.warn(
                f"the Trainer ended after {number_of(self._steps, 'step')} of round {driver.round.number}, which are "
                f"not sent, because an update needs {whole}"
            )
        if self._correction is not None:
            self._correction.close()
        driver.leave(error)

    @public_api
    def skip(self) -> None:
        """Sit out the open round, for example because this site has no data for it; if none is open, the next one.

        Within training, for example in another callback, training goes on, but nothing of the round is sent, and the
        next round begins where this one would have ended. Before `trainer.train()`, wait for a round to sit out.

        Raises:
            UsageError: the run uses DiLoCo, and training has not begun.
        """
        self.driver.skip()

    def state_dict(self) -> dict[str, Any]:
        """Return this site's state for a checkpoint. `on_save` writes it into the Trainer's own checkpoints."""
        return self.driver.state_dict()

    @public_api
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep the state from a checkpoint. It is compared with the run and the site's folder when the site joins.

        Raises:
            UsageError: `state` was not returned by `state_dict`.
        """
        self.driver.load_state_dict(state)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Write `state_dict` into the Trainer's checkpoint."""
        path = _in_checkpoint(args, state)
        if path.parent.is_dir():
            path.write_text(json.dumps(self.state_dict()), encoding="utf-8")

    @public_api
    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Join the run and load the global model.

        Raises:
            UsageError: the Trainer runs in several processes, uses DeepSpeed, has several Atoll callbacks, or has an
                optimizer that calls no step hooks.
            SchemaMismatch: the run trains a model with other tensors.
        """
        require_plain(args)
        require_alone(callbacks_of_the_caller(AtollCallback))
        module = self._module if self._module is not None else kwargs["model"]
        self._optimizer = kwargs["optimizer"]
        layers_of(self._optimizer)
        self._steps, self._samples, self._metrics = 0, 0, {}
        if self._taking_part and args.auto_find_batch_size and self._model is module:
            with self._leaving():
                self._begin_again(control)
            return
        self.leave()
        _leave_failed()
        self.driver.forget()
        if state.global_step and _in_checkpoint(args, state).is_file():  # the Trainer resumes from a checkpoint
            self.load_state_dict(json.loads(_in_checkpoint(args, state).read_text(encoding="utf-8")))
        self._model, self._is_scaled = module, bool(args.fp16)
        _BEGUN.callback = weakref.ref(self)
        with self._leaving():
            self._begin(module, control)
            self._taking_part = True

    def _begin(self, module: nn.Module, control: TrainerControl) -> None:
        driver = self.driver
        if not driver.takes_part:
            ensure_lines()
            LOG.info("%s", ALONE)
            return
        if driver.state() == "diloco":
            share = 1.0 if driver.weight is None else driver.weight
            assert self._optimizer is not None
            driver.start_diloco(module, self._optimizer, share, self._sync_every)
            control.should_training_stop |= self.finished
        else:
            self._open_round(control)

    def _begin_again(self, control: TrainerControl) -> None:
        """Restart the round from its global model: the Trainer has begun again with smaller batches, after an error.

        In a DiLoCo run, continue with the current weights.
        """
        assert self._optimizer is not None
        if self.driver.diloco is not None:
            self.driver.diloco.follow(self._optimizer)
            control.should_training_stop |= self.finished
        elif self.driver.round is not None:
            LOG.info(
                "the Trainer has started training again, so round %d is started again, too", self.driver.round.number
            )
            self._open_round(control)

    @public_api
    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Count the step. If it was the last one of the round, submit the update, and load the next global model."""
        driver, module = self.driver, self._model
        if module is None or not driver.takes_part:
            return
        with self._leaving():
            if driver.diloco is not None:
                control.should_training_stop |= driver.diloco.over
            elif driver.finished:  # the run was over at the start, but the Trainer always makes one step
                driver.load_into(module)
            else:
                self._steps += 1
                self._samples += samples_of_step(args, state, kwargs.get("train_dataloader"))
                if self._steps == self._sync_every:
                    self._end_round(control)

    @public_api
    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """If a round is an epoch, submit the update, wait, and load the next global model."""
        if self._sync_every is None and self._steps:
            with self._leaving():
                self._end_round(control)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Keep the loss and the metrics of evaluations for the next update."""
        metrics = metrics_in(logs or {})
        diloco = self.driver.diloco
        if diloco is None:
            self._metrics.update(metrics)
            return
        evaluated = {name: value for name, value in metrics.items() if name.startswith("eval_")}
        diloco.report(**{name: value for name, value in metrics.items() if name not in evaluated})
        self.driver.credit(evaluated, "eval_steps")

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Leave the run."""
        self.leave()

    def _open_round(self, control: TrainerControl) -> None:
        """Wait for the next round and load its global model. After the last round, load the run's result."""
        driver, module = self.driver, self._model
        assert module is not None
        if driver.state() == "finished":
            driver.load_into(module)
            driver.finished = control.should_training_stop = True
            return
        assert driver.round is not None
        driver.load_into(module)
        assert self._optimizer is not None
        self._correction = driver.round.correct(module, self._optimizer, allow_partial=driver.allow_partial)
        if self._is_scaled and self._correction.changes_training:
            raise UsageError(
                "The Trainer scales gradients (fp16), but this run's algorithm needs unscaled gradients.",
                "Train in bf16 or fp32.",
            )

    def _end_round(self, control: TrainerControl) -> None:
        """Submit the update of the round, then wait for the next round and load its global model."""
        assert self._model is not None
        if self.driver.round is not None:  # else it was skipped
            self.driver.submit(self._model, samples=self._samples, metrics=self._metrics)
        self._steps, self._samples, self._metrics = 0, 0, {}
        self._open_round(control)

    @contextmanager
    def _leaving(self) -> Iterator[None]:
        """If the `with` block raises an error, leave the run: the Trainer does not tell its callbacks about errors."""
        try:
            yield
        except BaseException as error:
            self.leave(error)
            raise


def _in_checkpoint(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(args.output_dir or ".") / f"checkpoint-{state.global_step}" / "atoll.json"


def _leave_failed() -> None:
    """Leave the run of an earlier Trainer that failed in this thread, so that its site name can be used again."""
    earlier = getattr(_BEGUN, "callback", None)
    callback = earlier() if earlier is not None else None
    if callback is not None:
        callback.leave(getattr(sys, "last_value", None) or RuntimeError("its training ended with an error"))


T = TypeVar("T")

_NO_METRICS = ("_runtime", "_per_second", "_time")
"""Suffixes of values that the Trainer logs with an evaluation but that are not metrics."""


def require_plain(args: TrainingArguments) -> None:
    """Raise an error for several processes or DeepSpeed: the callback would see only a part of the training.

    Raises:
        UsageError: the Trainer has several processes, or uses DeepSpeed.
    """
    if args.world_size > 1:
        raise UsageError(
            f"The Trainer runs in {args.world_size} processes, and each of them would be a separate worker.",
            "Start one process per site: without torchrun, or with --nproc-per-node 1.",
        )
    if args.deepspeed:
        raise UsageError(
            "The Trainer runs under DeepSpeed, which hides parameters and steps from Atoll.",
            "Train without DeepSpeed. For data parallelism, start several sites.",
        )


def callbacks_of_the_caller(kind: type[T]) -> list[T]:
    """Return the callbacks of class `kind` from the Trainer that called the current callback.

    The Trainer does not pass this list to its callbacks. So this function searches the call stack for the Trainer's
    `CallbackHandler`.
    """
    frame = inspect.currentframe()
    while frame is not None:
        handler = frame.f_locals.get("self")
        if isinstance(handler, CallbackHandler):
            return [callback for callback in handler.callbacks if isinstance(callback, kind)]
        frame = frame.f_back
    return []


def samples_of_step(args: TrainingArguments, state: TrainerState, loader: Any) -> int:
    """Return the number of samples of the last optimizer step. At the end of an epoch, a step may have fewer samples.

    Args:
        args: the Trainer's arguments.
        state: the Trainer's state.
        loader: the Trainer's data loader.
    """
    batch = state.train_batch_size or args.train_batch_size
    full = int(batch * args.gradient_accumulation_steps)
    try:
        samples, batches = len(loader.dataset), len(loader)
    except (AttributeError, TypeError):  # a dataset of unknown length
        return full
    steps = math.ceil(batches / args.gradient_accumulation_steps)
    if not steps or state.global_step % steps:
        return full
    if not (batches - 1) * batch < samples <= batches * batch:  # the sampler has another length, or drop_last is set
        samples = batches * batch
    return samples - (steps - 1) * full


def metrics_in(logs: dict[str, Any]) -> dict[str, float]:
    """Return the training loss and the `eval_…` metrics that are finite numbers, without durations and speeds."""
    numbers = {
        key: value
        for key, value in logs.items()
        if (key == "loss" or key.startswith("eval_"))
        and not key.endswith(_NO_METRICS)
        and isinstance(value, int | float)
        and not isinstance(value, bool)
    }
    return finite_metrics(numbers, "trainer")
