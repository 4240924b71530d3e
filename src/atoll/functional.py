"""`atoll.functional`: functions with which a script takes part in rounds without a loop over them."""

from __future__ import annotations

from atoll.worker.training.functional_loop import init, is_running, receive, send

__all__ = ["init", "is_running", "receive", "send"]
