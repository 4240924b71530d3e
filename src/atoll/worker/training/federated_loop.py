"""The federated loop: `with atoll.join(...) as worker: for fl_round in worker: ...`.

In each round, the script loads the global model, trains it, and submits the result. Without a server, the same script
runs alone: one round of plain local training.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, TypeVar, overload

import numpy as np
import torch
from torch import Tensor, nn

from atoll.algorithms.base import Runs
from atoll.algorithms.by_hand import Shapes, given_groups
from atoll.algorithms.optimizer_hooks import (
    ALL_CORRECTED,
    ALL_IN_ONE,
    Given,
    StepHooks,
    optimizers_in,
    warn_of_what_none_trains,
)
from atoll.errors import UsageError, print_interrupt_in_a_line, public_api
from atoll.filters.base import Filter, require_filters
from atoll.protocol import messages
from atoll.protocol.messages import Ticket, VersionRef
from atoll.protocol.values import Lost, Next, Open, Refused, TooLate, UpdateInfo, VersionGone, Wait, require
from atoll.tensors.arrays import Arrays, as_tensors, require_framework, to_numpy
from atoll.tensors.dtypes import torch_dtype
from atoll.tensors.module_tensors import Tensors, Told, fits, named_parameters, named_tensors, schema_of, unwrapped
from atoll.tensors.schema import PARAMS, name_beside
from atoll.transport.http_client import http_to, server_of
from atoll.worker.arguments import counted, default_site, finite_metrics, positive, require_joined, require_site
from atoll.worker.exchange.exchange import Finish
from atoll.worker.exchange.participation import Participation, take_part
from atoll.worker.log_lines import ALONE, ALONE_ENDED, LOG, ensure_lines, size
from atoll.worker.session.channel import HttpChannel
from atoll.worker.session.leave_at_exit import last_words
from atoll.worker.session.session import Session
from atoll.worker.tasks.answer_tasks import Answers
from atoll.worker.tasks.evaluate_models import keep_local, local_model

H = TypeVar("H")
Model = TypeVar("Model", bound="nn.Module | dict[str, Tensor]")


def matching(session: Session, model: nn.Module | Tensors) -> dict[str, Tensor]:
    """Return a model's own tensors by name, after checking that its schema is the run's.

    Raises:
        SchemaMismatch: the model's schema differs from that of the run.
    """
    schema = session.schema.model
    tensors = fits(model, schema)
    if tensors is not None:
        return tensors
    if isinstance(model, nn.Module):
        tensors, mine = named_tensors(model)[0], schema_of(model)
    else:
        # a mapping does not say which tensors are buffers or tied: take that from the run's schema
        buffers, tied = {spec.name: spec.group != PARAMS for spec in schema.tensors}, dict(schema.aliases)
        named = named_tensors(unwrapped(model, buffers.keys() | tied.keys()))[0]
        tensors = {name: tensor for name, tensor in named.items() if name not in tied}
        mine = replace(schema_of(Told(tensors, buffers)), aliases=schema.aliases)
    mine.require_equal(schema, mine=f"worker {session.site}", theirs="the server")
    return tensors


# -- One round of a federated run, as the training script sees it.


@public_api
class Round:
    """One round of a federated run: the version to train from, and the ticket to submit under.

    Attributes:
        done: whether the round is over for this worker: submitted, or not needed any more.
        params: name → CPU tensor or numpy array, set by `atoll.functional.receive`. Empty if `receive` filled a model,
            and after `send` with `clear_cache`.
        sent: the model that `atoll.functional.send` sent, if `clear_cache` was False; else None.
    """

    def __init__(self, place: Participation, ticket: Ticket) -> None:
        self._begin()
        self._place, self._session, self._exchange = place, place.session, place.exchange
        self._ticket, self.done = ticket, False
        self._hooks: StepHooks | None = None

    def _begin(self) -> None:
        self.params: dict[str, Any] = {}
        self.sent: nn.Module | Arrays | None = None

    @property
    def number(self) -> int:
        """The number of the round, from 1. If the round is already over, `load_into` switches to the newest round."""
        return self._ticket.round

    @property
    def version(self) -> int:
        """The number of the version to train from."""
        return self._ticket.base.number

    @property
    def base(self) -> VersionRef:
        """The reference of the version to train from: its fragment, number and digest."""
        return self._ticket.base

    @public_api
    def load_into(self, model: Model) -> Model:
        """Pull the global model into `model`, in place, and return `model`. A second call restarts the round.

        Raises:
            SchemaMismatch: `model` has another schema than the run; nothing was transferred.
        """
        tensors = matching(self._session, model)
        if self._hooks is not None:
            self._hooks.close()
            self._hooks = None
        self._pull(tensors)
        self._session.tell(state="training", version=self._ticket.base.number)
        return model

    def _pull(self, into: dict[str, Tensor]) -> None:
        """Pull the version of the ticket; if the server no longer has that version, switch to the newest round.

        Nothing is lost by that, because nothing was trained from the old version. A version can disappear when a
        deadline passes, or when the server is restored from a backup.
        """
        self._require_joined()
        while isinstance(pull := require(self._exchange.pull(self._ticket.base, into)), VersionGone):
            LOG.info("%s: round %d is taken no more: %s", self._session.site, self.number, pull.error.message)
            reply = require(self._exchange.ask_and_resend())
            # if the run has ended meanwhile, there is no ticket: train from the result; the update will not count
            latest = {"base_version": reply.head.number, "base_digest": reply.head.digest}
            self._ticket = reply.ticket if isinstance(reply, Open) else self._ticket.model_copy(update=latest)

    @public_api
    def correct(self, model: nn.Module, optimizer: Given) -> StepHooks:
        """Hook the optimizer: count its steps, and apply the local correction of the run's algorithm, if it has one.

        Args:
            model: the model that `load_into` filled. Call `correct` before training it.
            optimizer: the optimizer of all trainable parameters; or a list of several, in the order in which they step.
                An algorithm that divides by the learning rate allows only one.

        Returns:
            The hooks, which stay until the round is submitted. As a context manager, they are removed at its end.

        Raises:
            UsageError: the global model was not pulled, or `correct` was called before in this round.
        """
        self._require_base()
        session, exchange = self._session, self._exchange
        if self._hooks is None:
            read = exchange.base.values_of
            self._hooks = StepHooks(model, session.info.algorithm, exchange.rule, read, exchange.kept)
        session.optimizers = list(optimizers_in(optimizer))
        attached = self._hooks.attach(optimizer)
        if attached.changes_training and not session.corrects:  # once, not in every round
            told = ALL_IN_ONE if attached.one_rate else ALL_CORRECTED
            warn_of_what_none_trains(session.optimizers, attached.parameters, session.site, told)
            session.corrects = True
        return attached

    @public_api
    def global_state(self, group: str) -> dict[str, Tensor]:
        """Return the global tensors that the algorithm stores beside the model in one group.

        Args:
            group: name of the group.

        Returns:
            Name of a parameter → new CPU tensor of the parameter's shape; empty if the run has no such group.

        Raises:
            UsageError: the global model was not pulled.
        """
        self._require_base()
        shapes = self._shapes_beside().get(group, {})
        return _read(group, shapes, self._exchange.base.values_of)

    @public_api
    def own_state(self, group: str) -> dict[str, Tensor]:
        """Return the tensors that the algorithm keeps at this site in one group; zeros until an update has counted.

        Args:
            group: name of the group.

        Returns:
            Name of a parameter → new CPU tensor of the parameter's shape; empty if the algorithm keeps no such group.
        """
        exchange = self._exchange
        if exchange.kept is None or exchange.rule is None or group not in exchange.rule.keeps:
            return {}
        return _read(group, self._parameter_shapes(), exchange.kept.read)

    @overload
    def state_dict(self, framework: Literal["torch"] = "torch") -> dict[str, Tensor]: ...

    @overload
    def state_dict(self, framework: Literal["numpy"]) -> dict[str, np.ndarray[Any, Any]]: ...

    @public_api
    def state_dict(self, framework: str = "torch") -> dict[str, Any]:
        """Pull the global model, and return its tensors by name in new memory, including tied tensors.

        Args:
            framework: "torch" for CPU tensors, "numpy" for arrays. NumPy gets bf16 and 8-bit floats as fp32.
        """
        require_framework(framework)
        tensors = self._new_tensors()
        return to_numpy(tensors) if framework == "numpy" else tensors

    def _new_tensors(self) -> dict[str, Tensor]:
        schema = self._session.schema.model
        owned = {s.name: torch.empty(s.shape, dtype=torch_dtype(s.dtype), device="cpu") for s in schema.tensors}
        self._pull(owned)
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
        """Submit the trained model; return when the server has the update in its journal.

        Args:
            model: a module with the run's schema; or a mapping of names to tensors, numpy arrays, or objects with
                DLPack or `__array__`. It is not changed.
            weight: this update's weight in the mean: samples, tokens, or any positive number.
            metrics: finite numbers by name; the server averages them over the workers, by weight.
            steps: local optimizer steps in the round; shown in the status, and FedNova's divisor. By default the steps
                that `correct` counted.
            groups: tensors that the update carries beside the model, if `correct` is not used: group → name of a
                parameter → tensor of the parameter's shape. Give `steps`, too.

        Raises:
            UsageError: the round was submitted before, or the global model was not pulled.
            UsageError: an entry of the mapping is no array; `weight`, `steps` or a metric is no valid number; or
                `groups` are not those that the run needs. The message names the wrong entry.
            SchemaMismatch: `model` has another schema than the run.
        """
        if self.done:
            raise UsageError(
                f"Round {self.number} was submitted already.", "Submit once, then go on to the next round."
            )
        self._submit(model, UpdateInfo(positive(weight), counted(steps), metrics or {}), groups)

    def _submit(self, model: nn.Module | Arrays, info: UpdateInfo, groups: Mapping[str, Arrays] | None) -> None:
        self._require_joined()
        schema = self._session.schema.model
        tensors = matching(self._session, model if isinstance(model, nn.Module) else as_tensors(model, schema))
        self._require_base()
        if self._hooks is not None:
            self._hooks.close()
            info = replace(info, steps=info.steps or self._hooks.steps)
        finish = self._finish(groups, info.steps)
        info = replace(info, metrics=finite_metrics(info.metrics, self._session.site))
        if self._session.info.keeps_local and not self._exchange.filters:
            keep_local(self._place, tensors, self.number)
        if require(self._exchange.is_over(self._ticket)):
            LOG.warning("%s: round %d is over, it does not count", self._session.site, self.number)
            self._end()
            return
        match self._exchange.submit(self._ticket, tensors, info, finish=finish):
            case TooLate(error):  # keep the outbox: if the server falls back to the base, it needs this update
                LOG.warning("%s: round %d went on without this update: %s", self._session.site, self.number, error)
            case Refused() as refusal:
                self._exchange.refused(refusal)
            case Lost(error):
                raise error
        self._end()

    def _end(self) -> None:
        self.done = True
        self._hooks, self._session.optimizers = None, []  # free the model while this worker waits

    def _finish(self, given: Mapping[str, Arrays] | None, steps: int) -> Finish | None:
        """Return the function that provides the groups beside the model; None if the update has none.

        The groups are measured by `correct`, or `given` by a loop that implements the algorithm by hand.

        Raises:
            UsageError: the round lacks the algorithm's correction, or `given` does not fit the run or this round.
        """
        session, exchange, shapes = self._session, self._exchange, self._shapes_beside()
        corrects = self._hooks is not None and self._hooks.changes_training
        if given is None:
            if self._hooks is not None:
                self._hooks.require_steps()
                return self._hooks.finish if corrects else None
            if exchange.rule is None:
                return None
            by_hand = ", or submit the groups of a loop written by hand" if shapes else ""
            raise UsageError(
                f"Round {self.number} of {session.info.algorithm} was trained without its correction.",
                f"Call fl_round.correct(model, optimizer) after fl_round.load_into(model), before training{by_hand}.",
            )
        if not shapes:
            raise UsageError(
                f"Round {self.number} of {session.info.algorithm} got groups, and the run has none beside the model.",
                "Leave them out.",
            )
        if corrects:
            raise UsageError(
                f"Round {self.number} got groups, and fl_round.correct has measured them already.",
                "Use one of the two.",
            )
        if exchange.filters:
            raise UsageError(
                f"The groups of round {self.number} would leave this site without passing its filters.",
                "Use fl_round.correct(model, optimizer), which forms them from what the filters leave; or join without "
                "filters.",
            )
        if steps < 1:
            raise UsageError(
                f"Round {self.number} got groups and steps={steps}.",
                "Say with steps= how many optimizer steps they were measured over.",
            )
        return given_groups(given, shapes, exchange.kept, exchange.rule.keeps if exchange.rule else ())

    def _parameter_shapes(self) -> Shapes:
        return {spec.name: spec.shape for spec in self._session.schema.tensors if spec.group == PARAMS}

    def _shapes_beside(self) -> Mapping[str, Shapes]:
        groups = sorted({spec.group for spec in self._session.schema.tensors if spec.is_beside})
        return dict.fromkeys(groups, self._parameter_shapes())

    def _require_joined(self) -> None:
        require_joined(self._session.has_left, self._session.site, "atoll.join")

    def _require_base(self) -> None:
        self._require_joined()
        if not self._exchange.base.holds(self._session.info.run, self._ticket.base.digest):
            raise UsageError(
                f"Round {self.number} has no base: the global model was not pulled.",
                "Call fl_round.load_into(model) before training.",
            )


def _read(group: str, shapes: Shapes, runs: Runs) -> dict[str, Tensor]:
    return {name: runs(name_beside(group, name), 0, math.prod(shape)).reshape(shape) for name, shape in shapes.items()}


@public_api
class Worker(Answers):
    """One site's participation in a federated run, created by `atoll.join`. Iterate over it to get the rounds.

    If handlers are registered, the loop also answers tasks of the run's other workflows, before the first round and
    after the last one.
    """

    def __init__(self, place: Participation) -> None:
        self._place = place
        super().__init__(place.session, place.exchange.filters, local=lambda: local_model(place), folder=place.folder)
        self._left = self._recovered = False
        self._round: Round | None = None

    @property
    def bytes_up(self) -> int:
        """Bytes of tensors that this worker has sent so far."""
        return self._session.counters.bytes_up

    @property
    def bytes_down(self) -> int:
        """Bytes of tensors that this worker has received so far."""
        return self._session.counters.bytes_down

    @public_api
    def __enter__(self) -> Worker:
        self._require_joined()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        print_interrupt_in_a_line(error)
        self.leave(error)

    def leave(self, error: BaseException | None = None) -> None:
        """Leave the run. Idempotent.

        Args:
            error: the error that ended local training, if any; the server gets its text.
        """
        if self._left:
            return
        self._left = True
        said = last_words(error)
        self._answer_no_more()
        self._place.leave(said)
        LOG.info(
            "%s: left after sending %s and receiving %s",
            self.site,
            size(self._session.counters.bytes_up),
            size(self._session.counters.bytes_down),
        )

    @public_api
    def load_into(self, model: Model) -> Model:
        """Pull the newest global model into `model`, in place, and return `model`.

        After the last round, the newest model is the run's result. An open round keeps its base version, so that its
        update can still be submitted.

        Raises:
            SchemaMismatch: `model` has another schema than the run.
            UsageError: this worker has left its run.
        """
        self._require_joined()
        tensors = matching(self._session, model)
        keep = self._round.base if self._round is not None and not self._round.done else None
        self._place.exchange.pull_head(tensors, keep=keep)
        if keep is not None:
            self._session.tell(state="training")
        return model

    @public_api
    def next_round(self, wait_s: float | None = None) -> Round | None:
        """Wait for the next round. An alternative to iterating over the worker.

        Args:
            wait_s: longest time to wait, in seconds; None: no limit.

        Returns:
            The round; None when the run is finished, or when the time is over.
        """
        self._require_joined()
        reply = self._next(wait_s)
        self._round = Round(self._place, reply.ticket) if isinstance(reply, Open) else None
        return self._round

    def _next(self, wait_s: float | None) -> Next:
        """Ask the server for the next round; the first time, first send an update that an earlier process has left."""
        if not self._recovered:
            self._place.exchange.recover()
            self._recovered = True
        return require(self._place.exchange.ask_and_resend(wait_s))

    def __iter__(self) -> Iterator[Round]:
        rounds = self._rounds()
        while (round_ := self._following(rounds)) is not None:
            yield round_

    @public_api
    def _following(self, rounds: Iterator[Round]) -> Round | None:
        self._require_joined()
        return next(rounds, None)

    def _rounds(self) -> Iterator[Round]:
        info = self._session.info
        self._session.answers_tasks = True
        self._require_evaluator()
        if not info.trains and self._answers_any:
            self._serve(rounds=False)
            return
        while True:
            reply = self._next(None)
            if isinstance(reply, Wait):  # another workflow comes before the rounds
                if not self._serve(rounds=True):
                    return
                continue
            self._tell(reply.previous)
            if not isinstance(reply, Open):
                if reply.tasks and not self._answers_any:
                    LOG.warning(
                        "%s: training is over, and the run goes on with tasks, for which this site has no handler: "
                        "register them before the loop, with worker.evaluates(function) or worker.task(name)",
                        self.site,
                    )
                elif reply.tasks:
                    self._serve(rounds=False)
                told = f" ({reply.reason})" if reply.reason != "finished" else ""
                LOG.info("%s: the run is finished at version %d%s", self.site, reply.head.number, told)
                return
            round_ = self._round = Round(self._place, reply.ticket)
            yield round_
            if not round_.done:
                raise UsageError(
                    f"Round {round_.number} ended without an update from {self.site}.",
                    "Call fl_round.submit(model) once in every round; leave the `with` block to stop taking part.",
                )

    def _tell(self, previous: messages.Outcome | None) -> None:
        """Warn if the last update was formed but did not count.

        Args:
            previous: the outcome of this site's previous ticket.
        """
        note = self._place.exchange.outbox.note
        if previous is None or previous.state != "expired" or note is None or note.ticket != previous.ticket:
            return
        LOG.warning("%s: the update of round %d did not count: %s", self.site, note.round, previous.reason)


# -- Without a server: one round of plain local training; nothing is sent.


class LocalRound(Round):
    """The one round of a script that runs without a server."""

    number = 1
    version = 0
    done = False

    @public_api
    def __init__(self) -> None:
        self._begin()
        self._model: nn.Module | Tensors | None = None

    @public_api
    def load_into(self, model: Model) -> Model:
        """Return the model unchanged."""
        self._model = model
        return model

    @public_api
    def correct(self, model: nn.Module, optimizer: Given) -> StepHooks:
        """Count the optimizer's steps, without any correction."""
        return StepHooks(model).attach(optimizer)

    @public_api
    def global_state(self, group: str) -> dict[str, Tensor]:
        """Return a zero tensor for each float parameter, so that a hand-written correction has no effect.

        Empty before `load_into`.
        """
        named = named_parameters(self._model) if isinstance(self._model, nn.Module) else {}
        return {name: torch.zeros(value.shape) for name, value in named.items() if value.is_floating_point()}

    own_state = global_state

    def _new_tensors(self) -> dict[str, Tensor]:
        if self._model is None:
            raise UsageError(
                "There is no global model without a server.",
                "Fill a model first: fl_round.load_into(model), or atoll.functional.receive(into=model).",
            )
        return {name: tensor.clone() for name, tensor in named_tensors(self._model)[0].items()}

    def _submit(self, model: nn.Module | Arrays, info: UpdateInfo, groups: Mapping[str, Arrays] | None) -> None:
        """Log the metrics that would have been submitted."""
        told = ", ".join(f"{key} {value:.4g}" for key, value in finite_metrics(info.metrics, "alone").items())
        self._model = None
        LOG.info("alone: trained without a server%s", f" ({told})" if told else "")


