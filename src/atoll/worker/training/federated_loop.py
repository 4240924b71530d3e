"""The federated loop: `with atoll.join(...) as worker: for fl_round in worker: ...`.

In each round, the script loads the global model, trains it, and submits the result. Without a server, the same script
runs alone: one round of plain local training.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar, overload

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from atoll.algorithms.optimizer_hooks import (
    ALL_CORRECTED,
    ALL_IN_ONE,
    Given,
    StepHooks,
    held_by,
    layers_in,
    optimizers_in,
    require_holds_all,
    require_trains,
)
from atoll.algorithms.weight_copies import WeightCopies
from atoll.config.round_config import RoundConfig
from atoll.errors import NotSimulated, UsageError, public_api
from atoll.filters.base import Filter, require_filters
from atoll.protocol import messages
from atoll.protocol.messages import Ticket, VersionRef
from atoll.protocol.values import Finished, Next, Open, Wait
from atoll.runtime import ensure_lines
from atoll.tensors.arrays import Arrays, require_framework, require_model, to_numpy
from atoll.tensors.dtypes import torch_dtype
from atoll.tensors.module_tensors import Tensors, is_extra_state, put_
from atoll.tensors.schema import Schema
from atoll.transport.http_client import http_to, server_of
from atoll.worker.arguments import finite_metrics, require_accepted, require_joined, site_of, steps_of, weight_of
from atoll.worker.exchange.encode_update import Finish, LocalFragment
from atoll.worker.exchange.participation import LoopTerms, Participation, take_part
from atoll.worker.exchange.script_state import WorkerState
from atoll.worker.log_lines import ALONE, LOG
from atoll.worker.session.session import OF_LOST_STEPS, OF_WEIGHT_COPIES, Session
from atoll.worker.tasks.answer_tasks import Task, TaskWorker
from atoll.worker.tasks.evaluate_models import local_model
from atoll.worker.training.frozen_parameters import say_frozen
from atoll.worker.training.round_backends import RoundBackend, ScriptAlone, ServerBackend
from atoll.worker.training.submitted_groups import given_groups
from atoll.worker.training.update_report import ReportClock

Model = TypeVar("Model", bound="nn.Module | dict[str, Tensor]")


def _finish_load_(backend: RoundBackend, model: nn.Module | dict[str, Tensor], loaded: dict[str, Tensor]) -> None:
    """After a version was loaded into a model's tensors, set what is not loaded in place: extra state, kept tensors.

    Args:
        backend: provided the version.
        model: the model.
        loaded: its tensors, with the values of the version.
    """
    put_(model, {name: value for name, value in loaded.items() if is_extra_state(name)})
    if backend.local is not None:
        backend.local.put_first_(model, loaded)
        backend.local.load_kept_(model)


def _kept_by_script(backend: RoundBackend) -> dict[str, Any]:
    """Return what the script has kept with the last update of this site that counts."""
    local = backend.local
    return {} if local is None or local.script is None else local.script.load(local.outcome_of)


NEWEST = -1
"""In place of the number of a version: the newest version, whatever its number is."""


# -- One round of a federated run, as the training script sees it.


@public_api
class Round:
    """One round of a federated run, at one site: load the global model, train it, and submit the result.

    Attributes:
        done: whether `submit` has returned, so that the round is over for this worker.
        params: the global model as a dict name → CPU tensor or numpy array, set by `atoll.functional.receive`. Empty if
            `receive` filled a model instead, and after `send` with `clear_cache`.
        sent: the model that `atoll.functional.send` sent, if `clear_cache` was False; else None.
        is_corrected: whether the loop itself has applied an algorithm's correction that sends nothing besides the
            model. Integrations set it.
    """

    def __init__(
        self,
        backend: RoundBackend,
        ticket: Ticket,
        copies: WeightCopies,
        clock: ReportClock,
        session: Session | None = None,
        state: WorkerState | None = None,
    ) -> None:
        self._backend, self._ticket, self._copies, self._clock, self._session = backend, ticket, copies, clock, session
        self._state = WorkerState(backend.site) if state is None else state
        self._state.begin(_kept_by_script(backend))
        self.done = False
        self._hooks: StepHooks | None = None
        self._optimizers: Sequence[Optimizer] = ()
        self.params: dict[str, Any] = {}
        self.sent: nn.Module | Arrays | None = None
        self.is_corrected = False

    @property
    def ticket(self) -> int:
        """The number of the right to submit: the same for a worker that is started again before it has submitted."""
        return self._ticket.id

    @property
    def number(self) -> int:
        """The number of the round, from 1. It changes if `load_into` finds that a newer round is open."""
        return self._ticket.round

    @property
    def version(self) -> int:
        """The number of the version of the global model to train from."""
        return self._ticket.base.number

    @property
    def global_step(self) -> int:
        """The number of local steps that the global model has behind it, along one site, as the sites have reported.

        It is the place of this round in a schedule of the whole run, for a site that joins late or starts again, too.
        """
        return self._ticket.global_step

    @property
    def config(self) -> dict[str, Any]:
        """What the run tells this site for this round: names and plain values, such as `{"lr": 0.1, "epochs": 2}`.

        They come from the setting `rounds.config` and from the run's configuration function. Empty without a server:
        `config.get("lr", 0.1)` serves a script that also runs alone. A missing name raises `NotTold`, a `KeyError`.
        """
        return RoundConfig(copy.deepcopy(self._ticket.config), is_alone=isinstance(self._backend, ScriptAlone))

    @property
    def base(self) -> VersionRef:
        """The version of the global model to train from: its fragment, number and digest."""
        return self._ticket.base

    @public_api
    def load_into(self, model: Model) -> Model:
        """Load the global model into `model`, in place, and return `model`.

        A second call in the same round discards the training since the first call. An optimizer may train the model
        through several rounds: copies of the weights that it keeps are loaded, too.

        Raises:
            SchemaMismatch: `model` has other tensors than the run's model. Nothing was downloaded.
            UsageError: the optimizer keeps a copy of the weights that cannot be loaded. Nothing was downloaded.
        """
        tensors = self._backend.tensors_of(model)
        self._forget_training()
        with self._copies.loading(model, tensors):
            _finish_load_(self._backend, model, self._pull(model, tensors))
        return model

    def _forget_training(self) -> None:
        if self._hooks is not None:
            self._hooks.close()
            self._hooks = None

    def _pull(self, model: Model, tensors: Tensors) -> dict[str, Tensor]:
        """Load the round's version into a model. Return the tensors that were loaded."""
        self._require_joined()
        loaded: dict[str, Tensor] | None = None

        def into(version: int) -> Tensors:
            nonlocal loaded
            own = tensors if loaded is None else self._backend.tensors_of(model)
            loaded = self._backend.to_fill(own, version)
            return loaded

        before = self._ticket
        with self._clock.waiting():
            self._ticket = self._backend.pull(before, into)
        if self._ticket.id != before.id:  # the server may have gone back meanwhile
            self._state.begin(_kept_by_script(self._backend))
        assert loaded is not None
        return loaded

    @public_api
    def correct(self, model: nn.Module, optimizer: Given, *, allow_partial: bool = False) -> StepHooks:
        """Hook the optimizer, to count its steps and to apply the correction of local steps that the algorithm needs.

        Examples of a correction are FedProx's proximal term and SCAFFOLD's control variates. For algorithms without a
        correction, the hook only counts.

        Args:
            model: the model that `load_into` filled. Call `correct` before training it.
            optimizer: the optimizer of all trainable parameters; or a list of several. The steps of the last one are
                counted. An algorithm that divides by the learning rate allows only one.
            allow_partial: whether the optimizers may hold only a part of the trainable parameters. Steps of an
                optimizer that is not in the list are not corrected.

        Returns:
            The hooks, which are removed when the round is submitted. In a `with` statement, they are removed at its
            end.

        Raises:
            UsageError: `load_into` was not called, the hooks of an earlier call are still there, an optimizer holds
                none of the model's parameters, or the algorithm does not work with these optimizers. Or the algorithm
                corrects steps, but the optimizers do not hold all trainable parameters.
        """
        self._require_base()
        require_model(model, mapping=False)
        local = self._backend.local
        if self._hooks is None:
            terms = (local.info.algorithm.text, local.rule, local.of_version, local.algorithm_state) if local else ()
            self._hooks = StepHooks(model, *terms, own=local.layouts.schema.kept if local else ())
        for layers in layers_in(optimizer):
            self._copies.watch(layers[0])
        hooks, optimizers = self._hooks, optimizers_in(optimizer)
        if local is not None and hooks.changes_training and not allow_partial:
            require_trains(optimizers, hooks.parameters)
            advice = ALL_IN_ONE if hooks.one_rate else ALL_CORRECTED
            require_holds_all(held_by(optimizers), hooks.parameters, advice)
        self._optimizers = optimizers
        return hooks.attach(
            optimizer,
            is_partial=allow_partial or not hooks.changes_training,
            needs_steps=local is not None and local.info.needs_steps,
        )

    @public_api
    def global_state(self, group: str) -> dict[str, Tensor]:
        """Return a group of tensors that the algorithm adds to the global model, such as SCAFFOLD's control variate.

        Args:
            group: name of the group.

        Returns:
            Name of a parameter → new CPU tensor of the parameter's shape; empty if the run has no such group.

        Raises:
            UsageError: the global model was not loaded.
        """
        self._require_base()
        return self._backend.global_state(group)

    @public_api
    def own_state(self, group: str) -> dict[str, Tensor]:
        """Return a group of tensors that the algorithm keeps at this site, such as SCAFFOLD's local control variate.

        They are zeros until an update of this site has been aggregated.

        Args:
            group: name of the group.

        Returns:
            Name of a parameter → new CPU tensor of the parameter's shape; empty if the algorithm keeps no such group.
        """
        return self._backend.own_state(group)

    @overload
    def state_dict(self, framework: Literal["torch"] = "torch") -> dict[str, Tensor]: ...

    @overload
    def state_dict(self, framework: Literal["numpy"]) -> dict[str, np.ndarray[Any, Any]]: ...

    @public_api
    def state_dict(self, framework: str = "torch") -> dict[str, Any]:
        """Download the global model. Return its tensors by name in new memory; tied tensors under each of their names.

        Args:
            framework: "torch" for CPU tensors, "numpy" for arrays, with bf16 and 8-bit floats as fp32.
        """
        require_framework(framework)
        tensors = self._new_tensors()
        return to_numpy(tensors) if framework == "numpy" else tensors

    def _new_tensors(self) -> dict[str, Tensor]:
        schema = self._backend.schema
        owned = {s.name: torch.zeros(s.shape, dtype=torch_dtype(s.dtype), device="cpu") for s in schema.tensors}
        _finish_load_(self._backend, owned, self._pull(owned, owned))
        return owned | {alias: owned[owner] for alias, owner in schema.aliases}

    @public_api
    def submit(
        self,
        model: nn.Module | Arrays,
        *,
        weight: float = 1.0,
        metrics: dict[str, float] | None = None,
        steps: int = 0,
        groups: Mapping[str, Arrays] | None = None,
    ) -> None:
        """Submit the trained model. Return when the server has recorded the update on disk.

        If the server refuses the update, or the update comes too late, log a warning and return. With `weight=0`, sit
        out the round: nothing is sent, the round does not wait for this site, and the state that the site keeps between
        rounds stays as it is.

        Args:
            model: a module with the same tensors as the run's model; or a mapping of names to tensors, numpy arrays, or
                objects with DLPack or `__array__`. It is not changed.
            weight: this update's weight in the mean: samples, tokens, or any positive number; 0 to sit out the round,
                for example because the site has no samples.
            metrics: finite numbers by name; the server averages them over the workers, by weight. Those of a site that
                sits out are only in the server's log.
            steps: number of local optimizer steps in the round. The server's status shows it, and FedNova divides by
                it. By default the steps that `correct` counted.
            groups: the tensors that the run's algorithm needs in the update besides the model, if your loop computes
                them itself instead of calling `correct`: group name → parameter name → tensor of the parameter's shape.
                Give `steps`, too.

        Raises:
            UsageError: the round was already submitted, or the global model was not loaded.
            UsageError: an entry of the mapping is not an array; `weight`, `steps` or a metric is not a valid number, or
                above the run's bound; or `groups` are not those that the run needs. The message names the wrong entry.
            SchemaMismatch: `model` has other tensors than the run's model.
            UpdateRefused: the server has refused several updates in a row; or, without a server, `model` contains NaN
                or Inf.
        """
        self._require_open()
        weight, steps = weight_of(weight), steps_of(steps)
        self._require_joined()
        tensors = self._backend.tensors_of(model)
        if weight:
            self._require_base()
        if self._hooks is not None:
            self._hooks.close()
            steps = steps or self._hooks.steps
        if weight:
            if self._backend.local is not None:
                require_accepted(weight, steps, self._backend.local.info)
            finish = self._finish(groups, steps)
            self._give_state()
        found = finite_metrics({} if metrics is None else metrics, self._backend.site)
        report = self._clock.report(weight, steps, found)
        if weight:
            self._copies.look_at_end()
            with self._clock.waiting():
                self._backend.submit(self._ticket, tensors, report, finish, self._optimizers)
        else:
            self._backend.sit_out(self._ticket, report)
        if self._session is not None:
            say_frozen(self._session, model)
        self._end()

    @public_api
    def skip(self, *, metrics: dict[str, float] | None = None) -> None:
        """Sit out the round, for example because this site has no data for it now. No model is needed.

        The site stays in the run: the round does not wait for it, and the status names it among those that sat out. The
        state that the site keeps between rounds stays as it is. This is `submit` with `weight=0`.

        Args:
            metrics: finite numbers by name, for the server's log.

        Raises:
            UsageError: the round is over for this worker already, or a metric is not a valid number.
        """
        self._require_open()
        self._require_joined()
        self._forget_training()
        found = finite_metrics({} if metrics is None else metrics, self._backend.site)
        self._backend.sit_out(self._ticket, self._clock.report(0.0, 0, found))
        self._end()

    def _require_open(self) -> None:
        if self.done:
            raise UsageError(
                f"Round {self.number} is over for this site: it was already submitted or skipped.",
                "Call submit or skip once in each round.",
            )

    def _give_state(self) -> None:
        """Let the update that is formed next have the script's state with it. A script that keeps nothing has none."""
        packed, script = self._state.packed(), self._backend.local.script if self._backend.local is not None else None
        if script is not None:
            script.given = packed if len(self._state) or not script.is_empty else None

    def _end(self) -> None:
        self.done = True
        self._state.end(f"round {self.number} is over for this site")
        self._hooks, self._optimizers = None, ()  # free the model while this worker waits
        self._copies.forget_model()

    def _finish(self, submitted: Mapping[str, Arrays] | None, steps: int) -> Finish | None:
        """Return a function that computes the groups of tensors to send besides the model; None if there are none.

        The groups come from the hooks of `correct`, or the script has computed them and passed them to `submit`.

        Args:
            submitted: the argument `groups` of `submit`.
            steps: number of local steps in the round.

        Raises:
            UsageError: the algorithm needs a correction that was not used, or `submitted` does not fit the run or this
                round.
        """
        local = self._backend.local
        if local is None:  # nothing is sent
            return None
        groups, algorithm = local.groups, local.info.algorithm
        corrects = self._hooks is not None and self._hooks.changes_training
        if submitted is None:
            if self._hooks is not None:
                self._hooks.require_steps()
                return self._hooks.finish if corrects else None
            if local.rule is None or (self.is_corrected and not groups):
                return None
            by_hand = ", or submit the groups that your own training loop has computed" if groups else ""
            raise UsageError(
                f"Round {self.number} of {algorithm} was trained without the algorithm's correction.",
                f"Call fl_round.correct(model, optimizer) after fl_round.load_into(model), before training{by_hand}.",
            )
        if not groups:
            raise UsageError(
                f"submit(groups=...) was called in round {self.number}, but {algorithm} needs no tensors "
                "besides the model.",
                "Leave groups out.",
            )
        if corrects:
            raise UsageError(
                f"submit(groups=...) was called in round {self.number}, but fl_round.correct has already "
                "computed the groups.",
                "Use only one of the two.",
            )
        if local.filters:
            raise UsageError(
                f"The groups given to submit() in round {self.number} would bypass this site's filters.",
                "Use fl_round.correct(model, optimizer), which computes them from filtered values, or join "
                "without filters.",
            )
        if steps < 1:
            raise UsageError(
                f"submit(groups=...) in round {self.number} has steps={steps}.",
                "Set steps to the number of optimizer steps that the groups were measured over.",
            )
        return given_groups(submitted, groups, local.algorithm_state, local.rule.state_groups if local.rule else ())

    def _require_joined(self) -> None:
        require_joined(self._backend.has_left, self._backend.site, "atoll.join", self._backend.process)

    def _require_base(self) -> None:
        self._require_joined()
        if not self._backend.has_base(self._ticket):
            raise UsageError(
                f"The global model of round {self.number} was not downloaded.",
                "Call fl_round.load_into(model) before training.",
            )


