"""NVFlare's writers. The last number under each name is sent with the next update, and is in the server's trackers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from atoll.integrations.nvflare import AnalyticsDataType, log


class SummaryWriter:
    """Takes numbers as TensorBoard's writer does."""

    def __init__(self, ctx: object = None) -> None: ...

    def add_scalar(self, tag: str, scalar: float, global_step: int | None = None, **kwargs: Any) -> None:
        """Log a number. It is sent under its tag; the step is not sent."""
        log(tag, scalar, AnalyticsDataType.SCALAR, global_step=global_step)

    def add_scalars(
        self, tag: str, scalars: Mapping[str, float], global_step: int | None = None, **kwargs: Any
    ) -> None:
        """Log several numbers. Each is sent under `tag/name`."""
        log(tag, scalars, AnalyticsDataType.SCALARS, global_step=global_step)

    def flush(self) -> None:
        """Do nothing: the numbers travel with the next update."""


class WandBWriter:
    """Takes numbers as W&B's `log` does."""

    def __init__(self, ctx: object = None) -> None: ...

    def log(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log numbers by name. The step is not sent."""
        log("metrics", metrics, AnalyticsDataType.METRICS, global_step=step)


class MLflowWriter:
    """Takes values as MLflow does. Numbers of metrics are sent; parameters, texts and tags are not."""

    def __init__(self, ctx: object = None) -> None: ...

    def log_metric(self, key: str, value: float, step: int | None = None) -> None:
        """Log a number. The step is not sent."""
        log(key, value, AnalyticsDataType.METRIC, global_step=step)

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log numbers by name. The step is not sent."""
        log("metrics", metrics, AnalyticsDataType.METRICS, global_step=step)

    def log_param(self, key: str, value: Any) -> None:
        """Warn, once, that parameters are not sent."""
        log(key, value, AnalyticsDataType.PARAMETER)

    def log_params(self, values: Mapping[str, Any]) -> None:
        """Warn, once, that parameters are not sent."""
        log("params", values, AnalyticsDataType.PARAMETERS)

    def log_text(self, text: str, artifact_file_path: str) -> None:
        """Warn, once, that texts are not sent."""
        log(artifact_file_path, text, AnalyticsDataType.TEXT)

    def set_tag(self, key: str, tag: Any) -> None:
        """Warn, once, that tags are not sent."""
        log(key, tag, AnalyticsDataType.TAG)

    def set_tags(self, tags: Mapping[str, Any]) -> None:
        """Warn, once, that tags are not sent."""
        log("tags", tags, AnalyticsDataType.TAGS)
