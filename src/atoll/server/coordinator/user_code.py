"""The user's code at the server: functions and `@id` components of the run file, and threads that run user code.

At its exit, Python waits for the threads of a pool, so a filter that hangs would block the end of the server. Therefore
user code runs in daemon threads, a few at a time. The log names a call that takes long. Such a call no longer counts as
one of the few, so that a filter that hangs does not block the filters of other sites.
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
from atoll.registry import OwnName
from atoll.runtime import stay_single_threaded

LOG = logging.getLogger("atoll.server")
T = TypeVar("T")
K = TypeVar("K", bound=Hashable)

Function = Callable[[Any], Any]
"""A workflow's function: it takes a `Controller`."""

SAY_S = 30.0
"""Seconds after which the log names a call that has not ended, and the call no longer counts for `AT_ONCE`."""
AT_ONCE = 8
"""Maximum number of running calls that began less than `SAY_S` seconds ago. Each needs memory for tensor values."""
LAZY = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
"""Checks for coroutine functions and generators, which do nothing when they are called."""


async def shared(
    running: dict[K, asyncio.Future[None]], key: K, begin: Callable[[], Coroutine[Any, Any, None]]
) -> bool:
    """Run work only once per key: the first caller begins it, and later callers with this key wait for its end.

    If the work raises an error, all callers get this error. If a caller is cancelled, the work goes on.

    Args:
        running: key → running work. To cancel work, cancel its future.
        key: identifies the work.
        begin: function that returns the coroutine that does the work.

    Returns:
        False if the work was cancelled, else True.
    """

    def end(done: asyncio.Future[None]) -> None:
        del running[key]
        if not done.cancelled():
            done.exception()  # mark the error as read, because there may be no caller any more

    if key not in running:
        running[key] = asyncio.ensure_future(begin())
        running[key].add_done_callback(end)
    work = running[key]
    try:
        await asyncio.shield(work)
    except asyncio.CancelledError:
        if not work.cancelled():
            raise
        return False
    return True


class UserThreads:
    """Runs the user's code in daemon threads, so that it cannot block the event loop or the end of the server."""

    def __init__(self) -> None:
        self._room = asyncio.Semaphore(AT_ONCE)
        self._locks: dict[str, asyncio.Lock] = {}

    async def run(self, call: Callable[[], T], what: str, key: str, timeout_s: float | None = None) -> T:
        """Run `call` in a new thread. Return its result or raise its error.

        If the caller is cancelled, the thread goes on, and later calls with the same `key` wait for its end.

        Args:
            call: the function to run.
            what: text for the log that says what the code does.
            key: calls with the same key run one after another, because user code, such as a filter, may have state
                that only one call at a time may use.
            timeout_s: maximum seconds of each of two waits: for the end of earlier calls with this key, and for the end
                of the call itself; None: no limit.

        Raises:
            TimeoutError: a wait took longer than `timeout_s`.
            UsageError: the call raised an exception that is not a subclass of `Exception`, such as SystemExit.
        """
        lock = self._locks.setdefault(key, asyncio.Lock())
        async with asyncio.timeout(timeout_s):
            await lock.acquire()
        result: asyncio.Future[T] | None = None
        try:
            async with self._room:
                result = self._begin(call, what, lock)
                async with asyncio.timeout(timeout_s) as limit:
                    await asyncio.wait([result], timeout=SAY_S)
            async with asyncio.timeout_at(limit.when()):
                return await result
        finally:
            if result is None:  # no thread was started that would release the lock
                lock.release()
            else:
                result.cancel()  # if the caller is cancelled, nothing else reads the result

    def _begin(self, call: Callable[[], T], what: str, lock: asyncio.Lock) -> asyncio.Future[T]:
        """Start a thread that runs `call` and then releases `lock`. Return a future with the result."""
        loop = asyncio.get_running_loop()
        result: asyncio.Future[T] = loop.create_future()
        slow = loop.call_later(SAY_S, LOG.warning, "%s: not finished after %g s. Check their code.", what, SAY_S)

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
            except BaseException as error:  # such an error would end the server if it was raised in the event loop
                ended = UsageError(f"{what} ended with {error!r}.", "Raise an Exception instead.")
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
    """The components of a run: objects that the run file refers to as `@id`. They are created when they are needed.

    Raises:
        ConfigError: a component's table in the run file is malformed, or two components have the same id.
    """

    def __init__(self, settings: Settings) -> None:
        self._components = components_of(settings.workflow.components)
        self._instances: dict[str, Any] = {}
        self._making: list[str] = []

    def function_of(self, entry: WorkflowEntry) -> Function:
        """Return the function of a workflow with its arguments filled in. The result takes only the controller.

        Raises:
            ConfigError: the function is not found, is not callable, or does not take these arguments.
        """
        where, found = f"workflow {entry.name!r}", entry.path
        if entry.kind:
            found = registry.load("workflows", entry.registered)
        elif isinstance(found, OwnName):
            found = self._at(found.text, where) if is_reference(found.text) else registry.load_attribute(found)
        if not callable(found):
            raise ConfigError(
                f"{where} is of type {type(found).__name__}, not a function.", "Use a function of one argument."
            )
        args = self._filled(dict(entry.args), where)
        if any(kind(each) for kind in LAZY for each in (found, getattr(found, "__call__", None))):  # noqa: B004
            raise ConfigError(
                f"{where} is {getattr(found, '__name__', found)!r}, a coroutine function or a generator, "
                "which does nothing when it is called.",
                "Use a plain function: def without async and yield.",
            )
        try:
            inspect.signature(found).bind(None, **args)
        except ValueError:  # a builtin without a signature
            pass
        except TypeError as error:
            raise ConfigError(
                f"{where} cannot be called with args {sorted(args)}: {error}.",
                "Write a function that takes the controller, and these args as keyword arguments.",
            ) from None
        require = getattr(found, "require", None)
        if require is not None:
            require(**args)
        return functools.partial(found, **args)

    def _filled(self, value: Any, where: str) -> Any:
        """Return a value of the run file with each text `@id` replaced by the component. `@@` stands for `@` itself."""
        if isinstance(value, dict):
            return {key: self._filled(item, where) for key, item in value.items()}
        if isinstance(value, list):
            return [self._filled(item, where) for item in value]
        if isinstance(value, str) and value.startswith("@@"):
            return value[1:]
        return self._at(value, where) if is_reference(value) else value

    def _at(self, reference: str, where: str) -> Any:
        name = reference[1:]
        if name not in self._instances:
            component = component_at(reference, self._components, where)
            if name in self._making:
                circle = " → ".join([*self._making[self._making.index(name) :], name])
                raise ConfigError(f"Components refer to each other in a circle: {circle}.", "Remove one reference.")
            self._making.append(name)
            args = self._filled(dict(component.args), f"component {name!r}")
            instance = registry.load_attribute(component.path)
            if isinstance(instance, type) or args:  # a function without arguments is the component itself
                instance = registry.construct(
                    functools.partial(instance, **args),
                    f"Component {name!r} is {component.path!r} with args = {args!r}",
                    "Use only arguments that the component has.",
                )
            self._instances[name] = instance
            self._making.pop()
        return self._instances[name]
