"""Hugging Face's Trainer as a worker: `Trainer(..., callbacks=[AtollCallback()])`.

One `trainer.train()` spans all rounds of the run: the optimizer with its state, and the learning-rate schedule, go on
from round to round; the global model is loaded into the parameters in place. The server chooses the algorithm:

    FedAvg, FedProx, SCAFFOLD, …   submit, wait and load, every `sync_every` steps or at the end of each epoch
    DiLoCo                         `atoll.DiLoCo` around the model and the Trainer's optimizer
"""

from __future__ import annotations

import atexit
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from atoll.border import border
from atoll.errors import UsageError
from atoll.filters.base import Filter, require_filters
from atoll.integrations.fitting import require_alone
from atoll.worker.correction.optimizer_hooks import Correction
from atoll.worker.correction.optimizers import innermost
from atoll.worker.log_lines import LOG
from atoll.worker.session.address import server_of
from atoll.worker.session.leave_at_exit import what_ends
from atoll.worker.site_name import default_site
from atoll.worker.training.alone import Round
from atoll.worker.training.diloco_loop import DiLoCo
from atoll.worker.training.federated_loop import join, run_here, takes_part

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as error:
    raise UsageError("Hugging Face transformers is not installed.", "pip install 'atoll[transformers]'.") from error

from atoll.integrations.training import callbacks_of_the_caller, metrics_in, require_plain, samples_of_step

_BEGUN = threading.local()
"""`part`: a weak reference to what began in this thread last. A thread has one Trainer that trains."""


