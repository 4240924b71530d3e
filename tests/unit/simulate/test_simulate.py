"""Parts of a simulation: pinned versions, jobs whose process ends, what a site keeps, threads."""

from __future__ import annotations

import gc
import os
import queue
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_here import simulate_here
from harness.processes import wait_until
from torch import nn

import atoll
from atoll.json_files import NoteDamaged
from atoll.protocol.messages import Outcome
from atoll.server.local_site import VersionsInUse
from atoll.simulate import engine, simulated_site
from atoll.simulate.engine import Beginning, Job, JobResult
from atoll.simulate.simulated_site import result_of_error
from atoll.simulate.simulation import threads_of
from atoll.tensors.payload import pack
from atoll.tensors.schema import TensorSpec
from atoll.worker.exchange import local_state
from atoll.worker.exchange.local_state import Owner, TwoPhaseFile
from atoll.worker.exchange.script_state import ScriptState

# -- versions that are pinned while sites train from them


class Pin:
    def __init__(self, version: int, held: list[int]) -> None:
        self.row, self._held = self, held
        self.fragment, self.version = 0, version
        held.append(version)

    def release(self) -> None:
        self._held.remove(self.version)


@pytest.fixture
def held() -> list[int]:
    """The versions that are pinned."""
    return []


@pytest.fixture
def bases(held: list[int]) -> VersionsInUse:
    class Pins:
        def pin(self, fragment: int, version: int) -> Pin:
            assert fragment == 0
            return Pin(version, held)

    versions: Any = Pins()
    return VersionsInUse(versions)


def test_a_version_stays_while_sites_train_from_it(bases: VersionsInUse, held: list[int]) -> None:
    """A simulation keeps a version as long as sites train from it, and lets it go once another version
    takes its place.
    """
    first, again = bases.take(0, 0), bases.take(0, 0)
    assert first is again
    assert held == [0]
    bases.give_back(first)
    other = bases.take(0, 1)
    assert held == [0, 1]  # one still trains from the first
    bases.give_back(again)
    bases.give_back(other)
    bases.take(0, 1)
    assert held == [0, 1]  # looked at when another is pinned
    bases.take(0, 2)
    assert held == [1, 2]


def test_a_simulation_releases_all_versions_at_its_end(bases: VersionsInUse, held: list[int]) -> None:
    bases.take(0, 0)
    bases.take(0, 1)
    bases.release()
    assert held == []


# -- jobs whose process ends


def test_an_exception_that_causes_itself_is_reported() -> None:
    """An exception that is its own cause is reported once."""
    error = ValueError("round and round")
    error.__cause__ = error
    assert result_of_error(error).error == "ValueError: round and round"


class Ends:
    """A host, and each of its processes in turn, by how it begins and how it ends."""

    name, kind, ahead, pid = "test", "a process", 0, 1

    def __init__(self, *lives: str) -> None:
        self._lives, self._life = list(lives), ""
        self._given = queue.SimpleQueue[int]()
        self.results = queue.SimpleQueue[str]()

    def begin(self, beginning: Beginning) -> Ends:
        self._life = self._lives.pop(0)
        return self

    def ready(self) -> None:
        if self._life == "killed":
            raise engine.Killed("It was ended by SIGKILL.")

    def give(self, job: Job) -> None:
        for _ in range(2 if self._life == "returns twice" else 1):
            self._given.put(job.ticket.id)

    def hear(self) -> tuple[int, JobResult] | None:
        ticket = self._given.get()
        return None if self._life == "ends" else (ticket, JobResult(error="raised"))

    def bury(self) -> str:
        return "ended"

    def job_done(self, job: Job, result: JobResult) -> None:
        self.results.put(result.error)

    def failed_to_go_on(self, error: Exception) -> None:
        self.results.put(str(error))

    def nothing(self) -> None: ...

    open = close = kill = take_back = nothing

    def result(self) -> str:
        """What comes of a job."""
        begun = engine.Engine(self, 1)
        begun.start(None, self)  # type: ignore[arg-type]
        begun.put(SimpleNamespace(ticket=SimpleNamespace(id=7), site="a", attempts=0))  # type: ignore[arg-type]
        return self.results.get(timeout=10)


@pytest.mark.covers("V2")
@pytest.mark.parametrize(
    ("lives", "error"),
    [
        (["returns"], "raised"),
        (["ends", "killed", "killed", "returns"], "raised"),
        (["ends", "killed", "killed", "killed"], "It was ended by SIGKILL."),
        (["ends", "ends", "ends", "returns"], "its process ended, 3 times in a row"),
    ],
)
def test_a_job_restarts_in_another_process(lives: list[str], error: str) -> None:
    """If the process of a job ends, the job starts again in another process. After three failures in a row, the job has
    an error that says why.
    """
    assert Ends(*lives).result() == error


