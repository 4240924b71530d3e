"""Typed messages that describe the status of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Self

from pydantic import Field, JsonValue

from atoll.format_text import listed, number_of, numbers, of_fragment, size
from atoll.protocol.messages import Count, Estimate, Many, Message, Report, Shown, Steps, Table

KEPT = "status.json"
"""Name of the file in the state directory with the last saved status.

The server saves the status when the server starts, after new versions, when the run is finished, and when the server
ends.
"""
GLOBAL = "global."
"""`rounds.best_metric` names a metric of the server's evaluation with this prefix; without it, one of the sites."""
HISTORY = 20
"""Maximum number of past rounds in a status. The file `metrics.jsonl` has all rounds."""


class SiteRound(Report):
    """One site's update in a round: what the site reports, and what the server knows of it."""

    site: Shown
    staleness: Count = Field(0, description="Versions between the update's base and the base of the round.")
    nbytes: Count = Field(0, description="Size of the update in bytes.")
    norm: float | None = Field(
        None, ge=0, description="L2 norm of the update, as the server received it; null: not known or not finite."
    )


class WorkerStatus(Message):
    """The status of one site: its newest process, its progress and its traffic."""

    site: Shown
    host: Shown = ""
    state: Shown = Field("", description="alive, dead, left or failed; in a failed run, ended or not told")
    doing: Shown = ""
    joined_at: Shown = ""
    last_heartbeat_s: Estimate = Field(
        0.0, description="Seconds since the last request, or since the server restarted."
    )
    heard: bool = Field(True, description="Whether the site sent a request since the server restarted.")
    step: Count = Field(0, description="Local steps of the site's newest process; 0: it has reported none.")
    steps_per_s: Estimate = 0.0
    rounds: Count = Field(0, description="Number of the site's counted updates.")
    version: Count = 0
    staleness: Count = Field(
        0, description="Rounds between the site's version and the head. It means something only while it has a ticket."
    )
    ticket_s: Estimate = Field(0.0, description="Seconds for which the site has its open ticket; 0: it has none.")
    usual_s: Estimate = Field(
        0.0,
        description="Median seconds from ticket to complete update since the server's start; 0: no update yet.",
    )
    local_steps: Steps = Field(0, description="Steps between synchronisations under DyLU; 0: the run's sync_every.")
    bytes_up: Count = Field(0, description="Bytes received from the site since the server started.")
    bytes_down: Count = Field(0, description="Bytes sent to the site since the server started.")
    gradient_bytes: Count = Field(
        0,
        description="With DiLoCo: bytes of gradients that data-parallel training would have sent since the server "
        "started.",
    )
    waited_s: Estimate = Field(
        0.0, description="Seconds in which training stood still before the updates since the server started."
    )
    retries: Count = 0
    reconnections: Count = 0
    metrics: Table[float] = Field(default_factory=dict)
    labels: Table[Shown] = Field(default_factory=dict)
    error: Shown = ""
    refused: Shown = Field("", description="Why the site's last update was refused; empty after one that counts.")
    last: SiteRound | None = Field(None, description="The site's newest update among the rounds of `history`.")


class Missing(Message):
    """A site that a round waits for, and how long it has waited."""

    site: Shown
    for_s: Estimate = Field(description="Seconds that the round has waited for this site.")


