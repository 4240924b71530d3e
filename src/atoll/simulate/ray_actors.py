"""Train simulated sites in Ray actors, on this machine or on a cluster. Actors share no disk with the simulation.

Versions of the model, updates, and the state that sites keep between rounds are sent as Ray objects. The simulation
stores all results. So if an actor is lost, another one can repeat its job.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import shutil
import socket
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np

from atoll.errors import AtollError, ConfigError, RunFailed, ServerUnreachable, StoreError
from atoll.posix import read_at, remove_left_behind, write_at
from atoll.simulate import engine
from atoll.simulate.engine import Beginning, Job, JobResult, SiteRound
from atoll.simulate.simulated_site import SiteTrainer, result_of_error
from atoll.system_calls import nameless_file
from atoll.worker.exchange.local_state import Kept, put_kept, read_kept, write_kept

CONNECT_S = 5.0
TEMPORARY, FOLDER = "/tmp", "atoll-ray-"
"""If the simulation starts Ray: where to create the folder of Ray's files, and the prefix of the folder's name. The
paths of Ray's sockets must be short."""
ACTOR = "atoll-actor-"
"""Prefix of the name of an actor's folder; its host and its process id follow."""
END_S = 2.0
"""Seconds that an idle actor gets to remove its files before it is killed."""
INSTALL = "Install it with pip install 'atoll[ray]', or use the engine 'local', which does not need Ray."


class Actor:
    """The class of a Ray actor: a process that trains simulated sites.

    Args:
        beginning: the message `Beginning`, as JSON values.
        folder: where to create the actor's folder; None: in the temporary folder of the actor's machine.
    """

    def __init__(self, beginning: dict[str, Any], folder: str | None) -> None:
        os.dup2(2, 1)  # the script's output must not mix with a summary on standard output
        temporary, prefix = folder or tempfile.gettempdir(), f"{ACTOR}{socket.gethostname()}_"  # machines may share it
        remove_left_behind(temporary, prefix)
        self._folder = tempfile.TemporaryDirectory(dir=temporary, prefix=f"{prefix}{os.getpid()}-")
        begun = Beginning.model_validate({**beginning, "sites": self._folder.name})
        self._error: AtollError | None = None
        self._base, self._spool = (nameless_file(Path(self._folder.name)) for _ in range(2))
        try:
            self._trainer = SiteTrainer(begun)
        except AtollError as error:
            self._error = error

    def ready(self) -> dict[str, Any]:
        """Return the process id and host of this actor, or the error that keeps the actor from training."""
        if self._error is not None:
            return {"message": self._error.message, "remedy": self._error.remedy, "trace": self._error.trace}
        return {"pid": os.getpid(), "host": socket.gethostname()}

    def end(self) -> None:
        """Remove the actor's files. Called before the actor is killed."""
        self._folder.cleanup()

    def take(self, version: np.ndarray[Any, Any]) -> None:
        """Store a version in the actor's file, in place of the earlier version. The next sites train from it."""
        write_at(self._base, version.data, 0)

    def train(self, job: dict[str, Any], kept: Kept, nbytes: int) -> tuple[dict[str, Any], Any, Kept]:
        """Train one round of one site.

        Args:
            job: the message `SiteRound`, as JSON values.
            kept: the files of the state that the site keeps between rounds, as they were before the round.
            nbytes: size of an update, in bytes.

        Returns:
            The result as JSON values, the bytes of the update (empty if there is none), and the site's state after the
            round.
        """
        folder = Path(self._folder.name) / job["site"]
        try:
            put_kept(folder, kept)
            result = self._trainer.train(SiteRound.model_validate(job), self._base, self._spool)
            update = np.empty(nbytes if result.update is not None else 0, np.uint8)
            read_at(self._spool, update.data, 0)
            return result.to_json(), update, read_kept(folder)
        except OSError as error:  # the disk of the actor's machine
            return result_of_error(error).to_json(), np.empty(0, np.uint8), {}
        finally:
            shutil.rmtree(folder, ignore_errors=True)


