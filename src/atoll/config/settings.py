"""The settings of a run: fourteen typed groups, validated when they are built, and immutable.

The name of a setting is `group.key`. Set it in the run file (as a key in the TOML table of its group), with the
environment variable `ATOLL_<GROUP>__<KEY>`, or with the option `--set group.key=value`. The command line overrides the
environment, which overrides the file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    SecretStr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from atoll.config.bounds import (
    CHUNK_BYTES,
    CHUNK_STEP_BYTES,
    IDLE_TIMEOUT_S,
    LEAST_CHUNK_BYTES,
    MAX_WEIGHT,
    MOST_CHUNK_BYTES,
    MOST_CONNECTIONS,
    MOST_FRAGMENTS,
    MOST_RANKS,
    MOST_STEPS,
    is_chunk,
)
from atoll.config.consistency import require_consistent
from atoll.config.round_changes import CHANGEABLE, Change, changes_of
from atoll.config.round_config import fault_in_table
from atoll.config.run_file import COMMAND_LINE, Layer, environment_layer, file_layer, merged, nearest_key, source_of
from atoll.config.workflow_settings import with_components
from atoll.errors import ConfigError, public_api
from atoll.registry import OwnName

# -- When a changed value takes effect. Settings in none of these lists: at the server's next start.

FROZEN = (
    "algorithm",
    "swarm.enabled",
    "async.enabled",
    "async.sync_rounds_first",
    "diloco.num_fragments",
    "diloco.sync_every",
    "diloco.fragment_sync_delay",
    "diloco.fragment_update_alpha",
    "diloco.max_inflight",
    "model.ranks",
    "aggregation.upload_codec",
    "aggregation.download_codec",
    "network.part_bytes",
    "disk.in_files",
)
"""Fixed once the run has begun: files on disk, waiting updates or running sites depend on these settings."""

FROZEN_OUTER = ("algorithm.outer_optimizer", "algorithm.outer_lr_of", "async.momentum_every")
"""Also fixed once the run has begun: together, these settings define the outer optimizer."""

AT_THE_BEGINNING = ("model.source", "model.args", "model.buffers", "run.seed")
"""Settings of the initial model, which only the first start reads. A later start with other tensors is refused."""

FOR_SITES = (
    "network.connections",
    "network.heartbeat_interval_s",
    "network.idle_timeout_s",
    "aggregation.max_weight",
    "aggregation.max_steps",
)
"""Settings that the server sends to a site when the site's worker starts; a running worker keeps its values."""


def _chunk(nbytes: int) -> int:
    if nbytes and not is_chunk(nbytes):
        raise PydanticCustomError(
            "chunk",
            f"the size should be 0, or {LEAST_CHUNK_BYTES} to {MOST_CHUNK_BYTES} and a multiple of {CHUNK_STEP_BYTES}",
        )
    return nbytes


ChunkBytes = Annotated[int, AfterValidator(_chunk)]
"""Type of a setting for the size of a part, in bytes; 0: tensors are sent inside the message."""


Seed = Annotated[int, Field(ge=-(2**63), lt=2**64)]
"""Type of a setting that seeds torch's random numbers."""


SiteName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
"""Type of a setting with the name of a site: 1 to 64 letters, digits, `.`, `_`, `-`."""


class _WrongValue(ValueError):
    """A wrong value, as pydantic expects it from a validator: `_readable` adds the setting and its source."""

    def __init__(self, message: str, remedy: str) -> None:
        super().__init__(message)
        self.message, self.remedy = message, remedy


class Group(BaseModel):
    """A group of settings: one table of the run file.

    Types are strict: `true` is not 1, and `"1"` is not a number. An integer is accepted where a number is expected.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=(), strict=True)

    @field_validator("*", mode="before")
    @classmethod
    def _as_toml_writes_it(cls, value: Any, info: ValidationInfo) -> Any:
        """Accept a list as a tuple, and text as a path: TOML writes them so."""
        kind = str(cls.model_fields[info.field_name or ""].annotation)
        if isinstance(value, list) and "tuple" in kind:
            return tuple(value)
        return Path(value) if isinstance(value, str) and "Path" in kind else value


class Choice(Group):
    """A setting that chooses code, by `name` (from Atoll or a package) or by `path` (your own). Other keys: options."""

    model_config = ConfigDict(extra="allow")

    name: str | None = Field(None, min_length=1, description="Name of a part of Atoll or of an installed package.")
    path: str | None = Field(
        None, min_length=1, description="Your own implementation, as `my_file.py:attribute` or `module:attribute`."
    )

    @model_validator(mode="after")
    def _one(self) -> Self:
        if self.name and self.path:
            raise _WrongValue(f"both name ({self.name!r}) and path ({self.path!r}) are set.", "Set only one of them.")
        if self.name and ":" in self.name:
            raise _WrongValue(f"name is {self.name!r}, a path to code.", f"Write path = {self.name!r}.")
        return self

    @property
    def target(self) -> OwnName | None:
        """The name or the path; None if neither is given."""
        text = self.name or self.path
        return OwnName(text) if text else None

    @property
    def options(self) -> dict[str, Any]:
        """All keys besides `name` and `path`: the options of the chosen code."""
        return dict(self.model_extra or {})

    def __str__(self) -> str:
        return self.name or self.path or ""


class Run(Group):
    """The run's name, and its script, seed and threads."""

    name: str = Field("atoll", description="Name of the run, shown in the status and the summary.", max_length=100)
    script: str | None = Field(
        None,
        description="What each site runs in `atoll run` and `atoll simulate`: a function, as `my_file.py:function` or "
        "`module:function`, or a script, as `my_file.py`.",
    )
    seed: Seed = Field(
        0, description="Seed for building the initial model; in a simulation, also for the random numbers of the sites."
    )
    threads: int = Field(0, ge=0, description="Threads of the aggregation; 0: one per core, at most 8.")


