"""Actors of Ray that train simulated sites, on this machine or on a cluster; they share no disk with the simulation.

Versions, updates and what a site keeps between its rounds travel as Ray's objects. An actor that is lost leaves nothing
behind, so another one gets the same job.
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
from atoll.posix import nameless_file, read_at, write_at
from atoll.simulate import engine
from atoll.simulate.job_messages import Answer, Beginning, Job, SiteRound
from atoll.simulate.kept_state import Kept, put_kept, read_kept, write_kept
from atoll.simulate.site_process import Station, answer_to

CONNECT_S = 5.0
TEMPORARY, FOLDER = "/tmp", "atoll-ray-"
"""Where Ray has its files, if the simulation starts it; names of sockets in it have to be short."""
ACTOR = "atoll-actor-"
"""Prefix of an actor's folder, followed by its process."""
END_S = 2.0
"""Time for idle actors to remove their files."""
INSTALL = "Install it: pip install 'atoll[ray]'; or take engine local, which needs nothing."


class Actor:
    """A process of Ray that trains simulated sites.

    Args:
        folder: for its files; None: that of temporary files there.
    """

    def __init__(self, beginning: dict[str, Any], folder: str | None) -> None:
        os.dup2(2, 1)  # what the script prints must not mix with a summary
        temporary = folder or tempfile.gettempdir()
        _remove_left_behind(temporary, ACTOR)
        self._folder = tempfile.TemporaryDirectory(dir=temporary, prefix=f"{ACTOR}{os.getpid()}-")
        begun = Beginning.model_validate({**beginning, "sites": self._folder.name})
        self._error: AtollError | None = None
        self._base, self._spool = (nameless_file(Path(self._folder.name)) for _ in range(2))
        try:
            self._station = Station(begun)
        except AtollError as error:
            self._error = error

    def ready(self) -> dict[str, Any]:
        """Return where it runs, or why it cannot train."""
        if self._error is not None:
            return {"message": self._error.message, "remedy": self._error.remedy, "trace": self._error.trace}
        return {"pid": os.getpid(), "host": socket.gethostname()}

    def end(self) -> None:
        """Remove its files before it is killed."""
        self._folder.cleanup()

    def take(self, version: np.ndarray[Any, Any]) -> None:
        """Take the version to train from, until the next one comes."""
        write_at(self._base, version.data, 0)

    def train(self, job: dict[str, Any], kept: Kept, nbytes: int) -> tuple[dict[str, Any], Any, Kept]:
        """Train a job, with what its site keeps; return the answer, the update, and what the site keeps from now on.

        Args:
            nbytes: of an update.
        """
        folder = Path(self._folder.name) / job["site"]
        try:
            put_kept(folder, kept)
            answer = self._station.train(SiteRound.from_json(job), self._base, self._spool)
            update = np.empty(nbytes if answer.update is not None else 0, np.uint8)
            read_at(self._spool, update.data, 0)
            return answer.to_json(), update, read_kept(folder)
        except OSError as error:  # this machine's disk
            return answer_to(error).to_json(), np.empty(0, np.uint8), {}
        finally:
            shutil.rmtree(folder, ignore_errors=True)


class RayHost:
    """Ray, on this machine or on a cluster.

    Args:
        processes: how many actors are to run at once.
        address: of a cluster; None: Ray is started on this machine, unless this program has one.

    Raises:
        ConfigError: Ray is not installed.
    """

    name, kind, ahead = "Ray", "an actor", 0

    def __init__(self, processes: int, address: str | None) -> None:
        try:
            import ray
        except ImportError as error:
            raise ConfigError("The engine is ray, which is not installed here.", INSTALL) from error
        self.ray: Any = ray
        self._count, self._address = processes, address
        self._lock = threading.Lock()  # guards `_version`
        self._version: tuple[str, Any] = "", None  # digest, and Ray's object
        self.folder: str | None = None
        self._cleanup = contextlib.ExitStack()

    def open(self) -> None:
        """Connect to Ray, or start it, unless this program has connected already."""
        if self.ray.is_initialized():
            return
        options: dict[str, Any] = {"address": self._address or "local", "logging_level": logging.ERROR}
        if self._address is None:
            _remove_left_behind(TEMPORARY, FOLDER)
            self.folder = tempfile.mkdtemp(prefix=f"{FOLDER}{os.getpid()}-", dir=TEMPORARY)
            self._cleanup.callback(shutil.rmtree, self.folder, ignore_errors=True)
            options |= {"include_dashboard": False, "num_cpus": self._count, "_temp_dir": self.folder}
        else:
            _require_listening(self._address)
        self._cleanup.callback(self.ray.shutdown)
        try:
            self.ray.init(**options)
        except Exception as error:
            at = f"at {self._address} " if self._address else "on this machine "
            last = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ServerUnreachable(f"Ray {at}cannot be reached: {last.rstrip('.')}.", _REMEDY) from error

    def close(self) -> None:
        """Call `ray.shutdown` if `open` has called `ray.init`, and remove Ray's folder if it was made. Idempotent."""
        self._cleanup.close()

    def begin(self, beginning: Beginning) -> RayProcess:
        """Start an actor, which begins to load the script."""
        kind = self.ray.remote(num_cpus=1, max_restarts=0)(Actor)
        return RayProcess(self, kind.remote(beginning.model_dump(mode="json"), self.folder), Path(beginning.sites))

    def got(self, ref: Any, timeout_s: float | None = None) -> Any:
        """Return what an actor answers.

        Raises:
            _Lost: it has ended, or its machine has. RunFailed: it does not begin, or Ray cannot go on.
        """
        known = self.ray.exceptions
        try:
            return self.ray.get(ref, timeout=timeout_s)
        except known.GetTimeoutError:
            raise RunFailed(
                f"Ray has started no process for a simulated site in {timeout_s:g} s.",
                f"Take fewer processes than {self._count}, or a cluster with as many free CPUs.",
            ) from None
        except known.OutOfMemoryError as error:  # Ray has killed it, before the machine did
            raise _Lost(" (its machine had too little memory)") from error
        except (known.RayActorError, known.WorkerCrashedError, known.NodeDiedError, known.ObjectLostError) as error:
            raise _Lost from error
        except known.RayTaskError:  # a bug of this package in an actor
            raise
        except known.RayError as error:
            last = (str(error).strip().splitlines() or [""])[0]
            raise RunFailed(
                f"Ray cannot go on: {type(error).__name__}: {last.rstrip('.')}.",
                "The same command goes on from the state directory, with --engine local, too.",
            ) from error

    def version(self, job: Job) -> Any:
        """Return the version of a job as one object of Ray for all actors."""
        with self._lock:
            if self._version[0] != job.ticket.base_digest:
                content = np.empty(os.fstat(job.base.fd).st_size, np.uint8)
                read_at(job.base.fd, content.data, 0)
                self._version = job.ticket.base_digest, self.ray.put(content)
            return self._version[1]


