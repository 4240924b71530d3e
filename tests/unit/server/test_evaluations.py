"""The list of versions without a complete evaluation."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from atoll.protocol.status_messages import RoundSummary
from atoll.server.coordinator.evaluate_versions import Result, VersionEvaluation


def test_all_failures_are_counted_until_a_version_succeeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The status keeps the last 20 problems, but counts all. A version that is evaluated after all is none of them."""
    results = [Result({}, "no data")] * 25 + [Result({"value": 1.0})]
    process = SimpleNamespace(name="f", every=1, timeout_s=1.0, evaluate=lambda path, version: results.pop(0))
    run: Any = SimpleNamespace(
        state=SimpleNamespace(finished=False),
        settings=SimpleNamespace(disk=SimpleNamespace(state_dir=tmp_path)),
        io=None,
        ledger=SimpleNamespace(
            rules=SimpleNamespace(tracking=SimpleNamespace(metric="")), record=lambda event, row, happened: row()
        ),
        store=SimpleNamespace(run_log=SimpleNamespace(set_summary=lambda fragment, version, text: None)),
        spawn=asyncio.ensure_future,
    )
    history: Any = SimpleNamespace(summaries=[], replace=lambda summary: None)
    evaluation = VersionEvaluation(run, history, process)
    monkeypatch.setattr(evaluation, "_export", lambda path, heads: None)

    async def evaluate(version: int, heads: list[int]) -> None:
        summary = RoundSummary(
            fragment=0, round=version, version=version, metrics={}, counts={}, seconds=0.1, bytes_up=1, sites=[]
        )
        task = evaluation.begin(summary, heads)
        assert task is not None
        await task

    async def all_versions() -> None:
        for version in range(1, 26):
            await evaluate(version, [version, version])
        status = evaluation.status()
        assert status is not None
        assert (len(status.failed), status.failures) == (20, 25)
        await evaluate(25, [25, 26])

    asyncio.run(all_versions())
    status = evaluation.status()
    assert status is not None
    assert ([*status.failed], status.failures) == ([str(version) for version in range(6, 25)], 24)
