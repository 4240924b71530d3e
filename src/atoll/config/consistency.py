"""Check that the settings of a run do not contradict each other; each error names what to write instead."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from atoll.config.round_changes import CODEC, changes_of
from atoll.config.run_file import FOLDERS
from atoll.config.workflow_settings import EVALUATES, TRAIN, components_of, entries_of
from atoll.errors import ConfigError
from atoll.format_text import number_of

At = Callable[[str], Any]
"""`group.key` → its value. This file takes settings by their keys, because `Settings` imports this file."""
IsDefault = Callable[[str], bool]
"""`group.key` → whether the setting has its default value."""


class Argument(str):
    """Name of a Python argument that was given in place of a setting, for example a function or filters.

    Messages show this name as the value of the setting.
    """

    def __repr__(self) -> str:
        return f"given by the argument {self}"


def require_consistent(at: At, is_default: IsDefault) -> None:
    """Check all settings, and raise on the first contradiction.

    Args:
        at: a function `group.key` → the setting's value.
        is_default: a function `group.key` → whether the setting has its default value.

    Raises:
        ConfigError: two settings contradict each other. The message has both values and a remedy.
    """
    _require_names(at)
    _require_async(at, is_default)
    _require_rounds(at)
    _require_streaming(at, is_default)
    if at("model.ranks") > 1:
        this, instead = f"model.ranks is {at('model.ranks')}", "set model.ranks = 1 and train without sharding"
        _require_defaults(at, is_default, this, _NOT_SHARDED, instead)
    _require_workflows(at)
    _require_swarm(at, is_default)
    _require_changes(at, is_default)
    _require_plugins(at)
    _require_heartbeats(at)
    _require_files(at)
    _require_best(at)


def _require_defaults(at: At, is_default: IsDefault, this: str, others: Mapping[str, str], instead: str) -> None:
    """Check that the settings in `others` have their default values, as the setting in `this` requires.

    Args:
        at: a function `group.key` → the setting's value.
        is_default: a function `group.key` → whether the setting has its default value.
        this: the given setting and its value, for the message: "swarm.enabled is true".
        others: `group.key` of a setting that must have its default → the reason, for the message.
        instead: the second remedy in the message; the first one is to leave the other setting out.

    Raises:
        ConfigError: a setting in `others` does not have its default value.
    """
    for key, why in others.items():
        if not is_default(key):
            given = f"the argument {at(key)}" if isinstance(at(key), Argument) else key
            raise ConfigError(f"{key} is {described(at(key))}, but {this}: {why}.", f"Leave {given} out, or {instead}.")


def described(value: Any) -> str:
    """Return a setting's value as text for a message; for a table with a name or path, only the name or path."""
    return repr(str(value) if isinstance(value, Path) else getattr(value, "target", None) or value)


def _require_names(at: At) -> None:
    for key in FOLDERS:
        if "\0" in str(at(key)):
            raise ConfigError(f"{key} is {str(at(key))!r}.", "Use a path without a null character.")
    if not at("run.name").isprintable():
        raise ConfigError(f"run.name is {at('run.name')!r}.", "Use one line of printable characters.")


def _require_rounds(at: At) -> None:
    floor, sites, quorum = at("rounds.min_sites") or 1, at("rounds.sites"), at("rounds.quorum")
    if floor > sites:
        raise ConfigError(
            f"rounds.min_sites is {floor}, but rounds.sites is {sites}: round 1 could never close.",
            f"Set rounds.min_sites to at most {sites}.",
        )
    if quorum and quorum < floor:
        raise ConfigError(
            f"rounds.quorum is {quorum}, below rounds.min_sites, which is {floor}.",
            f"Set rounds.quorum to at least {floor}, or to 0.",
        )
    if quorum and not at("rounds.deadline_s"):
        raise ConfigError(
            f"rounds.quorum is {quorum}, but rounds.deadline_s is 0, so the quorum never takes effect.",
            "Set rounds.deadline_s to the number of seconds after which the quorum is enough.",
        )
    if at("rounds.deadline_s") and not quorum:
        raise ConfigError(
            f"rounds.deadline_s is {at('rounds.deadline_s'):g}, but rounds.quorum is 0, so the deadline has no effect.",
            "Set rounds.quorum to the number of updates that are enough after the deadline.",
        )