class AtollCallback(TrainerCallback):
    """Makes a Trainer a worker of a run; without a server it trains as it would without this.

    Args:
        server: address, `http://host:8512`; by default `ATOLL_SERVER`.
        site: this worker's name; by default `ATOLL_SITE`, else made of host and process.
        sync_every: optimizer steps of a round. By default an epoch; in a DiLoCo run that run's H, from which a given
            value must not differ.
        weight: this worker's share in the mean: a number, or a function asked once a round. By default the samples of
            the round; in a DiLoCo run 1.
        module: what travels, where it is not the Trainer's whole model: `atoll.integrations.peft.adapter(model)`.
        folder: where the base and outbox files lie; by default `ATOLL_DIR`, else `.atoll`.
        labels: anything to be shown in status.
        filters: that every update of this site passes through, in this order, before any byte of it leaves.
        require_server: refuse to train alone where no server is configured.

    Raises:
        UsageError: one is no filter.

    Attributes:
        rounds: that this worker has brought to their end.
        finished: whether the run is over; then the Trainer stops, with the run's result in its model.
    """

    def __init__(
        self,
        server: str | None = None,
        site: str | None = None,
        *,
        sync_every: int | None = None,
        weight: float | Callable[[], float] | None = None,
        module: nn.Module | None = None,
        folder: str | Path | None = None,
        labels: dict[str, str] | None = None,
        filters: Sequence[Filter] = (),
        require_server: bool = False,
    ) -> None:
        if sync_every is not None and sync_every < 1:
            raise UsageError(f"sync_every is {sync_every}.", "Give the number of optimizer steps of a round.")
        self._server, self._given_site, self._sync_every = server, site, sync_every
        self._weight, self._module, self._folder, self._labels = weight, module, folder, labels
        self._filters, self._require_server = require_filters(filters), require_server
        self._part: _Rounds | _Hooked | None = None
        self._taking_part = False

    @property
    def site(self) -> str:
        """This worker's name."""
        return self._given_site or default_site()

    @property
    def rounds(self) -> int:
        return self._part.rounds if self._part else 0

    @property
    def finished(self) -> bool:
        return self._part is not None and self._part.finished

    def leave(self, error: BaseException | None = None) -> None:
        """Stop taking part; for programs that go on after `trainer.train()` has failed. Idempotent."""
        self._taking_part = False
        if self._part is not None:
            self._part.leave(error)

    @border
    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Join the run and load the global model.

        Raises:
            UsageError: the Trainer runs in several processes, or hides its optimizer, or is several sites.
            ConfigError: no server is configured, and one is required; or an ATOLL_ variable is misspelt.
            SchemaMismatch: the run trains another model.
        """
        require_plain(args)
        require_alone(callbacks_of_the_caller(AtollCallback))
        module = self._module if self._module is not None else kwargs["model"]
        optimizer = innermost(kwargs["optimizer"])
        if self._taking_part and args.auto_find_batch_size and self._part is not None and self._part.module is module:
            with self._leaving():
                self._part.begin_again(optimizer, control)
            return
        self.leave()
        _leave_failed()
        require_server, site = self._require_server and not takes_part(None), self.site
        server = server_of(self._server, require_server=require_server)
        where: dict[str, Any] = {"server": server, "site": site, "folder": self._folder, "labels": self._labels}
        where["filters"] = self._filters
        info = run_here(server, site)
        if info is not None and info.sync_every:
            share = 1.0 if self._weight is None else self._weight
            self._part = _Hooked(DiLoCo(module, optimizer, sync_every=self._sync_every, weight=share, **where))
        else:
            self._part = _Rounds(module, optimizer, self._sync_every, self._weight, where, alone=info is None)
        _BEGUN.part = weakref.ref(self._part)
        atexit.register(_leave_at_exit, _BEGUN.part)
        with self._leaving():
            self._part.begin(control, scaled=bool(args.fp16))
            self._taking_part = True

    @border
    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Count the step; at the end of a round submit, wait, and load."""
        if self._part is not None:
            with self._leaving():
                self._part.after_step(control, samples_of_step(args, state, kwargs.get("train_dataloader")))

    @border
    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Where a round is an epoch: submit, wait, and load."""
        if self._part is not None:
            with self._leaving():
                self._part.after_epoch(control)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Keep the loss and what evaluations measured for the next update."""
        if self._part is not None:
            self._part.report(metrics_in(logs or {}))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Stop taking part."""
        self.leave()

    @contextmanager
    def _leaving(self) -> Iterator[None]:
        """An error in what this callback does ends the training, and the Trainer tells nobody: the server learns it."""
        try:
            yield
        except BaseException as error:
            self.leave(error)
            raise


class _Rounds:
    """The rounds of a federated run, between the Trainer's steps."""

    def __init__(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        sync_every: int | None,
        weight: float | Callable[[], float] | None,
        where: dict[str, Any],
        *,
        alone: bool,
    ) -> None:
        self.module, self._optimizer, self._sync_every, self._weight = module, optimizer, sync_every, weight
        self._worker = join(**where)
        self._alone = alone
        self._following: Iterator[Round] = iter(self._worker)
        self._round: Round | None = None
        self._correction: Correction | None = None
        self._metrics: dict[str, float] = {}
        self.steps = self.samples = self.rounds = 0
        self.finished = False

    def begin(self, control: TrainerControl, *, scaled: bool) -> None:
        self._scaled = scaled
        if not self._alone:
            self._next(control)

    def begin_again(self, optimizer: Optimizer, control: TrainerControl) -> None:
        """The Trainer tries smaller batches behind an error: the same round, from its global model."""
        self._optimizer = optimizer
        self.steps, self.samples, self._metrics = 0, 0, {}
        if self._round is not None:
            LOG.info("the Trainer begins anew, and so does round %d", self._round.number)
            self._load()

    def after_step(self, control: TrainerControl, samples: int) -> None:
        if self.finished:  # the run was over when the Trainer began, and it takes one step nevertheless
            self._worker.load_into(self.module)
            return
        self.steps, self.samples = self.steps + 1, self.samples + samples
        if self.steps == self._sync_every:
            self._end(control)

    def after_epoch(self, control: TrainerControl) -> None:
        if self._sync_every is None and self.steps:
            self._end(control)

    def report(self, metrics: dict[str, float]) -> None:
        self._metrics.update(metrics)

    def leave(self, error: BaseException | None = None) -> None:
        if self._round is not None and self.steps and not self._alone and error is None:
            LOG.warning(
                "the Trainer ended %d steps into round %d: they stay local. An update needs %s.",
                self.steps,
                self._round.number,
                "a whole epoch" if self._sync_every is None else f"{self._sync_every} steps",
            )
        self._round = None
        if self._correction is not None:
            self._correction.close()
        self._worker.leave(error)

    def _end(self, control: TrainerControl) -> None:
        if self._round is None:
            return
        given = self._weight() if callable(self._weight) else self._weight
        weight = self.samples if given is None else given
        self._round.submit(self.module, weight=weight, metrics=self._metrics)
        self.steps, self.samples, self._metrics = 0, 0, {}
        self.rounds += 1
        self._next(control)

    def _next(self, control: TrainerControl) -> None:
        self._round = next(self._following, None)
        if self._round is None:
            self._worker.load_into(self.module)
            self.finished = control.should_training_stop = True
            return
        self._load()

    def _load(self) -> None:
        assert self._round is not None
        self._round.load_into(self.module)
        self._correction = self._round.correct(self.module, self._optimizer)
        if self._scaled and self._correction.changes_training:
            raise UsageError(
                "The Trainer scales gradients (fp16), and this run's algorithm corrects local training.",
                "Train in bf16 or fp32: a correction must not meet scaled gradients.",
            )