BufferRule = Literal["mean", "max", "sum", "first", "keep"]


def _rules(value: object) -> object:
    if isinstance(value, str | list | tuple):
        names = [value] if isinstance(value, str) else list(map(str, value))
        table = ", ".join(f'"{name}" = "mean"' for name in names)
        raise _WrongValue(
            f"{value!r} are patterns without their rules.", f"Write a table: model.buffers = {{{table}}}."
        )
    return value


class Model(Group):
    """The initial model: its source, buffers and storage, and the number of ranks of a sharded worker."""

    source: str | None = Field(
        None,
        min_length=1,
        description="Initial model: `module:function` that returns an `nn.Module` or arrays, a `.safetensors` file, or "
        "a folder of them.",
    )
    args: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of `module:function`.")
    buffers: Annotated[dict[str, BufferRule], BeforeValidator(_rules)] = Field(
        default_factory=dict,
        description='Pattern of names → rule for the next value of a buffer, such as `{"bn.*" = "keep"}`. The first '
        "matching pattern counts. Rules: `mean`; `max`; `sum`, the value plus the changes of all sites; `first`, the "
        "value of the first site by name; `keep`, each site's own value, which is never sent (parameters, too). "
        "Without a rule, the kind of buffer decides. If the initial model is a file, a matching tensor is a buffer.",
    )
    ranks: int = Field(
        1,
        ge=1,
        le=MOST_RANKS,
        description="Number of ranks of each sharded worker (FSDP2); parts are cut so that each belongs to one rank. "
        "Workers that are not sharded may have any number of ranks.",
    )
    persistor: Choice = Field(
        default_factory=Choice,
        description="Your own storage for models, an object with `load` and `save`: `{path = …}`, with its keyword "
        "arguments as further keys. Relative paths in the arguments start at the server's working directory.",
    )

    @property
    def function(self) -> OwnName:
        """The function that builds the initial model, if `source` is not the name of a file."""
        return OwnName(self.source or "")


class Algorithm(Choice):
    """The algorithm, and the options of its local training, such as `mu = 0.1` for FedProx."""

    name: str | None = Field(
        None,
        min_length=1,
        description="`diloco`, `fedavg`, `fedprox`, `fednova`, … or a name from an installed package. Required for "
        "runs with rounds.",
    )
    path: str | None = Field(
        None,
        min_length=1,
        description="Your own algorithm instead of `name`, as `my_file.py:attribute` or `module:attribute`. Only for "
        "algorithms without a local rule; one with a local rule must be installed, and is set by `name`.",
    )
    outer_optimizer: Choice = Field(
        default_factory=Choice,
        description="Outer optimizer and its arguments (`lr`, `momentum`, …): `{name = …}`, where name is the "
        "lower-case name of an optimizer in `torch.optim`, `delayed_nesterov` or `yogi`; or `{path = …}`. Default: set "
        "by the algorithm.",
    )
    outer_lr_of: dict[str, Annotated[float, Field(gt=0)]] = Field(
        default_factory=dict,
        description='Pattern of parameter names → their outer learning rate, such as `{"head.*" = 0.3}`. The first '
        "matching pattern counts.",
    )


class DiLoCo(Group):
    """DiLoCo: when workers synchronise the model, as a whole or fragment by fragment (streaming)."""

    sync_every: int = Field(
        500, ge=1, le=MOST_STEPS, description="Local optimizer steps between two synchronisations (H)."
    )
    num_fragments: int = Field(
        1,
        ge=1,
        le=MOST_FRAGMENTS,
        description="Number of fragments of the model. One is synchronised every sync_every/num_fragments steps.",
    )
    fragment_sync_delay: int = Field(
        0,
        ge=0,
        le=MOST_STEPS,
        description="Local steps between forming a fragment's update and merging the result (τ).",
    )
    fragment_update_alpha: float = Field(
        0.0, ge=0, le=1, description="Share of the local parameters that a merge keeps (α); 0: take the global ones."
    )
    max_inflight: int = Field(
        1,
        ge=1,
        le=MOST_FRAGMENTS,
        description="Fragments for which a worker may have unfinished updates at once.",
    )
    dynamic_local_steps: bool = Field(
        False,
        description="DyLU: in an asynchronous run, give slower workers fewer local steps: H × their speed / the "
        "highest speed.",
    )


