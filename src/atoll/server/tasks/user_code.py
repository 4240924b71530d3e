"""The user's code at the server: functions and `@id` components of the run file, and threads that run it.

A pool waits for its threads when it ends, and the interpreter does: a filter that hangs would hold up all other sites,
and then the end of the server. So the user's code runs in daemon threads, a few at a time, and the log names what takes
long.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import logging
import threading
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, TypeVar

from atoll import registry
from atoll.config import Settings, WorkflowEntry, component_at, components_of, is_reference
from atoll.errors import ConfigError, UsageError
from atoll.runtime import stay_single_threaded

LOG = logging.getLogger("atoll.server")
T = TypeVar("T")
K = TypeVar("K", bound=Hashable)

Function = Callable[[Any], Any]
"""A workflow: it takes a `Controller`."""

SAY_S = 30.0
"""How long a call takes before the log names it."""
AT_ONCE = 8
"""Calls at a time; each holds a few runs of elements."""
LAZY = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
"""Whether a call of a function runs none of its code."""


async def shared(
    under_way: dict[K, asyncio.Future[None]], key: K, begin: Callable[[], Coroutine[Any, Any, None]]
) -> bool:
    """Wait for work that is done once, however many ask for it; return False if it is cancelled in `under_way`.

    Errors of the work are raised to all that wait; a caller that is cancelled leaves it under way.
    """

    def end(done: asyncio.Future[None]) -> None:
        del under_way[key]
        if not done.cancelled():
            done.exception()  # the request that waited was told, or asks again

    if key not in under_way:
        under_way[key] = asyncio.ensure_future(begin())
        under_way[key].add_done_callback(end)
    work = under_way[key]
    try:
        await asyncio.shield(work)
    except asyncio.CancelledError:
        if not work.cancelled():
            raise
        return False
    return True


class UserThreads:
    """Runs the user's code in threads beside an event loop."""

    def __init__(self) -> None:
        self._room = asyncio.Semaphore(AT_ONCE)
        self._locks: dict[str, asyncio.Lock] = {}

    async def run(self, call: Callable[[], T], what: str, key: str, timeout_s: float | None = None) -> T:
        """Return or raise what `call` does, in a thread of its own.

        The thread goes on if the caller is cancelled, and then holds up calls of the same `key` only.

        Args:
            what: names the code and its work, for the log.
            key: calls of one key run one after the other: a filter keeps state from the begin of a payload to its end.
            timeout_s: how long to wait for earlier calls, and then how long the call may take.

        Raises:
            TimeoutError: it was not done in that time.
            UsageError: it called sys.exit, or the like.
        """
        lock = self._locks.setdefault(key, asyncio.Lock())
        async with asyncio.timeout(timeout_s):
            await lock.acquire()
        result: asyncio.Future[T] | None = None
        try:
            async with self._room:
                result = self._begin(call, what, lock)
                async with asyncio.timeout(timeout_s):
                    return await result
        finally:
            if result is None:  # no thread was started, which would release it
                lock.release()

    def _begin(self, call: Callable[[], T], what: str, lock: asyncio.Lock) -> asyncio.Future[T]:
        """Start the thread, which releases the lock at its end."""
        loop = asyncio.get_running_loop()
        result: asyncio.Future[T] = loop.create_future()
        slow = loop.call_later(SAY_S, LOG.warning, "%s: not done after %g s. Look at their code.", what, SAY_S)

        def end(set_result: Callable[[], None]) -> None:
            lock.release()
            slow.cancel()
            if not result.done():
                set_result()

        def work() -> None:
            stay_single_threaded()
            try:
                set_result = functools.partial(result.set_result, call())
            except Exception as error:
                set_result = functools.partial(result.set_exception, error)
            except BaseException as error:  # passed on, it would end the server
                ended = UsageError(f"{what} ended with {error!r}.", "Let them raise an Exception.")
                set_result = functools.partial(result.set_exception, ended)
            with contextlib.suppress(RuntimeError):  # the server has ended meanwhile
                loop.call_soon_threadsafe(end, set_result)

        try:
            threading.Thread(target=work, name="atoll-user-code", daemon=True).start()
        except BaseException:
            slow.cancel()
            raise
        return result


class Components:
    """The components of a run, each made when it is first referred to.

    Raises:
        ConfigError: the tables of the run file are wrong.
    """

    def __init__(self, settings: Settings) -> None:
        self._components = components_of(settings.workflow.components)
        self._made: dict[str, Any] = {}
        self._making: list[str] = []

    def function_of(self, entry: WorkflowEntry) -> Function:
        """Return the function of a workflow with its arguments bound; it takes the controller.

        Raises:
            ConfigError: it is not found, is not callable, or does not take these arguments.
        """
        where, found = f"workflow {entry.name!r}", entry.path
        if entry.kind:
            found = registry.load("workflows", entry.kind)
        elif isinstance(found, str):
            found = self._at(found, where) if is_reference(found) else registry.load_attribute(found)
        if not callable(found):
            raise ConfigError(f"{where} is a {type(found).__name__}.", "Name a function of one argument.")
        args = self._filled(dict(entry.args), where)
        if any(kind(each) for kind in LAZY for each in (found, getattr(found, "__call__", None))):  # noqa: B004
            raise ConfigError(
                f"{where} is {getattr(found, '__name__', found)!r}, a coroutine function or a generator: a call of it "
                "does nothing.",
                "Write it as a plain function: def without async and yield.",
            )
        try:
            inspect.signature(found).bind(None, **args)
        except ValueError:  # a builtin without a signature
            pass
        except TypeError as error:
            raise ConfigError(
                f"{where} cannot be called with args {sorted(args)}: {error}.",
                "Its function takes the controller, then args by their names.",
            ) from None
        require = getattr(found, "require", None)
        if require is not None:
            require(**args)
        return functools.partial(found, **args)

    def _filled(self, value: Any, where: str) -> Any:
        """Replace references in a value of the run file by their components; `@@` stands for a plain `@`."""
        if isinstance(value, dict):
            return {key: self._filled(item, where) for key, item in value.items()}
        if isinstance(value, list):
            return [self._filled(item, where) for item in value]
        if isinstance(value, str) and value.startswith("@@"):
            return value[1:]
        return self._at(value, where) if is_reference(value) else value

    def _at(self, reference: str, where: str) -> Any:
        name = reference[1:]
        if name not in self._made:
            component = component_at(reference, self._components, where)
            if name in self._making:
                circle = " → ".join([*self._making[self._making.index(name) :], name])
                raise ConfigError(f"Components refer to each other in a circle: {circle}.", "Break it.")
            self._making.append(name)
            args = self._filled(dict(component.args), f"component {name!r}")
            found = registry.load_attribute(component.path)
            if isinstance(found, type) or args:  # a function without arguments is the component itself
                found = registry.made(
                    functools.partial(found, **args),
                    f"Component {name!r} is {component.path!r} with args = {args!r}",
                    "Give the arguments that it has.",
                )
            self._made[name] = found
            self._making.pop()
        return self._made[name]
