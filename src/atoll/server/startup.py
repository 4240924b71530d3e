"""A server's start: open the state directory, begin a run or continue it, and refuse changes of fixed settings."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from atoll.aggregation.plan import AggregationPlan, Plan, cpu_capability, torch_build
from atoll.algorithms.resolve import resolve
from atoll.blobs.model_file import ModelFile
from atoll.config import Settings, default_of
from atoll.config.consistency import Argument, require_consistent
from atoll.config.round_changes import CODEC, Change, require_kept_changes
from atoll.config.settings import FROZEN
from atoll.errors import ConfigError, StateCorrupt, UsageError
from atoll.posix import usable
from atoll.rounds.early_stopping import MetricProgress
from atoll.server.coordinator.exports import require_files, require_no_results, require_own_results
from atoll.server.coordinator.first_shapes import NewShapes
from atoll.server.coordinator.ledger import snapshot_of
from atoll.server.coordinator.persistor import Persistor
from atoll.server.coordinator.tracker_threads import makers_of
from atoll.server.initial_model import initial_model, is_known, loaded_model, schema_for, write_version
from atoll.server.saved_state import SavedState
from atoll.store.file_slots import VERSION
from atoll.store.journal import NEW_RUN
from atoll.store.journal_tables import RunRow, utc_text
from atoll.store.store import Store
from atoll.store.versions import VersionDigests
from atoll.tensors.buffer_rules import described, require_kept, rule_for, shown_rule, without_effect
from atoll.tensors.dtypes import torch_dtype
from atoll.tensors.fragments import Split, split, split_of
from atoll.tensors.module_tensors import Tensors
from atoll.tensors.schema import Schema

LOG = logging.getLogger("atoll.server")

Outer = Callable[..., Optimizer] | None
"""The outer optimizer that a program passes to `Server`: a class, or a function (parameters, **options) → optimizer."""

CODE = {
    "workflow": "workflow.function",
    "outer_optimizer": "algorithm.outer_optimizer",
    "filters": "workflow.result_filters",
    "data_filters": "workflow.payload_filters",
    "config": "rounds.config_function",
    "evaluate": "server.evaluate",
}
"""Argument of a program → the setting that it replaces, if the argument is code."""

SAME_BITS = ("torch", "cpu_capability")
"""Keys in the record of the outer optimizer. Their values may differ after a restart; this causes only a warning."""


def settings_beside(caller: str, settings: Settings | Mapping[str, Any] | None, **named: object) -> Settings:
    """Return the settings of a program, including those that it passes as arguments.

    For example, `Server(model="my_models:build")` means the setting `model.source = "my_models:build"`.

    Args:
        caller: name of the caller, for the error.
        settings: a `Settings` object, a mapping, or None.
        named: the arguments `model`, `workflow`, `outer_optimizer`, `filters`, `config` and `evaluate`. A text becomes
            the value of the setting. Code (a class, function or object) takes its place; the run must support this
            setting.

    Raises:
        UsageError: an argument is a text, although `settings` is a complete `Settings` object.
        ConfigError: a setting is unknown or wrong, or contradicts an argument.
    """
    texts = {name: value for name, value in named.items() if isinstance(value, str)}
    if texts and isinstance(settings, Settings):
        raise UsageError(f"{caller} got settings and also {', '.join(sorted(texts))}.", "Set these in the settings.")
    optimizer = f"algorithm.outer_optimizer.{'path' if ':' in texts.get('outer_optimizer', '') else 'name'}"
    keys = {
        "model": "model.source",
        "workflow": "workflow.function",
        "outer_optimizer": optimizer,
        "config": CODE["config"],
        "evaluate": CODE["evaluate"],
    }
    values = {keys[name]: text for name, text in texts.items()}
    built = settings if isinstance(settings, Settings) else Settings.build({**(settings or {}), **values})
    code = {key: Argument(name) for name, key in CODE.items() if named.get(name) and name not in texts}
    require_consistent(
        lambda key: code.get(key) or built.at(key), lambda key: key not in code and built.at(key) == default_of(key)
    )
    return built


OpenedRun = tuple[Plan, Store, tuple[str, ...]]
"""The plan of a run, its store, and one sentence for each loss of data in a crash."""


def open_run(
    settings: Settings,
    model: nn.Module | Tensors | None,
    persistor: Persistor,
    outer: Outer = None,
    saved: SavedState | None = None,
) -> OpenedRun:
    """Begin a run in its state directory, or continue the run that is there.

    Args:
        settings: the run's settings.
        model: the initial model of a new run. If None, the persistor loads the model. If the persistor returns None,
            too, the setting `model.source` names the model.
        persistor: the user's persistor.
        outer: the outer optimizer; None if the settings name it.
        saved: the saved state that a new run goes on from; None: it begins with the initial model.

    Returns:
        The plan of the run, its store, and one sentence for each loss of data in a crash.

    Raises:
        ConfigError: the model or a setting cannot be used; a fixed setting differs from the run's; or the run would
            replace the exports of another run.
        SchemaMismatch: the model has other tensors than the run's model.
        StateLocked: another server uses the directory.
        StateCorrupt: no version in the directory is intact.
        StoreError: a file or folder cannot be used: for example, a folder has the name of a file, or another user owns
            the file.
    """
    makers_of(settings)  # refuse a tracker that is not installed before there is a run
    directory = settings.disk.state_dir
    with usable(directory, settings.exports):
        is_missing = not os.path.lexists(directory)
        is_empty = is_missing or (directory.is_dir() and not any(directory.iterdir()))
        store = Store(
            settings.disk.state_dir,
            durability=settings.disk.durability,
            keep_versions=settings.disk.keep_versions,
            max_pins=settings.disk.max_pinned_versions,
            keep_updates=settings.disk.keep_updates,
            in_memory=not settings.disk.in_files,
        )
        try:
            require_files(settings.exports, best=settings.rounds.best_metric is not None)
            run = store.run_log.run
            if saved is not None and run:
                saved.require_continued(store)
            if begun := run or (saved and saved.run):
                require_own_results(settings.exports, begun.run_id)
            else:
                require_no_results(settings.exports)
            if run and store.slots.in_memory:
                raise ConfigError(
                    f"{settings.disk.state_dir} contains a run, but with disk.in_files = false a stopped run "
                    "cannot continue.",
                    "Start a new run in another disk.state_dir; model.source can be this run's exported model.",
                )
            if model is None and not begun and (loaded := persistor.load()) is not None:
                model = loaded_model(settings, loaded)
            where = f"The run in {settings.disk.state_dir if run or not saved else saved.path}"
            plan = _take_up(settings, model, outer, begun, where) if begun else _create(settings, model, outer, store)
            _say_rules(settings, plan.schema)
            if saved is not None and not run:
                saved.restore(plan, store)
            if run and store.run_log.controls.back_to is None:  # before anything is changed
                _require_kept(plan, store, where)
            plan, lost = _continued(plan, store) if begun else (plan, _recover(plan, store))
            if len(store.versions.heads()) < len(plan.fragments):
                # a new run, or one killed before version 0 was written
                if model is None and (loaded := persistor.load()) is not None:
                    model = loaded_model(settings, loaded, plan.schema.model)
                _write_first(plan, store, initial_model(settings, model))
                lost = store.recover()
            _make_durable(plan, store)
            if begun:
                _take_up_changes(plan, store, where)
        except BaseException:
            if is_empty and store.journal.usable and store.run_log.run is None:  # leave no trace of a refused start
                store.discard(with_folder=is_missing)
            store.close()
            raise
    return plan, store, lost


@contextmanager
def open_again(plan: Plan, store: Store) -> Iterator[Store]:
    """Yield the store of a run; if it is closed, because the server has ended, open its state directory meanwhile.

    Raises:
        UsageError: the run kept its versions in memory.
        StateLocked, StateCorrupt, StoreError: the state directory cannot be used.
    """
    with store.journal.lock:
        closed = store.journal.closed
    if not closed:
        yield store
        return
    if store.slots.in_memory:
        raise UsageError(
            "The server has ended, and its run kept its versions in memory (disk.in_files = false).",
            "Save the state while the server runs.",
        )
    with _opened(plan) as again:
        yield again


@contextmanager
def _opened(plan: Plan) -> Iterator[Store]:
    """Open the state directory of a run, and check its files."""
    disk = plan.settings.disk
    with Store(
        disk.state_dir,
        durability=disk.durability,
        keep_versions=disk.keep_versions,
        max_pins=disk.max_pinned_versions,
        keep_updates=disk.keep_updates,
    ) as store:
        _recover(plan, store)
        yield store


def take_over_shapes(plan: Plan, new: NewShapes) -> None:
    """Write version 0 of a fragment again, with the shapes that the first update has given to buffers.

    The buffers with new shapes begin as zeros, which no site loads. Call it while no server uses the state directory.

    Raises:
        DiskFull: the disk is full; nothing was changed.
        StoreError: the state directory cannot be used.
    """
    fragment, split = new.fragment, replace(plan.split, schema=plan.schema.with_shapes(new.shapes))
    old, changed = plan.fragments[fragment], AggregationPlan.of_values(plan.values, split, 1)
    now = changed.fragments[fragment]
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(_opened(plan))
        source = ModelFile(old.version, stack.enter_context(store.versions.pin(fragment, 0)).fd, None)
        model = {
            spec.name: torch.zeros(spec.shape, dtype=torch_dtype(spec.dtype))
            if spec.name in new.shapes
            else source.tensor(spec)
            for spec in now.schema.model.tensors
        }
        stack.enter_context(store.journal.transaction(synced=True))
        live = [row.ticket for row in store.tickets.live() if row.fragment == fragment]
        store.tickets.expire(live, f"the update of {new.site} was the first, and decided the shapes of buffers")
        row = store.versions.forget_first(fragment)
        store.slots.reshape([each.shapes() for each in changed.fragments], fragment)
        store.slots.pool(VERSION, fragment).avoid(row.slot)
        draft = store.versions.begin(fragment, 0)
        stack.callback(draft.abandon)
        digests = write_version(draft.fds[0], now.version, now.header, model)
        store.versions.restore(
            draft,
            VersionDigests(digest=now.version.blob_id(digests), part_digests=tuple(digests)),
            summary_json=row.summary_json,
            created_at=row.created_at,
        )
        store.run_log.take_over_shapes(fragment, now.version.blob_id(digests), _schema_json(split), split.schema.digest)


def _schema_json(split: Split) -> str:
    places = {"fragments": list(split.places)} if split.count > 1 else {}
    return json.dumps(split.schema.to_json() | places)


def _recover(plan: Plan, store: Store) -> tuple[str, ...]:
    """Check the files of a state directory, and return one sentence for each loss of data in a crash."""
    shapes = [fragment.shapes() for fragment in plan.fragments]
    store.slots.shape([each.elsewhere() for each in shapes] if plan.is_swarm else shapes)
    return store.recover()


def _make_durable(plan: Plan, store: Store) -> None:
    """Fsync the newest versions: a power loss before the next ones are durable could otherwise take all versions."""
    for index in range(len(plan.fragments) if not plan.is_swarm else 0):
        store.versions.write_durable(index)


def plan_of(settings: Settings, model: nn.Module | Tensors | None = None, outer: Outer = None) -> Plan:
    """Return the plan of a new run.

    Args:
        settings: the run's settings.
        model, outer: the initial model and the outer optimizer, as in `open_run`.

    Raises:
        ConfigError: the model or a setting cannot be used.
    """
    schema = schema_for(settings, initial_model(settings, model))
    schema = schema.with_groups(resolve(settings).algorithm.extra_groups)
    return Plan.make(settings, split(schema, settings.diloco.num_fragments), outer)


def _create(settings: Settings, model: nn.Module | Tensors | None, outer: Outer, store: Store) -> Plan:
    plan = plan_of(settings, model, outer)
    schema = plan.schema
    store.run_log.create_run(
        RunRow(
            run_id=uuid.uuid4().hex,
            settings_json=_frozen(settings, plan),
            schema_json=_schema_json(plan.split),
            schema_digest=schema.digest,
            torch_build=torch_build(),
            cpu_capability=cpu_capability(),
            created_at=utc_text(),
        )
    )
    return plan


def _take_up(settings: Settings, model: nn.Module | Tensors | None, outer: Outer, row: RunRow, where: str) -> Plan:
    """Return the plan of a run that goes on. Refuse a model or fixed setting that differs from the run's.

    Args:
        settings: the settings of this start.
        model: the model of this start; None if the program passes none.
        outer: the outer optimizer; None if the settings name it.
        row: the journal's row of the run.
        where: the run and where it is, for errors.
    """
    try:
        before, split = json.loads(row.settings_json), split_of(json.loads(row.schema_json))
    except ValueError as error:
        raise StateCorrupt(f"{where} has damaged settings: {error}.", NEW_RUN) from None
    plan = Plan.make(settings, split, outer)
    _require_same_rules(settings, plan.schema, where)
    _require_same(where, before, json.loads(_frozen(settings, plan)))
    if model is not None or settings.model.source is not None:
        if not is_known(settings, model, plan.schema.model):
            try:
                initial = initial_model(settings, model)
            except ConfigError as error:
                LOG.warning("the run continues with its own model, although model.source cannot be read: %s", error)
            else:
                mine, theirs = schema_for(settings, initial), where[0].lower() + where[1:]
                mine.require_equal(plan.schema.model, mine="this start", theirs=theirs)
        LOG.info("continuing with the model in %s; the initial model is not read again", settings.disk.state_dir)
    if (row.torch_build, row.cpu_capability) != (torch_build(), cpu_capability()):
        LOG.warning(
            "the run was started with torch %s on %s, but continues with %s on %s: results may not be "
            "bit-identical to an uninterrupted run",
            row.torch_build,
            row.cpu_capability,
            torch_build(),
            cpu_capability(),
        )
    return plan


def _continued(plan: Plan, store: Store) -> tuple[Plan, tuple[str, ...]]:
    """Return the plan with the codec of the current round, and one sentence for each loss of data in a crash."""
    plan = _with_codec_of_now(plan, store)
    lost = _recover(plan, store)
    if not plan.fits(_round_of(store)):  # the run has gone back to a round of an earlier codec
        plan = _with_codec_of_now(plan, store)
        lost += _recover(plan, store)
    return plan, lost


def _round_of(store: Store) -> int:
    """Return the number of the current round of the model; of a fragment, the largest."""
    return max((each.done for each in snapshot_of(store, MetricProgress()).fragments), default=0) + 1


def _with_codec_of_now(plan: Plan, store: Store) -> Plan:
    """Return the plan with the codec of the current round. If the files are for another one, change them.

    The open tickets of the round end: their updates would have the earlier codec.
    """
    run, number = store.run_log.run, _round_of(store)
    assert run is not None
    plan = plan.with_codec_of(number)
    settings, codec = json.loads(run.settings_json), plan.values.codec
    now = {"name": str(codec.name), **codec.options}
    base = {key.removeprefix(f"{CODEC}."): each for key, each in settings.items() if key.startswith(f"{CODEC}.")}
    if now == settings.get(CODEC_NOW, base):
        return plan
    with store.journal.transaction(synced=True):
        live = [row.ticket for row in store.tickets.live()]
        store.tickets.expire(live, f"round {number} begins with another codec")
        store.slots.reshape([each.shapes() for each in plan.fragments], 0)
        store.run_log.change_settings(json.dumps(settings | {CODEC_NOW: now}), plan.settings.changes)
    LOG.info("from round %d on, updates have the codec %s", number, f"{codec.name} {dict(codec.options) or ''}".strip())
    return plan


def _require_same(where: str, recorded: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Refuse a changed value of a setting that must stay the same during a run.

    Raises:
        ConfigError: a value differs; the message names the first setting, both values and the remedy.
    """
    for key in dict.fromkeys([*current, *recorded]):  # in the order of FROZEN
        if key in (CHANGES, CODEC_NOW):  # see `_take_up_changes` and `_with_codec_of_now`
            continue
        old, new = recorded.get(key), current.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            old, new = _differing(old, new)
        if old != new:
            raise ConfigError(
                f"{where} has {key} = {old!r}, but this start sets {new!r}.",
                "Start with the old value, or start a new run in another disk.state_dir."
                + (_LATER if key.startswith(("diloco.sync_every", "algorithm.outer_optimizer", CODEC)) else ""),
            )