@public_api
class LocalWorker:
    """The worker that `atoll.join` returns without a server: its loop has one round, and nothing is sent."""

    site = "alone"
    bytes_up = bytes_down = 0
    _left = _begun = False

    def __enter__(self) -> LocalWorker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave(error)

    def leave(self, error: BaseException | None = None) -> None:
        """Log that the script ran without a server, unless an error ended training."""
        if not self._left and error is None:
            LOG.info("%s", ALONE_ENDED)
        self._left = True

    def load_into(self, model: Model) -> Model:
        """Return the model unchanged."""
        return model

    def next_round(self, wait_s: float | None = None) -> Round | None:
        """Return the only round; None in later calls."""
        begun, self._begun = self._begun, True
        return None if begun else LocalRound()

    def __iter__(self) -> Iterator[Round]:
        yield LocalRound()

    def task(self, name: str) -> Callable[[H], H]:
        """Return a decorator that does nothing, because no tasks come without a server."""
        return lambda handler: handler

    def evaluates(self, function: Any = None, *, model: nn.Module | None = None) -> Any:
        """Return the function unchanged, because no server asks for evaluations."""
        return function or (lambda decorated: decorated)

    def submits(self, function: Any) -> Any:
        """Return the function unchanged, because no server asks for a model."""
        return function

    def note(self, text: str) -> None:
        """Do nothing, because no server shows the text."""

    def tasks(self) -> Iterator[Any]:
        """Return an empty iterator, because no tasks come without a server."""
        return iter(())

    def run(self) -> None:
        """Return at once, because no tasks come without a server."""


