"""Integrations with other frameworks: `lightning`, `transformers`, `peft`, `nvflare`. Each is imported on first use."""

from __future__ import annotations

from typing import Any

__all__ = ["lightning", "nvflare", "peft", "transformers"]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in __all__:
        return import_module(f"atoll.integrations.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