@pytest.mark.covers("V2")
def test_close_waits_for_a_process_that_starts() -> None:
    """If the engine closes while a process starts in place of an ended one, the engine waits for this process and ends
    it.
    """

    class Slow(Ends):
        """Its second process gets ready only while the engine closes."""

        ended = False

        def ready(self) -> None:
            if not self._lives:
                self.results.put("starts")
                wait_until(lambda: begun._closed, "the close")

        def kill(self) -> None:
            self.ended = True

        def close(self) -> None:
            self.results.put(f"ended: {self.ended}")

    host = Slow("ends", "returns")
    begun = engine.Engine(host, 1)
    begun.start(None, host)  # type: ignore[arg-type]
    begun.put(SimpleNamespace(ticket=SimpleNamespace(id=7), site="a", attempts=0))  # type: ignore[arg-type]
    assert host.results.get(timeout=10) == "starts"
    begun.close()
    assert host.results.get(timeout=10) == "ended: True"


@pytest.mark.covers("V2")
def test_a_closed_engine_ends_what_still_starts() -> None:
    """If the engine closes while its first processes start, each of them is ended, whichever had started by then."""
    ends: list[int] = []

    class Starting(Ends):
        """The engine closes while this host starts the second process."""

        def begin(self, beginning: Any) -> Any:
            process = Starting()
            process.pid = len(begun.pids()) + 1
            if process.pid == 2:
                begun.close()
            return process

        def kill(self) -> None:
            ends.append(self.pid)

        def bury(self) -> str:
            ends.append(-self.pid)
            return "ended"

    begun = engine.Engine(Starting(), 3)
    begun.start(None, Starting())  # type: ignore[arg-type]
    assert ends == [1, -1, 2, -2]  # killed, then waited for; the third was not started
    assert begun.pids() == []


@pytest.mark.covers("V2")
def test_a_second_result_of_a_job_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    """If a process returns two results for one job, the second is ignored and the log says so."""
    host = Ends("returns twice")
    assert host.result() == "raised"
    wait_until(lambda: "ignored a second result" in caplog.text, "a line")
    assert host.results.empty()


def test_each_check_kills_one_overdue_process() -> None:
    """Each check kills one process that takes too long: the one with the oldest job that was not killed yet."""
    # A killed process may take a while to end. Meanwhile, the next check kills the next process.
    killed: list[int] = []

    class Stuck(Ends):
        def kill(self) -> None:
            killed.append(self.pid)

    begun = engine.Engine(Stuck(), 2)
    for pid in (1, 2):
        process = Stuck()
        process.pid = pid
        begun._crew.append(engine._Member(process, jobs=dict.fromkeys((pid, pid + 10)), since_s=float(pid)))  # type: ignore[arg-type]
    for _ in range(3):
        begun.free(0.0)
    assert killed == [1, 2]


# -- what a process holds of a round that is over


def train(worker: Any) -> None:
    for fl_round in worker:
        fl_round.submit(fl_round.load_into(nn.Linear(2, 1)))