class RayHost:
    """Starts the processes of a simulation as Ray actors, on this machine or on a cluster.

    Args:
        processes: how many actors run at the same time.
        address: the address of a Ray cluster; None: start Ray on this machine, unless this program is connected to Ray.

    Raises:
        ConfigError: Ray is not installed.
    """

    name, kind, ahead = "Ray", "an actor", 0

    def __init__(self, processes: int, address: str | None) -> None:
        try:
            import ray
        except ImportError as error:
            raise ConfigError("The engine is 'ray', but Ray is not installed here.", INSTALL) from error
        self.ray: Any = ray
        self._count, self._address = processes, address
        self._lock = threading.Lock()  # guards `_version`
        self._version: tuple[str, Any] = "", None  # digest of the newest version, and its Ray object
        self.folder: str | None = None
        self._cleanup = contextlib.ExitStack()

    def open(self) -> None:
        """Connect to the Ray cluster, or start Ray here. Do nothing if this program is already connected to Ray.

        Raises:
            ServerUnreachable: Ray cannot be reached or started.
        """
        if self.ray.is_initialized():
            return
        options: dict[str, Any] = {"address": self._address or "local", "logging_level": logging.ERROR}
        if self._address is None:
            remove_left_behind(TEMPORARY, FOLDER)
            self.folder = tempfile.mkdtemp(prefix=f"{FOLDER}{os.getpid()}-", dir=TEMPORARY)
            self._cleanup.callback(shutil.rmtree, self.folder, ignore_errors=True)
            options |= {"include_dashboard": False, "num_cpus": self._count, "_temp_dir": self.folder}
        else:
            _require_listening(self._address)
        self._cleanup.callback(self.ray.shutdown)
        try:
            self.ray.init(**options)
        except Exception as error:
            where = f"at {self._address} " if self._address else "on this machine "
            last = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ServerUnreachable(f"Ray {where}cannot be reached: {last.rstrip('.')}.", _REMEDY) from error

    def close(self) -> None:
        """Stop the Ray that `open` has started and remove its folder, or leave the cluster it joined. Idempotent."""
        self._cleanup.close()

    def begin(self, beginning: Beginning) -> RayProcess:
        """Start an actor and return it; the actor then loads the script."""
        kind = self.ray.remote(num_cpus=1, max_restarts=0)(Actor)
        return RayProcess(self, kind.remote(beginning.model_dump(mode="json"), self.folder), Path(beginning.sites))

    def got(self, ref: Any, timeout_s: float | None = None) -> Any:
        """Wait for the result of an actor's method, and return the result.

        Args:
            ref: the Ray reference of the result.
            timeout_s: how long to wait, in seconds, for an actor that is being started; None: without limit.

        Raises:
            _Lost: the actor or its machine has ended.
            RunFailed: the actor did not start in time, or Ray failed.
        """
        errors = self.ray.exceptions
        try:
            return self.ray.get(ref, timeout=timeout_s)
        except errors.GetTimeoutError:
            raise RunFailed(
                f"Within {timeout_s:g} s, Ray did not start a process that trains simulated sites.",
                f"Use fewer processes than {self._count}, or a cluster with that many free CPUs.",
            ) from None
        except errors.OutOfMemoryError as error:  # Ray killed the actor before the kernel would
            raise _Lost(" (its machine had too little memory)") from error
        except (errors.RayActorError, errors.WorkerCrashedError, errors.NodeDiedError, errors.ObjectLostError) as error:
            raise _Lost from error
        except errors.RayTaskError:  # a bug of Atoll in the actor
            raise
        except errors.RayError as error:
            last = (str(error).strip().splitlines() or [""])[0]
            raise RunFailed(
                f"Ray failed: {type(error).__name__}: {last.rstrip('.')}.",
                "To continue from the state directory, start the same simulation again; engine 'local' works, too.",
            ) from error

    def version(self, job: Job) -> Any:
        """Return the base version of a job as a Ray object, which all actors share."""
        with self._lock:
            if self._version[0] != job.ticket.base_digest:
                content = np.empty(os.fstat(job.base.fd).st_size, np.uint8)
                read_at(job.base.fd, content.data, 0)
                self._version = job.ticket.base_digest, self.ray.put(content)
            return self._version[1]