_ASYNC_ONLY = (
    "async.buffer_size",
    "async.grace_s",
    "async.max_staleness",
    "async.staleness_weight",
    "async.sync_rounds_first",
    "diloco.dynamic_local_steps",
)
_SYNC_ONLY = ("rounds.quorum", "rounds.deadline_s", "rounds.sample_fraction")
_SYNC_SO_FAR = {
    "rounds.best_metric": "a metric belongs to the pulled version, which may be deleted before the metric arrives",
    "aggregation.aggregator": "an aggregator needs the updates of one round, not of several",
    "workflow.result_filters": "filters need the update's base, which may be deleted before the update arrives",
    "workflow.function": "a workflow has no rounds",
}
"""Settings that asynchronous runs do not support, and why."""


def _require_async(at: At, is_default: IsDefault) -> None:
    """Check settings that apply only to asynchronous runs or only to synchronous runs.

    Raises:
        ConfigError: a setting does not apply to this kind of run, or an asynchronous run could never take a step.
    """
    enabled, floor, fragments = at("async.enabled"), at("rounds.min_sites") or 1, at("diloco.num_fragments")
    for key in _SYNC_ONLY if enabled else _ASYNC_ONLY:
        if not is_default(key):
            now, other = str(enabled).lower(), str(not enabled).lower()
            raise ConfigError(
                f"{key} is {at(key)!r}, but async.enabled is {now}: the setting applies to "
                f"{'synchronous' if enabled else 'asynchronous'} runs only.",
                f"Leave {key} out, or set async.enabled = {other}.",
            )
    if not enabled:
        return
    if floor > at("async.buffer_size"):
        raise ConfigError(
            f"async.enabled is true and rounds.min_sites is {floor}, but async.buffer_size is "
            f"{at('async.buffer_size')}: an asynchronous step would never get enough updates.",
            f"Set async.buffer_size to at least {floor}, or rounds.min_sites to {at('async.buffer_size')}.",
        )
    if floor > 1 and fragments > 1:
        raise ConfigError(
            f"async.enabled is true, rounds.min_sites is {floor} and diloco.num_fragments is {fragments}: "
            "sites that wait for a step of one fragment could block the step of another fragment forever.",
            "Leave rounds.min_sites out, or set diloco.num_fragments to 1.",
        )
    _require_defaults(at, is_default, "async.enabled is true", _SYNC_SO_FAR, "set async.enabled = false")


_WHOLE_MODELS = {
    "workflow.function": "a workflow has no rounds",
    "rounds.best_metric": "a metric describes a whole model, but a round updates only one fragment",
    "aggregation.aggregator": "your own aggregator needs whole models",
    "rounds.sample_fraction": "the next fragment's round could wait for a site that was not drawn",
}
"""Settings that runs with several fragments do not support, and why."""


