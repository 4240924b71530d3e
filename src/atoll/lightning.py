"""`atoll.lightning`: the integration of Lightning, under the name that users import."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from atoll.integrations import lightning as _lightning
from atoll.integrations.lightning import evaluates, is_running, patch, rounds

if TYPE_CHECKING:
    from atoll.integrations.lightning_callback import AtollCallback

__all__ = ["AtollCallback", "evaluates", "is_running", "patch", "rounds"]


def __getattr__(name: str) -> Any:
    if name == "AtollCallback":
        return _lightning.AtollCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