def _round_config(table: dict[str, Any]) -> dict[str, Any]:
    if fault := fault_in_table(table):
        raise _WrongValue(f"{fault}.", "Give names with numbers, texts, true, false, lists or tables of these.")
    return table


class Rounds(Group):
    """The number of rounds, and when a round closes."""

    total: int = Field(
        0,
        ge=0,
        le=10**15,
        description="Number of rounds until the run is finished; 0: it runs until stopped. Required for federated "
        "algorithms.",
    )
    sites: int = Field(1, ge=1, description="Number of sites that round 1 waits for.")
    min_sites: int | None = Field(
        None,
        ge=1,
        description="Smallest number of updates with which a round closes. Default for federated algorithms: all "
        "`rounds.sites`, or with `rounds.sample_fraction` all drawn sites. Default for DiLoCo, asynchronous "
        "runs and runs with a quorum: 1.",
    )
    quorum: int = Field(0, ge=0, description="Number of updates that are enough after `rounds.deadline_s`; 0: all.")
    deadline_s: float = Field(0.0, ge=0, description="Seconds after which `rounds.quorum` is enough; 0: no deadline.")
    sample_fraction: float = Field(
        1.0, gt=0, le=1, description="Share of the sites that is drawn at random for each round."
    )
    sample_min: int = Field(1, ge=1, description="Smallest number of sites that is drawn for a round.")
    sample_seed: int = Field(0, description="Seed for drawing sites.")
    best_metric: str | None = Field(
        None,
        min_length=1,
        description="Metric that decides which version is kept as `best.safetensors`. The value of "
        "a version is the mean over the workers that trained from it in one round.",
    )
    best_mode: Literal["max", "min"] | None = Field(
        None,
        description="Whether the largest or smallest value is best. Default: `min` if the name of `rounds.best_metric` "
        "ends with `loss`, else `max`.",
    )
    early_stop_after: int = Field(
        0, ge=0, description="End the run after this many rounds without an improvement; 0: never."
    )
    early_stop_min_delta: float = Field(
        0.0, ge=0, description="For early stopping, `rounds.best_metric` has to improve by more than this."
    )

    config: Annotated[dict[str, Any], AfterValidator(_round_config)] = Field(
        default_factory=dict,
        description="What sites are told for each round, as `fl_round.config`: names and values, such as "
        "`{epochs = 2, lr = {1 = 0.1, 10 = 0.01}}`. A table with numbers as keys is a schedule: here 0.1 from round "
        "1 on and 0.01 from round 10 on.",
    )
    config_function: str | None = Field(
        None,
        min_length=1,
        description="Function that is called with the number of a round and the name of a site, and returns a dict of "
        "further values of `rounds.config` for them: `my_file.py:function` or `module:function`.",
    )

    changes: tuple[dict[str, Any], ...] = Field(
        (),
        description="Settings that change within the run: tables with `from_round`, the first round with the new "
        f"values, and these values. What can change: {', '.join(f'`{key}`' for key in CHANGEABLE)}. A restart may "
        "change or add tables for rounds that have not begun.",
    )

    @property
    def function(self) -> OwnName | None:
        """The function that `config_function` names; None if it names none."""
        return OwnName(self.config_function) if self.config_function else None

    @property
    def best_mode_in_effect(self) -> Literal["max", "min"]:
        """`best_mode` if it is set; else "min" for a `best_metric` that ends in "loss", "max" for any other."""
        return self.best_mode or ("min" if (self.best_metric or "").endswith("loss") else "max")


class Async(Group):
    """Asynchronous runs: the server applies updates as they arrive, by default without waiting for other sites."""

    enabled: bool = Field(
        False, description="true: apply updates as they arrive. false: a round waits for the expected sites."
    )
    buffer_size: int = Field(1, ge=1, description="Updates averaged in one asynchronous step (FedBuff's K).")
    grace_s: float = Field(
        0.0,
        ge=0,
        description="Seconds that an asynchronous step waits for more updates; `inf`: until all sites have submitted.",
    )
    max_staleness: int | None = Field(
        None, ge=0, description="Refuse updates trained from a version more than this many versions behind the newest."
    )
    staleness_weight: str = Field(
        "constant",
        description="Factor for the weight of an update with a base s versions old: `constant` (1), `inverse_sqrt` "
        "(1/√(1+s)), or `module:function`, which maps s to a number above 0 and at most 1.",
    )
    sync_rounds_first: int = Field(0, ge=0, description="Synchronous rounds at the start of an asynchronous run.")
    momentum_every: int = Field(
        0,
        ge=0,
        description="Updates between two momentum steps (delayed Nesterov's N); 0: momentum at every update.",
    )

    @property
    def weight(self) -> OwnName:
        """The function of an update's staleness, by name or path (`staleness_weight`)."""
        return OwnName(self.staleness_weight)


