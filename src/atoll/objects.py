"""`atoll.objects`: pass nested containers of tensors between processes by reference; `register` adds your own types."""

from __future__ import annotations

from atoll.tensors.custom_types import Stream, register
from atoll.tensors.lazy_tensors import LazyTensor
from atoll.transport.object_client import Publisher, fetch, publish, withdraw

__all__ = ["LazyTensor", "Publisher", "Stream", "fetch", "publish", "register", "withdraw"]
