"""Files of a site: the lock of its folder, and what it keeps between rounds."""

from __future__ import annotations

import fcntl
import logging
import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.servers import plain_server
from torch import nn

import atoll
from atoll.codecs.version_difference import Downlink
from atoll.errors import ConfigError, StateLocked
from atoll.protocol import messages
from atoll.protocol.messages import Counted
from atoll.registry import OwnName
from atoll.tensors.layout import file_layout
from atoll.tensors.schema import Schema, TensorSpec
from atoll.worker.exchange.base_and_outbox import ScratchFile, folder_of, locked, remove_earlier
from atoll.worker.exchange.local_state import AlgorithmState, Owner, Residuals
from atoll.worker.exchange.pull_version import DeltaFile

# -- folders


def one_run(folder: Path, name: str) -> Path:
    """Take part as `a` in a run of one round; returns the site's folder of this run."""
    with plain_server(folder / name, nn.Linear(8, 4), rounds=1) as server:
        with atoll.join(server.url, site="a", folder=folder / "w") as worker:
            for fl_round in worker:
                fl_round.submit(fl_round.load_into(nn.Linear(8, 4)))
        return folder / "w" / "a" / server.status().run


@pytest.mark.covers("D4")
def test_a_folder_being_removed_stays_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While an earlier folder of a site is being removed, no process can start in it.

    The folder itself is locked until it is gone, and the file that names the lock is removed last.
    """
    first = one_run(tmp_path, "first")
    unlink, removed = os.unlink, []

    def begun_anew(path: str, *, dir_fd: int | None = None) -> None:
        unlink(path, dir_fd=dir_fd)
        if dir_fd is not None:
            removed.append(path)
            with pytest.raises(StateLocked), locked(first, "a"):
                pass

    monkeypatch.setattr(os, "unlink", begun_anew)
    one_run(tmp_path, "second")
    assert removed[-1] == "lock"
    assert set(removed) > {"lock", "base.safetensors", "outbox.bin"}
    assert not first.exists()
    with locked(first, "a"):  # anew, in a folder of its own
        assert first.exists()


def test_a_removed_lock_is_taken_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the folder is removed while a process takes its lock, the process takes the lock in a new folder."""
    # Guards against holding the lock of a removed file, beside a process that holds the new lock.
    folder = tmp_path / "a" / "run"
    flock, removals = fcntl.flock, iter([True])

    def removed_before(fd: int, how: int) -> None:
        if next(removals, False):
            (folder / "lock").unlink()
            folder.rmdir()
        flock(fd, how)

    monkeypatch.setattr(fcntl, "flock", removed_before)
    with locked(folder, "a"):
        assert (folder / "lock").read_text().startswith(f"process {os.getpid()} on ")
        with pytest.raises(StateLocked), locked(folder, "a"):
            pass


def test_forked_children_close_locks(tmp_path: Path) -> None:
    """A forked child closes its copies of locks and no other file. So the lock is free when the parent gives it up."""
    with locked(tmp_path, "a"):
        pass
    theirs, ours = socket.socketpair()  # `theirs` gets the number that the lock had
    with theirs, ours:
        with locked(tmp_path, "a"):
            if not (child := os.fork()):
                try:
                    ours.close()
                    theirs.send(b"runs")
                    theirs.recv(1)
                finally:
                    os._exit(0)
            theirs.close()
            assert ours.recv(4) == b"runs"
            with pytest.raises(StateLocked), locked(tmp_path, "a"):
                pass
        with locked(tmp_path, "a"):
            assert os.waitpid(child, os.WNOHANG) == (0, 0)  # it still runs
    os.waitpid(child, 0)


