"""`atoll.tasks`: answer the tasks that a workflow at the server sends.

    with atoll.tasks("http://host:8512", site="clinic-a") as worker:

        @worker.task("train")
        def train(payload):
            return {"w": payload["w"] + 1}

        worker.run()                           # until the workflow has ended

        for task in worker.tasks():            # or, in a loop of your own
            task.answer({"w": task.payload["w"] + 1})

A process that is killed and started again gets its open task again. The worker waits for a server that is gone.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType

from atoll.errors import UsageError, print_interrupt_in_a_line, public_api
from atoll.filters.base import ByTask, for_tasks
from atoll.transport.http_client import http_to, server_of
from atoll.worker.arguments import default_site, require_site
from atoll.worker.log_lines import LOG, ensure_lines
from atoll.worker.session.channel import HttpChannel
from atoll.worker.session.leave_at_exit import last_words
from atoll.worker.session.session import Session
from atoll.worker.tasks.answer_tasks import Answering, Answers


@public_api
class TaskWorker(Answers):
    """A site that answers tasks; made by `atoll.tasks`. Use it as a context manager."""

    def __init__(
        self,
        server: str,
        site: str,
        labels: dict[str, str] | None,
        request_task_tensors: bool,
        filters: ByTask,
    ) -> None:
        for_tasks(filters)  # refused before anything is asked
        self._connection = Session(HttpChannel(http_to(server)), site, labels=labels)
        folder = Path(os.environ.get("ATOLL_DIR", ""))
        kept_in = folder if os.environ.get("ATOLL_DIR") and folder.is_dir() else None
        ahead = not request_task_tensors
        super().__init__(Answering(self._connection, filters, pulls_ahead=ahead, folder=kept_in, join="atoll.tasks"))
        self._connection.join()
        LOG.info("%s: takes part in %s at %s", site, self._connection.info.name, self._connection.http.server)

    @property
    def site(self) -> str:
        """Its name."""
        return self._connection.site

    @public_api
    def __enter__(self) -> TaskWorker:
        self._answering.require_joined()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        print_interrupt_in_a_line(error)
        self.close(error)

    def close(self, error: BaseException | None = None) -> None:
        """Deregister. Idempotent."""
        self._answering.close()
        self._connection.leave(last_words(error))


@public_api
def tasks(
    server: str | None = None,
    site: str | None = None,
    *,
    labels: dict[str, str] | None = None,
    request_task_tensors: bool = True,
    filters: ByTask = (),
) -> TaskWorker:
    """Take part in a run that has a workflow.

    Args:
        server: address of the server; by default `ATOLL_SERVER`.
        site: this worker's name; by default `ATOLL_SITE`, else made of host and process.
        labels: shown in status.
        request_task_tensors: whether to pull the tensors of a task after it has arrived. False: pull those of the next
            task ahead, to disk, while a task is still worked on. Payloads are the same.
        filters: applied in this order to every answer of this site before it leaves; or by the name of a task.

    Returns:
        The worker; a context manager that deregisters it.

    Raises:
        UsageError: no server is named, or something in `filters` is no filter.
        ServerUnreachable: the server does not answer. VersionSkew: it speaks another protocol.
    """
    ensure_lines()
    server = server_of(server)
    if not server:
        raise UsageError("Tasks come from a server, and no server is named.", "Give its address, or set ATOLL_SERVER.")
    return TaskWorker(server, require_site(site or default_site()), labels, request_task_tensors, filters)
