"""`atoll.functional`: the rounds of a run as functions, for scripts that have no loop over rounds."""

from __future__ import annotations

from atoll.worker.training.functional_loop import init, is_running, receive, send

__all__ = ["init", "is_running", "receive", "send"]