@pytest.mark.covers("D4")
@pytest.mark.parametrize(
    ("share", "stays"),
    [
        (None, {"run"}),
        ((0, 2), {"rank-0-of-2/run", "rank-1-of-2/run", "rank-1-of-2/old", "rank-1-of-3/old", "rank-1-of-3/run"}),
        (
            (1, 2),
            {"rank-0-of-2/run", "rank-1-of-2/run", "rank-0-of-2/old", "run", "old"}
            | {f"rank-{rank}-of-3/{run}" for rank in (0, 2) for run in ("old", "run")},
        ),
    ],
    ids=["whole", "first-of-two", "second-of-two"],
)
def test_files_of_other_rank_counts_are_removed(tmp_path: Path, share: tuple[int, int] | None, stays: set[str]) -> None:
    """If a site starts with another number of ranks, it removes the files that were made for the earlier number."""
    # There are files of a whole site, of two ranks and of three, in an earlier run and in this one. Another rank
    # removes what one rank leaves.
    homes = ["", *(f"rank-{rank}-of-{ranks}/" for ranks in (2, 3) for rank in range(ranks))]
    for each in (tmp_path / "a" / f"{home}{run}" for home in homes for run in ("old", "run")):
        each.mkdir(parents=True)
        (each / "lock").touch()
        (each / "base.safetensors").write_bytes(b"x" * 100)
    remove_earlier(folder_of(tmp_path / "a", "run", share), "a", share)
    left = {str(path.parent.relative_to(tmp_path / "a")) for path in (tmp_path / "a").rglob("lock")}
    assert left == stays
    assert {path.name for path in (tmp_path / "a").iterdir()} == {name.partition("/")[0] for name in stays}


# -- what a site keeps between rounds


OWNER = Owner("a", "r")
MODEL = Schema.build([TensorSpec("w", "F32", (1,)), TensorSpec("frozen", "F32", (2,))])


@pytest.mark.covers("S2", "F41")
@pytest.mark.parametrize("how", ["gone", "damaged"])
@pytest.mark.parametrize(("became", "left"), [("counted", [0.0, 0.0]), ("refused", [1.0, 2.0])])
def test_a_lost_rounding_error_becomes_zero(tmp_path: Path, how: str, became: str, left: list[float]) -> None:
    """If the rounding error kept from an update is lost, it counts as zero once the update has counted; after a
    refusal, the earlier one stays.
    """
    # If the update was refused, the earlier residual stays. A power loss takes the file that was written last, and
    # mostly the update with it.
    mine = counted_residuals(tmp_path / "w")
    submit_next(mine)
    mine.close()
    file = tmp_path / "w" / "residual-0.bin"
    if how == "gone":
        file.unlink()
    else:
        file.write_bytes(bytes(file.stat().st_size))
    for _ in range(2):  # nor is it believed at the next start
        residuals(tmp_path / "w").close()
    again = residuals(tmp_path / "w")
    assert again.read("w", 0, 2).tolist() == [1.0, 2.0]
    again.adopt_if_counted(outcome(became))
    assert again.read("w", 0, 2).tolist() == left
    again.close()


def outcome(state: str) -> Any:
    return lambda ticket: messages.Outcome(ticket=ticket, state=state, base_version=0)


def residuals(folder: Path, owner: Owner = OWNER) -> Residuals:
    folder.mkdir(exist_ok=True)
    return Residuals(folder, Schema.build([TensorSpec("w", "F16", (2,))]), owner=owner)


def submit_next(mine: Residuals) -> None:
    """Update 8, from version 4: 5 and 6 are left of it."""
    mine.begin()
    mine.write("w", 0, torch.tensor([5.0, 6.0]))
    mine.belongs_to(8, version=4)


def counted_residuals(folder: Path) -> Residuals:
    """Of update 7, from version 3, which counted: 1 and 2 were left."""
    mine = residuals(folder)
    mine.write("w", 0, torch.tensor([1.0, 2.0]))
    mine.belongs_to(7, version=3)
    mine.adopt_if_counted(outcome("counted"))
    return mine


SINCE = pytest.mark.parametrize("restarted", [False, True], ids=["running", "restarted"])
"""Whether the process that wrote the files still has them open when the server goes back."""


@SINCE
def test_server_rollbacks_reset_rounding_errors(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, restarted: bool
) -> None:
    """If the server goes back to an earlier version, the site sets the rounding error of its codec to
    zero and says so.
    """
    mine = again = counted_residuals(tmp_path / "w")
    submit_next(mine)
    mine.adopt_if_counted(outcome("counted"))
    mine.follow(5, "a")
    assert mine.read("w", 0, 2).tolist() == [5.0, 6.0]
    if restarted:
        mine.close()
        again = residuals(tmp_path / "w")
    assert again.read("w", 0, 2).tolist() == [5.0, 6.0]
    caplog.set_level(logging.WARNING)
    again.follow(4, "a")
    assert again.read("w", 0, 2).tolist() == [0.0, 0.0]
    assert "a: the server went back to version 4; the encoding error of earlier updates is set to zero" in caplog.text
    again.close()


