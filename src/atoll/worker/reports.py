"""Numbers that a training loop reports: each report is part of one update that counts."""

from __future__ import annotations

from collections.abc import Mapping


class Reports:
    """Values by name, from `DiLoCo.report` to the update that carries them.

    Attributes:
        newest: every value that was reported last, for the status.
    """

    def __init__(self) -> None:
        self.newest: dict[str, float] = {}
        self._waiting: dict[str, float] = {}
        self._carried: dict[int, dict[str, float]] = {}

    def add(self, finite: Mapping[str, float], named: Mapping[str, float]) -> None:
        """Keep what was reported until an update takes it.

        Args:
            finite: the values that may travel.
            named: all that were reported: an earlier value of such a name is no longer true.
        """
        self.newest = {name: value for name, value in self.newest.items() if name not in named} | dict(finite)
        self._waiting = {name: value for name, value in self._waiting.items() if name not in named} | dict(finite)

    def take(self, fragment: int, *, is_lost: bool) -> dict[str, float]:
        """Give the next update of a fragment what no update has carried.

        Args:
            is_lost: whether the last update of this fragment never counts: what it carried is given again.
        """
        carried = self._carried.pop(fragment, {}) if is_lost else {}
        self._carried[fragment], self._waiting = carried | self._waiting, {}
        return dict(self._carried[fragment])
