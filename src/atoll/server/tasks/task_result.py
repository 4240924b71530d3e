"""What a site answered to a task, as a workflow gets it."""

from __future__ import annotations

import os
import threading
from typing import Any

from atoll.blobs.manifest import read_plain
from atoll.blobs.object_file import Stored
from atoll.errors import RunFailed, StoreError
from atoll.posix import read_at
from atoll.server.tasks.task_queue import Answer


class Result:
    """What a site answered.

    Attributes:
        site: its name.
        task: the task's name.
        error: what the site failed with; empty where it did not.
        lost: `gone` or `stuck` where the site was given up, and `error` says why; else empty.
    """

    def __init__(self, task: str, answer: Answer) -> None:
        self.site, self.task, self.error, self.lost = answer.site, task, answer.error, answer.lost
        self._text = answer.text
        self._stored: Stored | None = None
        self._loaded: list[Any] = []
        self._loading = threading.Lock()
        if answer.contents is not None:
            fd, answer.fd = answer.fd, -1
            self._stored = Stored(
                answer.contents,
                lambda offset, memory: _read(fd, memory, offset),
                lambda: os.close(fd),
                behind=answer.contents.behind,
            )

    @property
    def ok(self) -> bool:
        """Whether there is a payload."""
        return not self.error

    @property
    def payload(self) -> Any:
        """What the site sent, with the same structure; its tensors are loaded when it is first asked for.

        Raises:
            RunFailed: the site failed.
        """
        with self._loading:
            if not self._loaded:
                self._loaded.append(self._tree())
                self._stored = None  # the file goes here
            return self._loaded[0]

    def _tree(self) -> Any:
        if self.error:
            raise RunFailed(
                f"Site {self.site} failed at task {self.task!r}: {self.error}", "Look at its log; skip results not ok."
            )
        return read_plain(self._text or "") if self._stored is None else self._stored.tree()

    def __repr__(self) -> str:
        return f"Result(site={self.site!r}, task={self.task!r}{f', error={self.error!r}' if self.error else ''})"


def _read(fd: int, memory: memoryview, offset: int) -> None:
    try:
        read_at(fd, memory, offset)
    except EOFError as error:
        raise StoreError(f"The file of a result was cut off: {error}.") from None
