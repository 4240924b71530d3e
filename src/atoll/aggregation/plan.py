"""The plan of a run, computed from its settings and model: layouts of files, codecs, reducers, outer optimizer."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

import torch
from torch.optim import Optimizer

from atoll import registry
from atoll.aggregation.outer_state import RUNS, Column, Entries, entries, state_layout, state_regions, version_regions
from atoll.aggregation.user_aggregator import Accumulated, result_layout
from atoll.algorithms.resolve import ResolvedAlgorithm, resolve
from atoll.codecs import build_codecs, encoded_layout
from atoll.codecs.base import Codec
from atoll.codecs.version_difference import Downlink
from atoll.config import Settings
from atoll.errors import ConfigError
from atoll.outer_optimizers import build_outer
from atoll.outer_optimizers.torch_optimizer import OuterRule
from atoll.posix import nameless_file
from atoll.reducers import StalenessWeight, build_reducers, constant, staleness_weight
from atoll.reducers.base import Reducer
from atoll.store.store import FileShape, FragmentShapes
from atoll.tensors.byte_runs import ByteRun, RunTable
from atoll.tensors.dtypes import torch_dtype
from atoll.tensors.fragments import Split
from atoll.tensors.layout import TILE, Layout, version_header, version_layout
from atoll.tensors.schema import PARAMS, Schema

SWARM_SETTINGS = (
    "algorithm",
    "diloco.sync_every",
    "diloco.num_fragments",
    "diloco.fragment_sync_delay",
    "diloco.fragment_update_alpha",
    "diloco.max_inflight",
    "rounds.sites",
    "rounds.min_sites",
    "async.enabled",
    "async.buffer_size",
    "async.sync_rounds_first",
    "async.staleness_weight",
    "async.momentum_every",
    "swarm.enabled",
    "aggregation.reducer",
    "aggregation.upload_codec",
    "network.part_bytes",
    "disk.in_files",
)
"""Settings on which the result of a round depends. The server of a swarm sends them to the workers, which aggregate."""


def swarm_settings(settings: Settings) -> dict[str, Any]:
    """Return the settings that a worker needs to aggregate rounds of a swarm: name → JSON value."""
    return settings.chosen(SWARM_SETTINGS)


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


@dataclass(frozen=True)
class Plan:
    """How a run computes its rounds, and the layouts of its files. Without streaming, the model is one fragment.

    Attributes:
        settings: settings of the run.
        algorithm: the algorithm, with the settings applied.
        split: the model's schema and its fragments.
        codecs: name → codec.
        rule: the outer optimizer.
        reducers: group → reducer of its floats.
        fragments: layouts of each fragment's files.
        threads: number of threads that aggregate a round.
        staleness_weight: function of an update's staleness that returns a factor for its weight.
    """

    settings: Settings
    algorithm: ResolvedAlgorithm
    split: Split
    codecs: dict[str, Codec]
    rule: OuterRule
    reducers: dict[str, Reducer]
    fragments: tuple[FragmentPlan, ...]
    threads: int
    staleness_weight: StalenessWeight = constant

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
        algorithm = resolve(settings, outer)
        codecs = build_codecs(algorithm.codec, algorithm.codec_options)
        if settings.aggregation.aggregator.path:
            codecs[Accumulated.name] = Accumulated()
        rule = build_outer(algorithm.outer, algorithm.outer_options, settings.algorithm.outer_lr_of)
        _require_fitting(settings, split)
        reducers = build_reducers(algorithm.algorithm.reduce, algorithm.reducer, algorithm.reducer_options)
        if settings.async_.staleness_weight != "constant" and reducers[PARAMS].needs_all:
            raise ConfigError(
                f"async.staleness_weight is {settings.async_.staleness_weight!r}, but the reducer "
                f"{algorithm.reducer!r} ignores weights.",
                'Leave async.staleness_weight out, or set aggregation.reducer = {name = "mean"}.',
            )

        def fragment(schema: Schema) -> FragmentPlan:
            version = version_layout(schema, settings.network.part_bytes, settings.model.ranks)
            downlink = Downlink.of(
                version,
                settings.aggregation.download_codec.target or "none",
                settings.aggregation.download_codec.options,
            )
            state = state_layout(schema.tensors, rule, settings.network.part_bytes, masters=downlink is not None)
            return FragmentPlan(
                schema=schema,
                header=version_header(schema),
                version=version,
                update=encoded_layout(
                    schema, algorithm.codec, codecs, settings.network.part_bytes, settings.model.ranks
                ),
                state=state,
                downlink=downlink,
            )

        return cls(
            settings=settings,
            algorithm=algorithm,
            split=split,
            codecs=codecs,
            rule=rule,
            reducers=reducers,
            fragments=tuple(map(fragment, split.schemas)),
            threads=settings.run.threads or min(os.cpu_count() or 1, 8),
            staleness_weight=staleness_weight(settings.async_.staleness_weight),
        )

    @property
    def schema(self) -> Schema:
        """Schema of the whole model."""
        return self.split.schema

    @property
    def versions(self) -> tuple[Layout, ...]:
        """Layout of the version file, for each fragment of the model."""
        return tuple(fragment.version for fragment in self.fragments)

    @property
    def has_masters(self) -> bool:
        """Whether versions are downloaded through a codec. If so, the outer state has full-precision parameters."""
        return any(fragment.downlink is not None for fragment in self.fragments)

    @property
    def is_swarm(self) -> bool:
        """Whether the run is a swarm, in which workers aggregate rounds and keep the versions."""
        return self.settings.swarm.enabled

    @property
    def has_fragments(self) -> bool:
        """Whether the model has more than one fragment."""
        return len(self.fragments) > 1

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
        fd = nameless_file(self.settings.disk.state_dir) if to_disk else os.memfd_create(name, os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(fd, 0, max(nbytes, 1))
        except BaseException:
            os.close(fd)
            raise
        return fd

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


def _require_fitting(settings: Settings, split: Split) -> None:
    """Check that every pattern of `algorithm.outer_lr_of` matches the name of a float parameter.

    Raises:
        ConfigError: a pattern matches no name.
    """
    names = [spec.name for spec in split.schema.tensors if spec.group == PARAMS and spec.is_float]
    for pattern in settings.algorithm.outer_lr_of:
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
