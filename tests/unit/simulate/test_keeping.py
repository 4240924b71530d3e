"""What a site keeps, brought back from a process with another disk: a kill in between loses nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from atoll.json_files import NoteDamaged
from atoll.protocol.messages import Outcome
from atoll.tensors.schema import TensorSpec
from atoll.worker.exchange import local_state
from atoll.worker.exchange.local_state import Owner, TwoPhaseFile

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
    turns.settle(outcome)
    turns.begin()
    turns.write("w", 0, torch.full((4,), float(ticket)))
    turns.belongs_to(ticket, ticket)
    turns.close()


def value(folder: Path) -> float:
    """What counts once the pending update is counted."""
    turns = opened(folder)
    turns.settle(outcome)
    first = float(turns.read("w", 0, 4)[0])
    turns.close()
    return first


def test_it_is_the_same_afterwards(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for ticket in (1, 2, 3):
        local_state.put_kept(there, local_state.read_kept(here))
        trained(there, ticket)
        local_state.write_kept(here, local_state.read_kept(there))
        assert local_state.pending(here) == {ticket}
        assert local_state.read_kept(here) == local_state.read_kept(there)
    assert value(here) == 3.0


@pytest.mark.parametrize("step", [0, 1, 2])
def test_ended_at_any_step_the_round_can_be_trained_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
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

    write_note, write_bytes = local_state.write_note, Path.write_bytes
    monkeypatch.setattr(local_state, "write_note", lambda *given: (once_too_often(), write_note(*given)))
    monkeypatch.setattr(Path, "write_bytes", lambda *given: (once_too_often(), write_bytes(*given)))
    with pytest.raises(KeyboardInterrupt):
        local_state.write_kept(here, local_state.read_kept(there))
    monkeypatch.undo()
    assert value(here) == 1.0  # the update of ticket 1 was counted, that of ticket 2 is formed again


@pytest.mark.parametrize("change", [lambda data: data[:-9] + bytes([data[-9] ^ 1]) + data[-8:], lambda data: b""])
def test_a_damaged_note_is_said_and_removed_here_and_refused_from_there(
    tmp_path: Path, change: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
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
