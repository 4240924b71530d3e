"""The engine on Ray: actors, on this machine or on a cluster, that share no disk with the simulation.

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
import time
from pathlib import Path
from typing import Any

import numpy as np

from atoll.errors import AtollError, ConfigError, RunFailed, ServerUnreachable, StoreError
from atoll.posix import nameless_file, read_at, write_at
from atoll.simulate.job_messages import ATTEMPTS, START_S, Answer, Beginning, Heard, Job, SiteRound, overdue
from atoll.simulate.kept_state import Kept, put_kept, read_kept, write_kept
from atoll.simulate.train_sites import Station, answer_to

LOG = logging.getLogger("atoll.simulate")

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


class RayEngine:
    """Actors of Ray.

    Args:
        processes: how many.
        address: of a cluster; None: Ray is started on this machine, unless this program has one.

    Raises:
        ConfigError: Ray is not installed.
    """

    name = "Ray"

    def __init__(self, processes: int, address: str | None) -> None:
        try:
            import ray
        except ImportError as error:
            raise ConfigError("The engine is ray, which is not installed here.", INSTALL) from error
        self._ray: Any = ray
        self._count, self._address = processes, address
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards what follows
        self._hands: list[_Hand] = []
        self._version: tuple[str, Any] = "", None  # digest, and Ray's object
        self._closed = self._ours = False
        self._folder: str | None = None
        self._beginning: Beginning
        self._heard: Heard

    @property
    def capacity(self) -> int:
        """Two jobs an actor: one under way, one in the queue."""
        return 2 * self._count

    def start(self, beginning: Beginning, heard: Heard) -> None:
        """Connect to Ray, start all actors before waiting for any, then a thread for each; on an error, close."""
        self._beginning, self._heard = beginning, heard
        try:
            self._connect()
            self._hands = [_Hand(self) for _ in range(self._count)]
            for hand in self._hands:
                hand.ready()
        except BaseException:
            self.close()
            raise
        for hand in self._hands:
            threading.Thread(target=self._work, args=(hand,), name="atoll-ray", daemon=True).start()

    def put(self, job: Job) -> None:
        """Queue the job for the first actor that is idle."""
        self._jobs.put(job)

    def free(self, longer_s: float) -> None:
        """Kill the overdue actor if the queue is not empty; its thread starts another, and answers `stuck`."""
        if self._jobs.empty():
            return
        with self._lock:
            begun = [hand for hand in self._hands if hand.job is not None and not hand.stuck]
            if (longest := overdue(begun, longer_s)) is not None:
                longest.stuck = True
                longest.kill()

    def pids(self) -> list[int]:
        """Return those of the actors on this host; a cluster's other machines are left out."""
        here = socket.gethostname()
        with self._lock:
            return [hand.pid for hand in self._hands if hand.host == here]

    def close(self) -> None:
        """Kill the actors, and call `ray.shutdown` if this engine has called `ray.init`.

        Files go with Ray's folder where it is this engine's; else idle actors remove their own, and the next actor on a
        machine those of busy ones.
        """
        with self._lock:
            closed, self._closed = self._closed, True
            hands, self._hands = self._hands, []
        for _ in hands:
            self._jobs.put(None)
        if self._ray.is_initialized():  # else they have ended with it
            if self._folder is None:  # else it goes, with all that is in it
                with contextlib.suppress(Exception):  # they have ended, or Ray has
                    ends = [hand.end() for hand in hands if hand.job is None]
                    self._ray.wait(ends, num_returns=len(ends), timeout=END_S)
            for hand in hands:
                hand.kill()
        if not closed and self._ours:
            self._ray.shutdown()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    # -- Ray

    def _connect(self) -> None:
        if self._ray.is_initialized():
            return
        options: dict[str, Any] = {"address": self._address or "local", "logging_level": logging.ERROR}
        if self._address is None:
            _remove_left_behind(TEMPORARY, FOLDER)
            self._folder = tempfile.mkdtemp(prefix=f"{FOLDER}{os.getpid()}-", dir=TEMPORARY)
            options |= {"include_dashboard": False, "num_cpus": self._count, "_temp_dir": self._folder}
        else:
            _require_listening(self._address)
        self._ours = True
        try:
            self._ray.init(**options)
        except Exception as error:
            at = f"at {self._address} " if self._address else "on this machine "
            last = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ServerUnreachable(f"Ray {at}cannot be reached: {last.rstrip('.')}.", _REMEDY) from error

    def actor(self) -> Any:
        """Start an actor, which begins to load the script."""
        kind = self._ray.remote(num_cpus=1, max_restarts=0)(Actor)
        return kind.remote(self._beginning.model_dump(mode="json"), self._folder)

    def got(self, ref: Any, timeout_s: float | None = None) -> Any:
        """Return what an actor answers.

        Raises:
            _Lost: it has ended, or its machine has. RunFailed: it does not begin, or Ray cannot go on.
        """
        known = self._ray.exceptions
        try:
            return self._ray.get(ref, timeout=timeout_s)
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
                self._version = job.ticket.base_digest, self._ray.put(content)
            return self._version[1]

    # -- threads, one for each actor

    def _work(self, hand: _Hand) -> None:
        while (job := self._jobs.get()) is not None:
            with self._lock:
                hand.job, hand.since_s, hand.stuck = job, time.monotonic(), False
            try:
                answer = self._trained(hand, job)
                with self._lock:
                    hand.job = None
            except Exception as error:
                if not self._closed:
                    self._heard.failed_to_go_on(error)
                return
            self._heard.answered(job, answer)

    def _trained(self, hand: _Hand, job: Job) -> Answer:
        folder = Path(self._beginning.sites) / job.site
        while True:
            try:
                told, update, kept = hand.train(job, read_kept(folder))
                break
            except _Lost as lost:
                if self._closed:
                    raise
                if hand.stuck:
                    hand.begin_anew()
                    return Answer(stuck=True)
                LOG.warning("an actor was lost while it trained %s%s; another one takes its place", job.site, lost)
                job.attempts += 1
                hand.begin_anew()
                if job.attempts == ATTEMPTS:
                    told_why = f"its actor was lost, {ATTEMPTS} times in a row{lost}"
                    return Answer(error=told_why, trace=told_why)
        answer = Answer.from_json(told)
        if not answer.disk:  # else it has kept nothing of this round
            try:
                write_at(job.spool_fd, update.data, 0)
                write_kept(folder, kept)
            except (OSError, StoreError) as error:
                return answer_to(error)
        return answer