def _require_streaming(at: At, is_default: IsDefault) -> None:
    """Check that `sync_every` (H), `num_fragments` (K) and `fragment_sync_delay` (τ) fit each other.

    The letters are those of Streaming DiLoCo, arXiv 2501.18512, section 2.

    Raises:
        ConfigError: the values do not fit, or another setting does not support several fragments.
    """
    every, fragments, delay = at("diloco.sync_every"), at("diloco.num_fragments"), at("diloco.fragment_sync_delay")
    inflight = at("diloco.max_inflight")
    if every % fragments:
        below = every - every % fragments
        near = sorted({max(fragments, below), below + fragments}, key=lambda other: abs(other - every))
        raise ConfigError(
            f"diloco.sync_every is {every} and diloco.num_fragments is {fragments}: sync_every must be a "
            "multiple of num_fragments, because one fragment is due every sync_every/num_fragments steps.",
            f"Set diloco.sync_every to {' or '.join(map(str, near))}.",
        )
    if inflight > fragments:
        raise ConfigError(
            f"diloco.max_inflight is {inflight}, but diloco.num_fragments is {fragments}: each fragment can "
            "be in flight only once at a time.",
            f"Set diloco.max_inflight to at most {fragments}.",
        )
    longest = inflight * every // fragments
    if delay > longest:
        raise ConfigError(
            f"diloco.fragment_sync_delay is {delay}, but with diloco.sync_every {every}, num_fragments "
            f"{fragments} and max_inflight {inflight} a result must be merged within {number_of(longest, 'step')}.",
            f"Set diloco.fragment_sync_delay to at most {longest}, or allow more fragments in flight.",
        )
    if delay and delay >= every and at("diloco.fragment_update_alpha") == 0:
        raise ConfigError(
            f"diloco.fragment_sync_delay is {delay}, diloco.sync_every is {every}, and "
            f"diloco.fragment_update_alpha is 0. A merge then replaces the local parameters {number_of(delay, 'step')} "
            "after the update was formed, so all local steps would be lost.",
            "Set diloco.fragment_sync_delay to a small part of sync_every, for example "
            f"{max(1, every // 10)}, or diloco.fragment_update_alpha to a number above 0, for example 0.5.",
        )
    if fragments > 1:
        this, instead = f"diloco.num_fragments is {fragments}", "set diloco.num_fragments to 1"
        _require_defaults(at, is_default, this, _WHOLE_MODELS, instead)


_NOT_SHARDED = {
    "diloco.num_fragments": "sharded workers cannot synchronise fragments while they train",
    "diloco.fragment_sync_delay": "sharded workers cannot merge results later",
    "diloco.fragment_update_alpha": "sharded workers cannot merge a share of the local parameters",
    "workflow.function": "sharded workers cannot answer tasks",
    "workflow.steps": "sharded workers cannot answer tasks of workflows",
}
"""Settings that runs with sharded workers do not support yet, and why."""


def _require_workflows(at: At) -> None:
    entries, function, total = entries_of(at("workflow.steps")), at("workflow.function"), at("rounds.total")
    components_of(at("workflow.components"))
    if function and entries:
        raise ConfigError(
            f"Both workflow.function ({function!r}) and workflow.steps (number of steps: {len(entries)}) are set.",
            "Remove workflow.function, and add the function to workflow.steps: {path = …}.",
        )
    if function and total:
        raise ConfigError(
            f"workflow.function is {function!r}, but rounds.total is {total}: a run has either a workflow or rounds.",
            "Leave rounds.total out: the run is finished when the workflow returns. To run both in order, set "
            'workflow.steps: {kind = "train"}, then the workflow as {path = …}.',
        )
    trains = [entry.kind == TRAIN for entry in entries]
    if entries and total and not any(trains):
        raise ConfigError(
            f"rounds.total is {total}, but no step in workflow.steps trains: "
            f"{', '.join(each.name for each in entries)}.",
            'Add {kind = "train"} to workflow.steps, or leave rounds.total out.',
        )
    if any(trains[:-1]) and not total and not at("rounds.early_stop_after"):
        raise ConfigError(
            "rounds.total is 0, so training never ends, but workflow "
            f"{entries[trains.index(True) + 1].name!r} comes after it.",
            "Set rounds.total or rounds.early_stop_after.",
        )
    for entry in entries:
        versions = entry.args.get("versions") if entry.kind == EVALUATES else None
        if isinstance(versions, list) and "best" in versions and not at("rounds.best_metric"):
            raise ConfigError(
                f"{entry.name} evaluates the version 'best', but rounds.best_metric is not set, so no version is best.",
                "Set rounds.best_metric to the name of a metric that workers report, or leave 'best' out.",
            )