class Swarm(Group):
    """Swarms: runs in which workers, not the server, aggregate the updates."""

    enabled: bool = Field(
        False,
        description="Swarm: workers aggregate the rounds in turn, and tensors travel only between workers.",
    )
    aggregators: tuple[str, ...] = Field(
        (),
        description="Names of the sites that aggregate in turn. Default: all sites, in an order made from `run.seed`.",
    )


class Aggregation(Group):
    """How updates are encoded, checked and combined."""

    reducer: Choice = Field(
        default_factory=Choice,
        description="How updates are combined: `{name = …}` with options, where name is `mean`, `clipped_mean`, "
        "`median`, `trimmed_mean` or `normalised_mean` (FedNova), or `{path = …}`. Default: set by the "
        "algorithm, usually the mean.",
    )
    aggregator: Choice = Field(
        default_factory=Choice,
        description="Your own aggregator instead of a reducer: `{path = …}`, with its arguments as further keys.",
    )
    aggregator_timeout_s: float = Field(
        600.0,
        ge=0,
        description="Seconds without progress after which the server stops the aggregator and the run fails; 0: no "
        "limit.",
    )
    max_kept_updates: int = Field(
        32,
        ge=0,
        description="Number of updates of earlier rounds that the aggregator may keep on disk; the oldest are removed.",
    )
    upload_codec: Choice = Field(
        default_factory=Choice,
        description="Encoding of updates: `{name = …}` with options, where name is `none`, `bf16`, `int8`, `int4` or "
        "`topk` (with `density`), or `{path = …}`. Default: `bf16` for DiLoCo, else `none`.",
    )
    download_codec: Choice = Field(
        default_factory=Choice,
        description="Encoding of the differences between versions that workers download: `{name = …}` with "
        "options, where name is `int8`, `int4`, …. Default: `none`: workers download whole versions.",
    )
    max_update_norm: float = Field(1e12, ge=0, description="Refuse updates with a larger L2 norm; 0: no limit.")
    max_weight: float = Field(1e12, gt=0, le=MAX_WEIGHT, description="Refuse updates with a larger weight.")
    max_steps: int = Field(
        100_000,
        ge=1,
        description="In runs that divide by the number of local optimizer steps (FedNova, `normalised_mean`), refuse "
        "updates that report more.",
    )


class Workflow(Group):
    """Workflows (functions that send tasks to sites), and the filters that the server applies."""

    function: str | None = Field(
        None,
        description="Function that the run calls with a `controller` in place of rounds: it sends tasks to sites "
        "and collects answers. Write it as `my_file.py:attribute` or `module:attribute`.",
    )
    steps: tuple[dict[str, Any], ...] = Field(
        (),
        description="Steps of the run, in order: tables `{kind}`, where kind is `train` (the rounds) or "
        "`cross_site_evaluation`, or `{path, args}` for your own function. Each may set `start_timeout_s` "
        "and `progress_timeout_s`. Default: only the rounds.",
    )
    components: tuple[dict[str, Any], ...] = Field(
        (),
        description="Objects that other settings refer to as `@id`: tables `{id, path, args}`. Workflows, filters, the "
        "aggregator and the persistor may refer to them.",
    )
    payload_filters: tuple[dict[str, Any], ...] = Field(
        (),
        description="Filters that the server applies to payloads of tasks: tables like those of "
        "`workflow.result_filters`. Runs that only have rounds do not support them.",
    )
    result_filters: tuple[dict[str, Any], ...] = Field(
        (),
        description="Filters that the server applies, in this order, to updates and to answers to tasks: tables "
        "`{path, args, sites, tasks}`. `path` is `drop`, `norm_clip`, `cast` or your own "
        "`module:attribute`. `sites` and `tasks` limit a filter to these names.",
    )
    streamed_tasks: tuple[str, ...] = Field(
        ("train",), description="Names of tasks that send tensors in parts. Other tasks send them inside the message."
    )
    tensor_part_bytes: ChunkBytes = Field(
        CHUNK_BYTES,
        description="Part size for sending torch tensors in tasks, answers and `atoll.objects.publish`: 65536 to "
        "16777216, a multiple of 64; 0: send them inside the message.",
    )
    array_part_bytes: ChunkBytes = Field(CHUNK_BYTES, description="Part size for NumPy arrays; 0: in the message.")


