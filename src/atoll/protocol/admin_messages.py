"""Messages of the admin's operations: pause, resume and stop a run, or let it go back to an earlier version."""

from __future__ import annotations

from pydantic import Field

from atoll.protocol.messages import Count, Message, Shown


class PauseRun(Message):
    """Pause the run, or let it go on. May be repeated."""

    paused: bool = Field(description="true: no round begins; false: the run goes on.")


class StopRun(Message):
    """End the run: it is finished after the present round. May be repeated."""

    now: bool = Field(False, description="End an open round at once, without the updates that it has.")


class RollBack(Message):
    """Let the run go on from an earlier version that the server still has. May be repeated."""

    version: Count


class Controlled(Message):
    """What the operation has led to."""

    paused: bool
    stopping: bool
    version: Count = Field(description="The newest version when the request came.")
    epoch: Count = Field(description="The server's epoch. It rises when the run has gone back.")
    text: Shown = Field(description="What happens now, as a sentence.")