CHANGES, CODEC_NOW = "rounds.changes", "codec of now"
"""Keys in the record of the settings: what changes within the run, and the codec of the files of updates."""
_LATER = " With the old value, a table in rounds.changes can set another one for later rounds."


def _say_rules(settings: Settings, schema: Schema) -> None:
    """Log the rules of unusual buffers, and warnings about patterns of `model.buffers` without a match or an effect."""
    if text := described(schema):
        LOG.info(
            "rules that differ from those of running statistics (mean) and counters (max): %s. To change a rule, set "
            "model.buffers in a new run.",
            text,
        )
    for text in without_effect(schema.model, settings.model.buffers):
        LOG.warning("%s", text)


def _require_same_rules(settings: Settings, schema: Schema, where: str) -> None:
    """Refuse a changed rule of a buffer: the rules are chosen when a run begins.

    Raises:
        ConfigError: a tensor has another rule in the run, or a rule `keep` has no effect.
    """
    require_kept(schema.model, settings.model.buffers)
    for spec in schema.model.tensors:
        rule = rule_for(schema.model, spec, settings.model.buffers)
        if rule not in (None, spec.rule):
            raise ConfigError(
                f"{where} has the rule {shown_rule(spec.rule)!r} for {spec.name!r}, but this start sets model.buffers "
                f"to {rule!r}.",
                "Start without model.buffers, or start a new run in another disk.state_dir.",
            )


