"""`atoll.payloads`: let types of your own travel in tasks, answers and references; docs/tasks.md has two examples."""

from __future__ import annotations

from atoll.tensors.custom_types import Stream, register
from atoll.tensors.lazy_tensors import LazyTensor

__all__ = ["LazyTensor", "Stream", "register"]
