"""The metrics in an update: what the script measured on the global model, and what it gave to `DiLoCo.report`.

    pull version v  ->  metrics() of v  ->  H local steps  ->  update of v, with these metrics

The server records an update's metrics for the version of the global model that the update was trained from. So the
metrics must be measured on that version, before the local steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from atoll.tensors.module_tensors import Tensors
from atoll.worker.arguments import finite_metrics
from atoll.worker.exchange import apply_version
from atoll.worker.exchange.base_and_outbox import BaseFile


class Reports:
    """The values that the script gave to `DiLoCo.report`, by name. A value is kept until an update includes it.

    Attributes:
        newest: the last reported value of each name, to be shown in the server's status.
    """

    def __init__(self) -> None:
        self.newest: dict[str, float] = {}
        self._waiting: dict[str, float] = {}
        self._carried: dict[int, dict[str, float]] = {}

    def add(self, finite: Mapping[str, float], named: Mapping[str, float]) -> None:
        """Keep the values of one report until an update includes them.

        Args:
            finite: the finite values of this report.
            named: all values of this report, including those that are not finite. Values of earlier reports with these
                names are dropped.
        """
        self.newest = {name: value for name, value in self.newest.items() if name not in named} | dict(finite)
        self._waiting = {name: value for name, value in self._waiting.items() if name not in named} | dict(finite)

    def take(self, fragment: int, *, is_lost: bool) -> dict[str, float]:
        """Return the reported values that no earlier update has included, for a fragment's next update.

        Args:
            fragment: the fragment's number.
            is_lost: whether the fragment's last update is lost. If so, the values that it included are returned again.
        """
        carried = self._carried.pop(fragment, {}) if is_lost else {}
        self._carried[fragment], self._waiting = carried | self._waiting, {}
        return dict(self._carried[fragment])


MetricsFunction = Callable[[], dict[str, float]]


class GlobalModelMetrics:
    """The metrics of the newest version of the global model, measured by a function of the user's script.

    Args:
        ask: the script's function. It returns the metrics of the model's current weights. If None, nothing is measured.
        site: function that returns the site's name, for warnings.
        on_sync: the script's function for each new version, called while the model has the global values; None: none.
    """

    def __init__(
        self, ask: MetricsFunction | None, site: Callable[[], str], on_sync: Callable[[], object] | None = None
    ) -> None:
        self._ask, self._site, self._on_sync = ask, site, on_sync
        self._digest: str | None = None
        self._metrics: dict[str, float] = {}
        self._not_finite: set[str] = set()  # names that a warning was logged for, until their value is finite

    def measure(self, parts: Sequence[tuple[Tensors, BaseFile]], *, local: bool) -> None:
        """Measure the global model: call the script's function while the model holds the newest global values.

        For this, the newest version of each fragment is loaded into the model, and the local values are copied back
        afterwards. If the model has one fragment and `local` is False, the model equals the global model already, and
        nothing is loaded.

        Args:
            parts: for each fragment, the model's own tensors and the file of the fragment's newest version.
            local: whether the tensors may differ from the newest version.
        """
        if self._ask is None and self._on_sync is None:
            return
        single = parts[0][1].note if len(parts) == 1 else None
        self._digest = single.digest if single is not None else None  # None: several fragments were measured
        if self._digest is not None and not local:
            self._look()
            return
        originals = [{name: tensor.clone() for name, tensor in tensors.items()} for tensors, _ in parts]
        try:
            for tensors, base in parts:
                apply_version.load_(tensors, base)
            self._look()
        finally:
            for (tensors, _), before in zip(parts, originals, strict=True):
                for name, tensor in tensors.items():
                    tensor.copy_(before[name])

    def _look(self) -> None:
        """Call the script's functions: the model has the global values."""
        if self._ask is not None:
            self._metrics = finite_metrics(self._ask(), self._site(), self._not_finite)
        self.on_result()

    def on_result(self) -> None:
        """Call the script's function for each new version: the model has the run's result, or the global values."""
        if self._on_sync is not None:
            self._on_sync()

    def credit(self, metrics: dict[str, float], digest: str) -> None:
        """Add metrics that a framework, such as Lightning, has measured on the version with this digest."""
        earlier = self._metrics if self._digest == digest else {}
        self._metrics = earlier | finite_metrics(metrics, self._site(), self._not_finite)
        self._digest = digest

    def of(self, digest: str) -> dict[str, float]:
        """Return the metrics that were measured on the version with this digest, for an update trained from it.

        Return an empty dict if another version was measured.
        """
        return dict(self._metrics) if self._digest in (None, digest) else {}