def test_an_undone_update_restores_the_rounding_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If a site's update is undone, its codec's rounding error is again that from the update before."""
    # Update 8, from version 4, is taken back. Another update from version 4 still adds what update 7 left.
    mine = counted_residuals(tmp_path / "w")
    submit_next(mine)
    mine.adopt_if_counted(outcome("counted"))
    mine.take_back(8)
    mine.follow(4, "a")
    assert mine.read("w", 0, 2).tolist() == [1.0, 2.0]
    assert caplog.text == ""
    mine.close()


def test_a_kill_while_encoding_is_not_called_damage(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If the process is killed while it encodes an update again, the next start keeps the earlier rounding error and
    reports no damage.
    """
    mine = counted_residuals(tmp_path / "w")
    submit_next(mine)
    mine.begin()
    mine.write("w", 0, torch.tensor([9.0, 9.0]))
    mine.close()
    again = residuals(tmp_path / "w")
    assert again.note.pending == 0
    assert again.read("w", 0, 2).tolist() == [1.0, 2.0]
    assert caplog.text == ""
    again.close()


@pytest.mark.covers("F41")
@pytest.mark.parametrize("case", ["another site", "another run", "no note", "damaged"])
def test_only_undamaged_rounding_errors_are_used(tmp_path: Path, caplog: pytest.LogCaptureFixture, case: str) -> None:
    """A site uses only the undamaged rounding errors that it left in this run; otherwise they are zero, and damage is
    logged.
    """
    counted_residuals(tmp_path / "w").close()
    path = tmp_path / "w" / "residual-1.bin"
    if case == "no note":
        (tmp_path / "w" / "residual.json").unlink()
    elif case == "damaged":
        path.write_bytes(bytes(byte ^ 1 for byte in path.read_bytes()))
    owner = {"another site": Owner("b", "r"), "another run": Owner("a", "s")}.get(case, OWNER)
    found = residuals(tmp_path / "w", owner)
    assert found.read("w", 0, 2).tolist() == [0.0, 0.0]
    found.close()
    damage = "residual-1.bin is damaged (its digest differs) and is not used"
    assert (damage in caplog.text) is (case == "damaged")


def test_a_digest_reads_holes_as_zeros(tmp_path: Path) -> None:
    """The digest of a file is equal with holes and with written zeros. It differs for other bytes, or for bytes in
    another place.
    """
    chunk, files = 2**21, [ScratchFile(tmp_path / name, 5 * 2**21 + 8, ()) for name in "ab"]
    for place in (0, 3, 5):
        for file in files:
            file.write(place * chunk, memoryview(b"12345678"))
    files[1].write(chunk, memoryview(bytes(chunk)))
    assert files[0].content_digest() == files[1].content_digest()
    files[1].write(4 * chunk, memoryview(b"\1"))
    assert files[0].content_digest() != files[1].content_digest()
    files[1].write(4 * chunk, memoryview(b"\0"))
    files[1].write(3 * chunk, memoryview(bytes(8)))
    files[1].write(2 * chunk, memoryview(b"12345678"))  # the same bytes elsewhere
    assert files[0].content_digest() != files[1].content_digest()
    for file in files:
        file.close()


def test_tensors_that_no_update_sets_stay(tmp_path: Path) -> None:
    """If an update sets only some tensors of an algorithm's state, the other tensors of the state stay."""
    # Two updates count. The first one sets both tensors and the second one only one of them, and the files take turns.
    state = AlgorithmState(tmp_path, MODEL, ["momentum"], OWNER)
    for ticket, tensors in enumerate([{"w": [5.0], "frozen": [1.0, 2.0]}, {"w": [6.0]}], start=1):
        state.begin()
        for name, values in tensors.items():
            state.write(f"atoll.momentum.{name}", 0, torch.tensor(values))
        state.belongs_to(ticket, ticket)
        state.adopt_if_counted(lambda number: messages.Outcome(ticket=number, state="counted", base_version=0))
    assert state.read("atoll.momentum.w", 0, 1).tolist() == [6.0]
    assert state.read("atoll.momentum.frozen", 0, 2).tolist() == [1.0, 2.0]
    state.close()


