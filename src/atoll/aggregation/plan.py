"""What a run's settings and model mean in files and arithmetic: made once, then only read."""

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
from atoll.codecs.base import Codec
from atoll.codecs.encoded_layout import codecs_of, encoded_layout
from atoll.codecs.version_difference import Downlink
from atoll.config import Settings
from atoll.errors import ConfigError
from atoll.outer_optimizers import build_outer
from atoll.outer_optimizers.torch_optimizer import OuterRule
from atoll.posix import nameless_file
from atoll.reducers import build_reducers
from atoll.reducers.base import Reducer
from atoll.reducers.staleness_weight import StalenessWeight, constant, staleness_weight
from atoll.store.store import FileShape, FragmentShapes
from atoll.tensors.byte_runs import Run, RunTable
from atoll.tensors.dtypes import torch_dtype
from atoll.tensors.fragments import Split
from atoll.tensors.layout import TILE, Layout, version_header, version_layout
from atoll.tensors.schema import PARAMS, Schema

PLACED = (
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
"""Settings that decide what a round makes of its updates."""


def placed_settings(settings: Settings) -> dict[str, Any]:
    """Of a run, as they travel."""
    return settings.chosen(PLACED)


@dataclass(frozen=True)
class FragmentPlan:
    """The layouts of one fragment's files."""

    schema: Schema
    header: bytes
    version: Layout
    update: Layout
    state: tuple[bytes, Layout] | None
    downlink: Downlink | None

    def shapes(self) -> FragmentShapes:
        """Sizes and digest regions of the fragment's files."""
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
        """Of the outer state file; None where nothing is kept between rounds."""
        return self.state[1] if self.state else None

    @cached_property
    def version_runs(self) -> RunTable:
        """What one thread of a pass reads, steps and writes at a time; `cut` before each pass."""
        return RunTable(self.version, TILE)

    @cached_property
    def update_runs(self) -> RunTable:
        """Where the runs of a version lie in an update."""
        return RunTable(self.update, TILE)

    @cached_property
    def reduced_runs(self) -> RunTable:
        """Where they lie in what a user's aggregator makes of the updates."""
        return RunTable(result_layout(self.schema, self.version.part_bytes), TILE)

    @cached_property
    def entries(self) -> Entries:
        """Where each tensor's outer state lies."""
        return entries(self.state_layout)

    def columns(self, run: Run) -> dict[str, tuple[Column, int, torch.dtype]]:
        """Return key → (column, offset of the run's first element, dtype), of the outer state that is cut in runs."""
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
    """The rules of a run, and the layouts of its fragments: one, the whole model, unless it streams."""

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
        """The plan for a model that is cut in this way.

        Args:
            outer: the outer optimizer, in place of the setting's.

        Raises:
            ConfigError: algorithm, codec, reducer or outer optimizer cannot be used; the remedy says why.
        """
        algorithm = resolve(settings, outer)
        codecs = codecs_of(algorithm.codec, algorithm.codec_options)
        if settings.aggregation.aggregator.path:
            codecs[Accumulated.name] = Accumulated()
        rule = build_outer(algorithm.outer, algorithm.outer_options, settings.algorithm.outer_lr_of)
        _require_fitting(settings, split)
        reducers = build_reducers(algorithm.algorithm.reduce, algorithm.reducer, algorithm.reducer_options)
        if settings.async_.staleness_weight != "constant" and reducers[PARAMS].needs_all:
            raise ConfigError(
                f"async.staleness_weight is {settings.async_.staleness_weight!r}, but the reducer "
                f"{algorithm.reducer!r} has no "
                "weights.",
                'Leave async.staleness_weight out, or choose aggregation.reducer = {name = "mean"}.',
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
        """Of the whole model."""
        return self.split.schema

    @property
    def versions(self) -> tuple[Layout, ...]:
        """The layout of each fragment's versions."""
        return tuple(fragment.version for fragment in self.fragments)

    @property
    def has_masters(self) -> bool:
        """Whether versions are what workers hold, and the model lies beside them."""
        return any(fragment.downlink is not None for fragment in self.fragments)

    @property
    def is_swarm(self) -> bool:
        """Whether workers aggregate, and hold the versions."""
        return self.settings.swarm.enabled

    @property
    def streams(self) -> bool:
        """Whether the model is more than one fragment."""
        return len(self.fragments) > 1

    def new_file(self, name: str, nbytes: int) -> int:
        """A file of zeros without a name: beside the run's other files, or in memory where the run has none on disk.

        Args:
            name: what the system calls one in memory.

        Raises:
            OSError: no space; nothing of it is left behind.
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
        """Whether an update without its number of local steps cannot be reduced."""
        return any(reducer.needs_steps for reducer in self.reducers.values())

    @property
    def needs_population(self) -> bool:
        """Whether the weight of all sites must be known, so that each keeps its first weight."""
        return any(reducer.needs_population for reducer in self.reducers.values())


def _require_fitting(settings: Settings, split: Split) -> None:
    """Every pattern of `algorithm.outer_lr_of` has to name something that is stepped.

    Raises:
        ConfigError: one does not.
    """
    names = [spec.name for spec in split.schema.tensors if spec.group == PARAMS and spec.is_float]
    for pattern in settings.algorithm.outer_lr_of:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(
                f"algorithm.outer_lr_of has {pattern!r}, which is the name of no parameter.",
                registry.nearest(pattern, names, "Patterns are as those of files: head.*, *.bias."),
            )


def torch_build() -> str:
    """What "the same bits" depends on besides the input: the torch build."""
    return torch.__version__


def cpu_capability() -> str:
    """… and the vector instructions it uses here."""
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
