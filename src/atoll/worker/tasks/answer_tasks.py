"""How a site answers tasks: handlers by the names of tasks, over whatever connection the site has."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from atoll.blobs.manifest import read_plain
from atoll.blobs.object_file import Stored
from atoll.border import border, bordered
from atoll.errors import BadRequest, Gone, PartCorrupt, StoreError, TransferError, TransferStalled, UsageError
from atoll.filters.payload_filter import ByTask, said
from atoll.protocol import routes
from atoll.protocol import task_messages as tm
from atoll.tensors.payload import Packed, pack
from atoll.tensors.reference import TensorRef
from atoll.worker.broken_off import NetworkLost
from atoll.worker.exchange.filtering import AnswerFilters
from atoll.worker.log_lines import LOG
from atoll.worker.objects.fetch import fetch, fetch_stored
from atoll.worker.objects.object_transfer import idle_timeout
from atoll.worker.objects.publish import Publisher
from atoll.worker.session.connection import Connection
from atoll.worker.session.server_checks import require_joined
from atoll.worker.tasks.evaluate_models import Evaluate, Models
from atoll.worker.tasks.prefetch import Ahead
from atoll.worker.tasks.task import Task

Handler = Callable[[Any], Any]
H = TypeVar("H", bound=Callable[..., Any])

SUBMIT, VALIDATE = "submit_model", "validate"

UNDELIVERED = (TransferError, UsageError, StoreError, BadRequest)
"""Why an answer is not sent though its handler gave one: a stream that fails while it is read, tensors that do not get
through, a disk of this site that takes none, a server that would never keep so much."""


OF_EVALUATIONS = -2
"""Under this number, in place of a fragment's, a worker warns that it cannot evaluate while it trains."""


def say_evaluation_follows(connection: Connection) -> None:
    """Warn a site that evaluates only if its script opens `atoll.tasks` behind its loop, which no server can know."""
    if connection.evaluates:
        told = (
            f"the run ends with a cross-site evaluation that asks site {connection.site}, and a DiLoCo loop answers no "
            "tasks. Open atoll.tasks with worker.evaluates(function) behind the loop in the same script, or leave the "
            "site out of the evaluation's sites: else the evaluation waits for it, and has no values of it."
        )
        LOG.warning("%s: %s", connection.site, told)
        connection.warn(OF_EVALUATIONS, [told])


