"""The plan of a run, computed from its values and model: layouts of files, codecs, reducers, outer optimizer."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

import torch
from pydantic import ValidationError
from torch.optim import Optimizer

from atoll import registry
from atoll.aggregation.outer_state import RUNS, Column, Entries, entries, state_layout, state_regions, version_regions
from atoll.aggregation.user_aggregator import Accumulated, result_layout
from atoll.algorithms.resolve import ResolvedAlgorithm, resolve
from atoll.codecs import build_codecs, encoded_layout, sent_name
from atoll.codecs.base import Codec
from atoll.codecs.version_difference import Downlink
from atoll.config import Settings
from atoll.errors import ConfigError
from atoll.outer_optimizers import build_outer
from atoll.outer_optimizers.torch_optimizer import OuterRule
from atoll.protocol.messages import unsendable
from atoll.protocol.swarm_messages import SwarmPlan
from atoll.reducers import StalenessWeight, build_reducers, constant, staleness_weight
from atoll.reducers.base import Reducer
from atoll.registry import Name, ReceivedName
from atoll.store.store import FileShape, FragmentShapes
from atoll.system_calls import allocate, memory_file, nameless_file
from atoll.tensors.byte_runs import ByteRun, RunTable
from atoll.tensors.dtypes import torch_dtype
from atoll.tensors.fragments import Split
from atoll.tensors.layout import TILE, Layout, version_header, version_layout
from atoll.tensors.schema import PARAMS, Schema


@dataclass(frozen=True)
class Chosen:
    """A reducer, an outer optimizer or a codec that a run uses.

    Attributes:
        name: its name.
        options: its keyword arguments.
    """

    name: Name
    options: Mapping[str, Any]


@dataclass(frozen=True)
class PlanValues:
    """The values on which the result of a round depends, besides the model. A server makes them from its settings.

    In a swarm the workers aggregate, so the server sends them these values (`SwarmPlan`). Server and workers make their
    plans from these values, in the same way.

    Attributes:
        algorithm: name of the algorithm.
        reduce: group of tensors → name of the algorithm's own reducer of the group.
        reducer: the reducer of `params`.
        outer: the outer optimizer; if a program has passed a class or function, this and its arguments.
        outer_lr_of: pattern of parameter names → their outer learning rate.
        codec: the codec of `params` in an update.
        part_bytes: largest size of a part, in bytes.
        versions: largest number of versions of a fragment that the run keeps at the same time.
        in_files: whether versions and updates are kept in files; False: in memory.
        downlink: the codec of differences between versions; None: whole versions.
        ranks: number of ranks of sharded workers.
        accumulates: whether a user's aggregator replaces the reducer of `params`.
    """

    algorithm: str
    reduce: Mapping[str, Name]
    reducer: Chosen
    outer: Chosen | tuple[Callable[..., Optimizer], Mapping[str, Any]]
    outer_lr_of: Mapping[str, float]
    codec: Chosen
    part_bytes: int
    versions: int
    in_files: bool
    downlink: Chosen | None = None
    ranks: int = 1
    accumulates: bool = False

    @classmethod
    def of_settings(cls, settings: Settings, algorithm: ResolvedAlgorithm) -> PlanValues:
        """Return the values of a run with these settings.

        Args:
            settings: settings of the run.
            algorithm: its algorithm, with the settings applied.
        """
        download, disk, outer = settings.aggregation.download_codec, settings.disk, algorithm.outer
        return cls(
            algorithm=algorithm.name,
            reduce=algorithm.reduce,
            reducer=Chosen(algorithm.reducer, algorithm.reducer_options),
            outer=Chosen(outer, algorithm.outer_options)
            if isinstance(outer, Name)
            else (outer, algorithm.outer_options),
            outer_lr_of=settings.algorithm.outer_lr_of,
            codec=Chosen(algorithm.codec, algorithm.codec_options),
            part_bytes=settings.network.part_bytes,
            versions=disk.keep_versions + disk.max_pinned_versions + 2,  # the next one, and one that is being removed
            in_files=disk.in_files,
            downlink=Chosen(download.target, download.options) if download.target else None,
            ranks=settings.model.ranks,
            accumulates=bool(settings.aggregation.aggregator.path),
        )

    @classmethod
    def received(cls, message: SwarmPlan) -> PlanValues:
        """Return the values that the server of a swarm has sent. Names of what is built are `ReceivedName`."""
        return cls(
            algorithm=message.algorithm.text,
            reduce=message.reduce,
            reducer=Chosen(message.reducer.name, message.reducer.options),
            outer=Chosen(message.outer.name, message.outer.options),
            outer_lr_of=message.outer_lr_of,
            codec=Chosen(message.codec.name, message.codec.options),
            part_bytes=message.part_bytes,
            versions=message.versions,
            in_files=message.in_files,
        )

    def message(self) -> SwarmPlan:
        """Return the message that sends these values to the workers of a swarm.

        Raises:
            ConfigError: a name or an option cannot be sent.
        """
        parts = {"reducer": self.reducer, "outer": self.outer, "codec": self.codec}
        chosen = {
            key: {"name": str(each.name), "options": {name: _sent(value) for name, value in each.options.items()}}
            for key, each in parts.items()
            if isinstance(each, Chosen)
        }
        fields = {
            "algorithm": self.algorithm,
            "reduce": {group: str(name) for group, name in self.reduce.items()},
            "outer_lr_of": {pattern: float(lr) for pattern, lr in self.outer_lr_of.items()},
            "part_bytes": self.part_bytes,
            "versions": self.versions,
            "in_files": self.in_files,
        }
        try:
            return SwarmPlan.model_validate(fields | chosen)
        except ValidationError as error:
            raise ConfigError(
                unsendable(error, _SETTINGS),
                "The options of codec, reducer and outer optimizer are numbers, short texts and short lists of these. "
                "For others, set swarm.enabled = false.",
            ) from None


_SETTINGS = {
    "codec": "aggregation.upload_codec",
    "codec.options": "aggregation.upload_codec",
    "reducer": "aggregation.reducer",
    "reducer.options": "aggregation.reducer",
    "outer": "algorithm.outer_optimizer",
    "outer.options": "algorithm.outer_optimizer",
    "outer_lr_of": "algorithm.outer_lr_of",
}
"""Field of `SwarmPlan` that the user sets → the setting."""


def _sent(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


@dataclass(frozen=True)
class FragmentPlan:
    """The layouts of the files of one fragment.

    Attributes:
        schema: tensors of the fragment.
        header: header of a version's file.
        version: layout of a version.
        update: layout of an encoded update.
        state: header and layout of the file of the outer optimizer's state; None if there is no such state.
        downlink: codec and layout of the differences between versions that workers download; None if they always
            download whole versions.
    """

    schema: Schema
    header: bytes
    version: Layout
    update: Layout
    state: tuple[bytes, Layout] | None
    downlink: Downlink | None

    def shapes(self) -> FragmentShapes:
        """Return the sizes, headers and hashed regions of the fragment's files, which the store needs."""
        state = None
        if self.state:
            header, layout = self.state
            state = FileShape(layout.nbytes, header, state_regions(self.version, layout))
        delta = None
        if self.downlink is not None:
            ranges = tuple(((part.start, part.nbytes),) for part in self.downlink.parts)
            delta = FileShape(self.downlink.layout.nbytes, b"", ranges)
        return FragmentShapes(
            version=FileShape(self.version.nbytes, self.header, version_regions(self.version)),
            state=state,
            update_bytes=self.update.nbytes,
            update_parts=tuple((part.start, part.nbytes) for part in self.update.parts),
            delta=delta,
        )

    @property
    def state_layout(self) -> Layout | None:
        """Layout of the file of the outer optimizer's state; None if there is no such state."""
        return self.state[1] if self.state else None

    @cached_property
    def version_runs(self) -> RunTable:
        """Byte runs (ranges that one call processes) of a version. `RunTable.limit` sets their maximum size."""
        return RunTable(self.version, TILE)

    @cached_property
    def update_runs(self) -> RunTable:
        """Byte runs of an update. `RunTable.counterpart` returns the one with the same elements as one of a version."""
        return RunTable(self.update, TILE)

    @cached_property
    def reduced_runs(self) -> RunTable:
        """Byte runs of a user aggregator's result file. Use them in the same way as `update_runs`."""
        return RunTable(result_layout(self.schema, self.version.part_bytes), TILE)

    @cached_property
    def entries(self) -> Entries:
        """Segments (byte ranges) of the file of the outer optimizer's state, by tensor name, then by key."""
        return entries(self.state_layout)

    def columns(self, run: ByteRun) -> dict[str, tuple[Column, int, torch.dtype]]:
        """Return the places, in the state file, of the outer optimizer's state for a byte run of a version.

        Only state with one element per element of the tensor is included, such as `momentum_buffer`.

        Returns:
            key → (column, byte offset in the state file, dtype). The offset is that of the run's first element.
        """
        head = run.pieces[0]
        return {
            key: (
                (key, segment.spec.dtype),
                segment.offset + head.start * segment.spec.item_bytes,
                torch_dtype(segment.spec.dtype),
            )
            for key, segment in self.entries.get(head.segment.spec.name, {}).items()
            if segment.spec.group == RUNS
        }