@public_api
class Worker(TaskWorker):
    """One site's participation in a federated run; `atoll.join` returns it. Iterate over the worker to get the rounds.

    The loop also answers tasks of the run's other workflows, before the first round and after the last one, if handlers
    for them are registered. Without a server, the loop has one round, and nothing is sent.

    Args:
        backend: provides the rounds, and sends the updates.
        participation: the site's part in a server's run, needed to answer tasks; None without a server.
    """

    _joined_by = "atoll.join"

    def __init__(self, backend: RoundBackend, participation: Participation | None = None) -> None:
        if participation is None:
            super().__init__(backend.site)
        else:
            own, local = participation.exchange.local, partial(local_model, participation)
            super().__init__(
                backend.site,
                participation.session,
                own.filters,
                local=local,
                folder=participation.folder,
                load_kept=own.load_kept_ if participation.session.schema.kept else None,
            )
        self._backend, self._has_ended = backend, False
        self._copies = WeightCopies(partial(_report, self._session, self.site, OF_WEIGHT_COPIES))
        self._copies.discover_all()
        self._clock = ReportClock()
        self._round: Round | None = None
        self._state = WorkerState(backend.site)

    @property
    def state(self) -> WorkerState:
        """What this site keeps for itself from update to update: names → tensors, numbers, texts, lists, dicts.

        As a round begins, it has what it had when the site submitted its last update that counts, also after a kill.
        What changes before `submit` counts with that update. It is in the site's folder; nothing of it is sent. Tensors
        come back on the CPU.
        """
        return self._state

    @property
    def schema(self) -> Schema:
        """The schema of the run's model. Integrations use it."""
        return self._backend.schema

    @property
    def bytes_up(self) -> int:
        """Bytes of tensors that this worker has sent so far."""
        return self._backend.counters.bytes_up

    @property
    def bytes_down(self) -> int:
        """Bytes of tensors that this worker has received so far."""
        return self._backend.counters.bytes_down

    def warn(self, text: str) -> None:
        """Log a warning about this site's training, and report it to the server. Integrations call this."""
        _report(self._session, self.site, OF_LOST_STEPS, text)

    def leave(self, error: BaseException | None = None) -> None:
        """Leave the run. Idempotent. In a fork of the process that joined, do nothing.

        Args:
            error: the error that ended local training; the server gets its text. None: training ended well.
        """
        if not self._has_ended and self._process == os.getpid():
            self._has_ended = True
            self._answer_no_more()
            if self._round is not None:
                self._round._forget_training()
            self._copies.forget_model()
            self._backend.leave(error)

    @public_api
    def load_into(self, model: Model) -> Model:
        """Load the newest global model into `model`, in place, and return `model`.

        After the last round, the newest model is the run's result. During a round, the round's own version is kept on
        disk, so that an update can still be submitted. Without a server, the model stays as it is.

        Raises:
            SchemaMismatch: `model` has other tensors than the run's model.
            UsageError: this worker has left its run.
        """
        self._require_joined()
        keep = self._round.base if self._round is not None and not self._round.done else None
        tensors = self._backend.to_fill(self._backend.tensors_of(model), NEWEST)
        with self._copies.loading(model, tensors, refuses=False):  # for example to evaluate
            self._backend.load_newest(tensors, keep)
            _finish_load_(self._backend, model, tensors)
        return model

    @public_api
    def next_round(self, wait_s: float | None = None) -> Round | None:
        """Wait for the next round, and return it. Use this method in place of a loop over the worker.

        Args:
            wait_s: longest time to wait, in seconds; None: no limit.

        Returns:
            The round; None if there is no further round for this site, or if no round has begun within `wait_s`.
        """
        self._require_joined()
        reply = self._ask(wait_s)
        self._round = self._new_round(reply.ticket) if isinstance(reply, Open) else None
        return self._round

    def _ask(self, wait_s: float | None) -> Next | None:
        with self._clock.waiting():
            reply = self._backend.next_round(wait_s)
        if isinstance(reply, Finished) and self._session is not None:
            self._state.begin(_kept_by_script(self._backend))
            self._state.end("the run is finished")
        return reply

    def _new_round(self, ticket: Ticket) -> Round:
        if _begin_random is not None:
            _begin_random(self.site, ticket.round)
        return Round(self._backend, ticket, self._copies, self._clock, self._session, self._state)

    def _tasks(self, *, rounds: bool) -> Iterator[Task]:
        if self is _simulated:
            raise UsageError(f"Site {self.site} is simulated, so it gets no tasks from a server.", "Use a real worker.")
        return super()._tasks(rounds=rounds)

    def __iter__(self) -> Iterator[Round]:
        rounds = self._rounds()
        while (round_ := self._following(rounds)) is not None:
            yield round_

    @public_api
    def _following(self, rounds: Iterator[Round]) -> Round | None:
        self._require_joined()
        return next(rounds, None)

    def _rounds(self) -> Iterator[Round]:
        self._require_evaluator()
        for work in self.work():
            if isinstance(work, Task):
                self._handle(work)
                continue
            yield work
            if not work.done:
                raise UsageError(
                    f"Site {self.site} submitted no update in round {work.number}.",
                    "Call fl_round.submit(model) once in each round, or fl_round.skip() if the site has no data for "
                    "it. To stop taking part, leave the `with` block.",
                )

    def work(self, *, answers_all: bool = False) -> Iterator[Round | Task]:
        """Yield each round, and each task of the run's other workflows, in their order. Integrations call this.

        Args:
            answers_all: whether the caller answers tasks without a registered handler, too.
        """
        if self._session is not None:
            self._session.answers_tasks = True
            if not self._session.info.trains and (answers_all or self._answers_any):
                yield from self._tasks(rounds=False)
                return
        while (reply := self._ask(None)) is not None:
            if isinstance(reply, Wait):  # another workflow comes before the rounds
                yield from self._tasks(rounds=True)
                if not self._rounds_begin:
                    return
                continue
            if not isinstance(reply, Open):
                yield from self._end_of_rounds(reply, answers_all)
                return
            self._round = self._new_round(reply.ticket)
            yield self._round

    def _end_of_rounds(self, reply: Next, answers_all: bool) -> Iterator[Task]:
        """Yield the tasks that come after the last round, and log that the run is finished."""
        if reply.tasks and not (answers_all or self._answers_any):
            LOG.warning(
                "%s: the rounds are over, but the run continues with tasks, and this site has no handler for "
                "them. Register one before the loop: worker.evaluates(function) or worker.task(name)",
                self.site,
            )
        elif reply.tasks:
            yield from self._tasks(rounds=False)
        reason = f" ({reply.reason})" if reply.reason != "finished" else ""
        LOG.info("%s: the run is finished at version %d%s", self.site, reply.head.number, reason)


