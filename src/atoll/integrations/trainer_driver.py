"""What the callbacks for Lightning and Transformers share: joining a run, rounds, DiLoCo, updates, checkpoints.

Each framework's callback has a `TrainerDriver`. The callback deals with the framework's trainer; the driver deals with
the run.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict, TypeVar, Unpack

from torch import nn

from atoll import registry
from atoll.algorithms.optimizer_hooks import Given
from atoll.config.round_config import RoundConfig
from atoll.errors import UsageError, require_arguments
from atoll.filters.base import Filter, require_filters
from atoll.protocol import messages
from atoll.runtime import ensure_lines
from atoll.transport.http_client import server_of
from atoll.worker.arguments import site_of, weight_of
from atoll.worker.exchange.script_state import WorkerState
from atoll.worker.log_lines import LOG
from atoll.worker.session.leave_at_exit import what_ends
from atoll.worker.training.diloco_loop import DiLoCo, require_checkpoint, require_same_run
from atoll.worker.training.federated_loop import Round, Worker, join, run_here, takes_part

T = TypeVar("T")

NextTraining = Literal["alone", "round", "diloco", "finished"]
"""What the next training is: local without a server, a round of a federated run, a part of a DiLoCo run, or nothing,
because the run is finished."""


class SiteOptions(TypedDict, total=False):
    """The arguments, besides `server` and `site`, that all callbacks have. Each callback class documents them."""

    weight: float | Callable[[], float] | None
    folder: str | Path | None
    labels: dict[str, str] | None
    filters: Sequence[Filter]
    require_server: bool
    swarm: bool
    allow_partial: bool


class TrainerDriver:
    """A site's connection to a run, used by a trainer's callback. The arguments are those of the callback.

    Attributes:
        info: information about the run; None until the server has answered.
        worker: this site's worker in a federated run; None until it has joined.
        round: the open round; None between rounds.
        diloco: this site's `DiLoCo` object in a DiLoCo run; None until it has joined.
        rounds: number of rounds to which this site has submitted an update.
        finished: whether the run is over.
        allow_partial: whether the optimizers may hold only a part of the trainable parameters.
        on_join: functions to call with the worker after it has joined.
    """

    def __init__(self, server: str | None, site: str | None, **options: Unpack[SiteOptions]) -> None:
        unknown = [name for name in options if name not in SiteOptions.__annotations__]
        if unknown:
            known = ["server", "site", *SiteOptions.__annotations__]
            raise UsageError(
                f"Atoll's callback has no argument {unknown[0]!r}.",
                registry.nearest(unknown[0], known, f"Its arguments are {', '.join(known)}."),
            )
        require_arguments(SiteOptions.__annotations__, options)
        require_server = options.pop("require_server", False) and not takes_part(None)
        self.server = server_of(server, require_server=require_server)
        self.takes_part = takes_part(self.server)
        weight = options.pop("weight", None)
        self._given_site = site
        self.weight = weight if weight is None or callable(weight) else weight_of(weight)
        self.allow_partial = options.pop("allow_partial", False)
        self._where: dict[str, Any] = {**options, "filters": require_filters(options.get("filters", ()))}
        self.info: messages.RunInfo | None = None
        self.worker: Worker | None = None
        self.round: Round | None = None
        self.diloco: DiLoCo | None = None
        self._opening: Iterator[Round] = iter(())
        self.rounds, self.finished = 0, False
        self.on_join: list[Callable[[Worker], object]] = []
        self._checkpoint: dict[str, Any] = {}
        self._warned_of_evaluation = False

    @property
    def site(self) -> str:
        """This site's name. If none was given, a name is made on first use and kept."""
        self._given_site = site_of(self._given_site, self.server)
        return self._given_site

    def state(self) -> NextTraining:
        """Return what to do next, as a `NextTraining`. If needed, join the run and wait for its next round."""
        if not self.takes_part:
            return "alone"
        if self.finished:
            return "finished"
        if self.info is None or (self.worker is None and self.diloco is None):  # after an error, ask for the run again
            ensure_lines()
            self.info = run_here(self.server, self.site)
            assert self.info is not None
            require_same_run(self._checkpoint, self.info.run, self.site)
        if self.info.sync_every:
            return "diloco"
        if self.worker is None:
            worker = join(self.server, self.site, **self._where)
            assert isinstance(worker, Worker)
            self.worker, self._opening = worker, iter(worker)
            for tell in self.on_join:
                tell(worker)
            weakref.finalize(self, _leave_as_it_ends, worker)  # if the script ends without a call of `leave`
        if self.round is None:
            self.round = next(self._opening, None)
        return "finished" if self.round is None else "round"

    @property
    def config(self) -> dict[str, Any]:
        """What the run tells this site for the open round; in a DiLoCo run, for the newest one. Else empty."""
        source = self.round if self.round is not None else self.diloco
        return source.config if source is not None else RoundConfig({}, is_alone=True)

    @property
    def worker_state(self) -> WorkerState:
        """What this site keeps for itself with its updates: `Worker.state`. Change it before the training ends.

        Raises:
            UsageError: no round of a federated run has begun.
        """
        if self.worker is None:
            raise UsageError(
                f"Site {self._given_site or 'alone'} has no state now: no round of a federated run has begun.",
                "Use it within a fit of such a run. With DiLoCo, or alone, keep such values in your own checkpoint.",
            )
        return self.worker.state

    def forget(self) -> None:
        """Leave the run, and forget it. The next training that uses this driver joins again."""
        self.leave()
        self.info, self.rounds, self.finished = None, 0, False

    def load_into(self, module: nn.Module) -> bool:
        """Load the global model of the open round into a module; without an open round, the newest global model.

        Returns:
            Whether a model was loaded; False if this site has no worker.
        """
        if self.round is not None:
            self.round.load_into(module)
        elif self.worker is not None:
            self.worker.load_into(module)
        return self.worker is not None

    def submit(self, module: nn.Module, *, samples: int, metrics: dict[str, float], steps: int = 0) -> None:
        """Submit the module as this site's update in the open round.

        Args:
            module: the trained module.
            samples: number of samples trained on, the weight of the update if the user gave none.
            metrics: metrics of the round, by name.
            steps: number of optimizer steps in the round; 0: those that the hooks have counted.
        """
        assert self.round is not None
        self.round.submit(module, weight=self.weight_of(samples), metrics=metrics, steps=steps)
        self.round = None
        self.rounds += 1

    def skip(self) -> None:
        """Sit out the open round; if none is open, wait for the next one. In a DiLoCo run: `DiLoCo.skip`.

        Without a server, and after the last round, do nothing.

        Raises:
            UsageError: the run uses DiLoCo, and training has not begun.
        """
        state = self.state()
        if state == "diloco":
            if self.diloco is None:
                raise UsageError(
                    "skip() was called before training began in a DiLoCo run: its rounds are parts of the training.",
                    "Begin training first, or let weight be a function that returns 0 for a round to sit out.",
                )
            self.diloco.skip()
        elif self.round is not None:
            self.round.skip()
            self.round = None

    def weight_of(self, samples: int) -> float:
        """Return the weight of an update: the one given by the user, else the number of samples."""
        return samples if self.weight is None else value_of(self.weight)

    def start_diloco(
        self, module: nn.Module, optimizer: Given, weight: float | Callable[[], float], sync_every: int | None = None
    ) -> DiLoCo:
        """Join a DiLoCo run with this model and optimizer, and load the global model into the module.

        Args:
            module: the model to train.
            optimizer: the optimizer, or all optimizers.
            weight: weight of this site's updates: a number, or a function.
            sync_every: the expected number of local steps per round, to compare with the run's; None: no comparison.
        """
        self.diloco = DiLoCo(
            module,
            optimizer,
            server=self.server,
            site=self.site,
            weight=weight,
            sync_every=sync_every,
            allow_partial=self.allow_partial,
            **self._where,
        )
        self.diloco.load_state_dict(self._checkpoint)
        weakref.finalize(self, self.diloco.stop).atexit = False  # also leaves if the trainer is dropped
        return self.diloco.start()

    def state_dict(self) -> dict[str, Any]:
        """Return this site's state for a trainer's checkpoint, as JSON values: run, site and versions."""
        if self.diloco is not None:
            return self.diloco.state_dict()
        if self.info is None:
            return dict(self._checkpoint)
        place = {"global_step": self.round.global_step} if self.round is not None else {}
        return {"run": self.info.run, "site": self.site, "versions": [], **place}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep the state from a checkpoint. It is compared with the run and the site's folder when the site joins.

        Raises:
            UsageError: `state` was not returned by `state_dict`.
        """
        self._checkpoint = require_checkpoint(state)

    def credit(self, metrics: Mapping[str, float], interval: str) -> None:
        """Report the metrics of an evaluation if the DiLoCo model had the weights of the global model.

        If not, warn once. Metrics of a local model would mislead the setting `rounds.best_metric`, which compares
        versions of the global model.

        Args:
            metrics: metrics of the evaluation, by name.
            interval: name of the trainer's argument for the interval between evaluations, for the message.
        """
        diloco = self.diloco
        if diloco is None or not metrics or diloco.credit(dict(metrics)) or diloco.over or self._warned_of_evaluation:
            return
        self._warned_of_evaluation = True
        LOG.warning(
            "The metrics of an evaluation are not sent, because the evaluated model was not the global one. "
            "The two are equal only right after a synchronisation: set %s to a multiple of the run's sync_every (%d "
            "steps). In a run with fragments, tau or alpha they are never equal.",
            interval,
            diloco.sync_every,
        )

    def warn(self, text: str) -> None:
        """Log a warning about this site's training, and report it to the server."""
        if self.worker is None:
            LOG.warning("%s", text)
        else:
            self.worker.warn(text)

    def stop_diloco(self, error: BaseException | None = None) -> None:
        """Leave a DiLoCo run. Idempotent."""
        diloco, self.diloco = self.diloco, None
        if diloco is not None:
            self.rounds, self.finished = diloco.rounds, diloco.over
            diloco.stop(error)

    def leave(self, error: BaseException | None = None) -> None:
        """Leave the run. A later call of `state` joins again. Idempotent.

        Args:
            error: the error that ended training; the server gets its text. None: training ended well.
        """
        self.stop_diloco(error)
        worker, self.worker, self.round, self._opening = self.worker, None, None, iter(())
        if worker is not None:
            worker.leave(error)


def _leave_as_it_ends(worker: Worker) -> None:
    """Leave the run when a driver is garbage-collected.

    After `sys.exit`, this happens before Python's exit handlers run.
    """
    worker.leave(what_ends())


def value_of(value: T | Callable[[], T]) -> T:
    """Return `value`; if it is a function, call it and return its result."""
    return value() if callable(value) else value


def require_alone(callbacks: Sequence[Any]) -> None:
    """Raise an error if a trainer has several Atoll callbacks: one would wait forever for the update of another.

    Raises:
        UsageError: there are several callbacks. The message names their sites.
    """
    if len(callbacks) > 1:
        sites = ", ".join(repr(callback.site) for callback in callbacks)
        raise UsageError(
            f"The Trainer has {len(callbacks)} Atoll callbacks, for the sites {sites}, but a Trainer is one site.",
            "Use one callback. Run another site in another process with its own Trainer.",
        )
