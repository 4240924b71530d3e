"""The settings of a run: typed, frozen, validated once.

One flat list. Every setting is a key of the run file (TOML), a flag of `atoll server` (`--sync-every`) and an
environment variable (`ATOLL_SYNC_EVERY`); a flag wins over the environment, the environment over the file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from atoll import registry
from atoll.config.consistency import require_consistent
from atoll.config.run_file import environment_layer, file_layer
from atoll.config.workflow_settings import with_components
from atoll.errors import AtollError, ConfigError, public_api
from atoll.sizes import CHUNK_BYTES, ChunkBytes

# -- Which settings a run lives by, and from when on a changed one holds: the rest at the server's next start.


FROZEN = (
    "algorithm",
    "local_options",
    "placement",
    "mode",
    "sync_rounds_first",
    "num_fragments",
    "sync_every",
    "tau",
    "alpha",
    "max_inflight",
    "ranks",
    "codec",
    "codec_options",
    "downlink_codec",
    "downlink_codec_options",
    "part_bytes",
    "download_to_disk",
)
"""Files on disk hang on them, updates that wait to be applied, or what sites that are running were told, which would go
on in another way than those that start."""

FROZEN_OUTER = ("outer_optimizer", "outer_lr", "outer_lrs", "outer_momentum", "outer_options", "dn_buffer_size")
"""Frozen, too, as what they come to together: the rule of the outer optimizer."""

AT_THE_BEGINNING = ("model", "model_args", "buffers", "seed")
"""Of the initial model. It is not read again; where it is named and is another one by its tensors, it is refused."""

FOR_SITES = ("connections", "heartbeat_interval_s", "waiting_heartbeat_s", "idle_timeout_s")
"""Sites have them from the server when they start, and keep them until they are started again."""


DEFAULT_PORT = 8512

IDLE_TIMEOUT_S = 60.0


class Settings(BaseModel):
    """Everything that decides what a run does. `Settings.read` builds one from file, environment and flags."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    name: str = Field("atoll", description="A name for people; shown in status and in the summary.", max_length=100)
    model: str | None = Field(
        None,
        description="Initial model: `module:function` that returns an `nn.Module`, `{class_path, args}`, a "
        "`.safetensors` file, or a folder of them.",
    )
    model_args: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments for `module:function`.")
    buffers: tuple[str, ...] = Field(
        (),
        description="Further tensors to be averaged as buffers rather than stepped, as shell patterns; only needed "
        "where the initial model is a file that does not say.",
    )
    seed: int = Field(
        0, description="Seed set before the initial model is built; in a simulation, of what virtual workers draw, too."
    )

    algorithm: str = Field(
        "diloco", description="`diloco`, `fedavg`, `fedprox`, `fednova`, … or `module:attribute` of your own."
    )
    rounds: int = Field(0, ge=0, description="Rounds after which the run is finished; 0: until it is stopped.")
    num_workers: int = Field(1, ge=1, description="Workers that round one waits for.")
    min_workers: int | None = Field(
        None,
        ge=1,
        description="A round never closes with fewer updates. By default a round of a federated algorithm needs all "
        "`num_workers` (with `sample_fraction`: as many as are drawn of them); DiLoCo, an asynchronous run and one "
        "with a quorum need 1.",
    )
    quorum: int = Field(0, ge=0, description="Updates that suffice once the deadline has passed; 0: all expected.")
    round_deadline_s: float = Field(0.0, ge=0, description="Seconds after which a quorum closes a round; 0: never.")
    sample_fraction: float = Field(
        1.0, gt=0, le=1, description="Share of the workers that a round asks for, drawn anew each round."
    )
    sample_min: int = Field(1, ge=1, description="Workers that a round asks for at least.")
    sample_seed: int = Field(0, description="Seed of the draws.")
    sync_every: int = Field(500, ge=1, description="Local optimizer steps between two synchronisations (DiLoCo's H).")

    placement: Literal["server", "swarm"] = Field(
        "server",
        description="Where rounds are aggregated: `server`, or `swarm`: on a worker, another one each round; tensors "
        "then travel between workers alone.",
    )
    aggregators: tuple[str, ...] = Field(
        (),
        description="Sites that aggregate the rounds of a swarm, in turn; by default all of them, in an order that "
        "`seed` decides.",
    )

    mode: Literal["sync", "async"] = Field(
        "sync",
        description="`sync`: a round waits for the workers that it expects; `async`: updates are applied as they come, "
        "nobody waits for anybody. `--async` says the same.",
    )
    async_buffer: int = Field(1, ge=1, description="Updates that one asynchronous step is the mean of (FedBuff's K).")
    async_grace_s: float = Field(
        0.0, ge=0, description="Seconds that an asynchronous step waits for further updates; `inf`: for everybody's."
    )
    max_staleness: int | None = Field(
        None, ge=0, description="Refuse an update whose base is more than so many versions behind the head."
    )
    staleness_weight: str = Field(
        "constant",
        description="By what an update that is s versions behind is multiplied: `constant` (1), `inverse_sqrt` "
        "(1/√(1+s)), or `module:function` of your own, from s to a number above 0 and at most 1.",
    )
    sync_rounds_first: int = Field(
        0, ge=0, description="Rounds of an asynchronous run that wait for all workers, before the others begin."
    )
    dn_buffer_size: int = Field(
        0, ge=0, description="Updates between two steps of momentum: delayed Nesterov's N; 0: every update has its own."
    )
    dylu: bool = Field(
        False, description="Slower workers of an asynchronous run take fewer local steps: H·(their speed/the fastest)."
    )

    num_fragments: int = Field(
        1,
        ge=1,
        description="Parts of the model that are synchronised in turn, one every sync_every/num_fragments steps.",
    )
    tau: int = Field(
        0, ge=0, description="Local steps between taking a fragment's update and merging its result: overlap (τ)."
    )
    alpha: float = Field(
        0.0, ge=0, le=1, description="Share of the local parameters that a merge keeps: 0 takes the global ones (α)."
    )
    max_inflight: int = Field(1, ge=1, description="Fragments of one worker that may be under way at a time.")
    ranks: int = Field(
        1,
        ge=1,
        le=4096,
        description="Ranks of workers whose model is sharded (FSDP2): parts are cut so that none is of two ranks. "
        "Workers that are not sharded have any number.",
    )

    outer_optimizer: str | None = Field(
        None, description="`sgd`, `adam`, … or `module:attribute`; by default the algorithm's own."
    )
    outer_lr: float | None = Field(None, gt=0, description="Outer learning rate; by default the algorithm's own.")
    outer_lrs: dict[str, Annotated[float, Field(gt=0)]] = Field(
        default_factory=dict,
        description='Outer learning rates of some parameters, by their names: `{"head.*" = 0.3}`; of several patterns '
        "that fit, the first.",
    )
    outer_momentum: float | None = Field(None, ge=0, lt=1, description="Outer momentum; by default the algorithm's.")
    outer_options: dict[str, Any] = Field(
        default_factory=dict, description="Further keyword arguments of the outer optimizer."
    )
    local_options: dict[str, Any] = Field(
        default_factory=dict, description="How the algorithm corrects local training: `{mu = 0.1}` for FedProx."
    )
    reducer: str | None = Field(
        None,
        description="How the updates of a round become one: `mean`, `clipped_mean`, `median`, `trimmed_mean`, "
        "`normalised_mean` (FedNova), or `module:attribute` of your own; by default the algorithm's, the mean.",
    )
    reducer_options: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of the reducer.")
    aggregator: str | None = Field(
        None,
        description="An aggregator of your own in place of the reducer, as `my_file.py:attribute` or "
        "`module:attribute`.",
    )
    aggregator_options: dict[str, Any] = Field(default_factory=dict, description="Its keyword arguments.")
    aggregator_timeout_s: float = Field(
        600.0,
        ge=0,
        description="Seconds in which the aggregator neither reads nor gives a tensor, after which the server takes "
        "it to hang: it ends the aggregator, and the run fails; 0: no limit.",
    )
    max_kept_updates: int = Field(
        32, ge=0, description="Updates of earlier rounds, on disk, that the aggregator may keep; then the oldest go."
    )
    task_result_filters: tuple[dict[str, Any], ...] = Field(
        (),
        description="What updates pass through at the server before they are aggregated, and answers to tasks before "
        "the workflow has them, in this order: tables `{path, args, sites, tasks}`, where `path` is `drop`, "
        "`norm_clip`, `cast` or `module:attribute` of your own, `args` its arguments, `sites` whose updates or "
        "answers, by default everybody's, and `tasks` the names of a workflow's tasks, by default all.",
    )
    task_data_filters: tuple[dict[str, Any], ...] = Field(
        (),
        description="What payloads of tasks pass through at the server before they are sent to a site; tables as those "
        "of `task_result_filters`. A run with rounds has none.",
    )
    codec: str | None = Field(
        None,
        description="`none`, `bf16`, `int8`, `int4`, `topk` or one of your own; by default bf16 for DiLoCo, else none.",
    )
    codec_options: dict[str, Any] = Field(
        default_factory=dict, description="Its keyword arguments; of `topk` the density."
    )
    downlink_codec: str | None = Field(
        None,
        description="How versions travel to the workers, as differences from what they hold: `int8`, `int4`, …; by "
        "default `none`: whole.",
    )
    downlink_codec_options: dict[str, Any] = Field(default_factory=dict, description="Its keyword arguments.")
    max_update_norm: float = Field(1e12, ge=0, description="Refuse an update whose L2 norm is larger; 0: no limit.")
    max_weight: float = Field(1e12, gt=0, description="Refuse an update with a larger weight.")

    workflow: str | None = Field(
        None,
        description="A function that sends tasks to the sites and collects results, in place of rounds, as "
        "`my_file.py:attribute` or `module:attribute`; it is called with a `controller`.",
    )
    client: str | None = Field(
        None,
        description="What each virtual worker of `atoll simulate` runs: a function of a worker, as "
        "`my_file.py:function` or `module:function`, or a script, `my_file.py`.",
    )
    workflows: tuple[dict[str, Any], ...] = Field(
        (),
        description="What the run does, in this order: tables `{kind}` with `train` (the rounds) or "
        "`cross_site_evaluation`, or `{path, args}` with a function of your own, each with `start_timeout_s` and "
        "`progress_timeout_s`; by default the rounds alone.",
    )
    components: tuple[dict[str, Any], ...] = Field(
        (),
        description="Parts that workflows, filters, the aggregator and the persistor refer to as `@id`: tables "
        "`{id, path, args}`.",
    )
    stream_tasks: tuple[str, ...] = Field(
        ("train",), description="Tasks whose tensors are streamed in parts; those of others travel inline, in one go."
    )

    tensor_download_chunk_size: ChunkBytes = Field(
        CHUNK_BYTES,
        description="Bytes of a part of what tasks, their answers and `atoll.objects.publish` stream of torch tensors: "
        "65536 to 16777216, a multiple of 64; 0: torch tensors travel inline, in one go.",
    )
    np_download_chunk_size: ChunkBytes = Field(
        CHUNK_BYTES, description="The same for NumPy arrays; 0: NumPy arrays travel inline, whatever torch tensors do."
    )

    best_metric: str | None = Field(
        None,
        min_length=1,
        description="Metric by which the best version is kept as `best.safetensors`; a round's mean is credited to the "
        "version that its workers pulled.",
    )
    best_mode: Literal["max", "min"] = Field("max", description="Whether its largest or its smallest value is best.")
    early_stop_rounds: int = Field(
        0, ge=0, description="End the run after so many rounds without a better value; 0: never."
    )
    early_stop_min_delta: float = Field(0.0, ge=0, description="By how much more a value has to be better for that.")

    host: str = Field("127.0.0.1", description="Address to listen on; anything but loopback needs TLS and a token.")
    port: int | None = Field(
        None, ge=0, le=65535, description="By default 8512, or the first free one after it; 0: any free one."
    )
    tls_cert: Path | None = Field(None, description="Certificate chain (PEM).")
    tls_key: Path | None = Field(None, description="Its private key (PEM, mode 0600).")
    token_file: Path | None = Field(None, description="File (mode 0600) with the bearer token; or ATOLL_TOKEN.")
    insecure: bool = Field(False, description="Listen beyond loopback without TLS or without a token.")
    heartbeat_interval_s: float = Field(30.0, ge=0, description="Seconds between two heartbeats; 0: none.")
    heartbeat_timeout_s: float = Field(
        120.0, ge=0, description="Silence after which a worker is declared dead; 0: never."
    )
    waiting_heartbeat_s: float = Field(
        5.0,
        gt=0,
        description="While a call of a worker is unanswered, it sends a heartbeat every so many seconds; two in a row "
        "that stay unanswered end the call, and so does an unanswered one that an answered one follows.",
    )
    idle_timeout_s: float = Field(
        IDLE_TIMEOUT_S, gt=0, description="A transfer that moves no byte for so long has failed."
    )
    connections: int = Field(2, ge=1, le=64, description="Parallel connections a worker uses for tensors.")
    part_bytes: int = Field(16 * 2**20, ge=2**16, le=16 * 2**20, description="The most bytes of one part.")

    state_dir: Path = Field(
        Path("atoll-run"), description="Folder of the journal and the slots; by default beside the run file."
    )
    save_dir: Path | None = Field(None, description="Folder for what people open; by default `state_dir`/exports.")
    save_every: int = Field(0, ge=0, description="Export the model every so many rounds; 0: at the end only.")
    download_to_disk: bool = Field(
        True,
        description="Keep updates and versions in files; false: in memory, and the run ends with its server. Also "
        "ATOLL_TENSOR_DOWNLOAD_TO_DISK.",
    )
    durability: Literal["process", "power"] = Field(
        "process", description="What an acknowledged update survives: the server being killed, or a power loss."
    )
    persistor: str | None = Field(
        None,
        description="Your own store of models, as `my_file.py:attribute` or `module:attribute`: an object with `load` "
        "and `save`.",
    )
    persistor_options: dict[str, Any] = Field(
        default_factory=dict,
        description="Its keyword arguments; a path among them is relative to where the server is started.",
    )
    keep_versions: int = Field(2, ge=1, description="Versions kept for slow readers.")
    max_pins: int = Field(4, ge=1, description="Further versions that slow pulls may hold; then the oldest is revoked.")
    objects_max_bytes: int = Field(
        64 * 2**30, ge=0, description="The most bytes of published objects that the server keeps at a time; 0: none."
    )
    objects_expire_s: float = Field(
        86400.0, gt=0, description="The longest that the server keeps a published object, whatever its publisher asks."
    )
    min_free_bytes: int = Field(
        256 * 2**20, ge=0, description="Refuse uploads (507), and send no payload, when less disk than this is free."
    )
    threads: int = Field(0, ge=0, description="Threads of the aggregation; 0: one per core, at most 8.")

    @model_validator(mode="after")
    def _consistent(self) -> Settings:
        require_consistent(self)
        return self

    @classmethod
    @public_api
    def read(
        cls,
        path: Path | None = None,
        flags: Mapping[str, Any] | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> Settings:
        """Settings from a run file, the environment and flags (in rising priority).

        Args:
            path: a TOML run file; relative paths in it, and the state directory, are relative to its folder.
            flags: values by setting name; None means "not given".
            environ: the environment; by default that of the process.

        Raises:
            ConfigError: the file cannot be read, a key is unknown (the nearest valid one is offered), or a value is
                wrong; the source (file, variable, flag) is named.
        """
        given = {key: value for key, value in (flags or {}).items() if value is not None}
        merged: dict[str, Any] = {}
        source: dict[str, str] = {}
        layers = [
            file_layer(path, cls.model_fields) if path else {},
            environment_layer(os.environ if environ is None else environ, cls.model_fields),
            {key: (value, f"flag --{key.replace('_', '-')}") for key, value in given.items()},
        ]
        for layer in layers:
            for key, (value, where) in layer.items():
                merged[key], source[key] = value, where
        return cls.build(merged, source)

    @property
    def exports(self) -> Path:
        """Folder of the run's `model.safetensors` and `metrics.jsonl`."""
        return self.save_dir or self.state_dir / "exports"

    @classmethod
    @public_api
    def build(cls, values: Mapping[str, Any], source: Mapping[str, str] | None = None) -> Settings:
        """Settings from a plain mapping.

        Raises:
            ConfigError: as `read`.
        """
        where = dict(source or {})
        for key in values:
            if key not in cls.model_fields:
                raise ConfigError(
                    f"{where.get(key, 'settings')}: there is no setting {key!r}.", _nearest(key, values[key])
                )
        try:
            return cls.model_validate(with_components(_with_class_path(values)))
        except ValidationError as error:
            raise _readable(error, where) from None


def _with_class_path(values: Mapping[str, Any]) -> dict[str, Any]:
    """`model = {class_path = "my_models.Net", args = {…}}` as `model` and `model_args`.

    Raises:
        ConfigError: it has other keys, or `model_args` is given, too.
    """
    given, model = dict(values), values.get("model")
    if not isinstance(model, Mapping):
        return given
    path, args = model.get("class_path"), model.get("args", {})
    if not isinstance(path, str) or not isinstance(args, Mapping) or not model.keys() <= {"class_path", "args"}:
        raise ConfigError(
            f"model = {dict(model)!r} is not understood.", '{class_path = "my_models.Net", args = {size = 3}}'
        )
    if given.get("model_args"):
        raise ConfigError("The model has args, and model_args is given, too.", "Give one of them.")
    module, _, attribute = path.rpartition("." if ":" not in path else ":")
    return given | {"model": f"{module}:{attribute}", "model_args": dict(args)}


def _nearest(key: str, value: Any) -> str:
    if isinstance(value, dict):
        return "A run file has no sections: put the keys at the top level."
    return registry.nearest(key.replace("-", "_"), Settings.model_fields, "`atoll server --help` lists them all.")


def _readable(error: ValidationError, source: Mapping[str, str]) -> AtollError:
    """The first complaint of pydantic in Atoll's words."""
    first = error.errors()[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, AtollError):
        return cause
    key = str(first["loc"][0]) if first["loc"] else "settings"
    field = Settings.model_fields.get(key)
    message = first["msg"][0].lower() + first["msg"][1:]
    remedy = f"{key}: {field.description}" if field and field.description else ""
    return ConfigError(f"{source.get(key, 'settings')}: {key} = {first['input']!r}: {message}.", remedy)