def _report(session: Session | None, site: str, key: int, text: str) -> None:
    """Log a warning about a site's training, and report it to the server, if there is one."""
    if session is None:
        LOG.warning("%s: %s", site, text)
    else:
        session.report(key, text)


# -- In a process of a simulation, `join` returns the worker of the simulated site.


_simulated: Worker | None = None
"""The worker of the simulated site that this process is training; None outside of simulations."""


@contextmanager
def joined_as(worker: Worker) -> Iterator[None]:
    """Let `atoll.join` return this simulated site's worker inside the `with` block. Also set `ATOLL_SITE`."""
    global _simulated
    _simulated, before = worker, os.environ.get("ATOLL_SITE")
    os.environ["ATOLL_SITE"] = worker.site
    try:
        yield
    finally:
        _simulated = None
        if before is None:
            os.environ.pop("ATOLL_SITE", None)
        else:
            os.environ["ATOLL_SITE"] = before


_begin_random: Callable[[str, int], None] | None = None
"""Seeds the random numbers of a site's round: site, number of the round. None: the script seeds them itself, or not."""


@contextmanager
def seeded_by(begin_random: Callable[[str, int], None]) -> Iterator[None]:
    """Inside the `with` block, call `begin_random(site, number)` as each round begins, before the script has it."""
    global _begin_random
    before, _begin_random = _begin_random, begin_random
    try:
        yield
    finally:
        _begin_random = before


