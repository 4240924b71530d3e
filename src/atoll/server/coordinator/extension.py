"""Extensions of a server: guests with operations of their own, which follow the events and show a part of the status.

The tasks and the published objects are extensions that Atoll brings for every run. A package brings an extension by an
entry point of the group `atoll.extensions`: a subclass of `Extension`. The run file names it (`server.extensions`). If
such an extension raises, the log and the status name it once, and the run goes on.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

from pydantic import JsonValue, TypeAdapter

from atoll import registry
from atoll.config import Settings
from atoll.errors import ConfigError, StoreError
from atoll.format_text import visible
from atoll.protocol.openapi import OPERATIONS, Operation
from atoll.protocol.run_events import Happened
from atoll.rounds.state import State
from atoll.server.coordinator.event_log import EventLog

LOG = logging.getLogger("atoll.server")

CLOSE_S = 5.0
"""Seconds that an extension has to close."""
PART_BYTES = 2**16
"""Maximum size of an extension's part of the status, as JSON."""
MOST_WARNINGS = 20
"""Maximum number of warnings of an extension in the status."""
_JSON: TypeAdapter[JsonValue] = TypeAdapter(JsonValue)


class RunView(Protocol):
    """What an extension sees of a run.

    Attributes:
        settings: the run's settings.
        events: the run's events: read, follow or add to them.
    """

    settings: Settings
    events: EventLog

    @property
    def state(self) -> State:
        """The state of the rounds, leases and tickets. Only the run changes it. It is not there yet in `__init__`."""


class Extension:
    """Base class of extensions. All methods run on the server's event loop, so none may block.

    An extension that a package brings lives as long as the server. If the run begins again within it, as after a
    rollback, `follow` hands over the run, and the events go on: each comes once, in order.

    Each operation is carried out by the method of the same name: `async def NAME(self, message)` if the operation has
    a message, with `query` and the parameters of the path as further arguments. Its path begins with
    `/v1/extensions/EXTENSION/`; parameters of the path are numbers. If the reply is `bytes`, the method also gets
    `request` (aiohttp's) and `caller`, and returns an `aiohttp.web.StreamResponse`.

    Attributes:
        name: name of the extension, as the run file and the entry point have it.
        operations: what it answers over HTTP, and to which callers.
    """

    name: str
    operations: Sequence[Operation] = ()

    def __init__(self, run: RunView) -> None:
        self.run = run

    def follow(self, run: RunView) -> None:
        """Go on with the run, which begins again within this server: `run` is another object from now on."""
        self.run = run

    async def rest(self) -> None:
        """Read nothing of the run until `follow`: its files are closed, because it begins again."""

    def on_event(self, event: Happened) -> None:
        """Follow the events of the run. This is called after each event is in the journal."""

    def status(self) -> JsonValue:
        """Return the extension's part of the status: at most `PART_BYTES` of JSON, so no NaN; None for no part."""
        return None

    def warnings(self) -> Iterable[str]:
        """Return what is probably wrong at present, for the status and the events."""
        return ()

    def tick(self, now_s: float) -> None:
        """Do what is due at a time of `time.monotonic`. This is called about once a second."""

    async def close(self) -> None:
        """End what the extension has begun, within `CLOSE_S` seconds; the server is about to end."""