@dataclass(frozen=True, kw_only=True)
class AggregationPlan:
    """How the rounds of a run are aggregated, and the layouts of its files. Without streaming, there is one fragment.

    Attributes:
        values: the values that this plan was made from.
        split: the model's schema and its fragments.
        codecs: name → codec.
        rule: the outer optimizer.
        reducers: group → reducer of its floats.
        fragments: layouts of each fragment's files.
        threads: number of threads that aggregate a round.
    """

    values: PlanValues
    split: Split
    codecs: dict[str, Codec]
    rule: OuterRule
    reducers: dict[str, Reducer]
    fragments: tuple[FragmentPlan, ...]
    threads: int

    @classmethod
    def of_values(cls, values: PlanValues, split: Split, threads: int = 0) -> AggregationPlan:
        """Return the plan for a model.

        Args:
            values: the values on which the result of a round depends.
            split: the model's schema and fragments.
            threads: number of threads that aggregate a round; 0: one per core, at most 8.

        Raises:
            ConfigError: the codec, a reducer or the outer optimizer does not exist here or cannot be used, or a value
                does not fit the model. The message says why.
        """
        codec, part_bytes = values.codec, values.part_bytes
        codecs = build_codecs(codec.name, codec.options)
        if values.accumulates:
            codecs[Accumulated.name] = Accumulated()
        outer = values.outer
        target, options = (outer.name, outer.options) if isinstance(outer, Chosen) else outer
        rule = build_outer(target, options, values.outer_lr_of)
        _require_fitting(values.outer_lr_of, split)
        reducers = build_reducers(values.reduce, values.reducer.name, values.reducer.options)

        def fragment(schema: Schema) -> FragmentPlan:
            version = version_layout(schema, part_bytes, values.ranks)
            downlink = Downlink.of(version, values.downlink.name, values.downlink.options) if values.downlink else None
            return FragmentPlan(
                schema=schema,
                header=version_header(schema),
                version=version,
                update=encoded_layout(schema, codec.name.text, codecs, part_bytes, values.ranks),
                state=state_layout(schema.tensors, rule, part_bytes, masters=downlink is not None),
                downlink=downlink,
            )

        return AggregationPlan(
            values=values,
            split=split,
            codecs=codecs,
            rule=rule,
            reducers=reducers,
            fragments=tuple(map(fragment, split.schemas)),
            threads=threads or min(os.cpu_count() or 1, 8),
        )

    @property
    def schema(self) -> Schema:
        """Schema of the whole model."""
        return self.split.schema

    @property
    def codec(self) -> Codec:
        """The codec of `params` in updates."""
        return self.codecs[self.values.codec.name.text]

    @property
    def sent_codecs(self) -> tuple[ReceivedName, ReceivedName]:
        """The names, in messages, of the codec of updates and of the codec of the differences between versions."""
        down = self.fragments[0].downlink
        return sent_name(self.values.codec.name, self.codecs), down.name if down else ReceivedName("none")

    @property
    def versions(self) -> tuple[Layout, ...]:
        """Layout of the version file, for each fragment of the model."""
        return tuple(fragment.version for fragment in self.fragments)

    @property
    def has_masters(self) -> bool:
        """Whether versions are downloaded through a codec. If so, the outer state has full-precision parameters."""
        return any(fragment.downlink is not None for fragment in self.fragments)

    @property
    def has_fragments(self) -> bool:
        """Whether the model has more than one fragment."""
        return len(self.fragments) > 1

    @property
    def needs_steps(self) -> bool:
        """Whether a reducer needs the number of local steps of each update."""
        return any(reducer.needs_steps for reducer in self.reducers.values())

    @property
    def needs_population(self) -> bool:
        """Whether a reducer needs the total weight of all sites, including sites without an update in the round.

        If so, the journal keeps the weight of each site's first update.
        """
        return any(reducer.needs_population for reducer in self.reducers.values())


