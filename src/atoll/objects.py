"""`atoll.objects`: pass trees of tensors between processes by reference. Register your own types to pass them, too."""

from __future__ import annotations

from atoll.tensors.custom_types import Stream, register
from atoll.tensors.lazy_tensors import LazyTensor
from atoll.transport.object_client import Publisher, fetch, publish, withdraw

__all__ = ["LazyTensor", "Publisher", "Stream", "fetch", "publish", "register", "withdraw"]
