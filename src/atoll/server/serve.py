"""`atoll.Server`: the server of a run, for a program and for the command `atoll server`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar
from urllib.parse import urlsplit

from torch import nn
from torch.optim import Optimizer

from atoll.algorithms.resolve import require_training
from atoll.config import DEFAULT_PORT, Settings
from atoll.errors import AtollError, PortInUse, StoreError, UsageError, public_api
from atoll.posix import require_writable_folder
from atoll.protocol import status_messages
from atoll.protocol.run_events import Happened
from atoll.protocol.task_messages import Evaluation
from atoll.registry import label_of
from atoll.runtime import Latch, ensure_lines
from atoll.server.assemble_run import UserCode, assemble
from atoll.server.coordinator.build_status import (
    address_before,
    keep_status,
    status_before,
    status_of,
    write_status,
)
from atoll.server.coordinator.failure_notices import failure_for_sites
from atoll.server.coordinator.filter_table import Given
from atoll.server.coordinator.persistor import Persistor
from atoll.server.coordinator.roster import Lease
from atoll.server.coordinator.round_configs import ConfigFunction, config_function
from atoll.server.coordinator.run_core import RunCore
from atoll.server.coordinator.served_run import ServedRun
from atoll.server.coordinator.site_credentials import Issuing
from atoll.server.coordinator.user_code import Function
from atoll.server.evaluation_process import Evaluate, Evaluator
from atoll.server.http.app import HTTP_LOG, make_app, make_refusing_app
from atoll.server.http.gate import open_gate
from atoll.server.http.server_tls import ANY_HOST, ServerTls
from atoll.server.initial_model import NO_MODEL
from atoll.server.local_site import HOST, LocalSite, SiteCalls, VersionsInUse
from atoll.server.saved_state import SavedState, save
from atoll.server.startup import CODE, open_again, open_run, settings_beside, take_over_shapes
from atoll.server.tasks.task_payloads import TaskFilters
from atoll.server.tasks.workflow_schedule import WorkflowSchedule
from atoll.store.caller_tokens import keep_tokens, stored_tokens
from atoll.store.identities import KnownSites
from atoll.store.reader import open_state, recorded_failure
from atoll.store.store import require_unlocked
from atoll.tensors.module_tensors import Tensors
from atoll.tensors.reference import address_of
from atoll.transport.listener import Listener, listen, raise_files_limit, runner_of, start_listener
from atoll.transport.loop_thread import LoopThread
from atoll.transport.tls import fixed

LOG = logging.getLogger("atoll.server")
T = TypeVar("T")
Accept = Callable[..., Awaitable[Listener]]
"""Function that begins to accept connections for an aiohttp runner."""

PORTS_TO_TRY = 100
GRACE_S = 30.0
"""Maximum seconds that the server stays after the last round, for workers that have not pulled the result yet."""
GRACE_SAID_S = 1.0
"""Seconds after which the log names the workers that have not pulled the result. Most workers need less."""
ASK_AGAIN_S = 12.0
"""Seconds within which a site that waits for the server asks again, with its longest pause between two attempts."""
LONGEST_TELL_S = 120.0
"""Maximum seconds after the last request of a site for which a failed server waits for its next one."""
TELL_S = 0.05
"""Seconds between two checks whether all sites were told."""
RENEW_S = 86_400.0
"""Seconds between two checks whether the server's own certificate is to be made anew."""
STATUS_S = 1.0
"""Seconds between two checks for a new version. If there is one, the status is saved, in case the server is killed."""
WATCHED_S = 3.0
"""Seconds. If a client asked for the status within this time before the end of the run, the server stays this long for
the next requests of such clients, so that each sees the end."""
READ_BYTES = 2**16
"""Maximum bytes of a request's body in memory before a handler reads it. Handlers of parts read larger pieces."""


