"""Metrics of global versions, and numbers that a training loop reports: each is part of one update that counts.

    pull version v  ->  metrics() of v  ->  H local steps  ->  update of v, with these metrics

The server credits an update's metrics to the version that the update starts from, so they have to be measured there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from atoll.tensors.module_tensors import Tensors
from atoll.worker.arguments import finite_metrics
from atoll.worker.exchange import apply_version
from atoll.worker.exchange.base_and_outbox import VersionFile


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


Metrics = Callable[[], dict[str, float]]


class Measured:
    """What a function of the script says of the newest global version.

    Args:
        ask: the function; None: nothing is measured.
        site: for warnings.
    """

    def __init__(self, ask: Metrics | None, site: Callable[[], str]) -> None:
        self._ask, self._site = ask, site
        self._digest: str | None = None
        self._metrics: dict[str, float] = {}
        self._not_finite: set[str] = set()  # that was said

    def look_at(self, parts: Sequence[tuple[Tensors, VersionFile]], *, local: bool) -> None:
        """Ask, with the newest versions of all fragments in the model; what is local is copied and put back behind it.

        Args:
            parts: the model's own tensors of each fragment, and its version.
            local: whether they hold local progress. If not, a single fragment is the global model as it is.
        """
        if self._ask is None:
            return
        single = parts[0][1].note if len(parts) == 1 else None
        self._digest = single.digest if single is not None else None  # None: of versions of several fragments
        if self._digest is not None and not local:
            self._metrics = finite_metrics(self._ask(), self._site(), self._not_finite)
            return
        kept = [{name: tensor.clone() for name, tensor in tensors.items()} for tensors, _ in parts]
        try:
            for tensors, base in parts:
                apply_version.load_(tensors, base)
            self._metrics = finite_metrics(self._ask(), self._site(), self._not_finite)
        finally:
            for (tensors, _), before in zip(parts, kept, strict=True):
                for name, tensor in tensors.items():
                    tensor.copy_(before[name])

    def credit(self, metrics: dict[str, float], digest: str) -> None:
        """Numbers that a framework measured by itself of the version with this digest."""
        earlier = self._metrics if self._digest == digest else {}
        self._metrics = earlier | finite_metrics(metrics, self._site(), self._not_finite)
        self._digest = digest

    def of(self, digest: str) -> dict[str, float]:
        """For an update from the version with this digest; empty where another one was measured."""
        return dict(self._metrics) if self._digest in (None, digest) else {}
