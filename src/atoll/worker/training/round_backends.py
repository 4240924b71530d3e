"""The backends of a round: a backend provides the global model, and takes the round's update.

    ServerBackend   a worker of a run: the global model comes from a server, and updates go to it
    ScriptAlone     no server is configured: the script's model is the global model, and no update is sent
    SimulatedSite   a site of a simulation: it reads and writes the server's files (simulate/simulated_site.py)

`Round` and `Worker` (`federated_loop.py`) work with all three.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from blake3 import blake3
from torch import Tensor, nn
from torch.optim import Optimizer

from atoll.codecs import NoneCodec
from atoll.errors import ConfigError, UpdateRefused, UsageError
from atoll.format_text import numbers
from atoll.protocol.messages import Report, Ticket, VersionRef
from atoll.protocol.values import Lost, Next, Open, Refused, TooLate, VersionGone, Wait, require
from atoll.tensors.arrays import Arrays, as_tensor, as_tensors, require_model
from atoll.tensors.buffer_rules import run_schema
from atoll.tensors.chunks import is_sound, runs_of
from atoll.tensors.module_tensors import Marked, Tensors, fits, named_parameters, named_tensors, schema_of, unwrapped
from atoll.tensors.schema import PARAMS, Schema
from atoll.transport.http_client import Counters
from atoll.worker.exchange.encode_update import Finish, LocalFragment, UpdateWarnings
from atoll.worker.exchange.participation import Participation, federated_in_diloco
from atoll.worker.log_lines import ALONE_ENDED, LOG, size
from atoll.worker.session.leave_at_exit import last_words
from atoll.worker.tasks.evaluate_models import keep_local

Into = Callable[[int], Tensors]
"""A function: takes the number of a version, and returns the tensors to fill with this version."""


class RoundBackend(Protocol):
    """The interface through which a `Worker` and its `Round` get versions of the global model and submit updates.

    Attributes:
        counters: bytes of tensors that were sent and received.
        process: id of the process that takes part in a server's run; None without a server.
    """

    counters: Counters
    process: int | None

    @property
    def site(self) -> str:
        """The site's name."""

    @property
    def local(self) -> LocalFragment | None:
        """The site's base version, filters and local state; None without a run, when nothing is corrected or sent."""

    @property
    def has_left(self) -> bool:
        """Whether the worker has left the run."""

    @property
    def schema(self) -> Schema:
        """The schema of the run's model: the names, shapes and dtypes of its tensors.

        Raises:
            UsageError: there is no run, and no model was loaded yet.
        """

    def tensors_of(self, model: nn.Module | Arrays) -> dict[str, Tensor]:
        """Return a model's own tensors by name. First check that they match the tensors of the run's model.

        Raises:
            SchemaMismatch: the names, shapes or dtypes differ.
            UsageError: an entry of a mapping is not an array.
        """

    def to_fill(self, tensors: Tensors, version: int) -> dict[str, Tensor]:
        """Return the tensors into which to load a version, for a model with these tensors."""

    def next_round(self, wait_s: float | None) -> Next | None:
        """Wait for the next round, for at most `wait_s` seconds; None: without a limit.

        Returns:
            The reply, with a ticket (permission to submit an update) if there is a round. None: a script without a
            server has had its only round.
        """

    def pull(self, ticket: Ticket, into: Into) -> Ticket:
        """Load the version of the global model that a ticket names.

        Args:
            ticket: the ticket.
            into: returns the tensors to fill.

        Returns:
            The ticket to submit under. If the version no longer exists, this is a newer ticket, and its version was
            loaded.
        """

    def load_newest(self, into: Tensors, keep: VersionRef | None) -> None:
        """Fill the tensors of `into` with the newest version of the global model.

        If `keep` is given, the version `keep` stays the base, even if it is not the newest one.
        """

    def has_base(self, ticket: Ticket) -> bool:
        """Return whether the version that a ticket names was loaded."""

    def global_state(self, group: str) -> dict[str, Tensor]:
        """Return tensors that the algorithm keeps beside the global model: parameter name → new tensor of `group`."""

    def own_state(self, group: str) -> dict[str, Tensor]:
        """Return a group of tensors that the algorithm keeps at this site: parameter name → new tensor."""

    def submit(
        self, ticket: Ticket, tensors: Tensors, report: Report, finish: Finish | None, optimizers: Sequence[Optimizer]
    ) -> None:
        """Form an update and submit it under a ticket. Return when it was accepted or refused, or came too late.

        Args:
            ticket: the ticket of the update.
            tensors: the model's own tensors, by name; not changed.
            report: what the site reports of the update.
            finish: computes the tensor groups that the algorithm sends in addition to the model; None: no such groups.
            optimizers: the optimizers of the model that were passed to Atoll.
        """

    def sit_out(self, ticket: Ticket, report: Report) -> None:
        """Sit out the round of a ticket: no update is formed or sent, and the site's state stays as it is.

        Args:
            ticket: the ticket of the round.
            report: its metrics are recorded.
        """

    def leave(self, error: BaseException | None) -> None:
        """End the site's participation. `error` is the error that ended training; None: training ended well."""


