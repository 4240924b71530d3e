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
def test_no_process_begins_in_a_vanishing_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No process begins in a folder that is being removed.

    The folder itself is locked until it is gone, and the file that names the lock goes last.
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


def test_takes_a_lock_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes a lock anew when its folder is removed at that moment.

    Guards against holding the lock of a file that is no longer there, beside a process that holds the new one.
    """
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
    """A forked child closes its copies of locks and no other file."""
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
def test_ranks_take_other_numbers_files(tmp_path: Path, share: tuple[int, int] | None, stays: set[str]) -> None:
    """Files of another number of ranks go each by one rank.

    Whole, two ranks and three, in an earlier run and in this one; what a rank leaves, another one takes.
    """
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
def test_a_lost_update_matters_when_counted(tmp_path: Path, how: str, became: str, left: list[float]) -> None:
    """What is lost of a pending update matters only where it counted.

    A power loss takes the file that was written last, and mostly the update with it.
    """
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
def test_a_site_goes_back_with_its_server(tmp_path: Path, caplog: pytest.LogCaptureFixture, restarted: bool) -> None:
    """What is left of a version that is gone, or that comes again, belongs to nothing that the server has."""
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


def test_a_take_back_leaves_the_last_update(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What is left after a take back is of the update before.

    Update 8, from version 4, is taken back: another one from version 4 still adds what update 7 left.
    """
    mine = counted_residuals(tmp_path / "w")
    submit_next(mine)
    mine.adopt_if_counted(outcome("counted"))
    mine.take_back(8)
    mine.follow(4, "a")
    assert mine.read("w", 0, 2).tolist() == [1.0, 2.0]
    assert caplog.text == ""
    mine.close()


def test_a_killed_forming_is_no_damage(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A kill while an update is formed again is not called a damage."""
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
def test_only_own_undamaged_files_are_believed(tmp_path: Path, caplog: pytest.LogCaptureFixture, case: str) -> None:
    """Only what the site left in this run undamaged is believed."""
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


def test_zeros_count_where_nothing_was_written(tmp_path: Path) -> None:
    """A digest is of what is there: a hole and written zeros are the same, and so is a copy without holes."""
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


def test_unset_tensors_stay(tmp_path: Path) -> None:
    """A tensor of which an update sets nothing stays as it is.

    Two updates that count: the first sets both tensors, the second one of them, where the files take turns.
    """
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
def test_state_steps_back_with_the_server(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, restarted: bool, last: Counted, value: float, counts_again: float
) -> None:
    """Update 2 is lost and may be sent again; without any update, the state is zero."""
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
def test_earlier_state_has_one_update(tmp_path: Path) -> None:
    """The state before an update belongs to one update only.

    Another update from version 0, which a restored server has counted, did not leave this state.
    """
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
    """A state that may start from zero is checked like any other.

    From then on, zero is the state after the update that the server named: damage to it is noticed.
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


def test_only_missing_differences_are_downloaded(tmp_path: Path) -> None:
    """Of a difference, only what is missing is downloaded again.

    Its first part arrived; the process goes on, starts again, or has lost the file meanwhile.
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
