"""MLflow: a parent run for the run, with a child run for each site."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from atoll.trackers.base import PointTracker, TrackedRun, require_reachable

MOST_PARAMS, PARAM_CHARS, MOST_METRICS = 100, 500, 1000
"""MLflow's limits of a request: number of parameters, length of a value, number of points."""
DATABASES = ("sqlite:", "postgresql", "mysql", "mssql")
"""Beginnings of the addresses of stores that MLflow opens itself, with packages that its client does not bring."""
LAST = "atoll/round"
"""The last point of a round in each MLflow run: a round that has it is complete there."""


class MLflow(PointTracker):
    """Writes to an MLflow tracking server or store. A restarted server continues the same MLflow runs.

    Args:
        run: the run.
        uri: address of the tracking server or store; empty: MLflow's own default, such as `MLFLOW_TRACKING_URI`.
        experiment: name of the experiment; empty: the run's name.
    """

    module, package = "mlflow", "atoll[mlflow]"

    @classmethod
    def needs(cls, options: Mapping[str, object]) -> dict[str, str]:
        """Return the modules for these options: MLflow's client alone opens no database."""
        uri = str(options.get("uri") or os.environ.get("MLFLOW_TRACKING_URI", ""))
        database = {"sqlalchemy": "mlflow", "alembic": "mlflow"} if uri.startswith(DATABASES) else {}
        return super().needs(options) | database

    def __init__(self, run: TrackedRun, uri: str = "", experiment: str = "") -> None:
        super().__init__(run)
        from mlflow import entities, get_tracking_uri
        from mlflow.tracking import MlflowClient

        uri = uri or get_tracking_uri()
        require_reachable(uri)  # MLflow's own client tries for minutes before it says so
        self._entities, self._client = entities, MlflowClient(uri)
        found = self._client.get_experiment_by_name(experiment or run.name)
        self._experiment = found.experiment_id if found else self._client.create_experiment(experiment or run.name)
        self._runs = dict[str, str]()  # site → id of its MLflow run; "" for the parent
        self._last = dict[str, int]()  # site → the last complete step
        self._ended = ""
        for each in self._known():
            site = each.data.tags.get("atoll.site", "")
            self._runs[site] = each.info.run_id
            self._last[site] = int(each.data.metrics.get(LAST, 0))
            self._ended = each.info.status if not site else self._ended
        if "" not in self._runs:
            self._begin("", run.name)
            params = [entities.Param(key, value[:PARAM_CHARS]) for key, value in run.settings.items()]
            for start in range(0, len(params), MOST_PARAMS):
                self._client.log_batch(self._runs[""], params=params[start : start + MOST_PARAMS])

    def _known(self) -> list[Any]:
        found: list[Any] = []
        token: str | None = ""
        while token is not None:
            page = self._client.search_runs(
                [self._experiment], f"tags.`atoll.run` = '{self.run.id}'", page_token=token or None
            )
            found += page
            token = page.token or None
        return found

    def _begin(self, site: str, name: str) -> None:
        tags = {"atoll.run": self.run.id, "mlflow.runName": name}
        if site:
            tags |= {"atoll.site": site, "mlflow.parentRunId": self._runs[""]}
        self._runs[site] = self._client.create_run(self._experiment, tags=tags).info.run_id

    def write(self, step: int, at_s: float, run: Mapping[str, float], sites: Mapping[str, Mapping[str, float]]) -> None:
        """Write the points of a round: those of the sites first, since those of the run complete it."""
        if self._ended not in ("", "RUNNING"):
            self._ended = ""
            self._set("RUNNING")
        for site, values in {**sites, "": run}.items():
            if site not in self._runs:
                self._begin(site, site)
            if step <= self._last.get(site, 0):  # written before the server was killed
                continue
            told = [*((_allowed(name), value) for name, value in values.items()), (LAST, float(step))]
            points = [self._entities.Metric(name, value, int(at_s * 1000), step) for name, value in told]
            for start in range(0, len(points), MOST_METRICS):
                self._client.log_batch(self._runs[site], metrics=points[start : start + MOST_METRICS])
            self._last[site] = step

    def end(self, failure: str | None) -> None:
        """End the MLflow runs."""
        if failure is not None:
            self._client.set_tag(self._runs[""], "atoll.failure", failure)
        self._set("FINISHED" if failure is None else "FAILED")

    def _set(self, status: str) -> None:
        for run in self._runs.values():
            self._client.update_run(run, status=status)
        self._ended = status


def _allowed(name: str) -> str:
    """Return a metric's name with only what MLflow allows in one."""
    text = "".join(char if char.isalnum() or char in "_-. :/" else "_" for char in name)
    return "/".join(filter(None, (part.strip(".") for part in text.split("/")))) or "_"
