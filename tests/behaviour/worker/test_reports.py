"""`DiLoCo.report`: a value is part of one round, whatever becomes of the update that was to carry it."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.proxy import BEFORE_HEADER, Fault, Proxy
from kit import build_model, local_step, serve, together

import atoll

H = 2
DILOCO: dict[str, Any] = {
    "algorithm.name": "diloco",
    "diloco.sync_every": H,
    "aggregation.upload_codec.name": "none",
    "rounds.sites": 1,
    "rounds.total": 4,
}


def rounds_of(folder: Path) -> list[tuple[int, int, dict[str, float]]]:
    """(fragment, round, metrics) of every line of metrics.jsonl."""
    lines = (folder / "state" / "exports" / "metrics.jsonl").read_text().splitlines()
    return [(line["fragment"], line["round"], line["metrics"]) for line in map(json.loads, lines)]


def train(url: str, folder: Path, *, reports: dict[int, dict[str, float]], site: str = "a") -> None:
    """One site; `reports`: before this local step, these values."""
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with atoll.DiLoCo(model, optimizer, server=url, site=site, folder=folder / "workers") as diloco:
        step = 0
        while not diloco.finished:
            step += 1
            diloco.report(**reports.get(step, {}))
            local_step(model, optimizer, site, step)


@pytest.mark.parametrize("fragments", [1, 2])
def test_counts_a_reported_value_in_one_round(tmp_path: Path, fragments: int) -> None:
    """Of two reports before one synchronisation the last counts; what is reported later comes later."""
    streaming = {"diloco.num_fragments": fragments, "diloco.fragment_sync_delay": 1} if fragments > 1 else {}
    with serve(tmp_path, **DILOCO, **streaming) as server:
        train(server.url, tmp_path, reports={1: {"loss": 9.0, "acc": 0.5}, 2: {"loss": 5.0}, 3: {"loss": 4.0}})
        server.run()
    found = [metrics for _, _, metrics in sorted(rounds_of(tmp_path), key=lambda line: (line[1], line[0])) if metrics]
    if fragments == 1:
        assert [metrics for _, _, metrics in rounds_of(tmp_path)] == [{"loss": 5.0, "acc": 0.5}, {"loss": 4.0}, {}, {}]
    else:  # fragment 0 is due after the first step, fragment 1 after the second, fragment 0 again after the third
        assert found == [{"loss": 9.0, "acc": 0.5}, {"loss": 5.0}, {"loss": 4.0}]


def test_counts_a_value_once_where_the_acknowledgement_was_lost(tmp_path: Path) -> None:
    """The worker does not hear that its first update is in, trains on, and finds out at its next turn."""
    with serve(tmp_path, **DILOCO) as server, Proxy(server.port) as proxy:
        fault = Fault("POST .*/complete ", "down", at=BEFORE_HEADER, action="reset", wait=proxy.cut)
        proxy.faults.append(fault)
        model = build_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with atoll.DiLoCo(
            model, optimizer, server=proxy.url, site="a", folder=tmp_path / "workers", max_sync_retries=0
        ) as diloco:
            diloco.report(loss=5.0)
            step = 0
            while not diloco.finished:
                step += 1
                if step == H + 1:
                    assert fault.reached.is_set()
                    proxy.heal()
                local_step(model, optimizer, "a", step)
            assert diloco.skipped == 1
        server.run()
    assert [metrics for _, _, metrics in rounds_of(tmp_path)] == [{"loss": 5.0}, {}, {}, {}]


def test_counts_a_value_with_the_next_update_where_the_first_was_refused(tmp_path: Path) -> None:
    with serve(tmp_path, **DILOCO | {"rounds.total": 2}, **{"aggregation.max_update_norm": 1e3}) as server:
        model = build_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with atoll.DiLoCo(model, optimizer, server=server.url, site="a", folder=tmp_path / "workers") as diloco:
            diloco.report(loss=5.0)
            with torch.no_grad():
                model[0].weight.fill_(1e4)
            step = 0
            while not diloco.finished:
                step += 1
                local_step(model, optimizer, "a", step)
        assert server.status().refused == 1
        server.run()
    assert [metrics for _, _, metrics in rounds_of(tmp_path)] == [{"loss": 5.0}, {}]


def test_averages_a_round_over_the_sites_that_reported_in_it(tmp_path: Path) -> None:
    """Site a reports in the first round alone: from then on the mean is that of b."""
    with serve(tmp_path, **DILOCO | {"rounds.sites": 2, "rounds.total": 2}) as server:
        together(
            partial(train, server.url, tmp_path, site="a", reports={1: {"loss": 1.0}}),
            partial(train, server.url, tmp_path, site="b", reports={1: {"loss": 3.0}, 3: {"loss": 3.0}}),
        )
        server.run()
    assert [metrics for _, _, metrics in rounds_of(tmp_path)] == [{"loss": 2.0}, {"loss": 3.0}]