_NOT_IN_A_SWARM = {
    "workflow.function": "a workflow has no rounds for workers to aggregate",
    "workflow.steps": "an evaluation needs the server's versions, but in a swarm the server has none",
    "aggregation.aggregator": "your own aggregator runs at the server, which has no tensors in a swarm",
    "workflow.result_filters": "these filters run at the server, which gets no updates in a swarm; filter at the sites",
    "model.persistor": "the persistor runs at the server, which has no tensors in a swarm",
    "server.evaluate": "it evaluates versions at the server, which has no tensors in a swarm",
    "disk.export_every": "the server has no tensors to export in a swarm; each site has the run's result",
    "rounds.best_metric": "the server has no tensors in a swarm and cannot keep the best version",
    "model.ranks": "no rank of a sharded worker has the whole model",
    "disk.durability": "in a swarm the tensors are not on the server's disk",
    "disk.keep_updates": "in a swarm the server gets no updates",
    "trust.authority": "workers know each other by certificates that the run itself issues, by invitation",
}
"""Settings that swarms do not support yet, and why."""

_MADE_BY_WORKERS = ("algorithm.path", "algorithm.outer_optimizer", "aggregation.reducer", "aggregation.upload_codec")


_WITH_ONE_CODEC = {
    "async.enabled": "an asynchronous round may get updates of earlier rounds",
    "diloco.num_fragments": "the rounds of fragments do not begin together",
    "model.ranks": "sharded workers keep their files for the whole run",
    "aggregation.aggregator": "your own aggregator knows one codec",
    "workflow.result_filters": "filters at the server know one codec",
    "workflow.steps": "workflows would begin again with each codec",
    "disk.in_files": "the server has to write its files again",
    "swarm.enabled": "the workers of a swarm know one codec",
}
"""Settings that do not go together with a codec that changes within a run, and why."""


def _require_changes(at: At, is_default: IsDefault) -> None:
    made = changes_of(at("rounds.changes"))
    if any(CODEC in each.values for each in made):
        _require_defaults(at, is_default, f"rounds.changes sets {CODEC}", _WITH_ONE_CODEC, "leave that out")
    if at("swarm.enabled") and any("algorithm.outer_optimizer.lr" in each.values for each in made):
        raise ConfigError(
            "rounds.changes sets algorithm.outer_optimizer.lr, but swarm.enabled is true: the workers of a swarm step "
            "with one rate.",
            "Leave it out, or set swarm.enabled = false.",
        )


def _require_swarm(at: At, is_default: IsDefault) -> None:
    """Check the settings of a swarm: a run in which workers, not the server, aggregate the updates.

    Raises:
        ConfigError: a setting is not supported in a swarm, or a swarm setting is set although `swarm.enabled` is false.
    """
    if not at("swarm.enabled"):
        others = {"swarm.aggregators": "without a swarm, the server aggregates"}
        _require_defaults(at, is_default, "swarm.enabled is false", others, "set swarm.enabled = true")
        return
    this, instead = "swarm.enabled is true", "set swarm.enabled = false"
    _require_defaults(at, is_default, this, _NOT_IN_A_SWARM, instead)
    if str(at("aggregation.download_codec")) not in ("", "none"):
        others = {"aggregation.download_codec": "no process of a swarm has all versions"}
        _require_defaults(at, is_default, this, others, instead)
    if at("rounds.sites") < 2:
        raise ConfigError(
            f"{this}, but rounds.sites is {at('rounds.sites')}: a second worker must check each version and "
            "keep a copy.",
            "Set rounds.sites to 2 or more, or swarm.enabled = false.",
        )
    paths = {key: getattr(at(key), "path", at(key)) for key in _MADE_BY_WORKERS}
    weight = at("async.staleness_weight")
    for key, path in (paths | {"async.staleness_weight": weight if ":" in weight else None}).items():
        if path:
            raise ConfigError(
                f"{key.removesuffix('.path')} is {path!r}, but {this}: workers do not load code by its path.",
                "Register the code under a name with atoll.register in the scripts of the server and of every site, or "
                "make it an entry point of a package that all have installed, and set the name. Or set "
                "swarm.enabled = false.",
            )