class _Lost(Exception):
    """An actor has ended."""


class _Hand:
    """An actor and its replacements, one after the other."""

    def __init__(self, engine: RayEngine) -> None:
        self._engine = engine
        self._actor = engine.actor()
        self._base = ""  # digest of the version that it has
        self.pid, self.host = 0, ""
        self.job: Job | None = None
        self.since_s, self.stuck = 0.0, False

    def ready(self) -> None:
        """Wait until it has loaded the script.

        Raises:
            ConfigError: that cannot be loaded. RunFailed: Ray starts no actor, or it has ended.
        """
        try:
            told = self._engine.got(self._actor.ready.remote(), START_S)
        except _Lost as error:
            raise RunFailed(
                "An actor ended before it began.",
                "Ray's log says why; Atoll and the script have to be on every machine of the cluster.",
            ) from error
        if "message" in told:
            raise ConfigError(told["message"], told["remedy"], told["trace"])
        self.pid, self.host = told["pid"], told["host"]

    def begin_anew(self) -> None:
        """Replace the actor."""
        self.kill()
        self._actor, self._base = self._engine.actor(), ""
        self.ready()

    def train(self, job: Job, kept: Kept) -> Any:
        """Train a job as `Actor.train` does, with its version."""
        if self._base != job.ticket.base_digest:
            self._engine.got(self._actor.take.remote(self._engine.version(job)))
            self._base = job.ticket.base_digest
        return self._engine.got(self._actor.train.remote(job.round.to_json(), kept, job.update_bytes))

    def end(self) -> Any:
        """Call `Actor.end`."""
        return self._actor.end.remote()

    def kill(self) -> None:
        with contextlib.suppress(Exception):  # it has ended, or Ray has
            self._engine._ray.kill(self._actor)


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