def matching(schema: Schema, site: str, model: nn.Module | Arrays) -> dict[str, Tensor]:
    """Return a model's own tensors by name. First check that they have the names, shapes and dtypes of `schema`.

    Args:
        schema: the schema of the run's model.
        site: the site's name, for the message.
        model: a module, or a mapping of names to tensors or arrays.

    Raises:
        SchemaMismatch: the names, shapes or dtypes differ.
        UsageError: an entry of a mapping is not an array.
    """
    if not isinstance(model, nn.Module):
        model = as_tensors(model, schema)
    tensors = fits(model, schema)
    if tensors is not None:
        return tensors
    if isinstance(model, nn.Module):
        tensors, mine = named_tensors(model)[0], schema_of(model)
    else:
        # a mapping does not say which tensors are buffers or tied, but the run's schema does
        buffers, tied = {spec.name: spec.is_buffer for spec in schema.tensors}, dict(schema.aliases)
        named = named_tensors(unwrapped(model, buffers.keys() | tied.keys()))[0]
        tensors = {name: tensor for name, tensor in named.items() if name not in tied}
        mine = replace(schema_of(Marked(tensors, buffers)), aliases=schema.aliases)
    mine.require_equal(schema, mine=f"worker {site}", theirs="the run")
    return tensors


class ServerBackend:
    """The backend of a worker that has joined a server's run. It continues from the files in the site's folder.

    Args:
        participation: the site's part in the run.
        counts_rounds: whether a round counts as `sync_every` local steps, in a run that counts steps.
    """

    def __init__(self, participation: Participation, *, counts_rounds: bool = False) -> None:
        self._counts_rounds = counts_rounds
        self.participation, self.site = participation, participation.site
        self.process: int | None = os.getpid()
        self.counters, self.local = participation.session.counters, participation.exchange.local
        self.to_fill = self.local.to_fill
        self.global_state, self.own_state = self.local.global_state, self.local.own_state
        self._recovered, self._pulled_s = False, 0.0

    @property
    def schema(self) -> Schema:
        """The schema of the run's model; the first update of the run may give new shapes to buffers."""
        return self.participation.session.schema.model

    @property
    def has_left(self) -> bool:
        """Whether the worker has left, whether by a call, by a signal or at the end of the process."""
        return self.participation.session.has_left

    def tensors_of(self, model: nn.Module | Arrays) -> dict[str, Tensor]:
        """Return the model's own tensors by name. First check that they match the tensors of the server's model."""
        return matching(self.schema, self.site, model)

    def next_round(self, wait_s: float | None) -> Next:
        """Ask the server for the next round. The first call also sends any update that an earlier process left."""
        exchange = self.participation.exchange
        if not self._recovered:
            exchange.recover()
            self._recovered = True
        reply = require(exchange.ask_and_resend(wait_s))
        if isinstance(reply, Open) and self.local.info.sync_every and not self._counts_rounds:
            raise federated_in_diloco(self.local.info)
        previous, note = reply.previous, exchange.outbox.note
        if isinstance(reply, Wait) or previous is None or note is None or note.ticket != previous.ticket:
            return reply
        if previous.state == "expired":
            LOG.warning("%s: the update of round %d did not count: %s", self.site, note.round, previous.reason)
        return reply

    def pull(self, ticket: Ticket, into: Into) -> Ticket:
        """Download the version that the ticket names. If the server no longer has it, switch to the newest round.

        No training is lost, because none has started from the old version. A version can disappear when the round
        closes at its deadline, or when the server is restored from a backup.
        """
        exchange = self.participation.exchange
        while isinstance(pull := require(exchange.pull(ticket.base, into(ticket.base.number))), VersionGone):
            LOG.info("%s: round %d is skipped: %s", self.site, ticket.round, pull.error.message)
            reply = require(exchange.ask_and_resend())
            # if the run has ended meanwhile, there is no ticket: train from the result; the update will not count
            latest = {"base_version": reply.head.number, "base_digest": reply.head.digest}
            ticket = reply.ticket if isinstance(reply, Open) else ticket.model_copy(update=latest)
        self.participation.session.tell(state="training", version=ticket.base.number)
        self._pulled_s = time.monotonic()
        return ticket

    def load_newest(self, into: Tensors, keep: VersionRef | None) -> None:
        """Download the newest version; if `keep` must stay in the base file, download into a second file."""
        self.participation.exchange.pull_head(into, keep=keep)
        if keep is not None:
            self.participation.session.tell(state="training")

    def has_base(self, ticket: Ticket) -> bool:
        """Return whether the base file has the version that the ticket names."""
        return self.participation.exchange.base.holds(self.local.info.run, ticket.base.digest)

    def submit(
        self, ticket: Ticket, tensors: Tensors, report: Report, finish: Finish | None, optimizers: Sequence[Optimizer]
    ) -> None:
        """Send the update. Return when the server has recorded it on disk or refused it, or when it came too late."""
        session, exchange = self.participation.session, self.participation.exchange
        session.optimizers = optimizers
        if report.steps:
            seconds = time.monotonic() - self._pulled_s if self._pulled_s else math.inf  # a restarted site may not pull
            session.tell(step=session.heartbeat.step + report.steps, steps_per_s=report.steps / max(seconds, 1e-9))
        if self.local.info.keeps_local and not self.local.filters:
            keep_local(self.participation, tensors, ticket.round)
        if require(exchange.is_over(ticket)):
            LOG.warning("%s: round %d is over, so this site's update for it does not count", self.site, ticket.round)
        else:
            match exchange.submit(ticket, tensors, report, finish=finish):
                case TooLate(error):  # keep the outbox: if the server falls back to the base, it needs this update
                    LOG.warning("%s: round %d closed without this update: %s", self.site, ticket.round, error)
                case Refused() as refusal:
                    exchange.refused(refusal)
                case Lost(error):
                    raise error
        session.optimizers = []  # free the model while this worker waits

    def sit_out(self, ticket: Ticket, report: Report) -> None:
        """Tell the server that the site sits out the round. Return when the server has recorded it on disk."""
        match self.participation.exchange.sit_out(ticket, report):
            case TooLate(error) | Refused(error):
                LOG.warning("%s: round %d closed before this site sat it out: %s", self.site, ticket.round, error)
            case Lost(error):
                raise error

    def leave(self, error: BaseException | None) -> None:
        """Leave the run, and close the site's files."""
        self.participation.leave(last_words(error))
        sent, received = size(self.counters.bytes_up), size(self.counters.bytes_down)
        untold = self.participation.session.is_untold
        how = "ended (the server does not answer, and was not told)" if untold else "left the run"
        LOG.info("%s: %s after sending %s and receiving %s", self.site, how, sent, received)