def test_simulated_sites_are_freed_after_each_round(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A simulation frees each site when its round ends, without Python's garbage collector."""
    simulate_here(monkeypatch)
    sites: list[weakref.ref[Any]] = []
    make = simulated_site.SimulatedSite.__init__

    def made(self: Any, *given: Any) -> None:
        make(self, *given)
        sites.append(weakref.ref(self))

    monkeypatch.setattr(simulated_site.SimulatedSite, "__init__", made)
    settings = {"algorithm.name": "fedavg", "rounds.total": 2, "disk.state_dir": tmp_path}
    torch.manual_seed(0)
    gc.disable()  # what only the collector frees counts as held
    try:
        atoll.Simulation(nn.Linear(2, 1), settings, script=train, sites=3).run()
        assert [site() for site in sites] == [None] * 6
    finally:
        gc.enable()


# -- what a site keeps, brought back from a process with another disk


SPECS = [TensorSpec("w", "F32", (4,))]


def opened(folder: Path) -> TwoPhaseFile:
    folder.mkdir(exist_ok=True)
    return TwoPhaseFile(folder, "algorithm", SPECS, owner=Owner("a", "r"))


def outcome(ticket: int) -> Outcome:
    return Outcome(ticket=ticket, state="counted", base_version=0)


def trained(folder: Path, ticket: int) -> None:
    """A round: what was pending counts, and the ticket's number is what is pending now."""
    turns = opened(folder)
    if not turns.found:
        turns.zero()
    turns.adopt_if_counted(outcome)
    turns.begin()
    turns.write("w", 0, torch.full((4,), float(ticket)))
    turns.belongs_to(ticket, ticket)
    turns.close()


def value(folder: Path) -> float:
    """What counts once the pending update is counted."""
    turns = opened(folder)
    turns.adopt_if_counted(outcome)
    first = float(turns.read("w", 0, 4)[0])
    turns.close()
    return first


def test_a_sites_state_returns_unchanged(tmp_path: Path) -> None:
    """The state that a site keeps is unchanged when it is brought back from a process in which the site was trained."""
    here, there = tmp_path / "here", tmp_path / "there"
    for ticket in (1, 2, 3):
        local_state.put_kept(there, local_state.read_kept(here))
        trained(there, ticket)
        local_state.write_kept(here, local_state.read_kept(there))
        assert local_state.pending(here) == {ticket}
        assert local_state.read_kept(here) == local_state.read_kept(there)
    assert value(here) == 3.0


@pytest.mark.parametrize("step", [0, 1, 2])
def test_an_interrupted_return_keeps_the_old_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """If bringing back a site's state is interrupted at any step, the site keeps the state from before."""
    # The round can be trained again. The update of ticket 1 was counted, and that of ticket 2 is formed again.
    here, there = tmp_path / "here", tmp_path / "there"
    trained(here, 1)
    local_state.put_kept(there, local_state.read_kept(here))
    trained(there, 2)
    done = 0

    def once_too_often(*_: object) -> None:
        nonlocal done
        if done == step:
            raise KeyboardInterrupt
        done += 1

    write_note, replace_file = local_state.write_note, local_state.replace_file
    monkeypatch.setattr(local_state, "write_note", lambda *given: (once_too_often(), write_note(*given)))
    monkeypatch.setattr(
        local_state, "replace_file", lambda *given, **how: (once_too_often(), replace_file(*given, **how))
    )
    with pytest.raises(KeyboardInterrupt):
        local_state.write_kept(here, local_state.read_kept(there))
    monkeypatch.undo()
    assert value(here) == 1.0  # the update of ticket 1 was counted, that of ticket 2 is formed again


def script_kept(folder: Path, ticket: int) -> None:
    """A round of a script: it finds what counts, and keeps that and the ticket's number."""
    folder.mkdir(exist_ok=True)
    files = ScriptState(folder, Owner("a", "r"))
    files.given = pack({"tickets": [*files.load(outcome).get("tickets", []), ticket], "w": torch.ones(3)})
    files.begin()
    files.keep()
    files.belongs_to(ticket, ticket)


def script_finds(folder: Path) -> list[int]:
    found: list[int] = ScriptState(folder, Owner("a", "r")).load(outcome).get("tickets", [])
    return found


@pytest.mark.parametrize("step", range(4))
def test_an_interrupted_return_keeps_the_scripts_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """If bringing back a script's state is interrupted at any step, the site has the state from before, or the new."""
    # Each of six rounds; in the last one, the steps are: the note, the file, the note.
    here, there = tmp_path / "sites" / "here", tmp_path / "there"
    for ticket in range(1, 7):
        local_state.put_kept(there, local_state.read_kept(here))
        script_kept(there, ticket)
        if ticket < 6:
            local_state.write_kept(here, local_state.read_kept(there))
            assert local_state.read_kept(here) == local_state.read_kept(there)
            assert local_state.pending(here) == set(range(max(1, ticket - 3), ticket + 1))
    done = 0

    def once_too_often() -> None:
        nonlocal done
        done += 1
        if done == step + 1:
            raise KeyboardInterrupt

    write_note, replace_file = local_state.write_note, local_state.replace_file
    monkeypatch.setattr(local_state, "write_note", lambda *given: (once_too_often(), write_note(*given)))
    monkeypatch.setattr(
        local_state, "replace_file", lambda *given, **how: (once_too_often(), replace_file(*given, **how))
    )
    if step < 3:
        with pytest.raises(KeyboardInterrupt):
            local_state.write_kept(here, local_state.read_kept(there))
    else:
        local_state.write_kept(here, local_state.read_kept(there))
    monkeypatch.undo()
    assert script_finds(here) == list(range(1, 7 if step == 3 else 6))


@pytest.mark.parametrize("change", [lambda data: data[:-9] + bytes([data[-9] ^ 1]) + data[-8:], lambda data: b""])
def test_a_damaged_note_is_refused_or_removed(
    tmp_path: Path, change: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    """A damaged note from another process is refused, and the site keeps its state. A damaged note of the site itself
    is removed with a warning.
    """
    here, there = tmp_path / "here", tmp_path / "there"
    trained(there, 1)
    local_state.write_kept(here, local_state.read_kept(there))
    kept, note = local_state.read_kept(here), here / "algorithm.json"
    with pytest.raises(NoteDamaged):
        local_state.write_kept(here, kept | {note.name: change(kept[note.name])})
    assert local_state.read_kept(here) == kept
    note.write_bytes(change(kept[note.name]))
    caplog.set_level("WARNING", "atoll")
    assert local_state.pending(here) == set()
    assert [str(note) in line and "damaged" in line for line in caplog.messages] == [True]
    assert not note.exists()


# -- threads


def test_processes_divide_the_cores_among_their_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes of a simulation divide the cores among their threads. A valid `OMP_NUM_THREADS` sets the number of
    threads instead.
    """
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert [threads_of(processes) for processes in (1, 3, 8, 20)] == [8, 2, 1, 1]
    for told, threads in (("4", 4), ("4,2", 4), ("0", 2), ("many", 2), ("", 2)):
        monkeypatch.setenv("OMP_NUM_THREADS", told)
        assert threads_of(4) == threads
