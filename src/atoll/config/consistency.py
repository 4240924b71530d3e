"""Check that the settings of a run do not contradict each other; each error names what to write instead."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from atoll.config.workflow_settings import TRAIN, components_of, entries_of
from atoll.errors import ConfigError

At = Callable[[str], Any]
"""`group.key` → its value. This file takes settings by their keys, because `Settings` imports this file."""
IsDefault = Callable[[str], bool]
"""`group.key` → whether the setting has its default value."""


def require_consistent(at: At, is_default: IsDefault) -> None:
    """Check all settings, and raise on the first contradiction.

    Raises:
        ConfigError: two settings contradict each other. The message has both values and a remedy.
    """
    _require_name(at)
    _require_async(at, is_default)
    _require_rounds(at)
    _require_streaming(at, is_default)
    if at("model.ranks") > 1:
        this, instead = f"model.ranks is {at('model.ranks')}", "set model.ranks = 1 and train without sharding"
        _refuse_beside(at, is_default, this, _NOT_SHARDED, instead)
    _require_workflows(at)
    _require_swarm(at, is_default)
    _require_the_rest(at)


def _refuse_beside(at: At, is_default: IsDefault, this: str, others: Mapping[str, str], instead: str) -> None:
    """Refuse settings that must keep their defaults because of another setting.

    Args:
        at: gives the value of a setting.
        is_default: gives whether a setting has its default.
        this: the other setting with its value, as a clause for the message.
        others: `group.key` of a setting that must keep its default → the reason.
        instead: a remedy, for the message: what to do instead of leaving the key out.

    Raises:
        ConfigError: one of `others` has another value than its default.
    """
    for key, why in others.items():
        if not is_default(key):
            raise ConfigError(f"{key} is {shown(at(key))}, and {this}: {why}.", f"Leave {key} out, or {instead}.")


def shown(value: Any) -> str:
    """Return a value as text for a message; a table with a name or a path is shown by that alone."""
    return repr(getattr(value, "target", None) or value)


def _require_name(at: At) -> None:
    if not at("run.name").isprintable():
        raise ConfigError(f"run.name is {at('run.name')!r}.", "Write it in one line: logs and the status show it so.")


def _require_rounds(at: At) -> None:
    floor, sites, quorum = at("rounds.min_sites") or 1, at("rounds.sites"), at("rounds.quorum")
    if floor > sites:
        raise ConfigError(
            f"rounds.min_sites is {floor}, but rounds.sites is {sites}: round one could never close.",
            f"Set rounds.min_sites to at most {sites}.",
        )
    if quorum and quorum < floor:
        raise ConfigError(
            f"rounds.quorum is {quorum}, below rounds.min_sites, which is {floor}.",
            f"Set rounds.quorum to at least {floor}, or to 0.",
        )
    if quorum and not at("rounds.deadline_s"):
        raise ConfigError(
            f"rounds.quorum is {quorum}, but rounds.deadline_s is 0, so it never takes effect.",
            "Set rounds.deadline_s to the seconds after which the quorum suffices.",
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
    "rounds.best_metric": "metrics describe the version that a site pulled, which may be gone when they come",
    "aggregation.aggregator": "an aggregator takes the updates of one round, and here the next ones come meanwhile",
    "workflow.result_filters": "they need the version that an update started from, which may be gone when it comes",
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
                f"{key} is {at(key)!r}, but async.enabled is {now}: it has a meaning in "
                f"{'synchronous' if enabled else 'asynchronous'} runs only.",
                f"Leave {key} out, or set async.enabled = {other}.",
            )
    if not enabled:
        return
    if floor > at("async.buffer_size"):
        raise ConfigError(
            f"async.enabled is true, and rounds.min_sites is {floor}, but async.buffer_size is "
            f"{at('async.buffer_size')}: no step would ever have enough updates.",
            f"Set async.buffer_size to at least {floor}, or rounds.min_sites to {at('async.buffer_size')}.",
        )
    if floor > 1 and fragments > 1:
        raise ConfigError(
            f"async.enabled is true, rounds.min_sites is {floor}, and diloco.num_fragments is {fragments}: a "
            "step could wait for sites that wait for a step of another fragment.",
            "Leave rounds.min_sites out, or set diloco.num_fragments to 1.",
        )
    _refuse_beside(at, is_default, "async.enabled is true", _SYNC_SO_FAR, "set async.enabled = false")


_WHOLE_MODELS = {
    "workflow.function": "a workflow has no rounds",
    "rounds.best_metric": "a metric is of a whole model, and no round of a fragment ends with one",
    "aggregation.aggregator": "an aggregator of your own gets whole models",
    "rounds.sample_fraction": "a site that is not drawn for one fragment would be waited for in the next",
}
"""Settings that runs with several fragments do not support, and why."""


def _require_streaming(at: At, is_default: IsDefault) -> None:
    """Check that H, K and τ fit each other (Streaming DiLoCo, arXiv 2501.18512, section 2).

    Raises:
        ConfigError: the values do not fit, or another setting does not support several fragments.
    """
    every, fragments, delay = at("diloco.sync_every"), at("diloco.num_fragments"), at("diloco.fragment_sync_delay")
    inflight = at("diloco.max_inflight")
    if every % fragments:
        near = sorted(
            {max(fragments, every - every % fragments), every - every % fragments + fragments},
            key=lambda other: abs(other - every),
        )
        raise ConfigError(
            f"diloco.sync_every is {every}, and diloco.num_fragments is {fragments}: one fragment is due every "
            "sync_every/num_fragments steps, which has to be a whole number.",
            f"Set diloco.sync_every to {' or '.join(map(str, near))}.",
        )
    if inflight > fragments:
        raise ConfigError(
            f"diloco.max_inflight is {inflight}, but diloco.num_fragments is {fragments}: each is under way once at a "
            "time.",
            f"Set diloco.max_inflight to at most {fragments}.",
        )
    longest = inflight * every // fragments
    if delay > longest:
        raise ConfigError(
            f"diloco.fragment_sync_delay is {delay}, but with diloco.sync_every {every}, num_fragments {fragments} and "
            f"max_inflight {inflight} results have to be merged within {longest} steps.",
            f"Set diloco.fragment_sync_delay to at most {longest}, or allow more fragments in flight.",
        )
    if delay and delay >= every and at("diloco.fragment_update_alpha") == 0:
        raise ConfigError(
            f"diloco.fragment_sync_delay is {delay}, diloco.sync_every is {every}, and diloco.fragment_update_alpha is "
            f"0: a merge takes the global parameters in place of the local ones, {delay} steps after the update was "
            "taken, so that every local step would be lost.",
            f"Set diloco.fragment_sync_delay to a small part of sync_every, as {max(1, every // 10)}; or "
            "diloco.fragment_update_alpha above 0, as 0.5.",
        )
    if fragments > 1:
        this, instead = f"diloco.num_fragments is {fragments}", "set diloco.num_fragments to 1"
        _refuse_beside(at, is_default, this, _WHOLE_MODELS, instead)


_NOT_SHARDED = {
    "diloco.num_fragments": "a fragment is sent while training goes on, and ranks exchange what tiles have of two",
    "diloco.fragment_sync_delay": "the same holds for results that are merged later",
    "diloco.fragment_update_alpha": "a merge that keeps a share is of whole tensors",
    "workflow.function": "tasks have payloads, and no ranks",
    "workflow.steps": "the same holds for theirs",
}
"""Settings that runs with sharded workers do not support yet, and why."""


def _require_workflows(at: At) -> None:
    entries, function, total = entries_of(at("workflow.steps")), at("workflow.function"), at("rounds.total")
    components_of(at("workflow.components"))
    if function and entries:
        raise ConfigError(
            f"workflow.function is {function!r}, and workflow.steps has {len(entries)}.",
            f'Give that one among the steps: {{path = "{function}"}}.',
        )
    if function and total:
        raise ConfigError(
            f"workflow.function is {function!r}, and rounds.total is {total}: a run has a workflow or rounds.",
            "Leave rounds.total out; the run is finished when the workflow returns.",
        )
    trains = [entry.kind == TRAIN for entry in entries]
    if entries and total and not any(trains):
        raise ConfigError(
            f"rounds.total is {total}, and workflow.steps has no training: {', '.join(each.name for each in entries)}.",
            'Add {kind = "train"} to workflow.steps, or leave rounds.total out.',
        )
    if any(trains[:-1]) and not total and not at("rounds.early_stop_after"):
        raise ConfigError(
            f"rounds.total is 0, so training never ends, and workflow {entries[trains.index(True) + 1].name!r} comes "
            "after it.",
            "Set rounds.total, or rounds.early_stop_after.",
        )


_NOT_IN_A_SWARM = {
    "workflow.function": "a workflow has no rounds to place",
    "workflow.steps": "an evaluation takes the versions of the server, which has none",
    "aggregation.aggregator": "an aggregator of your own runs at the server",
    "workflow.result_filters": "they run at the server, which sees no update; filter at the sites",
    "model.persistor": "it runs at the server, which has no tensors",
    "disk.export_every": "the server has no tensors to export; the run's result is at every site",
    "rounds.best_metric": "the server has no tensors of the best version to keep",
    "model.ranks": "a sharded worker has the whole model nowhere",
    "disk.durability": "what the server writes through is not where the tensors are",
}
"""Settings that swarms do not support yet, and why."""

_MADE_BY_WORKERS = ("algorithm.path", "algorithm.outer_optimizer", "aggregation.reducer", "aggregation.upload_codec")


def _require_swarm(at: At, is_default: IsDefault) -> None:
    """Check the settings of a swarm: a run that its workers aggregate.

    Raises:
        ConfigError: a setting is not supported in a swarm, or a swarm setting is set although `swarm.enabled` is false.
    """
    if not at("swarm.enabled"):
        others = {"swarm.aggregators": "the server aggregates"}
        _refuse_beside(at, is_default, "swarm.enabled is false", others, "set swarm.enabled = true")
        return
    this, instead = "swarm.enabled is true", "set swarm.enabled = false"
    _refuse_beside(at, is_default, this, _NOT_IN_A_SWARM, instead)
    if at("aggregation.download_codec").target not in (None, "none"):
        others = {"aggregation.download_codec": "differences are made where all versions pass"}
        _refuse_beside(at, is_default, this, others, instead)
    if at("rounds.sites") < 2:
        raise ConfigError(
            f"{this}, and rounds.sites is {at('rounds.sites')}: the worker that aggregates needs a second one, "
            "which checks each version and holds it, too.",
            "Set rounds.sites to 2 or more, or swarm.enabled = false.",
        )
    paths = {key: getattr(at(key), "path", at(key)) for key in _MADE_BY_WORKERS}
    weight = at("async.staleness_weight")
    for key, path in (paths | {"async.staleness_weight": weight if ":" in weight else None}).items():
        if path:
            raise ConfigError(
                f"{key.removesuffix('.path')} is {path!r}, and {this}: workers run no code that a server names.",
                "Register it by an entry point of a package that every site has installed, or set swarm.enabled = "
                "false.",
            )


def _require_the_rest(at: At) -> None:
    interval_s, timeout_s = at("network.heartbeat_interval_s"), at("network.heartbeat_timeout_s")
    best, download = at("rounds.best_metric"), at("aggregation.download_codec")
    if download.options and download.target in (None, "none"):
        raise ConfigError(
            f"aggregation.download_codec has {download.options!r}, but names no codec: versions travel as they are.",
            "Add its name, or leave the options out.",
        )
    for key in ("aggregation.aggregator", "model.persistor"):
        if at(key).name or (at(key).options and not at(key).path):
            raise ConfigError(
                f"{key} is {at(key).model_dump(exclude_none=True)!r}, which names no code.",
                f'Write {key} = {{path = "my_file.py:attribute"}}, with its arguments beside the path.',
            )
    if timeout_s and not interval_s:
        raise ConfigError(
            f"network.heartbeat_interval_s is 0, but network.heartbeat_timeout_s is {timeout_s:g}: workers without "
            "heartbeats would be declared dead while they train.",
            "Set both to 0.",
        )
    if timeout_s and interval_s >= timeout_s:
        raise ConfigError(
            f"network.heartbeat_interval_s is {interval_s:g}, not below network.heartbeat_timeout_s, which is "
            f"{timeout_s:g}: every worker would be declared dead.",
            "Set the timeout to at least three intervals.",
        )
    if at("aggregation.aggregator").path and at("aggregation.reducer").target:
        raise ConfigError(
            f"Both aggregation.aggregator {shown(at('aggregation.aggregator'))} and aggregation.reducer "
            f"{shown(at('aggregation.reducer'))} are set.",
            "Set one of them.",
        )
    if not at("disk.in_files") and at("disk.durability") == "power":
        raise ConfigError(
            "disk.durability is 'power', but disk.in_files is false: memory survives no power loss.",
            "Set disk.durability to 'process', or disk.in_files to true.",
        )
    if at("rounds.early_stop_after") and best is None:
        raise ConfigError(
            f"rounds.early_stop_after is {at('rounds.early_stop_after')}, but no rounds.best_metric is set: nothing "
            "would ever stop.",
            "Set rounds.best_metric to the name of a metric that workers report.",
        )
    if best is not None and at("disk.keep_versions") < 2:
        raise ConfigError(
            f"rounds.best_metric is set, but disk.keep_versions is {at('disk.keep_versions')}: the version that "
            "workers measured would be gone when its metric is known.",
            "Set disk.keep_versions to at least 2.",
        )
    if (at("network.tls_cert") is None) != (at("network.tls_key") is None):
        raise ConfigError("Only one of network.tls_cert and network.tls_key is given.", "Give both, or neither.")