class RoundSummary(Message):
    """A round that has led to a version: its updates, ordered by site, and their metrics."""

    fragment: Count
    round: Count
    version: Count | None = Field(description="Version that the round made; null: none, because all sites sat out.")
    metrics: Table[float] = Field(description="Weighted mean over the workers that reported the metric.")
    counts: Table[Count] = Field(description="Number of workers that reported each metric.")
    global_metrics: Table[float] = Field(
        default_factory=dict,
        description="What server.evaluate returned for the version that the round made. The sites' metrics are of the "
        "version before it.",
    )
    seconds: Estimate
    grad_norm: float | None = Field(
        None, ge=0, description="L2 norm of the reduced update, before the server's optimizer steps; null: not finite."
    )
    bytes_up: Count
    expected: Count = Field(0, description="Number of updates if no site is missing; 0: an asynchronous step.")
    population: Count = Field(0, description="Number of workers that had joined when the round closed.")
    total_weight: float | None = Field(
        None,
        description="Estimated weight of all workers together; null: no reducer needs it.",
    )
    global_step: Estimate = Field(
        0.0,
        description="Local steps that the version has behind it, along one site: in each round, the mean of the steps "
        "that its sites report; in an asynchronous step, their sum divided by the number of sites.",
    )
    aggregator: Shown = Field("", description="Worker of a swarm that aggregated the round; empty: the server.")
    checker: Shown = Field("", description="Worker that checked the version before it became the head.")
    sat_out: Many[Shown] = Field(default_factory=list, description="Sites that sat out the round.")
    sites: Many[SiteRound] = Field(default_factory=list, description="The round's updates, ordered by site.")

    @property
    def workers(self) -> list[str]:
        """The sites with an update in the round, sorted."""
        return [each.site for each in self.sites]

    @property
    def values(self) -> dict[str, float]:
        """The round's metrics: means of the sites, and those of the server's evaluation with the prefix `GLOBAL`."""
        return {**self.metrics, **{GLOBAL + name: value for name, value in self.global_metrics.items()}}

    @property
    def counted(self) -> str:
        """How many updates the round has, and how many sites sat out, as text."""
        if self.version is None:
            return "all sites sat out"
        sat_out = f" ({number_of(len(self.sat_out), 'site')} sat out)" if self.sat_out else ""
        return f"{number_of(len(self.sites), 'update')}{sat_out}"

    @classmethod
    def sat_out_by_all(cls, fragment: int, number: int, sites: Sequence[str], population: int) -> Self:
        """Return the summary of a round that ended without a version, because all sites sat out.

        Args:
            fragment: index of the fragment.
            number: number of the round.
            sites: the sites that sat out.
            population: number of workers that had joined when the round ended.
        """
        return cls(
            fragment=fragment,
            round=number,
            version=None,
            metrics={},
            counts={},
            seconds=0.0,
            grad_norm=None,
            bytes_up=0,
            expected=len(sites),
            population=population,
            sat_out=list(sites),
        )

    def line(self, *, has_fragments: bool = False) -> str:
        """Return the round as one line of text; if the run has several fragments, the line names the fragment."""
        of = of_fragment(self.fragment if has_fragments else None)
        if self.version is None:
            return f"round {self.round}{of}: no version, because all sites sat out ({listed(self.sat_out)})"
        updates = number_of(len(self.sites), "update")
        is_partial = len(self.sites) + len(self.sat_out) < self.expected
        instead = f" instead of {self.expected}" if is_partial else ""
        sat_out = f"; {listed(self.sat_out)} sat out" if self.sat_out else ""
        lags = [each.staleness for each in self.sites]
        behind = f", up to {max(lags)} behind" if any(lags) else ""
        told = f"; {numbers(self.metrics)}" if self.metrics else ""
        told += f"; evaluated: {numbers(self.global_metrics)}" if self.global_metrics else ""
        return (
            f"round {self.round}{of}: version {self.version} from {updates}{instead} "
            f"({listed(self.workers)}{behind}{sat_out}), {size(self.bytes_up)}, "
            f"aggregated in {self.seconds:.2f} s{told}"
        )


class PlaceStatus(Message):
    """In a swarm, the workers of one fragment: its aggregator, its checker, and the holders of its newest version."""

    aggregator: Shown = Field(description="Worker that aggregates the round; empty: none.")
    checker: Shown = Field(description="Worker that checks the next version.")
    holders: Many[Shown] = Field(description="Workers that have the newest version with its outer state.")
    collected: Many[Shown] = Field(description="Sites with updates that the aggregator has collected.")


