"""The callback that makes each `trainer.fit` a round. Lightning is imported here, and only when this file is.

    on_fit_start           the global model into the module, on its device
    on_train_start         hooks on its optimizer, once other callbacks have tuned it
    on_train_batch_end     samples are counted
    on_fit_end             the update, with its weight, steps and metrics
    on_validation_start    outside of fit: the global model, which the next fit keeps

Rank 0 talks; the others get the model, and what corrects it, from rank 0.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from atoll.border import border
from atoll.errors import UsageError
from atoll.filters.base import Filter, require_filters
from atoll.integrations import fitting
from atoll.protocol import messages
from atoll.tensors.module_tensors import named_tensors
from atoll.worker.correction.optimizer_hooks import Correction, following
from atoll.worker.log_lines import LOG, ensure_lines
from atoll.worker.session.address import server_of
from atoll.worker.session.ranks import Ranks
from atoll.worker.site_name import default_site, require_site
from atoll.worker.training.alone import ALONE, Round
from atoll.worker.training.diloco_loop import DiLoCo
from atoll.worker.training.federated_loop import Worker, join, run_here, takes_part

NOTHING_LEFT = "The run is finished: this fit trains nothing."


if TYPE_CHECKING:
    from lightning.pytorch import Callback
else:
    Callback = fitting.callback_class()


class AtollCallback(Callback):
    """One site's part in a run: each `trainer.fit` is a round. Without a server the script trains alone.

    Args:
        server: address, `http://host:8512`; by default `ATOLL_SERVER`.
        site: this worker's name; by default `ATOLL_SITE`, else made of host and process.
        weight: this site's share in the mean: a number, or a function that is asked after each fit; by default the
            samples that were trained on.
        steps: optimizer steps of a round, in place of those that were counted: a number, or a function.
        folder: where the base and outbox files lie; by default `ATOLL_DIR`, else `.atoll`.
        labels: anything to be shown in status.
        filters: that every update of this site passes through, in this order, before any byte of it leaves.
        require_server: refuse to train alone where no server is configured.

    Raises:
        UsageError: one is no filter. ConfigError: no server is configured, and one is required; or an ATOLL_ variable
            is misspelt.
    """

    @border
    def __init__(
        self,
        server: str | None = None,
        site: str | None = None,
        *,
        weight: float | Callable[[], float] | None = None,
        steps: int | Callable[[], int] | None = None,
        folder: str | Path | None = None,
        labels: dict[str, str] | None = None,
        filters: Sequence[Filter] = (),
        require_server: bool = False,
    ) -> None:
        super().__init__()
        self._server = server_of(server, require_server=require_server and not takes_part(None))
        self._takes_part = takes_part(self._server)
        self._given_site, self._folder, self._labels = site, folder, labels
        self._weight, self._steps, self._filters = weight, steps, require_filters(filters)
        self._limits = fitting.Limits()
        self._info: messages.RunInfo | None = None
        self._worker: Worker | None = None
        self._rounds: Iterator[Round] | None = None
        self._round: Round | None = None
        self._correction: Correction | None = None
        self._diloco: DiLoCo | None = None
        self._module: Any = None
        self._fits, self._finished = 0, False
        self._in_round, self.measuring, self._samples = False, False, 0  # measuring: for cross-site evaluation
        self._first_step: int | None = None  # the Trainer's count when training began; None: it did not
        self._open_step: int | None = None  # the one whose batch has not ended
        self._global_metrics: dict[str, float] = {}
        self.on_join: list[Callable[[Worker], object]] = []
        self._schedule = fitting.Schedule()
        self._validations = fitting.Validations()

    # -- what a script asks

    @border
    def is_running(self, trainer: Any) -> bool:
        """As `atoll.integrations.lightning.is_running`."""
        ranks = self._ranks(trainer)
        if trainer.world_size > 1 and not ranks.together:
            return not self._finished  # the ranks meet in the first fit, and learn there what rank 0 learns
        running = bool(ranks.agree(self._is_running))
        if not running and self._takes_part:
            self._finish(ranks, self._module)
        return running

    def _is_running(self) -> bool:
        if not self._takes_part:
            return self._fits == 0
        return self._state() in ("round", "diloco")

    # -- hooks

    @border
    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        fitting.require_alone([callback for callback in trainer.callbacks if isinstance(callback, AtollCallback)])
        if self._takes_part and stage in ("fit", "validate"):
            fitting.require_whole_model(trainer)
        if self._takes_part and stage == "fit":
            fitting.require_own_weights(trainer)
            fitting.require_fresh(trainer)
        if stage == "fit":  # before configure_optimizers, which may build its schedule from the round
            pl_module.atoll_round, pl_module.atoll_rounds = self._ranks(trainer).agree(self._place)

    @border
    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self._limits.extend(trainer)
        self._fits, self._module = self._fits + 1, pl_module
        self._in_round = False
        self._first_step = self._open_step = None
        ranks = self._ranks(trainer)
        state = ranks.agree(self._state)
        if state == "finished":
            self._finish(ranks, pl_module)
            LOG.warning(NOTHING_LEFT)
            self._limits.train_nothing(trainer)
        elif state == "diloco":
            self._go_on_with_diloco(trainer, pl_module, ranks)
        elif state == "round":
            self._receive(ranks, pl_module)
            self._in_round, self._samples = True, 0

    @border
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._first_step = trainer.global_step
        if self._in_round:  # not in on_fit_start: what a LearningRateFinder tries there is no step of the round
            self._correct(trainer, pl_module, self._ranks(trainer))
            self._schedule.look_at(trainer)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self._open_step = trainer.global_step + 1

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._open_step = None
        if self._weight is None and (self._in_round or self._diloco is not None):
            self._samples += fitting.samples_of(batch)
        if self._diloco is not None and self._diloco.over:
            trainer.should_stop = True

    @border
    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self._limits.restore(trainer)
        if self._diloco is not None and self._diloco.over:
            self._stop_diloco()
        if not self._in_round:
            return
        self._in_round = False
        ranks = self._ranks(trainer)
        steps = self._require_steps(trainer)
        fitting.require_averaged(trainer)
        samples = ranks.total(self._samples)
        ranks.agree(lambda: self._submit(trainer, pl_module, steps, samples))
        self._let_go()

    @border
    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._validations.begin(trainer)
        if fitting.is_validating(trainer) and self._takes_part and not self.measuring:
            self._module = pl_module
            ranks = self._ranks(trainer)
            state = ranks.agree(self._state)
            if state == "round":
                self._receive(ranks, pl_module)
            elif state == "finished":
                self._finish(ranks, pl_module)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        if self.measuring:
            return
        if self._diloco is not None:
            self._validations.end(trainer, self._diloco)
        elif fitting.is_validating(trainer):
            self._global_metrics = fitting.metrics_of(trainer)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """The round ends here without an update. A further fit joins again, and begins it anew."""
        self._limits.restore(trainer)
        self._let_go()
        self._in_round = False
        self._stop_diloco(exception)
        self._leave(exception)

    # -- the worker

    def _ranks(self, trainer: Any) -> Ranks:
        return Ranks(trainer.global_rank, trainer.world_size, trainer.strategy.root_device)

    def _state(self) -> str:
        """What a fit that begins now is: `alone`, a `round`, `diloco`, or one too many since the run is `finished`."""
        if not self._takes_part:
            if self._fits <= 1:
                ensure_lines()
                LOG.info("%s", ALONE)
            return "alone"
        if self._finished:
            return "finished"
        info = self._info
        if info is None or (self._worker is None and self._diloco is None):  # behind an error the run may be another
            ensure_lines()
            info = self._info = run_here(self._server, self.site)
            assert info is not None
        if info.sync_every:
            return "diloco"
        if self._worker is None:
            worker = join(self._server, self.site, folder=self._folder, labels=self._labels, filters=self._filters)
            assert isinstance(worker, Worker)
            self._worker, self._rounds = worker, iter(worker)
            for told in self.on_join:
                told(worker)
            weakref.finalize(self, worker.leave)  # a script that just ends leaves, too
        if self._round is None:
            assert self._rounds is not None
            self._round = next(self._rounds, None)
        return "finished" if self._round is None else "round"

    def _place(self) -> list[int]:
        """Number of the round that a fit is, from 1, and how many the run has; 0 where that is open."""
        if self._takes_part and self._state() == "round" and self._round and self._info:
            return [self._round.number, self._info.rounds]
        return [1, 0 if self._takes_part else 1]

    @property
    def site(self) -> str:
        """This worker's name."""
        self._given_site = require_site(self._given_site or default_site())
        return self._given_site

    def _receive(self, ranks: Ranks, module: Any) -> None:
        """The round's global model into the module. It is pulled once; after that it comes from the base file."""

        def receive() -> None:
            assert self._round is not None
            self._round.load_into(module)

        with torch.inference_mode(mode=False):
            ranks.agree(receive)
            ranks.spread_(named_tensors(module)[0].values())

    def _finish(self, ranks: Ranks, module: Any) -> None:
        """The result of the run into the module, where one is known, and leave."""

        def receive() -> bool:
            found = self._worker is not None and module is not None
            if self._worker is not None and module is not None:
                self._worker.load_into(module)
            self._leave()
            return found

        self._finished = True
        with torch.inference_mode(mode=False):
            if ranks.agree(receive):
                ranks.spread_(named_tensors(module)[0].values())

    def _correct(self, trainer: Any, module: Any, ranks: Ranks) -> None:
        """Hook the optimizer, at every rank alike, if the run's algorithm corrects local training."""

        def told() -> list[Any]:
            assert self._info is not None
            return [self._info.algorithm, self._info.local]

        algorithm, local = ranks.agree(told)
        if local.get("correction", "none") == "none":
            return
        if local["correction"] == "scaffold":
            fitting.require_own_weights(trainer, algorithm)
        fitting.require_unscaled(trainer, algorithm)
        optimizer = fitting.the_optimizer(trainer, module, algorithm)

        def correct() -> None:
            assert self._round is not None
            self._correction = self._round.correct(module, optimizer)

        ranks.agree(correct)
        if not ranks.talks:
            self._correction = following(local, module).attach(optimizer)
        if self._correction is not None and self._correction.offsets:
            ranks.spread_(value for _, value in sorted(self._correction.offsets.items()))

    def _require_steps(self, trainer: Any) -> int:
        """Optimizer steps of this fit.

        Raises:
            UsageError: there was none, or one whose batch did not end.
        """
        if self._open_step is not None:
            raise UsageError(
                f"Optimizer step {self._open_step} was not followed by on_train_batch_end: the Trainer's hooks "
                "were interrupted, by a StopIteration for example, and what its batch did is not complete.",
                "Let every hook of a batch return; to end early, set trainer.should_stop = True.",
            )
        steps = trainer.global_step - self._first_step if self._first_step is not None else 0
        if not steps:
            raise UsageError(
                "This fit made no optimizer step, so the round has no update.",
                "Look at max_epochs, limit_train_batches, and at the data.",
            )
        return int(steps)

    def _submit(self, trainer: Any, module: Any, steps: int, samples: int) -> None:
        assert self._round is not None
        metrics = fitting.joined_metrics(fitting.metrics_of(trainer), self._global_metrics)
        given = self._steps() if callable(self._steps) else self._steps
        if self._correction is not None:
            steps = self._correction.steps
        self._round.submit(module, weight=self._weight_of(samples), metrics=metrics, steps=given or steps)
        self._round, self._global_metrics = None, {}

    def _weight_of(self, samples: int) -> float:
        if self._weight is None:
            return samples
        return self._weight() if callable(self._weight) else self._weight

    def _let_go(self) -> None:
        correction, self._correction = self._correction, None
        if correction is not None:
            correction.close()

    def _leave(self, error: BaseException | None = None) -> None:
        worker, self._worker = self._worker, None
        self._rounds = self._round = None
        self._global_metrics = {}
        if worker is not None:
            worker.leave(error)

    # -- DiLoCo

    def _go_on_with_diloco(self, trainer: Any, module: Any, ranks: Ranks) -> None:
        """Every H steps of the optimizer are a round, within a fit and across them."""
        if ranks.together:
            raise UsageError(
                "The run is DiLoCo's, and the Trainer has several ranks.", "Give each DiLoCo worker one device."
            )
        fitting.require_own_weights(trainer, "diloco")
        optimizer = fitting.the_optimizer(trainer, module, "diloco")
        if self._diloco is not None and self._diloco.model is module:
            self._diloco.follow(optimizer)
            return
        self._stop_diloco()

        def weight() -> float:
            samples, self._samples = self._samples, 0
            return self._weight_of(max(samples, 1))

        diloco = DiLoCo(
            module,
            optimizer,
            server=self._server,
            site=self.site,
            weight=weight,
            folder=self._folder,
            labels=self._labels,
            filters=self._filters,
        )
        diloco.local_metrics = lambda: self._validations.of_training(trainer)
        self._diloco = diloco.start()
        weakref.finalize(trainer, diloco.stop)
        if diloco.over:
            LOG.warning(NOTHING_LEFT)
            self._limits.train_nothing(trainer)

    def _stop_diloco(self, error: BaseException | None = None) -> None:
        diloco, self._diloco = self._diloco, None
        if diloco is not None:
            self._finished = diloco.over
            diloco.stop(error)
