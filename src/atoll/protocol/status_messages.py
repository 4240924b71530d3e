"""Typed messages of a run's status."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from atoll.protocol.messages import Count, Message

KEPT = "status.json"
"""File in the state directory with the last saved status.

The server saves the status when it begins, when the run is finished, and when the server ends.
"""


class WorkerStatus(Message):
    """The status of one site: its newest process, its progress and its traffic."""

    site: str
    host: str = ""
    state: str = Field("", description="alive, dead, left or failed")
    doing: str = ""
    joined_at: str = ""
    last_heartbeat_s: float = Field(0.0, description="Seconds since it was heard of, or since the server restarted.")
    heard: bool = Field(True, description="Whether it was heard of since the server restarted.")
    step: Count = 0
    steps_per_s: float = 0.0
    rounds: Count = Field(0, description="Updates of it that counted.")
    version: Count = 0
    staleness: Count = Field(0, description="Rounds that the head is ahead of it.")
    local_steps: Count = Field(0, description="That it takes between two synchronisations under DyLU; 0: all the same.")
    bytes_up: Count = Field(0, description="That the server has received from it since it was started.")
    bytes_down: Count = Field(0, description="That it has sent it since.")
    gradient_bytes: Count = Field(
        0, description="Gradients of the local steps in the updates of it that were accepted since."
    )
    retries: Count = 0
    reconnections: Count = 0
    metrics: dict[str, float] = Field(default_factory=dict)
    labels: dict[str, str] = Field(default_factory=dict)
    error: str = ""


class Missing(Message):
    """A site that a round waits for."""

    site: str
    for_s: float = Field(description="Seconds that the round has waited for it.")


class RoundSummary(Message):
    """A round that has led to a version: its updates, ordered by site, and their metrics."""

    fragment: Count
    round: Count
    version: Count
    workers: list[str]
    weights: list[float]
    metrics: dict[str, float] = Field(description="Mean by weight over those that reported the key.")
    counts: dict[str, Count] = Field(description="How many reported it.")
    seconds: float
    grad_norm: float | None = Field(
        None, description="L2 norm of what the round reduced its updates to, before the outer step; null: not finite."
    )
    bytes_up: Count
    staleness: list[Count] = Field(
        default_factory=list, description="Of each update: versions between its base and the one it was applied to."
    )
    expected: Count = Field(
        0, description="Updates that the round has when no site of the run is missing; 0: an asynchronous step."
    )
    population: Count = Field(0, description="Workers that had ever joined when the round closed.")
    total_weight: float | None = Field(
        None,
        description="The weight of all of them together, those not heard at the mean; null: no reducer needs it.",
    )
    aggregator: str = Field("", description="The worker of a swarm that reduced it; empty: the server did.")
    checker: str = Field("", description="The worker that checked the version before it became the head.")


class PlaceStatus(Message):
    """The workers that aggregate, check and hold a fragment of a swarm."""

    aggregator: str = Field(description="The worker that reduces the round; empty if none can.")
    checker: str = Field(description="The worker that checks the next version.")
    holders: list[str] = Field(description="Workers that have the newest version and the outer state beside it.")
    collected: list[str] = Field(description="Workers with an update that the aggregating worker has.")


class FragmentStatus(Message):
    """The status of one fragment: its head version, and the sites that its round waits for."""

    fragment: Count
    version: Count
    phase: str
    waiting_for: list[Missing]
    reason: str
    place: PlaceStatus | None = Field(None, description="In a swarm: the worker that aggregates.")


class BestStatus(Message):
    """The best version so far, by the setting `best_metric`."""

    metric: str
    mode: Literal["max", "min"]
    version: Count | None = Field(None, description="Null: no round has reported the metric yet.")
    round: Count | None = Field(None, description="The round of the workers that pulled and measured it.")
    value: float | None = None
    stale: Count = Field(0, description="Measurements since the last improvement, by `early_stop_min_delta`.")
    file: str = Field("", description="Where the server keeps it; empty while it is not written.")


class TaskStatus(Message):
    """A task that a workflow has sent. A payload travels streamed, inline, or skipped (it has no tensors)."""

    number: Count = Field(description="From 1 on, since the server was started.")
    name: str
    way: str = Field(description="How its payload travels, once for each site.")
    sites: list[str]
    missing: list[str] = Field(description="Sites that have not answered.")
    answers: dict[str, Count] = Field(description="How many answers came in each way; failed: errors.")
    open: bool
    seconds: float


class WorkflowStatus(Message):
    """The status of one workflow of a run."""

    name: str
    kind: str = Field(description="train, another registered kind, or empty: a function of the user's.")
    state: Literal["to come", "running", "done", "failed"]
    seconds: float = Field(0.0, description="Since it began, as long as it runs, or that it took; of this start.")
    quiet_s: float = Field(0.0, description="Seconds since anything of it moved, while it runs.")
    detail: str = Field("", description="How far it is.")


class Status(Message):
    """The status of a run. The defaults describe a run that saved no status."""

    run: str
    name: str = "a run"
    algorithm: str = ""
    policy: str = Field("", description="What closes a round, in words.")
    protocol: int
    epoch: Count = 0
    rounds: Count = 0
    finished: bool = False
    stopped: str = Field("", description="Why the run ended before its last round; else empty.")
    address: str = Field("", description="Where the server listens, or listened last; empty: a simulation.")
    best: BestStatus | None = Field(None, description="Null: the run tracks no metric.")
    uptime_s: float = 0.0
    left_s: float | None = Field(
        None,
        description="Seconds until the run has had its rounds, by how long the last ones took since the server was "
        "started; null: no round was measured yet, none can close for want of sites, or the run is finished or goes on "
        "until it is stopped.",
    )
    model_bytes: Count = 0
    codec: str = "none"
    outer: str = Field("", description="The outer optimizer and its options, in words.")
    downlink_codec: str = Field("none", description="How versions go down; none: whole.")
    sync_every: Count = 0
    tau: Count = Field(0, description="Local steps between taking a fragment's update and merging its result.")
    alpha: float = Field(0.0, description="Share of the local parameters that a merge keeps.")
    dylu: bool = Field(False, description="Whether slower workers take fewer local steps.")
    fragments: list[FragmentStatus] = Field(default_factory=list)
    workers: list[WorkerStatus] = Field(default_factory=list)
    history: list[RoundSummary] = Field(default_factory=list, description="The last rounds, oldest first.")
    bytes_up: Count = Field(0, description="Of updates that the server has received since it was started.")
    bytes_down: Count = Field(0, description="Of versions that it has sent since.")
    deaths: Count = Field(0, description="Workers that were declared dead, in the whole run.")
    refused: Count = Field(0, description="Updates that were refused, in the whole run.")
    staleness: dict[str, Count] = Field(
        default_factory=dict,
        description="How many updates counted so many versions behind the head, since the server was started.",
    )
    tasks: dict[str, Count] = Field(
        default_factory=dict, description="Payloads that a workflow sent: streamed, inline, and skipped (no tensors)."
    )
    workflows: list[WorkflowStatus] = Field(
        default_factory=list, description="In their order; empty for a run of rounds alone."
    )
    sent: list[TaskStatus] = Field(default_factory=list, description="The last tasks of a workflow, oldest first.")
    durability: str = "process"
    durable_version: Count | None = None
    warnings: list[str] = Field(default_factory=list)

    @property
    def version(self) -> int:
        """Version of the whole model: the oldest head version of its fragments."""
        return min(fragment.version for fragment in self.fragments)
