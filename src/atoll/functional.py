"""`atoll.functional`: functions for scripts that take part in rounds without a loop over the rounds."""

from __future__ import annotations

from atoll.worker.training.functional_loop import init, is_running, receive, send

__all__ = ["init", "is_running", "receive", "send"]
