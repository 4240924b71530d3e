"""Metrics that a site reports: of which update they are part, and of which version they are said."""

from __future__ import annotations

import math
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.proxy import BEFORE_HEADER, Fault, Proxy
from kit import SITES, build_model, diloco, exported, serve, take_steps, tensors_digest, together
from kit.servers import plain_server
from torch import nn

import atoll
from atoll.testing.run import history

H = 2
DILOCO: dict[str, Any] = {"algorithm": "diloco", "H": H, "codec": "none", "sites": 1, "rounds": 4}


def metrics_of(folder: Path) -> list[dict[str, float]]:
    """Of each round, in their order."""
    return [line["metrics"] for line in history(folder / "state")]


# -- `DiLoCo.report`: a value is part of one round, whatever becomes of the update that was to carry it


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
def test_a_reported_value_counts_once(
    tmp_path: Path, streaming: dict[str, int], expected: list[dict[str, float]]
) -> None:
    """A value that a DiLoCo loop reports counts in one round."""
    # Of several reports before a synchronisation, the last counts. With fragments, the value counts in the next
    # fragment's round.
    with serve(tmp_path, **DILOCO, **streaming) as server:
        train(server.url, tmp_path, {1: {"loss": 9.0, "acc": 0.5}, 2: {"loss": 5.0}, 3: {"loss": 4.0}})
        server.run()
    lines = sorted(history(tmp_path / "state"), key=lambda line: (line["round"], line["fragment"]))
    assert [line["metrics"] for line in lines if line["metrics"]] == [each for each in expected if each]
    assert streaming or metrics_of(tmp_path) == expected


def test_a_value_counts_once_after_an_outage(tmp_path: Path) -> None:
    """If the acknowledgement of an update is lost, its reported value still counts in one round only.

    The worker does not learn that its first update is in, trains on, and finds out at its next turn.
    """
    with serve(tmp_path, **DILOCO) as server, Proxy(server.port) as proxy:
        fault = Fault("PUT .*/parts/0 ", "down", at=BEFORE_HEADER, action="reset", wait=proxy.cut)
        proxy.faults.append(fault)

        def during(step: int) -> None:
            if step == H + 1:
                assert fault.reached.wait(60)  # the cut ends connections before it counts as reached
                proxy.heal()

        with diloco(proxy.url, tmp_path, max_sync_retries=0) as loop:
            loop.report(loss=5.0)
            take_steps(loop, during=during)
            assert loop.skipped == 1
        server.run()
    assert metrics_of(tmp_path) == [{"loss": 5.0}, {}, {}, {}]


@pytest.mark.parametrize("later", [{}, {"loss": 4.0}], ids=["alone", "and a newer one"])
def test_a_refused_updates_metrics_count_later(tmp_path: Path, later: dict[str, float]) -> None:
    """If an update is refused, its reported values count with the next update. A newer report of the same name takes
    its place.
    """
    with serve(tmp_path, **DILOCO | {"rounds": 2}, **{"aggregation.max_update_norm": 1e3}) as server:
        with diloco(server, tmp_path) as loop:
            loop.report(loss=5.0, acc=0.5)
            nn.init.constant_(next(loop.model.parameters()), 1e4)
            take_steps(loop, during=lambda step: loop.report(**later if step == H + 1 else {}))
        assert server.status().refused == 1
        server.run()
    assert metrics_of(tmp_path) == [{"loss": 5.0, "acc": 0.5} | later, {}]


def test_a_round_averages_its_reports(tmp_path: Path) -> None:
    """A round's metric is the mean over the sites that reported it in this round."""
    # Site `a` reports only in the first round. From then on, the mean is that of `b`.
    reports = {"a": {1: {"loss": 1.0}}, "b": {1: {"loss": 3.0}, 3: {"loss": 3.0}}}
    with serve(tmp_path, **DILOCO | {"sites": 2, "rounds": 2}) as server:
        together(*(lambda site=site: train(server.url, tmp_path, reports[site], site) for site in "ab"))
        server.run()
    assert metrics_of(tmp_path) == [{"loss": 2.0}, {"loss": 3.0}]


