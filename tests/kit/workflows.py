"""A server of one workflow, and sites that answer its tasks, in the test's process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from harness.processes import Nursery

import atoll
from atoll.testing.run import Status, Threads
from kit.folders import open_paths
from kit.servers import new_server

Handler = Callable[[Any], Any]


def workflow_server(folder: Path, workflow: Callable[[Any], None], **settings: Any) -> atoll.Server:
    """A server that is not started yet, on any free port, with its state in `folder`/state."""
    given: dict[str, Any] = {"disk.state_dir": folder / "state", "network.port": 0, "disk.min_free_bytes": 0} | settings
    return new_server(workflow=workflow, **given)


class AnsweringSites(Threads):
    """Sites that answer tasks until the workflow has ended.

    Args:
        names: one letter each, or a list.
        handlers: name of a task → the function that answers it.
        options: name of a site → further arguments of its `atoll.tasks`.
    """

    def __init__(
        self,
        url: str,
        names: Iterable[str],
        handlers: Mapping[str, Handler],
        options: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        self._url, self._handlers, self._options = url, handlers, options or {}
        super().__init__(*(partial(self._work, name) for name in names))

    def _work(self, name: str) -> None:
        with atoll.tasks(self._url, name, **self._options.get(name, {})) as worker:
            for task, handler in self._handlers.items():
                worker.task(task)(handler)
            worker.run()


def run_workflow_to_status(
    folder: Path,
    workflow: Callable[[Any], Any],
    handlers: Mapping[str, Handler],
    names: Iterable[str] = "a",
    options: Mapping[str, Mapping[str, Any]] | None = None,
    **settings: Any,
) -> tuple[Any, Status]:
    """Run a workflow with these sites to its end: what it returns, and the status then.

    Nothing of it is left at the server.
    """
    sites, returned = list(names), list[Any]()

    def main(controller: Any) -> None:
        controller.sites(at_least=len(sites), timeout_s=30)
        returned.append(workflow(controller))

    with workflow_server(folder, main, **settings) as server:
        answering = AnsweringSites(server.url, sites, handlers, options)
        assert server.wait(60)
        server.run()
        answering.join()
        status = server.status()
    assert files_of_objects(folder) == []
    return returned[0], status


def run_workflow(*arguments: Any, **settings: Any) -> Any:
    """What the workflow returns, with the arguments of `run_workflow_to_status`."""
    return run_workflow_to_status(*arguments, **settings)[0]


def run_workflow_as_processes(
    nursery: Nursery, script: Path, folder: Path, workflow: Callable[[Any], Any], names: Iterable[str], **settings: Any
) -> tuple[Any, Status]:
    """As `run_workflow_to_status`, with a process of this script for each site."""
    sites, returned = list(names), list[Any]()

    def main(controller: Any) -> None:
        controller.sites(at_least=len(sites), timeout_s=90)  # the first process of a test run starts slowly
        returned.append(workflow(controller))

    with workflow_server(folder, main, **settings) as server:
        workers = [nursery.start(str(script), server.url, name, cwd=folder) for name in sites]
        assert server.wait(100)
        server.run()
        status = server.status()
    assert [worker.wait() for worker in workers] == [0] * len(workers)
    assert kept_objects(folder) == []
    return returned[0], status


def kept_objects(folder: Path) -> list[str]:
    """Names of the files of payloads and answers that the server has in `folder`/state."""
    return sorted(path.name for path in (folder / "state" / "objects").glob("*"))


def files_of_objects(folder: Path) -> list[str]:
    """As `kept_objects`, and files without a name that this process has open."""
    objects = str(folder / "state" / "objects")
    return kept_objects(folder) + [path for path in open_paths() if path.startswith(objects)]