def counted_state(folder: Path) -> AlgorithmState:
    """Of two updates that counted, from version 0 and version 1: they left 1 and 2."""
    state = AlgorithmState(folder, MODEL, ["momentum"], OWNER)
    state.begin_at_zero()
    for ticket in (1, 2):
        state.begin()
        state.write(MOMENTUM, 0, torch.tensor([float(ticket)]))
        state.belongs_to(ticket, ticket - 1, str(ticket) * 64)
        state.adopt_if_counted(outcome("counted"))
    return state


MOMENTUM = "atoll.momentum.w"


@pytest.mark.covers("S2")
@SINCE
@pytest.mark.parametrize(
    ("last", "value", "counts_again"),
    [
        pytest.param(Counted(base_version=0, digest="1" * 64), 1.0, 2.0, id="first-update"),
        pytest.param(Counted(), 0.0, 0.0, id="no-update"),
    ],
)
def test_algorithm_state_goes_back_with_the_server(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, restarted: bool, last: Counted, value: float, counts_again: float
) -> None:
    """If the server goes back, the algorithm's state of a site goes back to the last update that the server has
    counted.
    """
    # Update 2 is lost and may be sent again. Without any counted update, the state is zero.
    state = counted_state(tmp_path)
    if restarted:
        state.close()
        state = AlgorithmState(tmp_path, MODEL, ["momentum"], OWNER)
    state.follow(last)
    assert state.read(MOMENTUM, 0, 1).tolist() == [value]
    assert "damaged" not in caplog.text
    state.adopt_if_counted(outcome("counted"))
    assert state.read(MOMENTUM, 0, 1).tolist() == [counts_again]
    state.close()


@pytest.mark.covers("S2")
def test_an_earlier_state_belongs_to_one_update(tmp_path: Path) -> None:
    """If the server has counted an update that this site did not make, the error says that the site's state is lost."""
    # For any other update, an error says that the state is lost. A restored server has counted another update from
    # version 0, which did not leave this state.
    state = counted_state(tmp_path)
    assert state.last_updates == [
        Counted(base_version=1, digest="2" * 64),
        Counted(base_version=0, digest="1" * 64),
    ]
    with pytest.raises(ConfigError, match="state of this site is lost"):
        state.follow(Counted(base_version=0, digest="9" * 64))
    state.close()


@pytest.mark.covers("S2", "F41")
def test_new_states_are_checked_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a state may start from zero, later damage to it is noticed as with any other state.

    From then on, zero is the state after the update that the server named.
    """
    state = counted_state(tmp_path)
    monkeypatch.setenv("ATOLL_NEW_STATE", "1")
    state.follow(Counted(base_version=7, digest="9" * 64))
    state.close()
    for damage in (False, True):
        if damage:
            (tmp_path / "algorithm-0.bin").write_bytes(b"\1" * (tmp_path / "algorithm-0.bin").stat().st_size)
        again = AlgorithmState(tmp_path, MODEL, ["momentum"], OWNER)
        assert again.state == ("missing" if damage else "kept")
        again.close()


# -- the difference between two versions


def test_only_missing_parts_of_differences_are_downloaded(tmp_path: Path) -> None:
    """If some parts of a difference have arrived, only the missing parts are downloaded, also after a restart. If the
    file is lost, all parts are downloaded.
    """
    schema = Schema.build([TensorSpec(name, "F32", (2**14,)) for name in "abc"])
    downlink = Downlink.of(file_layout(schema.tensors, b"", 2**16), OwnName("bf16"), {})
    file = DeltaFile(tmp_path, downlink)
    first, *rest = every = [part for part in downlink.parts if part.nbytes]
    file.write(first.start, memoryview(b"\1" * first.nbytes))
    digests = [file.digest(first).hex(), *["0" * 64] * (downlink.count - 1)]
    delta = messages.Delta(base_version=1, base_digest="1" * 64, digest="2" * 64, part_digests=digests)
    assert file.begin(delta, "3" * 64) == every
    assert file.begin(delta, "3" * 64) == rest
    file.close()
    again = DeltaFile(tmp_path, downlink)
    assert again.begin(delta, "3" * 64) == rest
    again.close()
    (tmp_path / "delta.bin").unlink()
    anew = DeltaFile(tmp_path, downlink)
    assert anew.begin(delta, "3" * 64) == every
    anew.close()