def require_real(what: str) -> None:
    """Raise an error if this process is part of a simulation, which does not support the loop `what`.

    Args:
        what: name of the training loop, such as "atoll.DiLoCo".

    Raises:
        NotSimulated: this process trains a simulated site.
    """
    if _simulated is not None:
        raise NotSimulated(
            f"{what} cannot run in a simulation: it synchronises after a number of local steps, but a simulated site "
            "is trained for one round at a time.",
            "Write the script as a loop over rounds with atoll.join, or run it with real workers.",
        )


@public_api
def join(
    server: str | None = None,
    site: str | None = None,
    *,
    folder: str | Path | None = None,
    labels: dict[str, str] | None = None,
    filters: Sequence[Filter] = (),
    require_server: bool = False,
    swarm: bool = False,
) -> Worker:
    """Join a federated run. Use the result as a context manager, and iterate over its rounds.

    Args:
        server: address of the server, `http://host:8512`; by default `ATOLL_SERVER`. If neither is given, the script
            runs alone.
        site: name of the site; by default `ATOLL_SITE`, else a name made from host and process, or "alone" if there is
            no server.
        folder: the folder for Atoll's files of this site, each about as large as the model; by default `ATOLL_DIR`,
            else `.atoll`.
        labels: labels of this worker, shown in the server's status.
        filters: filters that are applied to every update of this site, in this order, before it is sent.
        require_server: whether to raise an error if no server is configured, instead of training alone.
        swarm: whether this site may take part in a swarm, in which other sites connect to it and it connects to them;
            `ATOLL_SWARM` and `ATOLL_PEER_*` can allow it, too.

    Returns:
        The worker. Without a server, it has one round, and sends nothing.

    Raises:
        ConfigError: no server is configured although one is required, or an ATOLL_ variable is misspelt. Or the run is
            a swarm, but `swarm` is False.
        ServerLost: the server did not answer within ATOLL_GIVE_UP_S, by default a day.
        PeerError: a web server that is not Atoll answers at the server's address.
        ServerUnreachable: the server's certificate is not accepted, or the address is https but the server has no TLS.
        StateLocked: another process on this machine takes part as the same site.
    """
    if _simulated is not None:
        _run_of(_simulated).filters = require_filters(filters)
        return _simulated
    ensure_lines()
    server, filters = server_of(server, require_server=require_server), require_filters(filters)
    site = site_of(site, server)
    if not server:
        LOG.info("%s", ALONE)
        return Worker(ScriptAlone(site))
    where = Path(folder) if folder else None
    return _joined(take_part(server, site, folder=where, labels=labels, filters=filters, swarm=swarm))


