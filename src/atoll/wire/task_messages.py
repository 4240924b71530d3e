"""The messages of tasks: what a workflow asks of a site, and what the site answers."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from atoll.sizes import MOST_CHUNK_BYTES
from atoll.wire.messages import Count, Hex16, Hex32, Message, Text

TaskName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}$")]
"""`train`, `validate`, `submit_model`, or a name of the user's own."""


Chunk = Annotated[int, Field(ge=0, le=MOST_CHUNK_BYTES)]


class ObjectKey(Message):
    """An object at this server, for who may pull it."""

    object: Hex16
    secret: Hex16
    digest: Hex32
    expires_at: Count = Field(description="Seconds since 1970.")


class Body(Message):
    """A payload: as JSON where it is small and has no tensors, else as an object. Exactly one of the two."""

    plain: str | None = Field(None, description="The payload as JSON text.")
    object: ObjectKey | None = None


class TaskRequest(Message):
    """Ask for the next open task of this site; waits up to `wait_s` for one."""

    wait_s: float = Field(0.0, ge=0, le=20.0)
    rounds: bool = Field(False, description="This process takes part in rounds, too: it is told when they begin.")
    besides: Hex16 | None = Field(None, description="A task that the site has in hand: the next other one is wanted.")


class Task(Message):
    task: Hex16 = Field(description="Id of the task, one for all its sites.")
    name: TaskName
    streamed: bool = Field(description="Whether tensors of the answer are to be streamed rather than sent inline.")
    tensor_chunk_bytes: Chunk = Field(description="Of a part of torch tensors in it; 0: they go inline all the same.")
    np_chunk_bytes: Chunk = Field(description="Of a part of NumPy arrays.")
    body: Body


class TaskReply(Message):
    status: Literal["task", "wait", "finished", "rounds"] = Field(
        description="finished: the last workflow has ended; rounds: training goes on, for who takes part in it."
    )
    task: Task | None = None


class TaskAnswer(Message):
    """What a site answers: a payload, or the error that it failed with."""

    body: Body | None = None
    error: Text | None = None
