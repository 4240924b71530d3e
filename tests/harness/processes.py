"""Processes and ports of tests, as `atoll.testing.run` has them."""

from __future__ import annotations

from atoll.testing.run import PRELOAD, Process, free_port, interruptible, wait_until
from atoll.testing.run import ForkServer as Nursery
from atoll.testing.run import RestartedProcess as Kept

__all__ = ["PRELOAD", "Kept", "Nursery", "Process", "free_port", "interruptible", "wait_until"]
