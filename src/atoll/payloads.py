"""`atoll.payloads`: let types of your own travel in tasks, answers and references; docs/tasks.md has two examples."""

from __future__ import annotations

from atoll.tensors.kinds import Stream, register
from atoll.tensors.lazy import LazyTensor

__all__ = ["LazyTensor", "Stream", "register"]
