"""A server of one workflow, and sites that answer its tasks, in the test's process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import atoll
from atoll.testing.run import Threads
from kit.servers import new_server

Handler = Callable[[Any], Any]


def workflow_server(folder: Path, workflow: Callable[[Any], None], **settings: Any) -> atoll.Server:
    """A server that is not started yet, on any free port, with its state in `folder`/state."""
    given: dict[str, Any] = {"disk.state_dir": folder / "state", "network.port": 0, "disk.min_free_bytes": 0} | settings
    return new_server(workflow=workflow, **given)


class AnsweringSites(Threads):
    """Sites that answer tasks until the workflow has ended.

    Args:
        handlers: name of a task → the function that answers it.
    """

    def __init__(self, url: str, names: Iterable[str], handlers: Mapping[str, Handler]) -> None:
        self._url, self._handlers = url, handlers
        super().__init__(*(partial(self._work, name) for name in names))

    def _work(self, name: str) -> None:
        with atoll.tasks(self._url, name) as worker:
            for task, handler in self._handlers.items():
                worker.task(task)(handler)
            worker.run()


def kept_objects(folder: Path) -> list[str]:
    """Names of the files of payloads and answers that the server has in `folder`/state."""
    return sorted(path.name for path in (folder / "state" / "objects").glob("*"))