class Network(Group):
    """How workers connect to the server."""

    host: str = Field(
        "127.0.0.1",
        description="Address to listen on. On any other than loopback, the server uses TLS, and sites need credentials "
        "(`trust.required`).",
    )
    port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="Port to listen on; 0: any free port. Default: in a new run 8512, or the next free port; in a run "
        "that continues, its last port.",
    )
    tls_cert: Path | None = Field(None, description="File with the certificate chain (PEM).")
    tls_key: Path | None = Field(None, description="File with the private key of the certificate (PEM, mode 0600).")
    token_file: Path | None = Field(None, description="File (mode 0600) with the bearer token; or set ATOLL_TOKEN.")
    insecure: bool = Field(False, description="Allow addresses other than loopback without TLS or credentials.")
    heartbeat_interval_s: float = Field(30.0, ge=0, description="Seconds between two heartbeats; 0: no heartbeats.")
    heartbeat_timeout_s: float = Field(
        120.0, ge=0, description="Seconds without any request after which a worker is declared dead; 0: never."
    )
    idle_timeout_s: float = Field(
        IDLE_TIMEOUT_S,
        gt=0,
        description="Seconds without a byte after which a transfer fails. A worker's first attempt at a part of an "
        "update or a version fails after 25 s, so that a silent network is soon noticed.",
    )
    connections: int = Field(
        2, ge=1, le=MOST_CONNECTIONS, description="A worker's parallel connections for transferring tensors."
    )
    part_bytes: int = Field(16 * 2**20, ge=2**16, le=16 * 2**20, description="Largest size of a part, in bytes.")


class Trust(Group):
    """Which sites may take part, and how each proves its name."""

    sites: tuple[SiteName, ...] = Field(
        (), description="Names of the sites that may take part. Default: each site that may connect."
    )
    required: bool | None = Field(
        None,
        description="Whether each site needs a credential of its own, by `atoll invite`. Default: true if other "
        "machines can reach the server and `network.insecure` is not set; also with `trust.address` or "
        "`trust.authority`.",
    )
    address: str | None = Field(
        None,
        pattern=r"^https?://[^\s/?#@]+[^\s?#@]*$",
        description="Address of the server in invitations, if a proxy in front of it ends TLS. Sites then get tokens "
        "of their own, because the proxy does not pass client certificates on.",
    )
    names: tuple[str, ...] = Field(
        (),
        description="More host names and IP addresses at which sites reach the server, for its own certificate. On a "
        "server that listens on all addresses, invitations have the first one in place of the machine's name.",
    )
    authority: Path | None = Field(
        None,
        description="File with the certificates (PEM) of your own authority of client certificates. A site's name is "
        "in a SPIFFE URI, else the common name.",
    )
    certificate_s: float = Field(
        7 * 86_400.0,
        ge=1.0,
        le=366 * 86_400.0,
        description="Seconds for which the credential of a site is valid; its worker renews it at half of this time.",
    )
    invitation_s: float = Field(
        86_400.0, gt=0, le=30 * 86_400.0, description="Seconds for which an invitation can be used."
    )


class Limits(Group):
    """Limits for each site and address. A client over its limit slows down only itself."""

    first_update_s: float = Field(
        3600.0,
        ge=0,
        description="Seconds for which a round waits, after its first update, for a site that has never contributed; "
        "or as long again as that update took, if this is longer. Later rounds give the site a ticket, but do not wait "
        "for it until it has contributed. If sites with ever new names never contribute, rounds wait for them for "
        "twice this time, then for a fifth of the time. 0: no limit.",
    )
    weight_share: float = Field(
        0.5,
        gt=0,
        le=1,
        description="Share of the weight of a round above which a warning names the site, if the round has three or "
        "more; 1: no warning.",
    )
    wrong_credentials: int = Field(
        30,
        ge=1,
        description="Wrong tokens and invitations a minute that one address may send; further requests with a wrong "
        "one are refused unread (HTTP 429). Requests with a right one are answered all the same.",
    )
    connections: int | None = Field(
        None, ge=1, description="Connections in all. Default: as many as the limit of open files allows."
    )
    address_connections: int = Field(
        1024,
        ge=1,
        description="Connections of one address that have shown no credential yet. For a further one, the oldest of "
        "them is closed.",
    )
    site_connections: int = Field(256, ge=1, description="Connections of one site.")
    site_requests_per_s: float = Field(
        500.0,
        gt=0,
        description="Requests a second of one site, reader or address without a credential, on average. Further ones "
        "wait, and are refused if the wait is longer than 2 s (HTTP 429).",
    )
    sites: int = Field(1000, ge=1, description="Sites that may have joined over HTTP.")
    joins_per_minute: int = Field(
        600, ge=1, description="Joins a minute of one site, or of one address if sites need no credentials."
    )
    site_object_bytes: int = Field(
        16 * 2**30,
        ge=0,
        description="Bytes on disk of the objects that one site publishes at the server, or one address if sites need "
        "no credentials.",
    )
    event_streams: int = Field(200, ge=4, description="Streams of events in all; one caller gets a quarter of them.")