def join_any() -> Worker:
    """Join as `atoll.join` does, also a run that counts local steps: a round counts as those between two versions.

    Integrations call this, for code that trains as long as it likes in each round. Raises the errors of `atoll.join`.
    """
    if _simulated is not None:
        raise NotSimulated(
            f"Site {_simulated.site} is simulated, but what it runs keeps files at a site.", "Leave --engine out."
        )
    ensure_lines()
    server = server_of(None, require_server=True)
    assert server is not None  # required
    terms = LoopTerms(by_rounds=True)
    return _joined(take_part(server, site_of(None, server), loop=terms), counts_rounds=True)


def _joined(participation: Participation, *, counts_rounds: bool = False) -> Worker:
    site, info = participation.site, participation.session.info
    run = f"{info.name} ({info.algorithm})" if info.trains else info.name
    LOG.info("%s: joined run %s at %s", site, run, participation.session.http.server)
    return Worker(ServerBackend(participation, counts_rounds=counts_rounds), participation)


def _run_of(worker: Worker) -> LocalFragment:
    local = worker._backend.local
    assert local is not None  # a simulated site takes part in a run
    return local


def takes_part(server: str | None) -> bool:
    """Return whether `atoll.join` with this server address would take part in a run, of a server or of a simulation.

    Otherwise the script would train alone.
    """
    return bool(server) or _simulated is not None


def run_here(server: str | None, site: str) -> messages.RunInfo | None:
    """Return the description of the run that `atoll.join` would join; None if the script would train alone.

    Raises:
        VersionSkew: server and worker use different versions of the protocol.
        PeerError, ServerLost, ServerUnreachable: as for `atoll.join`.
    """
    if _simulated is not None:
        return _run_of(_simulated).info
    if not server:
        return None
    session = Session(http_to(server, site=site), site)
    session.http.close()
    return session.info
