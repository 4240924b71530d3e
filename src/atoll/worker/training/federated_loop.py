"""The federated loop, `with atoll.join(...) as worker: for fl_round in worker: ...`, and one round of it.

Each round yields the global model; the script trains it and submits what it became. Without a server the same
script runs alone: one round, plain local training.
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
    """The model's own tensors by name, after its schema was found to be the run's."""
    schema = session.schema.model
    tensors = fits(model, schema)
    if tensors is not None:
        return tensors
    if isinstance(model, nn.Module):
        tensors, mine = named_tensors(model)[0], schema_of(model)
    else:
        # a mapping cannot say which of its tensors are buffers, nor which are tied: what the run knows is taken over
        buffers, tied = {spec.name: spec.group != PARAMS for spec in schema.tensors}, dict(schema.aliases)
        named = named_tensors(unwrapped(model, buffers.keys() | tied.keys()))[0]
        tensors = {name: tensor for name, tensor in named.items() if name not in tied}
        mine = replace(schema_of(Told(tensors, buffers)), aliases=schema.aliases)
    mine.require_equal(schema, mine=f"worker {session.site}", theirs="the server")
    return tensors


# -- One round of a federated run, as a training script has it: the version to train from, and the right to submit.


@public_api
class Round:
    """One round of a federated run: the version to train from, and the ticket to submit under.

    Attributes:
        params: name → CPU tensor or numpy array, as `atoll.functional.receive` gave them; empty where that filled a
            model, and after `send`, unless that was told to keep them.
        sent: what `atoll.functional.send` sent, where it was told to keep it.
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
        """Counts from 1. `load_into` makes it the newest round's where this one is over by then."""
        return self._ticket.round

    @property
    def version(self) -> int:
        """The version to train from."""
        return self._ticket.base.number

    @property
    def base(self) -> VersionRef:
        """The version to train from."""
        return self._ticket.base

    @public_api
    def load_into(self, model: Model) -> Model:
        """Pull the global model into `model`, in place, and return it; the round begins anew where it had begun.

        Raises:
            SchemaMismatch: it is not the model of the run; no tensor has moved.
        """
        tensors = matching(self._session, model)
        if self._hooks is not None:
            self._hooks.close()
            self._hooks = None
        self._pull(tensors)
        self._session.tell(state="training", version=self._ticket.base.number)
        return model

    def _pull(self, into: dict[str, Tensor]) -> None:
        """Pull the version of the ticket; where the server no longer has it, that of the newest round.

        Nothing was trained from the old one: a deadline has passed meanwhile, or the server was restored from a backup.
        """
        self._require_joined()
        while isinstance(pull := require(self._exchange.pull(self._ticket.base, into)), VersionGone):
            LOG.info("%s: round %d is taken no more: %s", self._session.site, self.number, pull.error.message)
            reply = require(self._exchange.ask_and_resend())
            # a run that has ended meanwhile gives no ticket any more: training goes on from its result, in vain
            latest = {"base_version": reply.head.number, "base_digest": reply.head.digest}
            self._ticket = reply.ticket if isinstance(reply, Open) else self._ticket.model_copy(update=latest)

    @public_api
    def correct(self, model: nn.Module, optimizer: Given) -> StepHooks:
        """Have the run's algorithm correct local training, if it does; else steps are counted, and nothing changes.

        Args:
            model: that `load_into` filled, before it is trained.
            optimizer: all of its trainable parameters are in; or a list of several, in the order in which they step
                (not where the algorithm divides by the learning rate). Their steps are followed until the round is
                submitted.

        Returns:
            What counts the steps; a context manager, too, that lets go of the optimizer at its end.

        Raises:
            UsageError: the global model was never pulled, or the round is corrected already.
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
        """Return what the algorithm keeps beside the model in a group, by its name.

        Returns:
            Parameter's name → new CPU tensor of its shape; empty where the run has no such group.

        Raises:
            UsageError: the global model was never pulled.
        """
        self._require_base()
        shapes = self._shapes_beside().get(group, {})
        return _read(group, shapes, self._exchange.base.values_of)

    @public_api
    def own_state(self, group: str) -> dict[str, Tensor]:
        """Return what the algorithm keeps at this site, likewise; zeros until an update counted."""
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
        """The global model by name, tied tensors included, in new memory.

        Args:
            framework: "torch" for CPU tensors, "numpy" for arrays; bf16 and 8-bit floats are fp32 there.
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
        """Submit what `model` has become; returns when the server has it in its journal.

        Args:
            model: a module with the run's schema, or a mapping name → tensor, numpy array, or anything with DLPack or
                `__array__`; read, not changed.
            weight: samples, tokens, or any positive number; the mean is by weight.
            metrics: finite numbers by name; averaged by weight over the workers.
            steps: local optimizer steps in the round, for status, and what FedNova divides by; by default those that
                `correct` counted.
            groups: what the update of a hand-written loop carries beside the model: group → parameter's name → tensor
                of its shape. `steps` must be given with them.

        Raises:
            UsageError: the round was submitted before, or the global model was never pulled.
            SchemaMismatch: it is not the model of the run.
            UsageError: an entry of the mapping is no array; it is named.
            UsageError: the weight is not a positive finite number, `steps` or a metric is none; or `groups` are not
                what the run needs, and what is wrong is named.
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
            case TooLate(error):  # kept, as an update that counted is: the server may fall back to its base
                LOG.warning("%s: round %d went on without this update: %s", self._session.site, self.number, error)
            case Refused() as refusal:
                self._exchange.refused(refusal)
            case Lost(error):
                raise error
        self._end()

    def _end(self) -> None:
        self.done = True
        self._hooks, self._session.optimizers = None, []  # they hold the model, which nothing keeps in a wait

    def _finish(self, given: Mapping[str, Arrays] | None, steps: int) -> Finish | None:
        """Return what gives the groups beside the model: those that `correct` measured, or a hand-written loop's."""
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
    """One site's part in a federated run: iterate over its rounds. Made by `atoll.join`.

    Where handlers are registered, tasks of the run's other workflows are answered with them within that loop: before
    the first round and behind the last one.
    """

    def __init__(self, place: Participation) -> None:
        self._place = place
        super().__init__(place.session, place.exchange.filters, local=lambda: local_model(place), folder=place.folder)
        self._left = self._recovered = False
        self._round: Round | None = None

    @property
    def bytes_up(self) -> int:
        """Bytes of tensors sent so far."""
        return self._session.counters.bytes_up

    @property
    def bytes_down(self) -> int:
        """Bytes of tensors received so far."""
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
        """Deregister; with the error that ended local training, where there was one."""
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
        """Pull the newest global model into `model`, in place; after the last round, that is the result.

        A round that is open keeps the version that it started from, and can still be submitted.

        Raises:
            SchemaMismatch: it is not the model of the run.
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
        """Wait for the next round, in programs that are no loop over rounds.

        Args:
            wait_s: for so long at most; None: as long as the run lasts.

        Returns:
            The round; None when the run is finished, or the time is over.
        """
        self._require_joined()
        reply = self._next(wait_s)
        self._round = Round(self._place, reply.ticket) if isinstance(reply, Open) else None
        return self._round

    def _next(self, wait_s: float | None) -> Next:
        """Ask for the next round; what an earlier process has left is sent before."""
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
            if isinstance(reply, Wait):  # tasks come first
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
        """Warn about an update that was formed and did not count; without one, a ticket that is over is no news."""
        note = self._place.exchange.outbox.note
        if previous is None or previous.state != "expired" or note is None or note.ticket != previous.ticket:
            return
        LOG.warning("%s: the update of round %d did not count: %s", self.site, note.round, previous.reason)


# -- Without a server: the same script, one round, plain local training; nothing is sent.


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
        """Return the model as it is."""
        self._model = model
        return model

    @public_api
    def correct(self, model: nn.Module, optimizer: Given) -> StepHooks:
        """Count the steps; without a server nothing is corrected."""
        return StepHooks(model).attach(optimizer)

    @public_api
    def global_state(self, group: str) -> dict[str, Tensor]:
        """Return zeros after `load_into`, so that a loop written by hand for an algorithm trains plainly."""
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
        """Log what would have been submitted."""
        told = ", ".join(f"{key} {value:.4g}" for key, value in finite_metrics(info.metrics, "alone").items())
        self._model = None
        LOG.info("alone: trained without a server%s", f" ({told})" if told else "")


@public_api
class LocalWorker:
    """What `atoll.join` gives without a server: the same loop, one round, nothing sent."""

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
        """Nothing to leave: says so, unless an error ended training."""
        if not self._left and error is None:
            LOG.info("%s", ALONE_ENDED)
        self._left = True

    def load_into(self, model: Model) -> Model:
        """The model as it is."""
        return model

    def next_round(self, wait_s: float | None = None) -> Round | None:
        """Return the one round; None afterwards."""
        begun, self._begun = self._begun, True
        return None if begun else LocalRound()

    def __iter__(self) -> Iterator[Round]:
        yield LocalRound()

    def task(self, name: str) -> Callable[[H], H]:
        """No tasks come without a server: the handler is given back."""
        return lambda handler: handler

    def evaluates(self, function: Any = None, *, model: nn.Module | None = None) -> Any:
        """No server asks: the function is given back."""
        return function or (lambda decorated: decorated)

    def submits(self, function: Any) -> Any:
        """No server asks: the function is given back."""
        return function

    def note(self, text: str) -> None:
        """No server is told."""

    def tasks(self) -> Iterator[Any]:
        """None come without a server."""
        return iter(())

    def run(self) -> None:
        """Nothing is to be answered without a server."""


# -- Where `join` takes part without a server: the place of a simulated site, in a process of a simulation.


_seat: Worker | None = None


@contextmanager
def taken_by(seat: Worker) -> Iterator[None]:
    """Within, a join in this process is that of this simulated site; `ATOLL_SITE` names it, as at a real site."""
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
    """The simulated site that this process trains at this moment; None outside of simulations."""
    return _seat


def require_real(what: str) -> None:
    """Refuse, in a simulation, what does not take part in it by rounds: it would train alone, and never end.

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
    """Take part in a federated run; use it as a context manager and iterate over its rounds.

    Args:
        server: address, `http://host:8512`; by default `ATOLL_SERVER`. Without either the script runs alone.
        site: this worker's name; by default `ATOLL_SITE`, else made of host and process.
        folder: where the base and outbox files lie; by default `ATOLL_DIR`, else `.atoll`.
        labels: anything to be shown in status.
        filters: that every update of this site passes through, in this order, before any byte of it leaves.
        require_server: refuse to train alone where no server is configured.

    Returns:
        A `Worker`; where there is no server a `LocalWorker`, which has one round.

    Raises:
        ConfigError: no server is configured, and one is required; or an ATOLL_ variable is misspelt.
        ServerLost: the server did not answer for as long as ATOLL_GIVE_UP_S says; a day by default.
        ServerUnreachable: something else answers at its address.
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
    """Whether `join` with this address has a run to take part in: its server's, or the one that is simulated."""
    return bool(server) or seat_here() is not None


def run_here(server: str | None, site: str) -> messages.RunInfo | None:
    """What the run is, before `join` takes part in it; None where a script trains alone.

    Raises:
        VersionSkew: the two sides speak different protocols.
        ServerLost, ServerUnreachable: as `join`.
    """
    if (seat := seat_here()) is not None:
        return seat._session.info
    if not server:
        return None
    session = Session(HttpChannel(http_to(server)), site)
    session.channel.close()
    return session.info