@dataclass(frozen=True, kw_only=True)
class Plan(AggregationPlan):
    """The plan of a run at its server, which has the run's settings.

    Attributes:
        settings: settings of the run.
        algorithm: the algorithm, with the settings applied.
        staleness_weight: function of an update's staleness that returns a factor for its weight.
        changed: number of a round → the plan from this round on, for each change within the run (`rounds.changes`).
    """

    settings: Settings
    algorithm: ResolvedAlgorithm
    staleness_weight: StalenessWeight = constant
    changed: Mapping[int, Plan] = field(default_factory=dict)

    @classmethod
    def make(cls, settings: Settings, split: Split, outer: Callable[..., Optimizer] | None = None) -> Plan:
        """Return the plan for a model.

        Args:
            settings: settings of the run.
            split: the model's schema and fragments.
            outer: class or function that creates the outer optimizer; None if the settings name it.

        Raises:
            ConfigError: the algorithm, codec, reducer or outer optimizer cannot be used, or a setting does not fit the
                model or another setting. The message says why.
        """
        algorithm, weight = resolve(settings, outer), settings.async_.staleness_weight
        made = AggregationPlan.of_values(PlanValues.of_settings(settings, algorithm), split, settings.run.threads)
        if weight != "constant" and made.reducers[PARAMS].needs_all:
            raise ConfigError(
                f"async.staleness_weight is {weight!r}, but the reducer {algorithm.reducer!r} ignores weights.",
                'Leave async.staleness_weight out, or set aggregation.reducer = {name = "mean"}.',
            )
        plan = cls(
            **vars(made),
            settings=settings,
            algorithm=algorithm,
            staleness_weight=staleness_weight(settings.async_.weight),
        )
        changed = {each.from_round: plan._with(settings.of_round(each.from_round), outer) for each in settings.changes}
        return replace(plan, changed=changed)

    def _with(self, settings: Settings, outer: Callable[..., Optimizer] | None) -> Plan:
        """Return this plan with settings of which only those differ that may change within a run."""
        algorithm, rule = resolve(settings, outer), self.rule
        if algorithm.outer_options.get("lr") != self.algorithm.outer_options.get("lr"):
            rule = rule.with_lr(algorithm.outer_options["lr"])
        build_codecs(algorithm.codec, algorithm.codec_options)
        return replace(self, settings=settings, algorithm=algorithm, rule=rule)

    def with_codec_of(self, number: int) -> Plan:
        """Return this plan with the codec of updates in a round, if that changes within the run, and with its files."""
        if self.fits(number):
            return self
        now = self.of_round(number).algorithm
        codec = Chosen(now.codec, now.codec_options)
        values = replace(self.values, codec=codec)
        made = AggregationPlan.of_values(values, self.split, self.threads)
        algorithm = replace(self.algorithm, codec=now.codec, codec_options=now.codec_options)
        plans = {first: replace(each, **_files(made)) for first, each in self.changed.items()}
        return replace(self, **_files(made), algorithm=algorithm, changed=plans)

    def fits(self, number: int) -> bool:
        """Return whether updates of a round have the codec of this plan."""
        now = self.of_round(number).algorithm
        return Chosen(now.codec, now.codec_options) == self.values.codec

    def of_round(self, number: int) -> Plan:
        """Return the plan of a round: this one, or the one of the last change up to it."""
        return self.changed.get(max((first for first in self.changed if first <= number), default=0), self)

    @property
    def changes_steps(self) -> bool:
        """Whether the number of local steps between two synchronisations changes within the run."""
        return len({each.algorithm.sync_every for each in (self, *self.changed.values())}) > 1

    @property
    def own_code(self) -> tuple[tuple[str, str, str], ...]:
        """Kind, name in messages and place of the run's code for sites that is neither built in nor installed."""
        settings, algorithm, (up, down) = self.settings, self.algorithm, self.sent_codecs
        named = [
            ("codecs", up.text, algorithm.codec),
            ("codecs", down.text, settings.aggregation.download_codec.target),
        ]
        if algorithm.local is not None:
            named.append(("algorithms", algorithm.name, settings.algorithm.target))
        places = [(kind, name, registry.place_of(kind, own) if own else "") for kind, name, own in named]
        return tuple(each for each in places if each[-1])

    @property
    def is_swarm(self) -> bool:
        """Whether the run is a swarm, in which workers aggregate rounds and keep the versions."""
        return self.settings.swarm.enabled

    def new_file(self, name: str, nbytes: int) -> int:
        """Create an unnamed temporary file of zeros, and return its descriptor.

        The file is in the state directory. With `disk.in_files = false` it is in memory.

        Args:
            name: name that a file in memory gets, for debugging.
            nbytes: size of the file.

        Raises:
            OSError: there is no space. No file is left behind.
        """
        to_disk = self.settings.disk.in_files
        fd = nameless_file(self.settings.disk.state_dir) if to_disk else memory_file(name)
        try:
            allocate(fd, 0, max(nbytes, 1))
        except BaseException:
            os.close(fd)
            raise
        return fd


def _files(plan: AggregationPlan) -> dict[str, Any]:
    return {"values": plan.values, "codecs": plan.codecs, "fragments": plan.fragments}


def _require_fitting(outer_lr_of: Mapping[str, float], split: Split) -> None:
    """Check that every pattern of `algorithm.outer_lr_of` matches the name of a float parameter.

    Raises:
        ConfigError: a pattern matches no name.
    """
    names = [spec.name for spec in split.schema.tensors if spec.group == PARAMS and spec.is_float]
    for pattern in outer_lr_of:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(
                f"algorithm.outer_lr_of contains {pattern!r}, which matches no parameter of the model.",
                registry.nearest(pattern, names, "Patterns are shell patterns: head.*, *.bias."),
            )


def torch_build() -> str:
    """Return the version of torch. Two machines compute bit-identical results only with the same torch build."""
    return torch.__version__


def cpu_capability() -> str:
    """Return the machine type and the vector instructions that torch uses. Bit-identical results depend on both."""
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