@pytest.mark.covers("L14")
def test_a_reported_nan_loss_causes_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If a site reports a loss of NaN, the log warns once with the site, and the round has no loss."""
    # Otherwise, the last finite loss would stand for the update: 0.75 counts in no round.
    losses = [1.0, 0.5, 0.75, math.nan]
    with serve(tmp_path, **DILOCO | {"rounds": 2}) as server, diloco(server, tmp_path, "box-a") as loop:
        take_steps(loop, during=lambda step: loop.report(loss=losses[step - 1], accuracy=0.25))
        assert [line.metrics for line in server.status().history] == [
            {"loss": 0.5, "accuracy": 0.25},
            {"accuracy": 0.25},
        ]
    assert caplog.text.count("box-a: the metric 'loss' is nan, so it is not reported") == 1


class Strict(torch.Tensor):
    """Not to be asked for its value while it requires a gradient: torch warns of that once in a process."""

    def __float__(self) -> float:
        assert not self.requires_grad
        return super().__float__()


@pytest.mark.covers("L15")
def test_metrics_that_are_not_finite_are_omitted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If a metric of a site is not finite, the site warns and leaves it out."""
    # Its other metrics arrive. Guards against a NaN that is passed on, for which the server refused the update.
    loss = torch.ones((), requires_grad=True).as_subclass(Strict) * 0.25
    assert loss.requires_grad
    with plain_server(tmp_path, nn.Linear(2, 1), rounds=1) as server:
        with atoll.join(server.url, site="a", folder=tmp_path / "w") as worker:
            for fl_round in worker:
                metrics = {"loss": math.nan, "accuracy": 0.5, "of-torch": loss}
                fl_round.submit(fl_round.load_into(nn.Linear(2, 1)), metrics=metrics)
        assert server.status().history[0].metrics == {"accuracy": 0.5, "of-torch": 0.25}
    assert "the metric 'loss' is nan, so it is not reported" in caplog.text


# -- `DiLoCo(metrics=...)` measures global versions, and the server credits the numbers to those versions


def norm(model: nn.Module) -> float:
    """A number that no two versions have in common."""
    return sum(float(each.detach().double().square().sum()) for each in model.parameters())


class Run:
    """A DiLoCo run of two sites; a hook measures the model that it sees.

    Attributes:
        seen: site → digests of the models that the hook saw, in order.
        values: site → what it said of them.
        status: of the server, at the end.
    """

    def __init__(self, folder: Path, *, measures: bool = True, **settings: Any) -> None:
        self._folder, self._measures = folder, measures
        self.seen: defaultdict[str, list[str]] = defaultdict(list)
        self.values: defaultdict[str, list[float]] = defaultdict(list)
        with serve(folder, **DILOCO | {"H": 3, "sites": 2} | settings) as server:
            together(*(partial(self._work, server.url, site) for site in SITES))
            server.run()
            self.status = server.status()
        self.result = tensors_digest(exported(folder))

    def _work(self, url: str, site: str) -> None:
        def measure() -> dict[str, float]:
            self.seen[site].append(tensors_digest(loop.model.state_dict()))
            self.values[site].append(norm(loop.model))
            return {"norm": self.values[site][-1]}

        metrics = measure if self._measures else None
        loop = diloco(url, self._folder, site, metrics=metrics, weight=SITES[site])
        with loop:
            take_steps(loop, site=site)


@pytest.mark.covers("X41")
@pytest.mark.parametrize(
    "settings", [{}, {"tau": 1, "alpha": 0.0}, {"tau": 1, "alpha": 0.5}], ids=["whole", "overlap", "mixed"]
)
def test_metrics_belong_to_the_measured_version(tmp_path: Path, settings: dict[str, Any]) -> None:
    """The metrics that a site measures belong to the version that it measured, so that the best version is the right
    one.
    """
    run = Run(tmp_path, **{"rounds.best_metric": "norm", "rounds.best_mode": "max"}, **settings)
    a, b = (run.seen[site] for site in SITES)
    assert a == b  # both saw the same global versions
    assert len(set(a)) == len(a) == DILOCO["rounds"]
    assert a[0] == tensors_digest(build_model().state_dict())
    assert run.result not in a  # the result of the last round is not trained from
    values = run.values["a"]
    assert [metrics["norm"] for metrics in metrics_of(tmp_path)] == pytest.approx(values, rel=1e-12)
    best = run.status.best
    assert (best.version, best.value) == (values.index(max(values)), pytest.approx(max(values), rel=1e-12))


def test_metrics_with_fragments_measure_the_global_model(tmp_path: Path) -> None:
    """In a run with fragments, a site measures the global model, and the measurement does not change the result."""
    settings: dict[str, Any] = {"K": 3, "tau": 0, "alpha": 0.5}
    run = Run(tmp_path / "measured", **settings)
    a, b = (run.seen[site] for site in SITES)
    assert a == b
    assert len(set(a)) == len(a)
    assert Run(tmp_path / "plain", measures=False, **settings).result == run.result


def test_metrics_are_not_sent_with_carried_steps(tmp_path: Path) -> None:
    """If a site's local steps are added to a newer version, its update has no metric, because the site never had that
    version alone.
    """
    settings = DILOCO | {"sites": 2, "rounds.quorum": 1, "rounds.deadline_s": 0.2}
    with serve(tmp_path, **settings) as server:
        late, early = (diloco(server, tmp_path, site, metrics=lambda site=site: {f"of_{site}": 1.0}) for site in "ba")
        with late:  # it has version 0
            with early:
                take_steps(early, 4, "a")
            take_steps(late, 4, "b")
        assert server.status().version == 4
    assert metrics_of(tmp_path) == [{"of_a": 1.0}, {"of_a": 1.0}, {}, {"of_b": 1.0}]