def _differing(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the entries that differ between two tables, as [entries of `old`, entries of `new`].

    The entries of `options` are treated as entries of the table itself. The keys in `SAME_BITS` are ignored.
    """
    flat = [{**{k: v for k, v in each.items() if k != "options"}, **each.get("options", {})} for each in (old, new)]
    same = {key for key in flat[0] if key in flat[1] and flat[0][key] == flat[1][key]} | set(SAME_BITS)
    return [{key: value for key, value in each.items() if key not in same} for each in flat]


def _frozen(settings: Settings, plan: Plan) -> str:
    algorithm, (upload_codec, download_codec) = plan.algorithm, plan.sent_codecs
    chosen: dict[str, object] = settings.chosen(FROZEN)
    download = settings.aggregation.download_codec
    chosen |= {
        "algorithm": {"name": str(settings.algorithm) or algorithm.name, **(algorithm.local or {})},
        "aggregation.upload_codec": {"name": str(upload_codec), **algorithm.codec_options},
        "aggregation.download_codec": {"name": str(download_codec), **download.options},
        "diloco.sync_every": algorithm.sync_every,
    }
    single = {key: value for key, value in chosen.items() if not isinstance(value, dict)}
    options = {
        f"{key}.{name}": value[name] for key, value in chosen.items() if isinstance(value, dict) for name in value
    }
    single[CHANGES] = [list(each) for each in settings.changes]
    return json.dumps(options | single | {"algorithm.outer_optimizer": plan.rule.describe()}, default=str)


def _require_kept(plan: Plan, store: Store, where: str) -> tuple[list[Change], Sequence[Change]]:
    """Check that this start changes no round that has begun. Return the changes on record, and those of this start.

    Raises:
        ConfigError: a change of a round that has begun differs.
    """
    run = store.run_log.run
    assert run is not None
    recorded = [Change(*each) for each in json.loads(run.settings_json).get(CHANGES, [])]
    given = plan.settings.changes
    if recorded != given:
        rounds = snapshot_of(store, MetricProgress()).fragments
        begun = max((each.done + (each.expected is not None or bool(each.frozen)) for each in rounds), default=0)
        require_kept_changes(recorded, given, begun, where)
    return recorded, given


def _take_up_changes(plan: Plan, store: Store, where: str) -> None:
    """Let a run that goes on have the changes that this start gives for rounds that have not begun, and record them.

    Args:
        plan: the plan of the run.
        store: its store.
        where: the run and where it is, for errors.

    Raises:
        ConfigError: a change of a round that has begun differs.
    """
    recorded, given = _require_kept(plan, store, where)
    if recorded == given:
        return
    assert store.run_log.run is not None
    settings = json.loads(store.run_log.run.settings_json)
    store.run_log.change_settings(json.dumps(settings | {CHANGES: [list(each) for each in given]}), given)
    LOG.info("this start changes rounds.changes: %s", "; ".join(map(str, given)) or "nothing changes any more")


def _write_first(plan: Plan, store: Store, model: nn.Module | Tensors) -> None:
    """Write version 0 of each fragment that has none: the initial model, and zeros for the algorithm's tensors."""
    mine = schema_for(plan.settings, model)
    mine.require_equal(plan.schema.model, mine="the initial model", theirs="the run", shapes=True)
    for index, fragment in enumerate(plan.fragments):
        if store.versions.kept(index):
            continue
        draft = store.versions.begin(index, 0)
        try:
            if plan.is_swarm:
                with store.initial_file(index, os.O_RDWR | os.O_CREAT) as fd:
                    digests = write_version(fd, fragment.version, fragment.header, model)
                    os.fsync(fd)
            else:
                digests = write_version(draft.slot.fd, fragment.version, fragment.header, model)
        except BaseException:
            draft.abandon()
            raise
        written = VersionDigests(digest=fragment.version.blob_id(digests), part_digests=tuple(digests))
        store.versions.finish(draft, written, summary_json="")
        with store.journal.transaction():
            store.versions.commit(draft)