class Answering:
    """The handlers of a site, and the loop that calls them.

    Args:
        connection: of the site.
        filters: that its answers pass through.
        pulls_ahead: whether the tensors of a next task are pulled while one is worked on.
        local: gives the model that the site has trained last, from its file.
        folder: where models lie that are evaluated; by default that of temporary files.
        join: the call that takes part again once this is closed.
    """

    def __init__(
        self,
        connection: Connection,
        filters: ByTask,
        *,
        pulls_ahead: bool = False,
        local: Callable[[], Packed] | None = None,
        folder: Path | None = None,
        join: str = "atoll.join",
    ) -> None:
        self._join = join
        self._connection, self._filters = connection, AnswerFilters(filters, connection.site)
        self._ahead = Ahead(connection, self._stored) if pulls_ahead else None
        self._models = Models(connection, self._filters, local, folder, self._ref_to)
        self._handlers: dict[str, Handler] = {}
        self._builtin: dict[str, Handler] = {}
        self._warned: set[str] = set()
        self._rounds_begin = self._closed = False

    @property
    def site(self) -> str:
        return self._connection.site

    @property
    def has_handlers(self) -> bool:
        return bool(self._handlers or self._builtin)

    def task(self, name: str) -> Callable[[H], H]:
        """As `Answers.task`."""

        def decorate(handler: H) -> H:
            if name in self._handlers or (name == VALIDATE and name in self._builtin):
                raise UsageError(f"Task {name!r} has a handler already.", "Give each task one.")
            self._handlers[name] = handler
            return handler

        return decorate

    def evaluates(self, function: Evaluate, model: nn.Module | None) -> None:
        """As `Answers.evaluates`."""
        if VALIDATE in self._builtin or VALIDATE in self._handlers:
            raise UsageError("Task 'validate' has a handler already.", "Register one function that evaluates.")
        self._models.filled = model
        self._builtin[VALIDATE] = functools.partial(self._models.evaluate, function, model)
        self._builtin.setdefault(SUBMIT, self._models.submit)

    def submits(self, function: Callable[[], Any] | None, publisher: Publisher | None) -> None:
        """As `Answers.submits`."""
        self._models.give = function or self._models.give
        self._models.publisher = publisher or self._models.publisher
        self._builtin[SUBMIT] = self._models.submit

    def note(self, text: str) -> None:
        """As `Answers.note`."""
        self._doing(text[:64])

    def require_joined(self) -> None:
        """Refuse to go on once this is closed.

        Raises:
            UsageError: it is.
        """
        require_joined(self._closed, self.site, self._join)

    def require_evaluator(self) -> None:
        """Refuse to begin where a cross-site evaluation will ask for a function that is not there.

        Raises:
            UsageError: it will.
        """
        if self._connection.evaluates and not (VALIDATE in self._builtin or VALIDATE in self._handlers):
            raise UsageError(
                f"The run ends with a cross-site evaluation, and site {self.site} has no function that evaluates.",
                "Register one before the loop, with worker.evaluates(function); or leave the site out of the "
                "evaluation's sites.",
            )

    def run(self) -> None:
        """Answer tasks with the handlers until the last workflow has ended."""
        self.require_evaluator()
        if not self.has_handlers:
            raise UsageError("The worker has no handler.", 'Decorate a function with @worker.task("train") first.')
        self.serve(rounds=False)

    def serve(self, *, rounds: bool) -> bool:
        """Answer tasks with the handlers.

        Args:
            rounds: whether this process takes part in rounds, too: it goes back to them when they begin.

        Returns:
            Whether they do; else the last workflow has ended.
        """
        for task in self.tasks(rounds=rounds):
            handler = self._handlers.get(task.name) or self._builtin.get(task.name)
            if handler is None:
                known = ", ".join(sorted({*self._handlers, *self._builtin})) or "none"
                LOG.error("%s: there is no handler for task %r, only for %s", self.site, task.name, known)
                task.fail(f"there is no handler for task {task.name!r}, only for {known}")
                continue
            try:
                packed = pack(handler(task.payload))  # what cannot travel is the handler's error, too
            except Exception as error:
                LOG.exception("%s: task %r failed", self.site, task.name)
                task.fail(error)
                continue
            task.payload = None  # given back while the answer is on its way
            try:
                try:
                    answer = task.written(packed)
                finally:
                    del packed
                task.deliver(answer)
            except UNDELIVERED as error:
                LOG.error("%s: %s", self.site, said(error))
                task.fail(error)
        return self._rounds_begin

    def tasks(self, *, rounds: bool = False) -> Iterator[Task]:
        """The tasks of this site as they come, each with its payload; ends with the last workflow, or as `serve`."""
        self.require_joined()
        connection, lost, stalled = self._connection, "", ""
        self._rounds_begin = False
        request = tm.TaskRequest(wait_s=routes.LONG_POLL_S, rounds=rounds)
        ask = functools.partial(
            connection.http.post, routes.TASKS, request, tm.TaskReply, timeout_s=routes.LONG_POLL_S + 10.0
        )
        while True:
            self._doing("waiting for a task")
            reply = connection.patiently(ask, None, "ask for the next task")
            if reply.status == "finished":
                LOG.info("%s: the workflow has ended", self.site)
                return
            if reply.status == "rounds":
                self._rounds_begin = True
                return
            if reply.task is None:
                continue
            task = Task(connection, reply.task, self._warned, self._filters)
            try:
                task.payload = self._payload_of(reply.task)
            except StoreError as error:  # before what may pass: of a full disk of its own a site tells
                LOG.error("%s: the tensors of %s cannot be kept: %s", self.site, task.described, error)
                task.fail(error)
                continue
            except NetworkLost as error:
                if isinstance(error, TransferStalled) and stalled == task.id:
                    task.fail(self._never_came(task, error))
                    continue
                stalled = task.id if isinstance(error, TransferStalled) else stalled
                LOG.warning("%s: task %r did not arrive, asking again: %s", self.site, task.name, error)
                continue
            except (Gone, BadRequest, PartCorrupt, TransferError) as error:
                if isinstance(error, Gone) and lost != task.id:
                    lost = task.id  # it was closed meanwhile, and is not given again
                    continue
                task.fail(error)
                continue
            self._doing(f"task {task.name}"[:64])
            if self._ahead is not None:
                self._ahead.begin()
            yield task

    def _payload_of(self, message: tm.Task) -> Any:
        stored = self._ahead.take(message.task) if self._ahead is not None else None
        if stored is not None:
            return stored.tree()
        if message.body.object is None:
            return read_plain(message.body.plain or "")
        return fetch(self._ref_to(message.body.object), idle_timeout_s=self._idle_timeout_s())

    def _stored(self, key: tm.ObjectKey, abort: threading.Event) -> Stored:
        return fetch_stored(self._ref_to(key), idle_timeout_s=self._idle_timeout_s(), abort=abort)

    def _ref_to(self, key: tm.ObjectKey) -> TensorRef:
        http = self._connection.http
        return TensorRef(
            http.host, http.port, http.secure is not None, key.object, key.secret, key.digest, key.expires_at
        )

    def _idle_timeout_s(self) -> float:
        return idle_timeout(None, self._connection.info.idle_timeout_s)

    def _never_came(self, task: Task, why: TransferStalled) -> TransferStalled:
        """Names who did not send what."""
        server = self._connection.http.server
        error = TransferStalled(
            f"The tensors of {task.described} do not arrive at site {self.site} from {server}: {why.message}",
            why.remedy,
        )
        LOG.error("%s: %s", self.site, error)
        return error

    def _doing(self, state: str) -> None:
        self._connection.heartbeat = self._connection.heartbeat.model_copy(update={"state": state})

    def close(self) -> None:
        """Serve no model any more. Idempotent."""
        self._closed = True
        if self._ahead is not None:
            self._ahead.close()
        self._models.close()