def _by_name(value: object) -> object:
    """Return a list of names as a table: name → no options."""
    if isinstance(value, list | tuple) and all(isinstance(each, str) for each in value):
        return {name: dict[str, Any]() for name in value}
    return value


class Server(Group):
    """What is added to the server: extensions, and an evaluation of versions."""

    extensions: tuple[str, ...] = Field(
        (),
        description="Extensions of the server, by the names of their entry points in the group `atoll.extensions`. An "
        "installed package alone adds nothing.",
    )
    evaluate: str | None = Field(
        None,
        description="Function that evaluates versions at the server: it takes the model and returns its metrics. Write "
        "it as `my_file.py:attribute` or `module:attribute`. `rounds.best_metric` names its metrics as `global.NAME`.",
    )
    evaluate_every: int = Field(
        1, ge=1, description="Versions between two evaluations by `server.evaluate`; the last version always counts."
    )
    evaluate_timeout_s: float = Field(
        300.0, gt=0, description="Seconds after which an evaluation by `server.evaluate` is stopped."
    )

    @property
    def function(self) -> OwnName | None:
        """The place of the function that evaluates versions; None if there is none."""
        return OwnName(self.evaluate) if self.evaluate is not None else None

    trackers: Annotated[
        dict[str, dict[str, Any]],
        BeforeValidator(_by_name, json_schema_input_type=list[str] | dict[str, dict[str, Any]]),
    ] = Field(
        default_factory=dict,
        description="Trackers that show the run: `tensorboard`, `mlflow`, `wandb`, `trackio`, `opentelemetry` or names "
        'from installed packages. A list of names; or a table name → options: `{mlflow = {uri = "http://…"}}`.',
    )
    webhook: SecretStr | None = Field(
        None,
        description="Address to which the server posts a small JSON object when the run ends, fails or stalls. It is "
        "hidden where settings are shown, because it may contain a secret.",
    )
    stall_s: float = Field(
        1800.0,
        ge=0,
        description="Seconds without an update or a version after which the run has stalled, unless one of the rounds "
        "so far took longer than a third of that time: then three times as long as the longest; 0: never.",
    )

    @field_validator("webhook")
    @classmethod
    def _can_be_posted_to(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None and not re.match(r"https?://[^\s/?#]+[^\s]*$", value.get_secret_value()):
            raise _WrongValue(
                "it is not an address.",
                "Write the whole one, such as https://example.org/hook; stars stand for one that was hidden.",
            )
        return value

    @property
    def names(self) -> list[OwnName]:
        """The names of the extensions."""
        return [OwnName(name) for name in self.extensions]

    @property
    def options_of_trackers(self) -> dict[OwnName, dict[str, Any]]:
        """The trackers, each with its options."""
        return {OwnName(name): options for name, options in self.trackers.items()}


class Disk(Group):
    """What the server stores, and where."""

    state_dir: Path = Field(Path("atoll-run"), description="Folder for the run's state. Default: next to the run file.")
    export_dir: Path | None = Field(None, description="Folder of exports. Default: `exports` in `disk.state_dir`.")
    export_every: int = Field(0, ge=0, description="Rounds between two exports of the model; 0: only at the end.")
    in_files: bool = Field(
        True, description="Keep updates and versions in files; false: in memory, so a stopped run cannot continue."
    )
    durability: Literal["process", "power"] = Field(
        "process", description="What an acknowledged update survives: a kill of the server, or a power loss."
    )
    keep_versions: int = Field(
        2,
        ge=1,
        description="Number of newest versions that the server keeps; `atoll rollback` can go back to them. The log of "
        "the server says what each takes on disk.",
    )
    max_pinned_versions: int = Field(
        4, ge=1, description="Number of older versions to keep while workers need them; the oldest are deleted first."
    )
    keep_updates: int = Field(
        0,
        ge=0,
        description="Number of newest rounds of which the server keeps the updates, and the versions that they start "
        "from: `atoll verify` computes these rounds again. 0: an update is deleted as soon as its round is over.",
    )
    objects_max_bytes: int = Field(
        64 * 2**30, ge=0, description="Largest total size of published objects at the server; 0: no objects."
    )
    objects_expire_s: float = Field(
        86400.0, gt=0, description="Longest time that the server keeps an object, in seconds."
    )
    workflow_max_bytes: int = Field(
        64 * 2**30,
        ge=0,
        description="Largest total size of what a workflow of tasks has got from its sites, which the server keeps "
        "until the workflow ends: with it, the workflow goes on after a restart. Beyond that, or if the disk has too "
        "little space, nothing of it is kept, and a restart begins the workflow again. 0: always.",
    )
    min_free_bytes: int = Field(
        256 * 2**20,
        ge=0,
        description="Free disk space below which the server refuses uploads (HTTP 507) and sends no payloads.",
    )


class Settings(BaseModel):
    """All settings of a run. `Settings.read` reads them from a run file, the environment and the command line."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, protected_namespaces=())

    run: Run = Run()
    model: Model = Model()
    algorithm: Algorithm = Algorithm()
    diloco: DiLoCo = DiLoCo()
    rounds: Rounds = Rounds()
    async_: Async = Field(Async(), alias="async")
    swarm: Swarm = Swarm()
    aggregation: Aggregation = Aggregation()
    workflow: Workflow = Workflow()
    network: Network = Network()
    trust: Trust = Trust()
    limits: Limits = Limits()
    disk: Disk = Disk()
    server: Server = Server()
    _source: dict[str, str] = PrivateAttr(default_factory=dict)

    @property
    def source(self) -> Mapping[str, str]:
        """`group.key` → the file, the variable or the command line that has set it; empty if a program has."""
        return self._source

    def __eq__(self, other: object) -> bool:
        """Return whether all values are equal, whatever has set them."""
        return isinstance(other, Settings) and self.__dict__ == other.__dict__

    @model_validator(mode="after")
    def _consistent(self) -> Settings:
        require_consistent(self.at, lambda key: default_of(key) == self.at(key))
        for change in self.changes:
            try:
                self.of_round(change.from_round)
            except ValidationError as error:
                wrong = _readable(error, dict.fromkeys(change.values, f"rounds.changes {change}"))
                raise ConfigError(wrong.message, wrong.remedy) from None
            except ConfigError as error:
                raise ConfigError(f"rounds.changes {change}: {error.message}", error.remedy) from None
        return self

    @property
    def changes(self) -> list[Change]:
        """The changes within the run (`rounds.changes`), in order."""
        return changes_of(self.rounds.changes)

    def of_round(self, number: int) -> Settings:
        """Return the settings of a round: these, with all changes up to it, and without a list of changes.

        Raises:
            ValidationError, ConfigError: a changed value is wrong, or contradicts another setting.
        """
        made = [change.values for change in self.changes if change.from_round <= number]
        values = {key: value for each in made for key, value in each.items()}
        own = self.model_dump(by_alias=True, exclude_unset=True)
        own["rounds"] = {key: each for key, each in own.get("rounds", {}).items() if key != "changes"}
        return Settings.model_validate(merged(values, own))

    @classmethod
    @public_api
    def read(
        cls,
        path: Path | None = None,
        given: Mapping[str, Any] | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> Settings:
        """Read settings from a run file, the environment and the command line (in rising priority).

        Args:
            path: a TOML run file; relative paths in the file, and the default state directory, start at its folder.
            given: `group.key` → value, from the command line; None means "not given".
            environ: the environment variables; by default those of the process.

        Raises:
            ConfigError: the file cannot be read, a key is unknown, or a value is wrong. The message names the source
                (file, variable or command line), and suggests the nearest key for an unknown one.
        """
        return cls.build(*collected(path, given, environ))

    @classmethod
    @public_api
    def build(
        cls, values: Settings | Mapping[str, Any] | None = None, source: Mapping[str, str] | None = None
    ) -> Settings:
        """Build settings from a mapping, and validate them.

        Args:
            values: `group.key` → value, or `group` → a mapping or group object; later entries override earlier ones.
            source: `group.key` → the source of its value, for messages.

        Raises:
            ConfigError: a key is unknown, a value is wrong, or values contradict each other.
        """
        if isinstance(values, Settings):
            return values
        try:
            settings = cls.model_validate(with_components(merged(values or {})))
            settings._source = dict(source or {})
            return settings
        except ValidationError as error:
            raise _readable(error, source or {}) from None

    def changed(self, values: Mapping[str, Any]) -> Settings:
        """Return a copy with some values replaced.

        Args:
            values: `group.key` → new value.

        Raises:
            ConfigError: a key is unknown, a value is wrong, or values contradict each other.
        """
        return Settings.build(merged(values, self.model_dump(by_alias=True, exclude_unset=True)), self._source)

    def at(self, key: str) -> Any:
        """Return the value of the setting `group.key`; if `key` is the name of a group, the group."""
        group, _, name = key.partition(".")
        table = getattr(self, attribute(group))
        return getattr(table, name) if name else table

    def chosen(self, keys: tuple[str, ...]) -> dict[str, Any]:
        """Return the settings and groups with these keys: key → value, in a form that JSON can express."""
        chosen = {}
        for key in keys:
            group, _, name = key.partition(".")
            table = self.at(group).model_dump(mode="json", by_alias=True, include={name} if name else None)
            chosen[key] = table[name] if name else table
        return chosen

    def by_key(self) -> dict[str, Any]:
        """Return all settings, including the options of the algorithm: `group.key` → value."""
        found: dict[str, Any] = {}
        for group in GROUPS:
            found |= {key: self.at(key) for key in FIELDS if key.startswith(f"{group}.")}
            if group == "algorithm":
                found |= {f"algorithm.{option}": value for option, value in self.algorithm.options.items()}
        return found

    def with_absolute_folders(self) -> Settings:
        """Return these settings with absolute `disk` folders, which stay valid if the working directory changes."""
        folders = {key: getattr(self.disk, key) for key in ("state_dir", "export_dir")}
        absolute = {key: folder and folder.absolute() for key, folder in folders.items()}
        return self.model_copy(update={"disk": self.disk.model_copy(update=absolute)})

    @property
    def exports(self) -> Path:
        """The folder to which the run writes `model.safetensors` and `metrics.jsonl`."""
        return self.disk.export_dir or self.disk.state_dir / "exports"


def attribute(group: str) -> str:
    """Return the name of a group's attribute in `Settings`: `async_` for the group `async`, else the group's name."""
    return "async_" if group == "async" else group


GROUPS: dict[str, type[BaseModel]] = {
    field.alias or name: field.annotation  # type: ignore[misc]  # every field is a group
    for name, field in Settings.model_fields.items()
}
FIELDS: dict[str, FieldInfo] = {
    f"{group}.{key}": field for group, kind in GROUPS.items() for key, field in kind.model_fields.items()
}
"""Every setting: `group.key` → pydantic's description of the field."""


def default_of(key: str) -> Any:
    """Return the default of the setting `group.key`."""
    return FIELDS[key].get_default(call_default_factory=True)


def collected(
    path: Path | None, flags: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None
) -> tuple[dict[str, Any], dict[str, str]]:
    """Merge the settings of the run file, the environment and the command line, and record where each one was set.

    Returns:
        The values as nested tables, not validated yet; and `group.key` → the source of its value.
    """
    line: Layer = {key: (value, COMMAND_LINE) for key, value in (flags or {}).items() if value is not None}
    layers = [
        file_layer(path, FIELDS) if path else {},
        environment_layer(os.environ if environ is None else environ, FIELDS),
        line,
    ]
    values: dict[str, Any] = {}
    source: dict[str, str] = {}
    for layer in layers:
        values = merged({key: value for key, (value, _) in layer.items()}, values)
        source |= {key: where for key, (_, where) in layer.items()}
    return values, source


def _readable(error: ValidationError, source: Mapping[str, str]) -> ConfigError:
    """Return pydantic's first validation error as an error of Atoll, with the source of the value and a remedy."""
    first = error.errors()[0]
    cause = first.get("ctx", {}).get("error")
    key = ".".join(map(str, first["loc"])) or "settings"
    where = source_of(key, source) or "settings"
    if isinstance(cause, _WrongValue):
        return ConfigError(f"{where}: {key}: {cause.message}", cause.remedy)
    if first["type"] == "extra_forbidden":
        return ConfigError(f"{where}: the setting {key!r} does not exist.", nearest_key(key, FIELDS, first["input"]))
    if key in GROUPS:
        message = f"{where}: {key} = {first['input']!r}, but {key} is a group of settings, not a setting."
        return ConfigError(message, nearest_key(key, FIELDS))
    field = FIELDS.get(key)
    message = first["msg"][0].lower() + first["msg"][1:]
    if first["type"] == "model_type":
        given = first["input"] if isinstance(first["input"], str) else "…"
        part = "path" if ":" in given else "name"
        option, entry = f"--set {key}.{part}={given}", f"{key} = {{{part} = {given!r}}}"
        message = f"this setting is a table: write {option if where == COMMAND_LINE else entry}"
    remedy = f"{key}: {field.description}" if field and field.description else ""
    shown = str(first["input"]).lower() if isinstance(first["input"], bool) else repr(first["input"])
    kind, example = next((each for word, each in _KINDS.items() if first["type"].startswith(word)), ("", ""))
    if kind == "a list" and field and "dict" in str(field.annotation):
        kind, example = "a list of tables", "[{…}]"
    if kind:
        remedy = f"Write {key} = {example}, for example. {remedy}" if field else f"Write {kind}, as in TOML."
        return ConfigError(f"{where}: {key} = {shown}, but it must be {kind}.", remedy)
    return ConfigError(f"{where}: {key} = {shown}: {message}.", remedy)


_KINDS = {
    "int_": ("a whole number", "20"),
    "float_": ("a number", "0.5"),
    "bool_": ("true or false", "true"),
    "string_type": ("text", '"text"'),
    "tuple_type": ("a list", '["a", "b"]'),
    "dict_type": ("a table", "{…}"),
    "is_instance_of": ("text or a Path", '"folder"'),
}
"""Beginning of the type of pydantic's error → what the setting must be, and an example."""
