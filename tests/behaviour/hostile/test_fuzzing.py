"""A short part of `make fuzz`: requests to a server, and readers of what others have written."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from harness.fuzz_readers import Files, Reader, message_kinds, read_case, reader_case, readers
from harness.fuzz_routes import Routes, operations_tried
from harness.fuzzed import Findings, Values, try_for

from atoll.errors import BadRequest
from atoll.protocol.openapi import OPERATIONS
from atoll.server.coordinator.site_operations import SiteOperations

STATE = Path(__file__).parents[1] / "upgrades" / "recorded" / "state-13.tar.xz"


@pytest.fixture(scope="module")
def values() -> Values:
    return Values(60)


@pytest.fixture
def findings() -> Iterator[Findings]:
    return Findings()


@pytest.mark.slow
@pytest.mark.covers("F38", "X9")
def test_a_server_survives_any_request(tmp_path: Path, values: Values, findings: Findings) -> None:
    """Every operation answers any caller in time and below 500, and what it refuses changes no row of the journal."""
    with Routes(tmp_path / "states", values, findings) as served:
        try_for(served.case, served.send, 1, time.monotonic() + 60, most=300)
    assert not findings.counts, findings.text()
    assert len(operations_tried(findings)) >= 0.85 * len(OPERATIONS)
    assert findings.tried["status 2xx"] >= 40, "requests do not get far"


@pytest.mark.covers("F38", "X9")
def test_readers_refuse_damaged_bytes_in_their_own_words(values: Values, findings: Findings) -> None:
    """Every message, header and text from others is read or refused with the error that its reader declares."""
    found = readers()
    assert {f"message {kind.__name__}" for kind in message_kinds()} < {*found}
    try_for(
        lambda chance: reader_case(found, values, chance),
        lambda case: read_case(found, findings, case),
        1,
        time.monotonic() + 60,
        most=400,
    )
    assert not findings.counts, findings.text()


@pytest.mark.slow
@pytest.mark.covers("F41")
def test_damaged_files_are_refused_in_one_line(tmp_path: Path, findings: Findings) -> None:
    """Any damage to a policy, a credential, a log or a file of a state directory is read over, or refused with an error
    of Atoll.
    """
    files = Files(tmp_path, STATE)
    try_for(files.case, lambda case: files.read(findings, case), 1, time.monotonic() + 60, most=60)
    assert not findings.counts, findings.text()


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["raises", "changes the journal", "stands still"])
def test_fuzzing_finds_a_faulty_operation(
    fault: str, tmp_path: Path, values: Values, findings: Findings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operation that fails, changes the journal although it refuses, or stands still, is found."""

    ahead_s = [0.0]

    async def leave(self: Any, lease: Any, message: Any) -> None:
        if fault == "raises":
            raise KeyError("planted")
        if fault == "stands still":
            ahead_s[0] += 10.0
        elif fault == "changes the journal":
            with self._run.store.journal.transaction():
                self._run.store.journal.count("planted")
        raise BadRequest("planted")

    monkeypatch.setattr(SiteOperations, "leave", leave)
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + ahead_s[0])
    monkeypatch.setattr("harness.fuzz_routes.time", clock)
    monkeypatch.setattr("harness.fuzz_routes.OPERATIONS", [each for each in OPERATIONS if each.name == "leave"])
    with Routes(tmp_path / "states", values, findings) as served:
        try_for(served.case, served.send, 1, time.monotonic() + 60, most=10)
    said = {"raises": "KeyError", "changes the journal": "journal has changed", "stands still": "an answer after"}
    assert said[fault] in findings.text()


@pytest.mark.parametrize(
    ("read", "said"), [(lambda data: [][1], "IndexError"), (lambda data: bytes([1]) * 80_000_000, "more than 64 MB")]
)
def test_fuzzing_finds_a_faulty_reader(read: Any, said: str, values: Values, findings: Findings) -> None:
    """A reader that raises what it does not declare, or takes too much memory, is found."""
    found = {"planted": Reader(read, (b"x" * 20_000,), (ValueError,))}
    try_for(
        lambda chance: reader_case(found, values, chance),
        lambda case: read_case(found, findings, case),
        1,
        time.monotonic() + 60,
        most=10,
    )
    assert said in findings.text()