class _Lost(Exception):
    """The error for an actor that has ended, alone or with its machine."""


class RayProcess:
    """A Ray actor that trains simulated sites: the simulation's side.

    Args:
        host: the connection to Ray.
        actor: Ray's handle of the actor.
        sites: the folder with the state that sites keep between rounds, a folder for each site.
    """

    def __init__(self, host: RayHost, actor: Any, sites: Path) -> None:
        self._host, self._actor, self._sites = host, actor, sites
        self._base = ""  # digest of the version that the actor has
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._is_idle, self._how = True, "was lost"
        self.pid = 0

    def ready(self) -> None:
        """Wait until the actor has loaded the script.

        Raises:
            ConfigError: the script cannot be loaded.
            RunFailed: Ray did not start the actor in time, or the actor has ended.
        """
        try:
            message = self._host.got(self._actor.ready.remote(), engine.START_S)
        except _Lost as error:
            raise RunFailed(
                "A Ray actor ended before it was ready.",
                "See Ray's log. Atoll and the script must be installed on every machine of the cluster.",
            ) from error
        if "message" in message:
            raise ConfigError(message["message"], message["remedy"], message["trace"])
        self.pid = message["pid"] if message["host"] == socket.gethostname() else 0

    def give(self, job: Job) -> None:
        """Queue the job; `hear` sends it to the actor."""
        self._jobs.put(job)

    def take_back(self) -> None:
        """Return None: an actor gets no job in advance, so there is none to take back."""

    def hear(self) -> tuple[int, JobResult] | None:
        """Send the next job to the actor and wait. Return (ticket number, result); None if the actor has ended."""
        if (job := self._jobs.get()) is None:
            return None
        self._is_idle = False
        try:
            result = self._train(job)
        except _Lost as lost:
            self._how += str(lost)
            return None
        self._is_idle = True
        return job.ticket.id, result

    def _train(self, job: Job) -> JobResult:
        """Send a job to the actor, with its version and the site's local state. Store the update and the new state."""
        folder = self._sites / job.site
        if self._base != job.ticket.base_digest:
            self._host.got(self._actor.take.remote(self._host.version(job)))
            self._base = job.ticket.base_digest
        future = self._actor.train.remote(job.round.model_dump(), read_kept(folder), job.update_bytes)
        fields, update, kept = self._host.got(future)
        result = JobResult.from_json(fields)
        if not result.disk:  # after an error of its disk, an actor returns no local state
            try:
                write_at(job.spool_fd, update.data, 0)
                write_kept(folder, kept)
            except (OSError, StoreError) as error:
                return result_of_error(error)
        return result

    def kill(self) -> None:
        """Kill the actor. If it is idle, first let it remove its files, unless `RayHost.close` removes them later.

        Idempotent.
        """
        ray, is_idle, self._is_idle = self._host.ray, self._is_idle, False
        with contextlib.suppress(Exception):  # the actor or Ray may have ended
            if is_idle and self._host.folder is None and ray.is_initialized():
                ray.wait([self._actor.end.remote()], timeout=END_S)
            ray.kill(self._actor)
        self._jobs.put(None)

    def bury(self) -> str:
        """Kill the actor, and return a text that says how it ended.

        If files are left, the next actor on that machine removes them.
        """
        self.kill()
        return self._how


_REMEDY = (
    "Check that Ray runs there (ray status) and can be reached from this machine. If the cluster needs a "
    "token, set RAY_AUTH_MODE=token and put the token into ~/.ray/auth_token. To start Ray here, leave the "
    "address out."
)


def _require_listening(address: str) -> None:
    """Check that a process listens at an address. Without this check, Ray would try to connect for a minute.

    Raises:
        ServerUnreachable: no process listens at the address.
    """
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdecimal():
        return  # `auto`, which Ray understands
    try:
        socket.create_connection((host, int(port)), CONNECT_S).close()
    except OSError as error:
        why = error.strerror or str(error)
        raise ServerUnreachable(f"Ray at {address} cannot be reached: {why}.", _REMEDY) from error
