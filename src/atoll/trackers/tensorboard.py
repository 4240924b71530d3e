"""TensorBoard: curves of the run and its sites, as event files in `exports/tensorboard`."""

from __future__ import annotations

from collections.abc import Mapping

from atoll.trackers.base import PointTracker, TrackedRun, in_one


class TensorBoard(PointTracker):
    """Writes event files, which `tensorboard --logdir FOLDER` shows.

    Args:
        run: the run.
        folder: folder of the event files; empty: `tensorboard` in the folder of exports.
    """

    module, package = "tensorboard", "atoll[tensorboard]"

    def __init__(self, run: TrackedRun, folder: str = "") -> None:
        super().__init__(run)
        from torch.utils.tensorboard import SummaryWriter

        # points that a killed server wrote, but did not note, are hidden by purge_step, and come again
        path = folder or str(run.folder / "tensorboard")
        self._writer = SummaryWriter(path, purge_step=self.step + 1)
        if not self.step:
            rows = [f"|{key}|{value.replace('|', chr(92) + '|')}|" for key, value in run.settings.items()]
            self._writer.add_text("settings", "\n".join(["|setting|value|", "|---|---|", *rows]), 0)

    def write(self, step: int, at_s: float, run: Mapping[str, float], sites: Mapping[str, Mapping[str, float]]) -> None:
        """Write the points of a round."""
        for name, value in in_one(run, sites).items():
            self._writer.add_scalar(name, value, step, walltime=at_s)
        self._writer.flush()

    def close(self) -> None:
        """Close the files."""
        self._writer.close()