def _require_plugins(at: At) -> None:
    """Check the settings that name code: codec, aggregator, reducer and persistor."""
    download = at("aggregation.download_codec")
    if download.options and str(download) in ("", "none"):
        raise ConfigError(
            f"aggregation.download_codec has {download.options!r}, but no name of a codec.",
            "Add the name of the codec, or leave the options out.",
        )
    for key in ("aggregation.aggregator", "model.persistor"):
        if at(key).name or (at(key).options and not at(key).path):
            raise ConfigError(
                f"{key} is {at(key).model_dump(exclude_none=True)!r}, which has no path.",
                f'Write {key} = {{path = "my_file.py:attribute"}}, and add arguments as further keys.',
            )
    if at("aggregation.aggregator").path and at("aggregation.reducer").target:
        raise ConfigError(
            f"Both aggregation.aggregator {described(at('aggregation.aggregator'))} and aggregation.reducer "
            f"{described(at('aggregation.reducer'))} are set.",
            "Set only one of them.",
        )


def _require_heartbeats(at: At) -> None:
    """Check that a worker's heartbeats come before it is taken for dead."""
    interval_s, timeout_s = at("network.heartbeat_interval_s"), at("network.heartbeat_timeout_s")
    if timeout_s and not interval_s:
        raise ConfigError(
            f"network.heartbeat_interval_s is 0, but network.heartbeat_timeout_s is {timeout_s:g}: workers "
            "would send no heartbeats and be declared dead while they train.",
            "Set both to 0.",
        )
    if timeout_s and interval_s >= timeout_s:
        raise ConfigError(
            f"network.heartbeat_interval_s is {interval_s:g}, but network.heartbeat_timeout_s is only "
            f"{timeout_s:g}: workers would be declared dead between two heartbeats.",
            "Set the timeout to at least three times the interval.",
        )


def _require_files(at: At) -> None:
    """Check the settings of the server's files: state, exports and TLS."""
    if not at("disk.in_files") and at("disk.durability") == "power":
        raise ConfigError(
            "disk.durability is 'power', but disk.in_files is false: data in memory does not survive a power loss.",
            "Set disk.durability to 'process', or disk.in_files to true.",
        )
    if not at("disk.in_files") and at("disk.keep_updates"):
        raise ConfigError(
            f"disk.keep_updates is {at('disk.keep_updates')}, but disk.in_files is false: there are no files to keep.",
            "Leave disk.keep_updates out, or set disk.in_files to true.",
        )
    exports, own = at("disk.export_dir"), [at("disk.state_dir") / name for name in ("slots", "objects", "updates")]
    if exports is not None and exports.resolve() in [folder.resolve() for folder in own]:  # a link leads there, too
        raise ConfigError(
            f"disk.export_dir is {str(exports)!r}, where the server keeps its own files and removes all others.",
            "Use another folder, or leave disk.export_dir out.",
        )
    if (at("network.tls_cert") is None) != (at("network.tls_key") is None):
        raise ConfigError("Only one of network.tls_cert and network.tls_key is set.", "Set both, or neither.")


def _require_best(at: At) -> None:
    """Check the settings that need the best version."""
    best = at("rounds.best_metric")
    if at("rounds.early_stop_after") and best is None:
        raise ConfigError(
            f"rounds.early_stop_after is {at('rounds.early_stop_after')}, but rounds.best_metric is not set, "
            "so the run would never stop early.",
            "Set rounds.best_metric to the name of a metric that workers report.",
        )
    if best is not None and at("disk.keep_versions") < 2:
        raise ConfigError(
            f"rounds.best_metric is set, but disk.keep_versions is {at('disk.keep_versions')}: a version "
            "would be deleted before its metric arrives.",
            "Set disk.keep_versions to at least 2.",
        )
