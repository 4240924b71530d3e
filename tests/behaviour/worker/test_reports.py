"""`DiLoCo.report`: a value is part of one round, whatever becomes of the update that was to carry it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness.proxy import BEFORE_HEADER, Fault, Proxy
from kit import diloco, serve, take_steps, together

from atoll.testing.run import history

H = 2
DILOCO: dict[str, Any] = {"algorithm": "diloco", "H": H, "codec": "none", "sites": 1, "rounds": 4}


def metrics_of(folder: Path) -> list[dict[str, float]]:
    """Of each round, in their order."""
    return [line["metrics"] for line in history(folder / "state")]


def train(url: str, folder: Path, reports: dict[int, dict[str, float]], site: str = "a") -> None:
    """One site; `reports`: before this local step, these values."""
    with diloco(url, folder, site) as loop:
        take_steps(loop, site=site, during=lambda step: loop.report(**reports.get(step, {})))


@pytest.mark.parametrize(
    ("streaming", "expected"),
    [
        ({}, [{"loss": 5.0, "acc": 0.5}, {"loss": 4.0}, {}, {}]),
        # fragment 0 is due after the first step, fragment 1 after the second, fragment 0 again after the third
        ({"K": 2, "tau": 1}, [{"loss": 9.0, "acc": 0.5}, {"loss": 5.0}, {"loss": 4.0}]),
    ],
    ids=["whole", "streaming"],
)
def test_counts_a_reported_value_in_one_round(
    tmp_path: Path, streaming: dict[str, int], expected: list[dict[str, float]]
) -> None:
    """Of two reports before one synchronisation the last counts; what is reported later comes later."""
    with serve(tmp_path, **DILOCO, **streaming) as server:
        train(server.url, tmp_path, {1: {"loss": 9.0, "acc": 0.5}, 2: {"loss": 5.0}, 3: {"loss": 4.0}})
        server.run()
    lines = sorted(history(tmp_path / "state"), key=lambda line: (line["round"], line["fragment"]))
    assert [line["metrics"] for line in lines if line["metrics"]] == [each for each in expected if each]
    assert streaming or metrics_of(tmp_path) == expected


def test_counts_a_value_once_where_the_acknowledgement_was_lost(tmp_path: Path) -> None:
    """The worker does not hear that its first update is in, trains on, and finds out at its next turn."""
    with serve(tmp_path, **DILOCO) as server, Proxy(server.port) as proxy:
        fault = Fault("POST .*/complete ", "down", at=BEFORE_HEADER, action="reset", wait=proxy.cut)
        proxy.faults.append(fault)

        def during(step: int) -> None:
            if step == H + 1:
                assert fault.reached.is_set()
                proxy.heal()

        with diloco(proxy.url, tmp_path, max_sync_retries=0) as loop:
            loop.report(loss=5.0)
            take_steps(loop, during=during)
            assert loop.skipped == 1
        server.run()
    assert metrics_of(tmp_path) == [{"loss": 5.0}, {}, {}, {}]


@pytest.mark.parametrize("later", [{}, {"loss": 4.0}], ids=["alone", "and a newer one"])
def test_counts_a_value_with_the_next_update_where_the_first_was_refused(
    tmp_path: Path, later: dict[str, float]
) -> None:
    """A newer report of the same name takes its place."""
    with serve(tmp_path, **DILOCO | {"rounds": 2}, **{"aggregation.max_update_norm": 1e3}) as server:
        with diloco(server, tmp_path) as loop:
            loop.report(loss=5.0, acc=0.5)
            with torch.no_grad():
                next(loop.model.parameters()).fill_(1e4)
            take_steps(loop, during=lambda step: loop.report(**later if step == H + 1 else {}))
        assert server.status().refused == 1
        server.run()
    assert metrics_of(tmp_path) == [{"loss": 5.0, "acc": 0.5} | later, {}]


def test_averages_a_round_over_the_sites_that_reported_in_it(tmp_path: Path) -> None:
    """Site a reports in the first round alone: from then on the mean is that of b."""
    reports = {"a": {1: {"loss": 1.0}}, "b": {1: {"loss": 3.0}, 3: {"loss": 3.0}}}
    with serve(tmp_path, **DILOCO | {"sites": 2, "rounds": 2}) as server:
        together(*(lambda site=site: train(server.url, tmp_path, reports[site], site) for site in "ab"))
        server.run()
    assert metrics_of(tmp_path) == [{"loss": 2.0}, {"loss": 3.0}]
