"""Weights & Biases: one W&B run for the run, with the curves of its sites beside its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from atoll.trackers.base import PointTracker, TrackedRun, in_one


class WandB(PointTracker):
    """Writes to W&B. A restarted server continues the same W&B run: its id is that of the run.

    Args:
        run: the run.
        project: name of the project.
        entity: user or team that the run belongs to; empty: W&B's default.
        mode: "online", or "offline" to write files for `wandb sync` into `exports/wandb`; empty: as `WANDB_MODE` says.
    """

    module, package = "wandb", "atoll[wandb]"

    def __init__(
        self, run: TrackedRun, project: str = "atoll", entity: str = "", mode: Literal["", "online", "offline"] = ""
    ) -> None:
        super().__init__(run)
        import wandb

        run.folder.mkdir(parents=True, exist_ok=True)
        quiet = wandb.Settings(console="off", silent=True)
        wandb.setup(settings=quiet)  # else a missing key would be asked for on the terminal, again and again
        self._run = wandb.init(
            project=project,
            entity=entity or None,
            id=run.id,
            name=run.name,
            resume="allow",
            mode=mode or None,
            dir=str(run.folder),
            config=dict(run.settings),
            settings=quiet,
        )

    def write(self, step: int, at_s: float, run: Mapping[str, float], sites: Mapping[str, Mapping[str, float]]) -> None:
        """Write the points of a round. W&B itself drops those of a step that it already has."""
        self._run.log({**in_one(run, sites), "_timestamp": at_s}, step=step, commit=True)

    def end(self, failure: str | None) -> None:
        """Note in the summary how the run has ended."""
        self._run.summary["atoll/end"] = "finished" if failure is None else f"failed: {failure}"

    def close(self) -> None:
        """Upload or write what is left."""
        self._run.finish()