class _Lost(Exception):
    """An actor has ended."""


class RayProcess:
    """An actor, with what its sites keep, which lies here.

    Args:
        sites: folder of what sites keep between their rounds.
    """

    def __init__(self, host: RayHost, actor: Any, sites: Path) -> None:
        self._host, self._actor, self._sites = host, actor, sites
        self._base = ""  # digest of the version that it has
        self._given: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._is_idle, self._how = True, "was lost"
        self.pid = 0

    def ready(self) -> None:
        """Wait until it has loaded the script.

        Raises:
            ConfigError: that cannot be loaded. RunFailed: Ray starts no actor, or it has ended.
        """
        try:
            told = self._host.got(self._actor.ready.remote(), engine.START_S)
        except _Lost as error:
            raise RunFailed(
                "An actor ended before it began.",
                "Ray's log says why; Atoll and the script have to be on every machine of the cluster.",
            ) from error
        if "message" in told:
            raise ConfigError(told["message"], told["remedy"], told["trace"])
        self.pid = told["pid"] if told["host"] == socket.gethostname() else 0

    def give(self, job: Job) -> None:
        """Let `hear` send the job."""
        self._given.put(job)

    def take_back(self) -> None:
        """Return None: it has one job at a time."""

    def hear(self) -> tuple[int, Answer] | None:
        """Have the next job trained, and return its ticket and its answer; None once the actor has ended."""
        if (job := self._given.get()) is None:
            return None
        self._is_idle = False
        try:
            answer = self._train(job)
        except _Lost as lost:
            self._how += str(lost)
            return None
        self._is_idle = True
        return job.ticket.id, answer

    def _train(self, job: Job) -> Answer:
        """Train a job with its version and what its site keeps; put the update into the spool."""
        folder = self._sites / job.site
        if self._base != job.ticket.base_digest:
            self._host.got(self._actor.take.remote(self._host.version(job)))
            self._base = job.ticket.base_digest
        given = self._actor.train.remote(job.round.to_json(), read_kept(folder), job.update_bytes)
        told, update, kept = self._host.got(given)
        answer = Answer.from_json(told)
        if not answer.disk:  # else it has kept nothing of this round
            try:
                write_at(job.spool_fd, update.data, 0)
                write_kept(folder, kept)
            except (OSError, StoreError) as error:
                return answer_to(error)
        return answer

    def kill(self) -> None:
        """Kill the actor; an idle one removes its files first, unless they go with Ray's folder. Idempotent."""
        ray, is_idle, self._is_idle = self._host.ray, self._is_idle, False
        with contextlib.suppress(Exception):  # it has ended, or Ray has
            if is_idle and self._host.folder is None and ray.is_initialized():
                ray.wait([self._actor.end.remote()], timeout=END_S)
            ray.kill(self._actor)
        self._given.put(None)

    def bury(self) -> str:
        """Kill what is left of it; the next actor on its machine removes its files."""
        self.kill()
        return self._how


def _remove_left_behind(temporary: str, prefix: str) -> None:
    """Remove the folders of processes that were killed."""
    for path in Path(temporary).glob(f"{prefix}*-*"):
        owner = path.name.removeprefix(prefix).partition("-")[0]
        if owner.isdecimal() and not Path(f"/proc/{owner}").exists():
            shutil.rmtree(path, ignore_errors=True)


_REMEDY = (
    "Look whether Ray runs there (ray status), and whether this machine reaches it; where the cluster wants a token, "
    "set RAY_AUTH_MODE=token, and have it in ~/.ray/auth_token. Or leave the address out."
)


def _require_listening(address: str) -> None:
    """Refuse an address where no process listens: Ray itself would try for a minute.

    Raises:
        ServerUnreachable: no process listens there.
    """
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdecimal():
        return  # `auto`, which Ray understands
    try:
        socket.create_connection((host, int(port)), CONNECT_S).close()
    except OSError as error:
        why = error.strerror or str(error)
        raise ServerUnreachable(f"Ray at {address} cannot be reached: {why}.", _REMEDY) from error