class _Hooked:
    """A DiLoCo run: `atoll.DiLoCo` counts the optimizer's steps by itself."""

    def __init__(self, diloco: DiLoCo) -> None:
        self._diloco = diloco
        self._warned = self._left = False

    @property
    def module(self) -> nn.Module:
        return self._diloco.model

    @property
    def rounds(self) -> int:
        return self._diloco.rounds

    @property
    def finished(self) -> bool:
        return self._diloco.over

    def begin(self, control: TrainerControl, *, scaled: bool) -> None:
        self._diloco.start()
        self.after_step(control, 0)

    def begin_again(self, optimizer: Optimizer, control: TrainerControl) -> None:
        """The Trainer tries smaller batches behind an error: the weights are where they were, and go on."""
        self._diloco.follow(optimizer)
        self.after_step(control, 0)

    def after_step(self, control: TrainerControl, samples: int) -> None:
        if self._diloco.over:
            control.should_training_stop = True

    def after_epoch(self, control: TrainerControl) -> None:
        """A round is counted in steps."""

    def report(self, metrics: dict[str, float]) -> None:
        """An evaluation right behind a synchronisation measures the global model; that of a local one is not sent."""
        if self._left:  # an evaluation behind the training
            return
        evaluated = {name: value for name, value in metrics.items() if name.startswith("eval_")}
        self._diloco.report(**{name: value for name, value in metrics.items() if name not in evaluated})
        if evaluated and not self._diloco.credit(evaluated) and not self._diloco.over and not self._warned:
            self._warned = True
            LOG.warning(
                "An evaluation measured a local model: its metrics are not sent. The model is the global one right "
                "after a synchronisation, in a run without fragments, tau and alpha: set eval_steps to a multiple of "
                "the run's sync_every, %d steps.",
                self._diloco.sync_every,
            )

    def leave(self, error: BaseException | None = None) -> None:
        self._left = True
        self._diloco.stop(error)


def _leave_failed() -> None:
    """A Trainer begins in a thread in which another has not ended: that one failed, and its site is free again."""
    earlier = getattr(_BEGUN, "part", None)
    part = earlier() if earlier is not None else None
    if part is not None:
        part.leave(getattr(sys, "last_value", None) or RuntimeError("its training ended with an error"))


def _leave_at_exit(reference: weakref.ref[_Rounds | _Hooked]) -> None:
    """Tell the server that this process ends, and by which error, where nothing caught it."""
    part = reference()
    if part is not None:
        part.leave(what_ends())
