"""`atoll.functional`: federated rounds as plain functions, for scripts that cannot use a loop over `atoll.join`."""

from __future__ import annotations

from atoll.worker.training.functional_loop import init, is_running, receive, send, skip, state

__all__ = ["init", "is_running", "receive", "send", "skip", "state"]