@bordered
class Answers:
    """What a worker offers to register, whichever way it takes part."""

    def __init__(self, answering: Answering) -> None:
        self._answering = answering

    def task(self, name: str) -> Callable[[H], H]:
        """Decorate the function that answers the tasks of a name: payload in, payload out.

        What it raises is the site's answer; the worker goes on to the next task.
        """
        return self._answering.task(name)

    def evaluates(self, function: Evaluate | None = None, *, model: nn.Module | None = None) -> Any:
        """Register the function by which this site evaluates models, its own and others'; usable as a decorator.

        With it the site also gives its own model to be evaluated elsewhere: `submits` says which.

        Args:
            function: gets the model, and gives metrics: name → number.
            model: a module that is filled in place with each model, and given to the function; not the one that
                `submits` gives. None: the function gets a `LazyState`, name → tensor on disk.

        Raises:
            UsageError: there is one already.
        """
        if function is None:
            return lambda decorated: self.evaluates(decorated, model=model)
        self._answering.evaluates(function, model)
        return function

    def submits(self, function: Callable[[], Any] | None = None, *, publisher: Publisher | None = None) -> Any:
        """Say which model this site gives to be evaluated elsewhere, and from where others pull it.

        Args:
            function: gives a module, a mapping name → tensor, or a `LazyState`; None from it refuses. By default the
                model that this site submitted last, before it left the site.
            publisher: serves it. By default this process does, to processes of this machine, where the server is on
                it, too; else it goes by the server.
        """
        self._answering.submits(function, publisher)
        return function

    def note(self, text: str) -> None:
        """Say what this site is doing: shown in status, and a sign of life by which limits of workflows go."""
        self._answering.note(text)

    def tasks(self) -> Iterator[Task]:
        """The tasks of this site as they come, each with its payload; ends with the last workflow."""
        return self._answering.tasks()

    @border
    def run(self) -> None:
        """Answer tasks with the handlers until the last workflow has ended."""
        self._answering.run()
