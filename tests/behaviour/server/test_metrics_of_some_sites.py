"""The mean of a metric is over the sites that reported it, by the weights of their updates."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from kit import build_model, serve, together

import atoll

REPORTS: dict[str, tuple[float, dict[str, float]]] = {  # site → weight, metrics
    "a": (1.0, {"loss": 8.0, "accuracy": 0.25}),
    "b": (2.0, {"loss": 5.0}),
    "c": (5.0, {"accuracy": 0.75, "auc": 0.5}),
}


def work(url: str, folder: Path, site: str) -> None:
    weight, metrics = REPORTS[site]
    model = build_model()
    with atoll.join(url, site=site, folder=folder / "workers") as worker:
        for fl_round in worker:
            fl_round.load_into(model)
            fl_round.submit(model, weight=weight, metrics=metrics)


@pytest.mark.covers("L15")
def test_the_mean_of_a_metric_is_over_the_sites_that_reported_it(tmp_path: Path) -> None:
    with serve(tmp_path, **{"rounds.sites": 3, "rounds.min_sites": 3, "rounds.total": 1}) as server:
        together(*(partial(work, server.url, tmp_path, site) for site in REPORTS))
        server.run()
        (round_,) = server.status().history
    # loss: (1·8 + 2·5) / (1 + 2) = 6;  accuracy: (1·0.25 + 5·0.75) / (1 + 5) = 4/6;  auc: one site's
    assert round_.metrics == {"loss": pytest.approx(6.0), "accuracy": pytest.approx(2 / 3), "auc": 0.5}
    assert round_.counts == {"loss": 2, "accuracy": 2, "auc": 1}
    assert round_.weights == [1.0, 2.0, 5.0]
    assert round_.total_weight is None, "no reducer needs it, so that it is not kept"