class Extensions:
    """The extensions of a run.

    Args:
        run: the run.
        parts: the extensions that Atoll makes for each run anew, even if it begins again within the server.
        trackers: the one that Atoll makes once for a server.
        before: the extensions before the run has begun again; None: the server starts now.

    Attributes:
        own: the extensions that Atoll brings, which carry out operations of `OPERATIONS`. If one raises, the run fails,
            as with any part of the server.
        trackers: as above.
        problems: other extension → the first error that it raised, as a warning for the status.
    """

    def __init__(
        self, run: RunView, parts: Sequence[Extension], trackers: Extension, before: Extensions | None = None
    ) -> None:
        """Make the extensions that the settings name; or let those of `before` go on.

        Raises:
            ConfigError: there is no such extension, it cannot be made, or an operation of it is not possible.
        """
        self._parts, self.trackers, self.own = parts, trackers, (*parts, trackers)
        self._all: dict[str, Extension] = {} if before is None else before._all
        self.problems: dict[str, str] = {} if before is None else before.problems
        if before is None:
            self._make(run)
        else:
            trackers.follow(run)
            for name, each in self._all.items():
                self._try(name, partial(each.follow, run))
        for each in self._all.values():
            run.events.subscribe(f"the extension {each.name}", each.on_event)

    def _make(self, run: RunView) -> None:
        for name in run.settings.server.names:
            kind = registry.load("extensions", name)
            if not (isinstance(kind, type) and issubclass(kind, Extension)):
                raise ConfigError(
                    f"The extension {name!r} is {kind!r}, which is no extension.",
                    "Let its entry point lead to a subclass of atoll.server.coordinator.extension.Extension.",
                )
            try:
                self._add(kind(run))
            except ConfigError:
                raise
            except Exception as error:
                raise ConfigError(f"The extension {name!r} cannot be made: {error!r}.", "Correct its code.") from error

    def _add(self, extension: Extension) -> None:
        if extension.name in self._all:  # the second would silently replace the first
            raise ConfigError(
                f"Two extensions have the name {extension.name!r}.",
                "Name each once in server.extensions, or rename one.",
            )
        taken = {operation.name for operation in (*OPERATIONS, *self.operations)}
        begin = f"/v1/extensions/{extension.name}/"
        for operation in extension.operations:
            why = ""
            if operation.name in taken:
                why = "another operation has this name"
            elif not operation.path.startswith(begin):
                why = f"its path {operation.path} does not begin with {begin}"
            elif not callable(getattr(extension, operation.name, None)):
                why = "the extension has no method of this name"
            if why:
                raise ConfigError(
                    f"The operation {operation.name!r} of the extension {extension.name!r} is not possible: {why}.",
                    "Correct the extension, or leave it out of server.extensions.",
                )
            taken.add(operation.name)
        self._all[extension.name] = extension

    @property
    def operations(self) -> list[Operation]:
        """The operations of the extensions that packages bring."""
        return [operation for each in self._all.values() for operation in each.operations]

    def method(self, operation: Operation) -> Callable[..., Any]:
        """Return a function that carries out an operation by the method of its extension, which a package brings.

        Errors that mean something else where requests are handled, such as a broken connection of the extension's own,
        become a `RuntimeError`: the request gets status 500, and the log the error.
        """
        owner = next(each for each in self._all.values() if operation in each.operations)
        method: Callable[..., Any] = getattr(owner, operation.name)

        async def carry_out(**arguments: Any) -> Any:
            try:
                return await method(**arguments)
            except (OSError, TimeoutError, StoreError) as error:
                raise RuntimeError(f"{operation.name} of the extension {owner.name} failed: {error!r}") from error

        return carry_out

    def status(self) -> dict[str, Any]:
        """Return the parts of the status of extensions that packages bring: name of the extension → its part."""
        parts = {name: self._try(name, partial(_part, each)) for name, each in self._all.items()}
        return {name: part for name, part in parts.items() if part is not None}

    def warnings(self) -> list[str]:
        """Return the warnings of all extensions, and the problems with those that packages bring."""
        found = [text for each in self.own for text in each.warnings()]
        for name, extension in self._all.items():
            found += self._try(name, partial(_warnings, extension)) or []
        return [*found, *self.problems.values()]

    def tick(self, now_s: float) -> None:
        """Let each extension do what is due at a time of `time.monotonic`."""
        for own in self.own:
            own.tick(now_s)
        for name, each in self._all.items():
            self._try(name, partial(each.tick, now_s))

    def _try(self, name: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:
            if name not in self.problems:
                self.problems[name] = f"the extension {name} failed: {error!r}"
                LOG.exception("the extension %s failed; the run goes on", name)
            return None

    async def rest(self) -> None:
        """Close the parts of the run, which begins again. The other extensions go on with it."""
        await asyncio.gather(self._close_parts(), self.trackers.rest())

    async def close(self) -> None:
        """Close all extensions, at the same time; those that packages bring, within `CLOSE_S` seconds. Idempotent."""
        brought = [_closed(name, self._all.pop(name)) for name in list(self._all)]
        await asyncio.gather(self._close_parts(), self.trackers.close(), *brought)

    async def _close_parts(self) -> None:
        parts, self._parts = self._parts, ()
        for each in parts:
            await each.close()


async def _closed(name: str, extension: Extension) -> None:
    try:
        async with asyncio.timeout(CLOSE_S):
            await extension.close()
    except Exception as error:
        LOG.error("the extension %s could not be closed: %r", name, error)


def _warnings(extension: Extension) -> list[str]:
    return [visible(str(text)) for text in extension.warnings()][:MOST_WARNINGS]


def _part(extension: Extension) -> JsonValue:
    # through JSON text: NaN and lone surrogates would else fail only with the whole status, and so end the server
    text = json.dumps(extension.status(), allow_nan=False)
    if len(text) > PART_BYTES:
        raise ValueError(f"its part of the status has {len(text)} bytes, more than {PART_BYTES}")
    return _JSON.validate_json(text)
