"""The values of NVFlare's Client API, for scripts that run without NVFlare."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Any

from atoll.errors import UsageError


class ParamsType(StrEnum):
    """What `FLModel.params` are: a whole model, or its difference from the received one."""

    FULL = "FULL"
    DIFF = "DIFF"


class AnalyticsDataType(Enum):
    """Kind of a value that is logged. Atoll sends the numbers: SCALAR, SCALARS, METRIC and METRICS."""

    SCALARS = "SCALARS"
    SCALAR = "SCALAR"
    IMAGE = "IMAGE"
    TEXT = "TEXT"
    LOG_RECORD = "LOG_RECORD"
    PARAMETER = "PARAMETER"
    PARAMETERS = "PARAMETERS"
    METRIC = "METRIC"
    METRICS = "METRICS"
    MODEL = "MODEL"
    TAG = "TAG"
    TAGS = "TAGS"
    INIT_DATA = "INIT_DATA"


@dataclass
class FLModel:
    """A model on its way between server and script, as in NVFlare.

    Attributes:
        params_type: what `params` are; FULL by default, None without `params`.
        params: name → tensor or array.
        optimizer_params: not sent.
        metrics: name → number. They count as metrics of the received model.
        start_round: 0.
        current_round: number of the round, from 0; None in a task that is not training.
        total_rounds: number of rounds of the run; None: until it is stopped.
        meta: `NUM_STEPS_CURRENT_ROUND` is the weight of the update.
    """

    params_type: ParamsType | str | None = None
    params: Any = None
    optimizer_params: Any = None
    metrics: dict[str, Any] | None = None
    start_round: int | None = 0
    current_round: int | None = None
    total_rounds: int | None = None
    meta: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.params_type is not None and self.params is None:
            raise UsageError(f"FLModel has params_type {self.params_type!r}, but no params.", "Give params, too.")
        if self.params_type is not None or self.params is not None:
            try:
                self.params_type = ParamsType(self.params_type or ParamsType.FULL)
            except ValueError:
                raise UsageError(f"params_type is {self.params_type!r}.", "Use FULL or DIFF.") from None
        self.meta = {} if self.meta is None else self.meta