def require_finite(tensors: Tensors, schema: Schema, site: str, *, is_initial: bool = False) -> None:
    """Check the model of a script without a server for NaN and Inf, as a server would check an update.

    Args:
        tensors: the model's tensors.
        schema: the model's schema, with the rules that its buffers would have at a server.
        site: name of the site.
        is_initial: whether the model has not been trained yet.

    Raises:
        UpdateRefused: a tensor of a trained model contains NaN or Inf; the message names it.
        ConfigError: a tensor of the initial model contains NaN or Inf.
    """
    for spec in schema.tensors:
        if spec.name in tensors and not is_sound(spec, tensors[spec.name]):
            if is_initial:
                raise ConfigError(
                    f"The initial model's tensor {spec.name!r} contains NaN or Inf.", "Check how it is initialised."
                )
            raise UpdateRefused(
                f"The update of {site} was refused: {spec.name} contains NaN or Inf.",
                "Check the learning rate, the data and the loss at this site.",
            )


class ScriptAlone:
    """The backend of a script without a server: one round of local training, from the model's own values.

    The script gets the same errors and warnings for its model and update as with a server, with one exception: the
    first module after mappings may differ from them (`tensors_of`).
    """

    has_left = False
    process: int | None = None
    local: LocalFragment | None = None

    def __init__(self, site: str) -> None:
        self.site, self.counters = site, Counters()
        self._model: nn.Module | Tensors | None = None
        self._schema = Schema(())
        self._is_module = self._has_begun = False
        self._digest = b""  # of the parameters before training; empty before the model is loaded

    @property
    def schema(self) -> Schema:
        """The schema (names, shapes and dtypes) of the model that the script has loaded."""
        self._loaded()
        return self._schema

    def _loaded(self) -> nn.Module | Tensors:
        if self._model is None:
            raise UsageError(
                "Without a server, there is no global model to use.",
                "Load it into a model first: fl_round.load_into(model), or atoll.functional.receive(into=model).",
            )
        return self._model

    def tensors_of(self, model: nn.Module | Arrays) -> dict[str, Tensor]:
        """Return the model's own tensors by name. The model becomes the global model.

        The first model may have any tensors; later ones must have the same. There is one exception: the first module
        after mappings may again have any tensors, because a mapping does not say which tensors are buffers.
        """
        if not isinstance(model, nn.Module):
            require_model(model)
            model = {name: as_tensor(name, value) for name, value in model.items()}
        is_module = isinstance(model, nn.Module)
        if not self._schema.tensors or (is_module and not self._is_module):
            self._schema, self._is_module = run_schema(model, {}), is_module
        self._model = model
        return matching(self._schema, self.site, model)

    def to_fill(self, tensors: Tensors, version: int) -> dict[str, Tensor]:
        """Return the model's own tensors."""
        return dict(tensors)

    def next_round(self, wait_s: float | None) -> Next | None:
        """Return the only round in the first call, and None in later calls."""
        if self._has_begun:
            return None
        self._has_begun = True
        nothing = "0" * 64
        ticket = Ticket(id=0, fragment=0, round=1, base_version=0, base_digest=nothing, layout_digest=nothing)
        return Open(ticket.base, ticket=ticket)

    def pull(self, ticket: Ticket, into: Into) -> Ticket:
        """Copy the script's model, which is the global model here, unless the tensors to fill are its own."""
        tensors = into(ticket.base.number)
        for name, tensor in named_tensors(self._loaded())[0].items():
            if tensors[name].data_ptr() != tensor.data_ptr():
                tensors[name].copy_(tensor)
        require_finite(tensors, self.schema, self.site, is_initial=True)
        self._digest = self._digest_of(tensors)
        return ticket

    def _digest_of(self, tensors: Tensors) -> bytes:
        """Return a digest of the parameters' values, to notice that training did not change them."""
        hasher = blake3()
        for spec in self.schema.tensors:
            for data in runs_of(tensors[spec.name]) if spec.group == PARAMS else ():
                hasher.update(data)
        return hasher.digest()

    def load_newest(self, into: Tensors, keep: VersionRef | None) -> None:
        """Do nothing: the model has the newest values already."""

    def has_base(self, ticket: Ticket) -> bool:
        """Return whether the script has loaded its model."""
        return bool(self._digest)

    def global_state(self, group: str) -> dict[str, Tensor]:
        """Return zeros in the shape of each float parameter: without a server, the algorithm has no global tensors.

        A correction that the script computes from zeros changes nothing. Before a model is loaded, the result is empty.
        """
        named = named_parameters(self._model) if isinstance(self._model, nn.Module) else {}
        return {name: torch.zeros(value.shape) for name, value in named.items() if value.is_floating_point()}

    own_state = global_state

    def submit(
        self, ticket: Ticket, tensors: Tensors, report: Report, finish: Finish | None, optimizers: Sequence[Optimizer]
    ) -> None:
        """Refuse an update that a server would refuse, else log its metrics. Forget the model. Nothing is sent."""
        require_finite(tensors, self.schema, self.site)
        is_zero = self._digest_of(tensors) == self._digest
        UpdateWarnings(self.site, NoneCodec(), self.schema).about(is_zero, report.steps, filters=False)
        metrics = numbers(report.metrics)
        LOG.info("%s: trained without a server%s", self.site, f" ({metrics})" if metrics else "")
        self._model = None

    def sit_out(self, ticket: Ticket, report: Report) -> None:
        """Log that the script sat out its only round. Forget the model."""
        metrics = numbers(report.metrics)
        LOG.info("%s: sat out the round: its weight is 0%s", self.site, f" ({metrics})" if metrics else "")
        self._model = None

    def leave(self, error: BaseException | None) -> None:
        """If training ended without an error, log that the script ran without a server."""
        if error is None:
            LOG.info("%s", ALONE_ENDED)
