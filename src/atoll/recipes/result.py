"""What came of a recipe."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from atoll.border import bordered
from atoll.protocol.status_messages import RoundSummary, Status


@bordered
@dataclass(frozen=True)
class RunResult:
    """What an execution leaves.

    Attributes:
        model: the result of the run, a safetensors file; None where it lies on another machine.
        history: the rounds, oldest first; of a server that runs elsewhere its last ones.
        finished: whether the run is over; a site may leave a server's run before its end.
        state_dir: the run's state directory; None where it lies on another machine.
        folder: of the run file and the logs; None where nothing was written here.
        status: the last that the server said: clients, bytes, warnings; None of a simulation, and of a run that was
            finished before.
    """

    model: Path | None
    history: list[RoundSummary]
    finished: bool
    state_dir: Path | None
    folder: Path | None
    status: Status | None

    @property
    def metrics(self) -> dict[str, float]:
        """Of the last round, each the mean over the clients that reported it."""
        return dict(self.history[-1].metrics) if self.history else {}
