"""Errors by which a call of a worker breaks off, and that another attempt, or another holder, may mend."""

from __future__ import annotations

from atoll.errors import BadRequest, Busy, DiskFull, Gone, PartCorrupt, ServerUnreachable, TransferStalled

NetworkLost = (ServerUnreachable, TransferStalled, Busy, DiskFull)
"""What may pass by itself: asked again, after a pause."""

UNPULLED = (*NetworkLost, Gone, PartCorrupt, BadRequest)
"""What a pull from a worker of a swarm may end with; another one may have the same."""