# -- In a process of a simulation, `join` returns the worker of the simulated site.


_seat: Worker | None = None


@contextmanager
def taken_by(seat: Worker) -> Iterator[None]:
    """Within the block, make `join` return this simulated site's worker, and set `ATOLL_SITE` to the site's name."""
    global _seat
    _seat, before = seat, os.environ.get("ATOLL_SITE")
    os.environ["ATOLL_SITE"] = seat.site
    try:
        yield
    finally:
        _seat = None
        if before is None:
            os.environ.pop("ATOLL_SITE", None)
        else:
            os.environ["ATOLL_SITE"] = before


def seat_here() -> Worker | None:
    """Return the worker of the simulated site that this process is training now; None outside of simulations."""
    return _seat


def require_real(what: str) -> None:
    """Refuse a training loop that a simulation does not support: such a loop would train alone and never end.

    Args:
        what: name of the loop, for the message.

    Raises:
        UsageError: this process trains a simulated site.
    """
    if _seat is not None:
        raise UsageError(
            f"{what} counts steps of a loop of its own, and a simulated site has one round at a time.",
            "Write the client as a loop over rounds, with atoll.join; or run it with real workers.",
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
) -> Worker | LocalWorker:
    """Join a federated run. Use the result as a context manager, and iterate over its rounds.

    Args:
        server: address of the server, `http://host:8512`; by default `ATOLL_SERVER`. If neither is given, the script
            runs alone.
        site: this worker's name; by default `ATOLL_SITE`, else made from host and process.
        folder: the folder of the base and outbox files; by default `ATOLL_DIR`, else `.atoll`.
        labels: labels of this worker, shown in the status.
        filters: filters that are applied to every update of this site, in this order, before it is sent.
        require_server: refuse to train alone if no server is configured.

    Returns:
        A `Worker`; without a server a `LocalWorker`, which has one round.

    Raises:
        ConfigError: no server is configured although one is required, or an ATOLL_ variable is misspelt.
        ServerLost: the server did not answer within ATOLL_GIVE_UP_S, by default a day.
        ServerUnreachable: another program answers at the server's address.
        StateLocked: another process on this machine takes part as the same site.
    """
    if (seat := seat_here()) is not None:
        seat._place.exchange.filters = require_filters(filters)
        return seat
    ensure_lines()
    server = server_of(server, require_server=require_server)
    if not server:
        LOG.info("%s", ALONE)
        return LocalWorker()
    site = require_site(site or default_site())
    where = Path(folder) if folder else None
    place = take_part(server, site, folder=where, labels=labels, filters=filters)
    session = place.session
    LOG.info("%s: joined run %s (%s) at %s", site, session.info.name, session.info.algorithm, session.channel.server)
    return Worker(place)


def takes_part(server: str | None) -> bool:
    """Return whether `join` with this address would take part in a run: of a server, or of a simulation."""
    return bool(server) or seat_here() is not None


def run_here(server: str | None, site: str) -> messages.RunInfo | None:
    """Return the description of the run that `join` would take part in; None if the script would train alone.

    Raises:
        VersionSkew: server and worker use different versions of the protocol.
        ServerLost, ServerUnreachable: as `join`.
    """
    if (seat := seat_here()) is not None:
        return seat._session.info
    if not server:
        return None
    session = Session(HttpChannel(http_to(server)), site)
    session.channel.close()
    return session.info
