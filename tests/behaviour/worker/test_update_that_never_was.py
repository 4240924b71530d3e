"""A site that left a round without an update: nothing did not count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kit import build_model, serve, train_

import atoll


def test_does_not_warn_about_an_update_that_was_never_formed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "atoll")
    model = build_model()
    with serve(tmp_path, sites=2, rounds=3, **{"rounds.min_sites": 1}) as server:

        def join(site: str) -> Any:
            return atoll.join(server.url, site=site, folder=tmp_path / "workers")

        with join("a") as a:
            rounds = iter(a)
            with join("b") as b:
                assert next(iter(b)).number == 1  # and ends, as a script that breaks off while it trains
            first = next(rounds)
            first.load_into(model)
            train_(model, "a", 1)
            first.submit(model)
            second = next(rounds)
            with join("b") as b:
                second.load_into(model)
                train_(model, "a", 2)
                second.submit(model)
                assert next(iter(b)).number == 3  # it came when round 2 was open already
    told = [record for record in caplog.records if record.name == "atoll" and record.levelname == "WARNING"]
    assert [record.getMessage() for record in told] == []