@public_api
class Server:
    """The server of one run. It runs in a thread of the calling program.

    Args:
        model: the initial model: a module, a mapping name → tensor, or a text as for the setting `model.source`. The
            server reads the model once, when the run begins. None if the settings name a model, or if the state
            directory already has the run.
        workflow: a function that takes a `Controller`, or its import path. It replaces the setting `workflow.function`.
        outer_optimizer: a class of `torch.optim`, a function (parameters, **options) → optimizer, or a name or import
            path. Atoll calls the function several times, each time with other parameters. Before the run, Atoll tests
            the optimizer, and refuses it if the step of a tensor depends on other tensors.
        filters: the server's filters of updates and of answers to tasks: a list for all sites, or a mapping site →
            list. For answers also `{site: {task: list}}`. Pass either these or the setting `workflow.result_filters`.
        data_filters: the server's filters of task payloads, applied before sending, in the same forms. Pass
            either these or the setting `workflow.payload_filters`.
        config: a function that is called with the number of a round and the name of a site, and returns a dict for
            them, which the site finds in `fl_round.config`; or its import path. It replaces the setting
            `rounds.config_function`.
        evaluate: a function that evaluates versions: it takes the model, in evaluation mode and without gradients, and
            returns its metrics; or its import path, as in the setting `server.evaluate`. A function runs in a fork of
            this program, which cannot use CUDA if the program does; a path is imported by a new process.
        evaluation: arguments of a cross-site evaluation. With them, the server only evaluates the models in its state
            directory, and does not continue the run.
        settings: the run's settings: a `Settings` object, or a mapping such as
            `{"rounds": {"total": 10, "sites": 3}}` or `{"rounds.total": 10, "rounds.sites": 3}`.

    Raises:
        ConfigError: a setting is unknown or wrong, or contradicts an argument.
    """

    def __init__(  # noqa: PLR0913 (options, by keyword)
        self,
        model: nn.Module | Tensors | str | None = None,
        settings: Settings | Mapping[str, Any] | None = None,
        *,
        workflow: Function | str | None = None,
        outer_optimizer: Callable[..., Optimizer] | str | None = None,
        filters: Given = (),
        data_filters: Given = (),
        config: ConfigFunction | str | None = None,
        evaluate: Evaluate | str | None = None,
        evaluation: Mapping[str, Any] | None = None,
    ) -> None:
        self.settings = settings_beside(
            "Server",
            settings,
            model=model,
            workflow=workflow,
            outer_optimizer=outer_optimizer,
            filters=filters,
            config=config,
            evaluate=evaluate,
        ).with_absolute_folders()
        self._config = config_function(self.settings, None if isinstance(config, str) else config)
        model = None if isinstance(model, str) else model
        workflow = None if isinstance(workflow, str) else workflow
        self._outer = outer_optimizer = None if isinstance(outer_optimizer, str) else outer_optimizer
        self._model = model
        self._filters = TaskFilters(self.settings, data_filters, filters)
        self._workflows = WorkflowSchedule.of(self.settings, workflow, self._filters, evaluation)
        self._evaluator: Evaluator | None = None
        if self._workflows is None or self._workflows.trains:
            require_training(self.settings)
            self._evaluator = Evaluator.of(self.settings, None if isinstance(evaluate, str) else evaluate, model)
        if self._workflows is None or not self._workflows.sends_tasks:
            self._filters.require_rounds()
        has_model = model is not None or self.settings.model.source is not None or self.settings.model.persistor.path
        if not has_model and self._workflows is not None and not self._workflows.trains:
            self._model = NO_MODEL
        code = {
            "workflow": workflow,
            "filters": filters,
            "data_filters": data_filters,
            "config": config,
            "evaluate": evaluate,
        }
        code = {name: value for name, value in code.items() if not isinstance(value, str)}
        self._code = {name: _described(value) for name, value in code.items() if value}
        self._saved: SavedState | None = None
        self._gate, self._tls = open_gate(self.settings), ServerTls(self.settings)
        self._finished = Latch()
        self._thread = LoopThread("atoll-server", self._serve, self._finished.set)
        self._started = False
        self._served: ServedRun | None = None
        self._versions: tuple[ServedRun, VersionsInUse] | None = None  # those that local sites of this run use
        self._last_status: status_messages.Status | None = None
        self._followers: dict[str, Callable[[Happened], None]] = {}
        self.port = 0

    # -- life

    def start(self) -> Server:
        """Start the server in a background thread. Return this object as soon as workers can connect.

        If the program has not set up logging, print the server's log lines on standard error.

        Raises:
            PortInUse, StateLocked, StateCorrupt, ConfigError: the server cannot start.
            UsageError: this server was started before.
        """
        if self._started:
            raise UsageError("The server was already started.", "Create a new Server for another start.")
        self._started = True
        ensure_lines()
        with contextlib.ExitStack() as stack:
            if self._evaluator is not None:
                self._evaluator.fork()
                stack.callback(self._evaluator.close)
            self._thread.start()
            stack.pop_all()
        LOG.info("listening on %s", self.url)
        return self

    def run(self) -> None:
        """Serve until the run is finished and its workers have downloaded the result, or until `stop` is called.

        Raises:
            AtollError: the run failed; the message says how to continue.
        """
        if not self._started:
            self.start()
        self._thread.wait()

    def follow(self, name: str, on_event: Callable[[Happened], None]) -> None:
        """Call `on_event` for each event of the run, in the server's thread. Call this before `start`.

        Args:
            name: name of the follower. If it raises, this name is in the log and in the status, and the run goes on.
            on_event: it must not block.
        """
        self._followers[name] = on_event

    def stop(self) -> None:
        """End the server. A new `Server` with the same state directory continues the run. Idempotent."""
        if self._started:
            self._thread.stop()

    def __enter__(self) -> Server:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None and (self.finished or self._writes_result):
                self._thread.wait()  # as `run` does: sites would wait for a result that nothing serves any more
        finally:
            self.stop()

    # -- questions

    @property
    def url(self) -> str:
        """The URL that workers connect to."""
        host = socket.gethostname() if self.settings.network.host in ANY_HOST else self.settings.network.host
        return address_of(host, self.port, secure=self._tls.is_used)

    @property
    def exports(self) -> Path:
        """The folder with `model.safetensors` and `metrics.jsonl`."""
        return self.settings.exports

    @property
    def finished(self) -> bool:
        """Whether the run is finished and its result is exported."""
        return self._thread.error is None and self._served is not None and self._served.run.finished.is_set()

    @property
    def _writes_result(self) -> bool:
        """Whether the last round has ended: the last version is evaluated and exported now."""
        served = self._served if self._thread.error is None else None
        return served is not None and not served.run.has_workflows and served.run.state.finished

    def status(self) -> status_messages.Status:
        """Return the run's current status. After the end of the server, return its last status."""
        if self._last_status is not None:
            return self._last_status
        try:
            return self._ask(status_of)
        except UsageError:
            if self._last_status is not None:  # the server ended during the request
                return self._last_status
            raise

    @property
    def evaluation(self) -> Evaluation | None:
        """The results so far of the newest cross-site evaluation; None if there was none."""
        workflows = self._workflows
        return workflows.evaluated() if workflows is not None and workflows.evaluated is not None else None

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the run is finished or the server has ended. Return False after `timeout_s` seconds.

        Workers may still be downloading the result then. The end of a `with` block waits for them, as `run` does.

        Raises:
            AtollError: the run failed.
        """
        done = self._finished.wait(timeout_s)
        if self._thread.error is not None:
            raise self._thread.error
        if done and self._served is not None and self._served.run.failed is not None:  # it still tells its sites
            raise self._served.run.failed
        return done

    def save_state(self, path: str | Path) -> Path:
        """Write the run's state to `path`, as a safetensors file, and return the path. Make a missing folder.

        The file has the newest version of the model, under the names of its tensors. Further tensors are the state of
        the outer optimizer and the algorithm's own, such as SCAFFOLD's c. The metadata has the round of each fragment,
        the sites, the history and the settings. Updates of the open round are not in the file. After the end of the
        server, its state directory is read.

        To continue this run on this machine, nothing needs to be saved: the state directory is always up to date.

        Raises:
            UsageError: the run is a swarm, or kept its versions in memory and has ended; or `path` names no file.
            StoreError: the folder of `path` cannot be made or written.
            StateLocked: the server has ended, and another one uses its state directory.
            DiskFull: there is no space; no partial file is left.
        """
        run, path = self._require_served().run, Path(path)
        if not path.name or path.is_dir():
            raise UsageError(f"save_state got {str(path)!r}, which names no file.", "Pass the path of a file.")
        require_writable_folder(path.parent, "Pass a path in a folder that this user may write.")
        while True:
            ended = run.store.journal.closed
            try:
                with open_again(run.plan, run.store) as store:
                    return save(run.plan, store, path, self._code)
            except StoreError:
                if ended or not run.store.journal.closed:  # else the server has ended meanwhile
                    raise

    @classmethod
    def load_state(cls, path: str | Path, **options: Any) -> Server:
        """Return a server that continues a saved run in a new state directory, exactly as the saved one would have.

        It is the same run: sites that keep their folders go on, too. The first round waits for `rounds.sites`.

        Args:
            path: path of a file that `save_state` has written.
            options: further arguments of `Server`. `settings` replace those of the saved run, except for the settings
                that are fixed once a run has begun, which must be the same. The file has no settings of one machine
                (`network`, `disk`, `server`), and code must be named or passed again.

        Raises:
            ConfigError: the file is missing or none that `save_state` has written, or a setting is wrong.
            StateCorrupt: the file is damaged. Its tensors are checked at the start of the server.
        """
        saved = SavedState.read(Path(path))
        replaced = {key for name, key in CODE.items() if options.get(name)}
        server = cls(**options | {"settings": saved.settings(options.get("settings"), replaced)})
        saved.warn_of_code(server._code)
        server._saved = saved
        return server

    def local_site(self, site: str) -> SiteCalls:
        """Return a site in this process, which takes part without a network. `atoll.testing.local_worker` uses it.

        Args:
            site: name of the site.

        Raises:
            UsageError: the server is not running.
        """
        served = self._require_served()
        stopped = UsageError("The server has stopped.", "Start it again, then its sites.")
        if self._versions is None or self._versions[0] is not served:
            self._versions = served, VersionsInUse(served.run.store.versions)
        return SiteCalls(served, LocalSite(served, site, self._versions[1], HOST), self._thread.wait_for, stopped)

    def _require_served(self) -> ServedRun:
        if self._served is None:
            raise UsageError("The server is not running.", "Call start() first.")
        return self._served

    def _ask(self, question: Callable[[ServedRun], T]) -> T:
        """Call `question(served)` on the server's event loop, where the run's state does not change meanwhile.

        Return its result.
        """
        served, stopped = self._require_served(), UsageError("The server has stopped.", "Call this while it runs.")

        def work() -> T:
            if self._last_status is not None:
                raise stopped
            return question(served)

        return self._thread.call(work, stopped)

    # -- in the thread

    async def _serve(self) -> None:
        files, network = raise_files_limit(), self.settings.network
        ports, remedy = _ports(network.port, address_before(self.settings.disk.state_dir))
        try:
            listener = listen(network.host, ports, setting="network.host", remedy=remedy)
        except PortInUse:
            require_unlocked(self.settings.disk.state_dir)  # else a second server of this run uses the port
            raise
        self.port = listener.getsockname()[1]
        with contextlib.closing(listener):
            self._tls.read_settings()

            def accept(runner: Any) -> Awaitable[Listener]:
                secure = self._tls.context()
                self._gate.authority = self._tls.authority_name
                return start_listener(
                    listener.dup(),
                    runner,
                    fixed(secure) if secure else None,
                    files=files,
                    idle_timeout_s=network.idle_timeout_s,
                    most=self.settings.limits.connections,
                    most_of_address=self.settings.limits.address_connections,
                )

            failed: Exception | None = None
            is_again = False
            try:
                while True:
                    served, is_again = await self._serve_run(accept, failed)
                    if not is_again:
                        break
                    if (shapes := served.shapes.to_take_over) is None:
                        continue  # the run goes back, or has another codec now: opening it does that
                    try:
                        await asyncio.to_thread(take_over_shapes, served.run.plan, shapes)
                    except Exception as error:  # nothing was changed: serve the run once more, to tell its sites
                        failed = error
            except AtollError as error:
                await self._refuse(error, accept, is_again=is_again)
                raise
            finally:
                if self._served is not None:
                    await self._served.extensions.close()  # if the run could not begin again; else they are closed
                if self._evaluator is not None:
                    self._evaluator.close()
        if served.run.failed is not None:
            raise served.run.failed

    async def _renew_certificate(self) -> None:
        """Make the server's own certificate anew in time, as long as the server runs."""
        while True:
            await asyncio.sleep(RENEW_S)
            self._tls.context()

    async def _open(self) -> ServedRun:
        # load functions first: if one is wrong, no run is left that a corrected start would continue
        if self._workflows is not None:
            self._workflows.load()
        if self._evaluator is not None:
            await asyncio.to_thread(self._evaluator.open)
        persistor = Persistor(self.settings)
        opened = open_run(self.settings, self._model, persistor, self._outer, self._saved)
        self._model = None  # free its memory: version 0 is on disk
        try:
            self._gate.tokens.accept(keep_tokens(self.settings.disk.state_dir))
            code = UserCode(persistor, self._filters, self._workflows, self._config, self._evaluator)
            return assemble(opened, code, before=self._served)
        except BaseException:
            opened[1].close()
            raise

    async def _serve_run(self, accept: Accept, failed: Exception | None = None) -> tuple[ServedRun, bool]:
        """Serve the run of the state directory until it ends, or until it has to begin again with other shapes.

        Return the run, and whether this server lets it begin again now; at its end it leaves that to the next start.

        Args:
            accept: starts to accept connections.
            failed: the error because of which the run could not begin again; it ends this run, too.
        """
        served = await self._open()
        run, schedule, app = served.run, self._workflows, make_app(served, self._gate, version("atoll"))
        runner = runner_of(app, HTTP_LOG, read_bytes=READ_BYTES, linger_s=2.0)
        accepting: Listener | None = None
        is_again = False
        try:
            await runner.setup()
            before = address_before(self.settings.disk.state_dir)
            if self.settings.network.port is None and self.port != DEFAULT_PORT and not before:
                LOG.warning("port %d cannot be used, so this server listens on %d", DEFAULT_PORT, self.port)
            for name, on_event in self._followers.items():
                run.events.subscribe(name, on_event)
            moved_from = before if _has_moved(before, self.url, self.settings.network.host) else ""
            served.coordinator.start(self.url, moved_from)
            keep_status(served)
            self._served, self._last_status = served, None  # the run may have gone back
            if schedule is not None:
                schedule.start(served)
            self._tls.context()
            served.credentials.issuing = Issuing(*self._tls.issues(self.port))
            accepting = await accept(runner)
            run.spawn(self._renew_certificate())
            run.store.run_log.fail("")  # the start has succeeded
            self._thread.ready()
            if failed is not None:
                run.fail_by(failed, "Taking over the shapes of the first update", "Start the run again to repeat this.")
            await self._until_end(served)
            is_again = served.begins_again and not self._thread.stopping.is_set()
        finally:
            if schedule is not None:
                schedule.stop()
            run.send_away()
            if accepting is not None:
                await accepting.close()
            await runner.cleanup()
            try:
                if self._served is served and served.shapes.to_take_over is None:
                    self._last_status = keep_status(served)  # else the start failed, or the run begins again
            finally:
                await served.coordinator.stop(begins_again=is_again)
        return served, is_again and served.begins_again  # unless it has failed meanwhile

    async def _refuse(self, error: AtollError, accept: Accept, *, is_again: bool) -> None:
        """If a run that has sites cannot even start now, tell this to the sites that ask within their longest pause.

        It has sites that would wait in vain if it had failed for good before, or if this server has served it before.
        If each known site was told, end at once: the failed server, or an earlier start, has told those that ended.

        Args:
            error: why the start failed.
            accept: starts to accept connections.
            is_again: whether the run was to begin again with other shapes.
        """
        before = recorded_failure(self.settings.disk.state_dir) if self._served is None else ""
        if not error.is_final or not (before or is_again):
            return
        state_dir, all_told = self.settings.disk.state_dir, asyncio.Event()
        status = status_before(state_dir)
        known = status.workers if before else []
        workers = {each.site: each for each in known if each.state in ("alive", "not told", "ended")}

        def note(lease: Lease | None = None) -> None:
            if lease is not None and lease.site in workers:
                workers[lease.site] = workers[lease.site].model_copy(update={"state": "ended"})
            if workers and all(each.state == "ended" for each in workers.values()):
                all_told.set()

        note()
        most_s = _asks_within_s(self.settings.network.heartbeat_interval_s)
        LOG.error("%s", error)
        if all_told.is_set():
            return
        LOG.warning("telling the sites of the run for %g s that it cannot be started again, then ending", most_s)
        with contextlib.suppress(AtollError):
            self._gate.tokens.accept(stored_tokens(state_dir))
            with open_state(state_dir) as state:
                self._gate.known = KnownSites(state.identities())
        why = f"{before.rstrip('.')}. It" if before else "It"
        failed = failure_for_sites(self.settings.run.name, f"{why} cannot be started again: {error.message}")
        runner = runner_of(make_refusing_app(self._gate, failed, note), HTTP_LOG, read_bytes=READ_BYTES, linger_s=2.0)
        accepting = await accept(runner)
        waits = [asyncio.ensure_future(event.wait()) for event in (self._thread.stopping, all_told)]
        try:
            await asyncio.wait(waits, timeout=most_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await accepting.close()
            await runner.cleanup()
            if workers:  # a next start, if it fails, does not wait for the sites that were told now
                rest = [each for each in status.workers if each.site not in workers]
                write_status(state_dir, status.model_copy(update={"workers": [*workers.values(), *rest]}))

    async def _until_end(self, served: ServedRun) -> None:
        run, stopping = served.run, self._thread.stopping
        events = (stopping, run.has_failed, run.finished, run.begins_again)
        waits = [asyncio.ensure_future(event.wait()) for event in events]
        heads_before = heads = [each.head for each in run.state.rounds]
        while not (await asyncio.wait(waits, timeout=STATUS_S, return_when=asyncio.FIRST_COMPLETED))[0]:
            heads = [each.head for each in run.state.rounds]
            if heads != heads_before:
                heads_before = heads
                await asyncio.to_thread(write_status, run.settings.disk.state_dir, status_of(served))
        if run.finished.is_set() and not stopping.is_set() and run.failed is None:
            keep_status(served)
            self._finished.set()
            await self._until_left(run)
            await self._until_seen(run)
        elif run.failed is not None and run.failed.is_final:
            if self._workflows is not None:
                self._workflows.stop()
            run.store.run_log.fail(run.failed.message)
            keep_status(served)
            self._finished.set()
            await self._until_told(served)  # no wait after Ctrl-C, but the failure is recorded
            await self._until_seen(run)
        for wait in waits:
            wait.cancel()

    async def _until_told(self, served: ServedRun) -> None:
        """After a failure, wait until every live site has asked for something, and so was told.

        A site is silent, and is not waited for, if its next request is overdue.
        """
        begin_s, is_logged = time.monotonic(), False
        while untold := [site for site in served.failure.untold if not _is_overdue(served.run, site, begin_s)]:
            if self._thread.stopping.is_set():
                break
            if not is_logged and time.monotonic() - begin_s >= GRACE_SAID_S:
                is_logged = True
                LOG.info("telling %s that the run has failed; Ctrl-C ends this wait", ", ".join(untold))
            await asyncio.sleep(TELL_S)
        if left := served.failure.stop_telling():
            LOG.warning("%s was not told that the run has failed", ", ".join(left))

    async def _until_left(self, run: RunCore) -> None:
        """Wait until every worker has downloaded the result and left, for at most `GRACE_S` seconds.

        A worker is given up when it is silent. Without heartbeats, that is known only of one that has not asked for
        anything since a restart of the server.
        """
        stopping, begin_s, is_logged = self._thread.stopping, time.monotonic(), False
        beats = run.settings.network.heartbeat_interval_s > 0

        def is_there(site: str) -> bool:
            is_silent = (beats or not run.roster[site].heard) and _is_overdue(run, site, begin_s)
            return run.state.members[site].alive and not is_silent

        while present := ", ".join(sorted(filter(is_there, run.state.members))):
            waited_s = time.monotonic() - begin_s
            if stopping.is_set():
                return
            if waited_s >= GRACE_S:
                LOG.warning("%s did not download the result within %g s; use the exported file", present, GRACE_S)
                return
            if not is_logged and waited_s >= GRACE_SAID_S:
                is_logged = True
                LOG.info("waiting for %s to download the result, at most %g s; Ctrl-C ends this wait", present, GRACE_S)
            await run.changed(0.25)

    async def _until_seen(self, run: RunCore) -> None:
        """If clients poll the status, wait `WATCHED_S` seconds, so that each of them sees how the run has ended."""
        if run.watched_s is not None and time.monotonic() - run.watched_s < WATCHED_S:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._thread.stopping.wait(), WATCHED_S)