class FragmentStatus(Message):
    """The status of one fragment of the model: its newest version, and the sites that its round waits for."""

    fragment: Count
    version: Count
    round: Count = Field(0, description="Number of the round under way, or of the last one.")
    phase: Shown
    open_s: Estimate = Field(0.0, description="Seconds for which the round is open; 0: it is not.")
    waiting_for: Many[Missing]
    sat_out: Many[Shown] = Field(default_factory=list, description="Sites that sit out the open round.")
    reason: Shown
    trouble: Shown = Field("", description="What keeps awaited sites, or the aggregator, from going on; else empty.")
    place: PlaceStatus | None = Field(None, description="Workers of a swarm for this fragment.")


class BestStatus(Message):
    """The best version so far, by the setting `best_metric`."""

    metric: Shown
    mode: Literal["max", "min"]
    version: Count | None = Field(None, description="Null: no round has reported the metric yet.")
    round: Count | None = Field(None, description="Round in which workers measured this version.")
    value: float | None = None
    stale: Count = Field(0, description="Measurements since the last gain above `early_stop_min_delta`.")
    file: Shown = Field("", description="File of the best version; empty until it is written.")


class Recorded(Message):
    """The value of a metric in a round."""

    round: Count
    value: float


class EvaluationStatus(Message):
    """The evaluation of versions at the server, by the setting `server.evaluate`."""

    function: Shown
    every: Count = Field(description="Versions between two evaluations.")
    version: Count | None = Field(None, description="The version that was evaluated last.")
    metrics: Table[float] = Field(default_factory=dict, description="Its metrics.")
    seconds: Estimate = Field(0.0, description="Seconds that its evaluation took.")
    running: Count | None = Field(None, description="The version that is evaluated now.")
    problem: Shown = Field("", description="Why the last evaluation gave no result, or no complete one; else empty.")
    failed: Table[Shown] = Field(
        default_factory=dict, description="Version → problem of its evaluation: the last ones since the server's start."
    )
    failures: Count = Field(0, description="Versions without a complete evaluation since the server's start.")


class TaskStatus(Message):
    """A task that a workflow has sent. Tensors of a payload are sent streamed (in parts) or inline (in the message)."""

    number: Count = Field(description="Number of the task since the server started, from 1.")
    name: Shown
    way: Shown = Field(description="How the payload is sent: streamed, inline, or without_tensors: in the message.")
    sites: Many[Shown]
    missing: Many[Shown] = Field(description="Sites that have not answered yet.")
    answers: Table[Count] = Field(description="Way of sending → number of answers; failed: errors.")
    open: bool
    seconds: Estimate


class WorkflowStatus(Message):
    """The status of one workflow of a run."""

    name: Shown
    kind: Shown = Field(description="train, another registered kind, or empty for a user's function.")
    state: Literal["to come", "running", "done", "failed"]
    seconds: Estimate = Field(0.0, description="Seconds since the start of the workflow; after its end, its duration.")
    quiet_s: Estimate = Field(0.0, description="Seconds without any progress while it runs.")
    detail: Shown = Field("", description="The workflow's progress in words.")


class Headline(Message):
    """What a person should know of a run first."""

    text: Shown = Field(description="Round, what is awaited and why, when the run will be done, whether it learns.")
    act: bool = Field(False, description="Whether the run needs a person.")
    held_up: bool = Field(
        False, description="Whether the run is late or paused, or lacks what its end depends on. No end is then told."
    )
    late: Many[Shown] = Field(
        default_factory=list,
        description="Sites that hold the run up; in an asynchronous run also those that take much longer than usual.",
    )
    command: Shown = Field("", description="The command for what comes next; NAME and train.py stand for your own.")


