"""Settings that contradict each other, each with what to write instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from atoll.config.workflow_settings import TRAIN, components_of, entries_of
from atoll.errors import ConfigError

if TYPE_CHECKING:
    from atoll.config.settings import Settings


def require_consistent(settings: Settings) -> None:
    """Raise on the first contradiction.

    Raises:
        ConfigError: both values, and the remedy.
    """
    _require_name(settings)
    _require_async(settings)
    _require_rounds(settings)
    _require_streaming(settings)
    _require_unsharded(settings)
    _require_workflows(settings)
    _require_swarm(settings)
    _require_the_rest(settings)


def _require_name(settings: Settings) -> None:
    if not settings.name.isprintable():
        raise ConfigError(f"name is {settings.name!r}.", "Write it in one line: logs and the status show it so.")


def _require_rounds(settings: Settings) -> None:
    floor = settings.min_workers or 1
    if floor > settings.num_workers:
        raise ConfigError(
            f"min_workers is {floor}, but num_workers is {settings.num_workers}: round one could never close.",
            f"Set min_workers to at most {settings.num_workers}.",
        )
    if settings.quorum and settings.quorum < floor:
        raise ConfigError(
            f"quorum is {settings.quorum}, below min_workers, which is {floor}.",
            f"Set quorum to at least {floor}, or to 0.",
        )
    if settings.quorum and not settings.round_deadline_s:
        raise ConfigError(
            f"quorum is {settings.quorum}, but round_deadline_s is 0, so it never takes effect.",
            "Set round_deadline_s to the seconds after which the quorum suffices.",
        )


_ASYNC_ONLY = ("async_buffer", "async_grace_s", "max_staleness", "staleness_weight", "sync_rounds_first", "dylu")
_SYNC_ONLY = ("quorum", "round_deadline_s", "sample_fraction")
_SYNC_SO_FAR = {
    "best_metric": "metrics describe the version that a site pulled, which may be gone when they come",
    "aggregator": "an aggregator takes the updates of one round, and here the next ones come meanwhile",
    "task_result_filters": "they need the version that an update started from, which may be gone when it comes",
}
"""What an asynchronous run does not have, and why."""


def _require_async(settings: Settings) -> None:
    """What has a meaning in one of the modes only."""
    others = {"sync": _ASYNC_ONLY, "async": _SYNC_ONLY}[settings.mode]
    for name in others:
        value = getattr(settings, name)
        if value != type(settings).model_fields[name].default:
            other = "async" if settings.mode == "sync" else "sync"
            raise ConfigError(
                f"{name} is {value!r}, but mode is {settings.mode!r}: it has a meaning in {other} runs only.",
                f"Leave {name} out, or set mode = {other!r}.",
            )
    floor = settings.min_workers or 1
    if settings.mode == "async" and floor > settings.async_buffer:
        raise ConfigError(
            f"mode is 'async', and min_workers is {floor}, but async_buffer is {settings.async_buffer}: "
            "no step would ever have enough updates.",
            f"Set async_buffer to at least {floor}, or min_workers to {settings.async_buffer}.",
        )
    if settings.mode == "async" and floor > 1 and settings.num_fragments > 1:
        raise ConfigError(
            f"mode is 'async', min_workers is {floor}, and num_fragments is {settings.num_fragments}: a "
            "step could wait for sites that wait for a step of another fragment.",
            "Leave min_workers out, or set num_fragments to 1.",
        )
    for name, why in _SYNC_SO_FAR.items():
        if settings.mode == "async" and getattr(settings, name):
            raise ConfigError(
                f"{name} is {getattr(settings, name)!r}, but mode is 'async': {why}.",
                f"Leave {name} out, or set mode = 'sync'.",
            )
    if settings.workflow and settings.mode == "async":
        raise ConfigError(
            f"workflow is {settings.workflow!r}, and mode is 'async': a workflow has no rounds.", "Leave mode out."
        )


_WHOLE_MODELS = {
    "workflow": "a workflow has no rounds",
    "best_metric": "a metric is of a whole model, and no round of a fragment ends with one",
    "aggregator": "an aggregator of your own gets whole models",
    "sample_fraction": "who is not drawn for one fragment would be waited for in the next",
}
"""Settings that do not go with several fragments, and why."""


def _require_streaming(settings: Settings) -> None:
    """H, K and τ fit each other (2501.18512, section 2)."""
    h, k = settings.sync_every, settings.num_fragments
    if h % k:
        near = sorted({max(k, h - h % k), h - h % k + k}, key=lambda other: abs(other - h))
        raise ConfigError(
            f"sync_every is {h}, and num_fragments is {k}: one fragment is due every sync_every/num_fragments steps, "
            "which has to be a whole number.",
            f"Set sync_every to {' or '.join(map(str, near))}.",
        )
    if settings.max_inflight > k:
        raise ConfigError(
            f"max_inflight is {settings.max_inflight}, but num_fragments is {k}: each is under way once at a time.",
            f"Set max_inflight to at most {k}.",
        )
    longest = settings.max_inflight * h // k
    if settings.tau > longest:
        raise ConfigError(
            f"tau is {settings.tau}, but with sync_every {h}, num_fragments {k} and max_inflight "
            f"{settings.max_inflight} results have to be merged within {longest} steps.",
            f"Set tau to at most {longest}, or allow more fragments in flight.",
        )
    if settings.tau and settings.tau >= h and settings.alpha == 0:
        raise ConfigError(
            f"tau is {settings.tau}, sync_every is {h}, and alpha is 0: a merge takes the global parameters in "
            f"place of the local ones, {settings.tau} steps after the update was taken, so that every local step would "
            "be lost.",
            f"Set tau to a small part of sync_every, as {max(1, h // 10)}; or alpha above 0, as 0.5.",
        )
    if k == 1:
        return
    _refuse_beside(settings, f"num_fragments is {k}", _WHOLE_MODELS, "set num_fragments to 1")


def _refuse_beside(settings: Settings, this: str, others: Mapping[str, str], instead: str) -> None:
    """Refuse settings that are not left at their defaults beside another one.

    Args:
        others: name → why they do not go together.
    """
    for name, why in others.items():
        value = getattr(settings, name)
        if value != type(settings).model_fields[name].default:
            raise ConfigError(f"{name} is {value!r}, and {this}: {why}.", f"Leave {name} out, or {instead}.")


_NOT_SHARDED = {
    "num_fragments": "a fragment is sent while training goes on, and ranks exchange what tiles have of two of them",
    "tau": "the same holds for results that are merged later",
    "alpha": "a merge that keeps a share is of whole tensors",
    "workflow": "tasks have payloads, and no ranks",
    "workflows": "the same holds for theirs",
}
"""Settings that do not go with sharded workers so far, and why."""


def _require_unsharded(settings: Settings) -> None:
    if settings.ranks == 1:
        return
    _refuse_beside(settings, f"ranks is {settings.ranks}", _NOT_SHARDED, "set ranks = 1 and train without sharding")


def _require_workflows(settings: Settings) -> None:
    entries = entries_of(settings.workflows)
    components_of(settings.components)
    if not entries:
        return
    if settings.workflow:
        raise ConfigError(
            f"workflow is {settings.workflow!r}, and workflows has {len(entries)}.",
            f'Give that one among the workflows: {{path = "{settings.workflow}"}}.',
        )
    trains = [entry.kind == TRAIN for entry in entries]
    if settings.rounds and not any(trains):
        raise ConfigError(
            f"rounds is {settings.rounds}, and workflows has no training: {', '.join(each.name for each in entries)}.",
            'Add {kind = "train"} to workflows, or leave rounds out.',
        )
    if any(trains[:-1]) and not settings.rounds and not settings.early_stop_rounds:
        raise ConfigError(
            f"rounds is 0, so training never ends, and workflow {entries[trains.index(True) + 1].name!r} comes after "
            "it.",
            "Set rounds, or early_stop_rounds.",
        )


_NOT_IN_A_SWARM = {
    "workflow": "a workflow has no rounds to place",
    "workflows": "an evaluation takes the versions of the server, which has none",
    "aggregator": "an aggregator of your own runs at the server",
    "task_result_filters": "they run at the server, which sees no update; filter at the sites",
    "persistor": "it runs at the server, which has no tensors",
    "save_every": "the server has no tensors to export; the run's result is at every site",
    "best_metric": "the server has no tensors of the best version to keep",
    "downlink_codec": "differences are made where all versions pass",
    "ranks": "a sharded worker has the whole model nowhere",
    "durability": "what the server writes through is not where the tensors are",
}
"""Settings that do not go with a swarm so far, and why."""

_OF_THEIR_OWN = ("algorithm", "outer_optimizer", "reducer", "staleness_weight", "codec")


def _require_swarm(settings: Settings) -> None:
    """What a run has to be that is aggregated by its workers."""
    if settings.placement == "server":
        _refuse_beside(
            settings, "placement is 'server'", {"aggregators": "the server aggregates"}, "set placement = 'swarm'"
        )
        return
    told = dict(_NOT_IN_A_SWARM)
    if settings.downlink_codec == "none":
        del told["downlink_codec"]
    _refuse_beside(settings, "placement is 'swarm'", told, "set placement = 'server'")
    if settings.num_workers < 2:
        raise ConfigError(
            f"placement is 'swarm', and num_workers is {settings.num_workers}: who aggregates needs a second worker, "
            "which checks each version and holds it, too.",
            "Set num_workers to 2 or more, or placement = 'server'.",
        )
    for name in _OF_THEIR_OWN:
        if ":" in str(getattr(settings, name) or ""):
            raise ConfigError(
                f"{name} is {getattr(settings, name)!r}, and placement is 'swarm': workers run no code that a server "
                "names.",
                "Register it by an entry point of a package that every site has installed, or set placement = "
                "'server'.",
            )


def _require_the_rest(settings: Settings) -> None:
    if settings.downlink_codec_options and settings.downlink_codec in (None, "none"):
        raise ConfigError(
            f"downlink_codec_options is {settings.downlink_codec_options!r}, but no downlink_codec is set: versions "
            "travel as they are.",
            "Set downlink_codec, or leave its options out.",
        )
    if settings.heartbeat_timeout_s and not settings.heartbeat_interval_s:
        raise ConfigError(
            f"heartbeat_interval_s is 0, but heartbeat_timeout_s is {settings.heartbeat_timeout_s:g}: workers without "
            "heartbeats would be declared dead while they train.",
            "Set both to 0.",
        )
    if settings.heartbeat_timeout_s and settings.heartbeat_interval_s >= settings.heartbeat_timeout_s:
        raise ConfigError(
            f"heartbeat_interval_s is {settings.heartbeat_interval_s:g}, not below heartbeat_timeout_s, which is "
            f"{settings.heartbeat_timeout_s:g}: every worker would be declared dead.",
            "Set the timeout to at least three intervals.",
        )
    if settings.workflow and settings.rounds:
        raise ConfigError(
            f"workflow is {settings.workflow!r}, and rounds is {settings.rounds}: a run has a workflow or rounds.",
            "Leave rounds out; the run is finished when the workflow returns.",
        )
    if settings.aggregator and settings.reducer:
        raise ConfigError(
            f"Both aggregator {settings.aggregator!r} and reducer {settings.reducer!r} are set.", "Set one of them."
        )
    if not settings.download_to_disk and settings.durability == "power":
        raise ConfigError(
            "durability is 'power', but download_to_disk is false: memory survives no power loss.",
            "Set durability to 'process', or download_to_disk to true.",
        )
    if settings.early_stop_rounds and settings.best_metric is None:
        raise ConfigError(
            f"early_stop_rounds is {settings.early_stop_rounds}, but no best_metric is set: nothing would ever stop.",
            "Set best_metric to the name of a metric that workers report.",
        )
    if settings.best_metric is not None and settings.keep_versions < 2:
        raise ConfigError(
            f"best_metric is set, but keep_versions is {settings.keep_versions}: the version that workers measured "
            "would be gone when its metric is known.",
            "Set keep_versions to at least 2.",
        )
    if (settings.tls_cert is None) != (settings.tls_key is None):
        raise ConfigError("Only one of tls_cert and tls_key is given.", "Give both, or neither.")