def _is_overdue(run: RunCore, site: str, begin_s: float) -> bool:
    """Return whether a site is silent: its next request should have come by now.

    Args:
        run: the run.
        site: name of the site.
        begin_s: time from which on a site without heartbeats is waited for.
    """
    presence, interval_s = run.roster[site], run.settings.network.heartbeat_interval_s
    since_s = presence.heard_s if interval_s else begin_s
    return time.monotonic() >= since_s + _asks_within_s(interval_s, presence.heard)


def _ports(port: int | None, before: str) -> tuple[Sequence[int], str]:
    """Return the ports to try, in order, and the remedy if none can be used.

    Without a setting, a run that continues keeps its port, because its sites wait there.

    Args:
        port: the setting `network.port`.
        before: address at which the run was served last; empty if it begins.
    """
    kept = urlsplit(before).port if before else None
    if port is None and kept is not None:
        return [kept], (
            f"Sites of this run wait at {before}. Stop the process that uses the port; or choose another port with "
            "--port, and start the sites again with the new address."
        )
    remedy = "Stop the process that uses it, or choose another port with --port; 0: any free port."
    return range(DEFAULT_PORT, DEFAULT_PORT + PORTS_TO_TRY) if port is None else [port], remedy


def _has_moved(before: str, url: str, host: str) -> bool:
    """Return whether sites that wait at the address `before` do not find this server, which listens on `host`."""
    old, new = urlsplit(before), urlsplit(url)
    is_elsewhere = old.hostname != new.hostname and host not in ANY_HOST
    return bool(before) and (is_elsewhere or (old.scheme, old.port) != (new.scheme, new.port))


def _asks_within_s(interval_s: float, heard: bool = False) -> float:
    """Return the seconds within which a live site sends its next request.

    Args:
        interval_s: seconds between two heartbeats; 0: none.
        heard: whether the site knows that the server answers; if not, it tries again more often.
    """
    most_s = LONGEST_TELL_S if heard and interval_s else ASK_AGAIN_S
    return min(1.2 * interval_s + 1.0, most_s) if interval_s else most_s


def _described(code: Any) -> str:
    """Return the names of a program's functions and filters, for a comparison with those of another program."""
    if isinstance(code, Mapping):
        return ", ".join(f"{name}: {_described(each)}" for name, each in code.items())
    if isinstance(code, Sequence):
        return ", ".join(map(_described, code))
    return label_of(code)
