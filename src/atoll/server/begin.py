"""How a run begins, or goes on: the state directory, the first version, and what may not change between two starts."""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Callable, Container, Mapping

from torch import nn
from torch.optim import Optimizer

from atoll.algorithms.resolve import resolve
from atoll.config import Settings
from atoll.errors import ConfigError
from atoll.server.model import initial_model, is_known, loaded_model, schema_for, write_version
from atoll.server.persistor import Persistor
from atoll.server.plan import FragmentPlan, Plan, cpu_capability, torch_build
from atoll.server.roster import now_text
from atoll.store.rows import Recovered, RunRow
from atoll.store.store import Store
from atoll.tensors.fragments import split, split_of
from atoll.tensors.modules import Tensors
from atoll.tensors.schema import CONTROL
from atoll.wire.units import size

LOG = logging.getLogger("atoll.server")

Outer = Callable[..., Optimizer] | None
"""The outer optimizer that a program gives: a class, or a function (parameters, **options) → optimizer."""

FROZEN_SETTINGS = (
    "algorithm",
    "codec",
    "codec_options",
    "downlink_codec",
    "downlink_codec_options",
    "mode",
    "sync_rounds_first",
    "part_bytes",
    "download_to_disk",
)
"""What cannot change between two starts of one run, beside the outer optimizer: files on disk hang on it, or updates
that wait to be applied."""


def open_run(
    settings: Settings,
    given: nn.Module | Tensors | None,
    persistor: Persistor | None = None,
    outer: Outer = None,
) -> tuple[Plan, Store, Recovered]:
    """Begin a run in its state directory, or find the one that is there as its journal has it.

    Args:
        given: the initial model; else that of the persistor, else that of the settings.
        persistor: asked for the initial model where the run begins.
        outer: the outer optimizer, in place of the setting's.

    Raises:
        ConfigError: the model or a setting cannot be used, or is not the one that the run was begun with.
        StateLocked: another server owns the directory.
        StateCorrupt: no version in it is whole.
    """
    store = Store.open(
        settings.state_dir,
        durability=settings.durability,
        keep_versions=settings.keep_versions,
        max_pins=settings.max_pins,
        in_memory=not settings.download_to_disk,
    )
    try:
        if store.run and store.in_memory:
            raise ConfigError(
                f"{settings.state_dir} has a run, and with download_to_disk = false a run ends with its server.",
                "Begin a new one in another state_dir; model may name an export.",
            )
        if persistor is not None and given is None and not store.run and (loaded := persistor.load()) is not None:
            given = loaded_model(settings, loaded)
        plan = _take_up(settings, given, outer, store.run) if store.run else _create(settings, given, outer, store)
        _tell_of_the_way_down(plan)
        store.shape([fragment.shapes() for fragment in plan.fragments])
        recovered = store.recover()
        if len(recovered.heads) < len(plan.fragments):
            # the run was begun, but killed before its first version
            if persistor is not None and given is None and (loaded := persistor.load()) is not None:
                given = loaded_model(settings, loaded, plan.schema.model)
            _write_first(plan, store, initial_model(settings, given), recovered.heads)
            recovered = store.recover()
    except BaseException:
        store.close()
        raise
    return plan, store, recovered


def _tell_of_the_way_down(plan: Plan) -> None:
    """Say where differences are no less than versions: workers then pull these."""
    downlinks = [fragment.downlink for fragment in plan.fragments]
    down, whole = sum(each.layout.nbytes for each in downlinks if each), sum(each.nbytes for each in plan.versions)
    if any(downlinks) and down >= whole:
        LOG.warning(
            "downlink_codec %r saves nothing: a difference would take %s, a version has %s, and is pulled whole. The "
            "model is of small tensors, or of a narrow dtype; leave downlink_codec out.",
            plan.settings.downlink_codec,
            size(down),
            size(whole),
        )


def _create(settings: Settings, given: nn.Module | Tensors | None, outer: Outer, store: Store) -> Plan:
    schema = schema_for(settings, initial_model(settings, given))
    if CONTROL in resolve(settings).algorithm.reduce:
        schema = schema.with_controls()
    plan = Plan.make(settings, split(schema, settings.num_fragments), outer)
    places = {"fragments": list(plan.split.places)} if plan.streams else {}
    store.create_run(
        RunRow(
            run_id=uuid.uuid4().hex,
            settings_json=_frozen(settings, plan),
            schema_json=json.dumps(schema.to_json() | places),
            schema_digest=schema.digest,
            torch_build=torch_build(),
            cpu_capability=cpu_capability(),
            created_at=now_text(),
        )
    )
    return plan


def _take_up(settings: Settings, given: nn.Module | Tensors | None, outer: Outer, row: RunRow) -> Plan:
    """The plan of the run that is there; refused under settings or a model that it was not begun with."""
    plan = Plan.make(settings, split_of(json.loads(row.schema_json)), outer)
    one = {"num_fragments": 1, "ranks": 1}  # which are not written down
    before: Mapping[str, object] = one | json.loads(row.settings_json)
    now: Mapping[str, object] = one | json.loads(_frozen(settings, plan))
    for key in before:
        if before[key] != now.get(key):
            raise ConfigError(
                f"{settings.state_dir} has a run with {key} = {before[key]!r}, this start says {now.get(key)!r}.",
                "Start it with the old value, or begin a new run in another state_dir.",
            )
    if given is not None or settings.model is not None:
        if not is_known(settings, given, plan.schema.model):
            mine = schema_for(settings, initial_model(settings, given))
            mine.require_equal(plan.schema.model, mine="this start", theirs=f"the run in {settings.state_dir}")
        LOG.info("going on with the model of %s; the initial model is not read again", settings.state_dir)
    if (row.torch_build, row.cpu_capability) != (torch_build(), cpu_capability()):
        LOG.warning(
            "the run was begun with torch %s on %s, and goes on with %s on %s: bits may differ from an undisturbed run",
            row.torch_build,
            row.cpu_capability,
            torch_build(),
            cpu_capability(),
        )
    return plan


def _frozen(settings: Settings, plan: Plan) -> str:
    chosen: dict[str, object] = {key: getattr(settings, key) for key in FROZEN_SETTINGS}
    chosen["codec"], chosen["downlink_codec"] = plan.algorithm.codec, settings.downlink_codec or "none"
    for key in ("num_fragments", "ranks"):
        if getattr(settings, key) > 1:
            chosen |= {key: getattr(settings, key)}
    return json.dumps(chosen | {"outer_optimizer": plan.rule.describe()}, sort_keys=True, default=str)


def _write_first(plan: Plan, store: Store, model: nn.Module | Tensors, there: Container[int]) -> None:
    """Version 0: the initial model, and zeros beside it.

    Args:
        there: the fragments that have theirs already.
    """
    schema_for(plan.settings, model).require_equal(plan.schema.model, mine="the initial model", theirs="the run")
    for index, fragment in enumerate(plan.fragments):
        if index not in there:
            _write_fragment(index, fragment, store, model)


def _write_fragment(index: int, plan: FragmentPlan, store: Store, model: nn.Module | Tensors) -> None:
    draft = store.begin_version(index, 0)
    try:
        digests = write_version(draft.version_fd, plan.version, plan.header, model)
    except BaseException:
        draft.abandon()
        raise
    store.commit_version(
        draft,
        digest=plan.version.update_digest(digests),
        part_digests=tuple(digests),
        state_digests=(),
        summary_json="",
        tickets=(),
    )