class Status(Message):
    """The status of a run. Before the server has saved a status for the first time, most fields have their defaults."""

    run: Shown
    name: Shown = "a run"
    algorithm: Shown = ""
    policy: Shown = Field("", description="The closing policy in words.")
    stored: Shown = Field("", description="If no server answers: where the status was stored, and when.")
    compared: list[Shown] = Field(
        [], max_length=1000, description="Paths of further runs' pages, below this one: of `atoll page`."
    )
    headline: Headline | None = Field(None, description="Null: an older server has saved this status.")
    protocol: Count
    epoch: Count = 0
    rounds: Count = 0
    finished: bool = False
    has_result: bool = Field(
        False,
        description="Whether the run's result is written: the last version evaluated, model and metrics exported.",
    )
    stopped: Shown = Field("", description="Why the run ended before its last round; else empty.")
    paused: bool = Field(False, description="Whether the admin has paused the run.")
    stopping: bool = Field(False, description="Whether the admin has ended the run: the current round is the last.")
    failed: Shown = Field("", description="Why the run has failed and the server has ended; else empty.")
    address: Shown = Field("", description="Address of the server; empty for a simulation.")
    public_address: Shown = Field("", description="Address of the proxy in front of it, from trust.address.")
    state_dir: Shown = Field("", description="State directory of the server.")
    mode: Literal["rounds", "asynchronous", "swarm"] = Field(
        "rounds",
        description="asynchronous: no site waits for another. swarm: the sites' workers aggregate, not the server.",
    )
    best: BestStatus | None = Field(None, description="Null: the run tracks no metric.")
    evaluation: EvaluationStatus | None = Field(None, description="Null: the run has no server.evaluate.")
    uptime_s: Estimate = 0.0
    left_s: Estimate | None = Field(
        None,
        description="Estimated seconds until all rounds are done, from the duration of the last rounds. Null: fewer "
        "than three rounds have ended since the server's start, the run is held up, or it is finished or has no number "
        "of rounds.",
    )
    model_bytes: Count = 0
    codec: Shown = "none"
    outer: Shown = Field("", description="The outer optimizer and its options, in words.")
    downlink_codec: Shown = Field("none", description="Codec of version differences; none: whole versions.")
    sync_every: Steps = 0
    tau: Steps = Field(0, description="Local steps between forming a fragment's update and merging the result.")
    alpha: float = Field(0.0, ge=0, le=1, description="Share of the local parameters that a merge keeps.")
    dylu: bool = Field(False, description="Whether slower workers take fewer local steps.")
    fragments: Many[FragmentStatus] = Field(default_factory=list)
    workers: Many[WorkerStatus] = Field(default_factory=list)
    history: Many[RoundSummary] = Field(default_factory=list, description="The last rounds, oldest first.")
    first: Table[Recorded] = Field(
        default_factory=dict,
        description="First recorded value of each metric, in rounds of fragment 0; a metric of the "
        "server's evaluation has the prefix global.",
    )
    kept_versions: Many[Count] = Field(
        default_factory=list, description="Versions of the whole model that can be downloaded, oldest first."
    )
    bytes_up: Count = Field(0, description="Bytes of updates received since the server started.")
    bytes_down: Count = Field(0, description="Bytes of versions sent since the server started.")
    deaths: Count = Field(0, description="Workers declared dead during the run.")
    refused: Count = Field(0, description="Updates refused during the run.")
    staleness: Table[Count] = Field(
        default_factory=dict,
        description="Staleness in versions → number of counted updates with it, since the server started.",
    )
    tasks: Table[Count] = Field(
        default_factory=dict,
        description="Way of sending (streamed, inline or without_tensors) → number of payloads.",
    )
    workflows: Many[WorkflowStatus] = Field(
        default_factory=list, description="Workflows in order; empty if the run has only rounds."
    )
    sent: Many[TaskStatus] = Field(default_factory=list, description="The last tasks of a workflow, oldest first.")
    durability: Shown = "process"
    durable_version: Count | None = None
    warnings: Many[Shown] = Field(default_factory=list)
    extensions: Table[JsonValue] = Field(default_factory=dict, description="What each extension of the server shows.")

    @property
    def version(self) -> int:
        """The newest version that every fragment of the model has reached."""
        return min((fragment.version for fragment in self.fragments), default=0)


class SettingInEffect(Message):
    """A setting of the run."""

    key: Shown = Field(description="group.key")
    value: Shown = Field(description="As TOML; empty: not set.")
    source: Shown = Field(description="A file, a variable, the command line, the program, or a default.")


class SettingsInEffect(Message):
    """The settings of a run."""

    settings: Many[SettingInEffect]
