"""trackio: one trackio run for the run, with the curves of its sites beside its own."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

from atoll.trackers.base import PointTracker, TrackedRun, in_one

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
LOG = logging.getLogger("atoll.server")


class Trackio(PointTracker):
    """Writes to trackio, which `trackio show` shows. A restarted server continues the same trackio run.

    Args:
        run: the run.
        project: name of the project.
        space_id: Space of the Hugging Face Hub for the dashboard; empty: this machine, in `TRACKIO_DIR`.
        server_url: address of a trackio server of your own; its token is in `TRACKIO_WRITE_TOKEN`.
    """

    module, package = "trackio", "atoll[trackio]"

    def __init__(self, run: TrackedRun, project: str = "atoll", space_id: str = "", server_url: str = "") -> None:
        super().__init__(run)
        import trackio

        for module in (trackio, trackio.run, trackio.utils):  # its lines on standard output become lines of the log
            module.print = _log
        self._run = trackio.init(
            project=project,
            name=f"{run.name}-{run.id[:8]}",
            resume="allow",
            space_id=space_id or None,
            server_url=server_url or None,
            config=dict(run.settings),
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )
        self._last = getattr(self._run, "_next_step", 0) - 1  # trackio tells it nowhere else

    def write(self, step: int, at_s: float, run: Mapping[str, float], sites: Mapping[str, Mapping[str, float]]) -> None:
        """Write the points of a round, unless a server that was killed has written them."""
        if step > self._last:
            self._run.log(in_one(run, sites), step=step)

    def close(self) -> None:
        """Write what is left."""
        self._run.finish()


def _log(*texts: Any, **_: Any) -> None:
    LOG.info("trackio: %s", _COLOUR.sub("", " ".join(map(str, texts))).strip("* "))
