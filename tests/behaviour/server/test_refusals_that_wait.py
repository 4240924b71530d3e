"""What a site with a refused update is told: whether the round goes on or waits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kit import build_model, serve
from kit.client import Client

from atoll.errors import UpdateRefused


@pytest.mark.covers("X3")
@pytest.mark.parametrize(("min_sites", "waits"), [(None, True), (1, False)])
def test_says_that_the_round_waits_where_no_other_update_suffices(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, min_sites: int | None, waits: bool
) -> None:
    caplog.set_level("INFO", "atoll")
    with serve(tmp_path, **{"rounds.min_sites": min_sites}) as server:
        with (
            Client(server.url, site="a", folder=tmp_path / "w").register() as one,
            Client(server.url, site="b", folder=tmp_path / "w").register(),
        ):
            one.next_round()
            model = build_model()
            one.pull(model)
            with torch.no_grad():
                next(model.parameters())[0] = float("nan")
            one.submit(model)
            status = server.status().fragments[0]
    (told,) = [record.getMessage() for record in caplog.records if "The update of a was refused" in record.getMessage()]
    assert ("The round waits" in told, "continues with the other updates" in told) == (waits, not waits)
    assert (status.version, status.phase) == (0, "open")


def test_a_full_stop_is_between_the_cause_and_the_remedy() -> None:
    assert str(UpdateRefused("it ended: no such column", "Look at the data.")) == (
        "it ended: no such column. Look at the data."
    )
    assert str(UpdateRefused("Is it there?", "Look.")) == "Is it there? Look."
    assert str(UpdateRefused("It is refused.", "Look.")) == "It is refused. Look."
    assert str(UpdateRefused("it is refused")) == "it is refused"
