"""Combine a run's settings with its algorithm's defaults, and load the algorithm's local rule at a site.

This file does not import torch. The arguments of the outer optimizer are checked later, when `atoll.outer_optimizers`
builds it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from atoll import registry
from atoll.algorithms.base import Algorithm, LocalRule
from atoll.config import Settings, default_of
from atoll.errors import ConfigError
from atoll.registry import Name, OwnName, ReceivedName

_INSTEAD_OF_MOMENTUM = {
    "adam": "set the decay of its averages: algorithm.outer_optimizer = {betas = [0.9, 0.99]}",
    "adamw": "set the decay of its averages: algorithm.outer_optimizer = {betas = [0.9, 0.99]}",
    "yogi": "set the decay of its averages: algorithm.outer_optimizer = {betas = [0.9, 0.99]}",
    "adagrad": 'choose algorithm.outer_optimizer = {name = "sgd"}, or "rmsprop"',
}
"""Outer optimizer without momentum → advice for the error message."""


@dataclass(frozen=True)
class ResolvedAlgorithm:
    """An algorithm together with the settings that the run chose for it.

    Attributes:
        algorithm: the algorithm as defined, with everything that settings cannot change.
        outer: name or `module:attribute` of the outer optimizer; or the callable itself, if a program passed one.
        outer_options: keyword arguments of the outer optimizer.
        reducer: name or `module:attribute` of the reducer of `params`.
        reducer_options: keyword arguments of the reducer.
        local: options of the local rule; None: the algorithm has no local rule.
        codec: name or `module:attribute` of the codec of `params`.
        codec_options: keyword arguments of the codec.
        sync_every: local steps per round; 0 if the site's script decides when a round ends.
    """

    algorithm: Algorithm
    outer: Name | Callable[..., Any]
    outer_options: dict[str, Any]
    reducer: Name
    reducer_options: dict[str, Any]
    local: dict[str, Any] | None
    codec: Name
    codec_options: dict[str, Any]
    sync_every: int

    @property
    def name(self) -> str:
        """The algorithm's name, by which sites load it."""
        return self.algorithm.name

    @property
    def state_groups(self) -> tuple[str, ...]:
        """The groups of tensors that a site keeps between rounds."""
        return self.algorithm.state_groups

    @property
    def needs_all(self) -> bool:
        """Whether a round waits for all sites by default: true for federated algorithms."""
        return not self.algorithm.steps_driven

    @property
    def outer_name(self) -> str:
        """The outer optimizer's name for messages."""
        return str(self.outer) if isinstance(self.outer, Name) else registry.label_of(self.outer)

    @property
    def reduce(self) -> dict[str, Name]:
        """The algorithm's own reducers: group of tensors → name of the group's reducer."""
        return {group: OwnName(name) for group, name in self.algorithm.reduce.items()}


TASKS_ALONE = "fedavg"
"""The algorithm for settings that name none. Only a run that just executes tasks may have such settings."""


def require_training(settings: Settings) -> None:
    """Check that the settings of a run with rounds name an algorithm and, if it is federated, the number of rounds.

    Raises:
        ConfigError: the algorithm is missing, or the run is federated and the number of rounds is missing.
    """
    if settings.algorithm.target is None:
        raise ConfigError(
            "algorithm.name is not set.",
            f"Set it to one of {', '.join(registry.names('algorithms'))}. For example, fedavg averages the "
            "models of the sites, and diloco synchronises every diloco.sync_every local steps.",
        )
    if not _loaded(settings).steps_driven and "total" not in settings.rounds.model_fields_set:
        raise ConfigError(
            f"rounds.total is not set, but the federated algorithm {settings.algorithm} needs a number of rounds.",
            "Set rounds.total to the number of rounds; 0: run until the server is stopped.",
        )


def _loaded(settings: Settings) -> Algorithm:
    name = settings.algorithm.target or OwnName(TASKS_ALONE)
    registry.require_known("algorithms", "algorithm.name", name)
    algorithm = registry.load("algorithms", name)
    if not isinstance(algorithm, Algorithm):
        raise ConfigError(
            f"algorithm.path = {name!r} is of type {type(algorithm).__name__}, not an algorithm.",
            "Set the path of a value of the class atoll.algorithms.base.Algorithm.",
        )
    if ":" not in name.text and algorithm.name != name.text:
        raise ConfigError(
            f"The entry point {name!r} has an algorithm with another name, {algorithm.name!r}.",
            "Use the same name for both, because sites load the algorithm by this name.",
        )
    if not registry.is_sendable(algorithm.name):
        raise ConfigError(
            f"algorithm.path = {name!r} has the name {algorithm.name!r}, which messages to sites cannot contain.",
            registry.SENDABLE,
        )
    return algorithm


def resolve(settings: Settings, outer_given: Callable[..., Any] | None = None) -> ResolvedAlgorithm:
    """Return the algorithm that the settings name, combined with the settings' choices.

    Args:
        settings: the run's settings.
        outer_given: a callable that builds the outer optimizer; None: the settings name the outer optimizer.

    Raises:
        ConfigError: a name is unknown (the message suggests the nearest one), an option does not exist or has a wrong
            value, or two settings do not fit together.
    """
    algorithm = _loaded(settings)
    name = str(settings.algorithm) or algorithm.name
    has_state = bool(algorithm.extra_groups or algorithm.state_groups)
    if settings.model.ranks > 1 and has_state:
        raise ConfigError(
            f"model.ranks is {settings.model.ranks}, but algorithm.name is {name!r}: this algorithm's own "
            "tensors cannot be sharded.",
            "Set model.ranks = 1 and train without sharding, or use another algorithm.",
        )
    if not algorithm.steps_driven:
        _refuse_streaming(settings, name)
        if settings.diloco.dynamic_local_steps:
            raise ConfigError(
                f"diloco.dynamic_local_steps is set, but in {name!r} the worker's script decides when a round ends.",
                "Leave diloco.dynamic_local_steps out, or use algorithm.name = 'diloco', which counts local steps.",
            )
    outer = outer_given or settings.algorithm.outer_optimizer.target or OwnName(algorithm.outer)
    if isinstance(outer, OwnName):
        registry.require_known("outer", "algorithm.outer_optimizer.name", outer)
    own = OwnName(algorithm.reduce["params"])
    reducer = settings.aggregation.reducer.target or own
    registry.require_known("reducers", "aggregation.reducer.name", reducer)
    if algorithm.own_reducer and reducer != own:
        raise ConfigError(
            f"aggregation.reducer = {reducer!r} would replace {own!r}, an essential part of {algorithm.name}.",
            "Leave aggregation.reducer out, or use it with algorithm.name = 'fedavg'.",
        )
    if settings.async_.enabled and has_state:
        raise ConfigError(
            f"algorithm.name is {name!r}, but async.enabled is true: this algorithm's own tensors need "
            "synchronous rounds.",
            "Set async.enabled = false, or use another algorithm.",
        )
    registry.require_known("staleness", "async.staleness_weight", settings.async_.weight)
    outer_options = _outer_options(settings, algorithm, outer)
    if settings.async_.momentum_every:
        outer, outer_options = OwnName("delayed_nesterov"), _delayed(settings, outer, outer_options)
    codec = settings.aggregation.upload_codec.target or OwnName(algorithm.codec)
    registry.require_known("codecs", "aggregation.upload_codec.name", codec)
    if download := settings.aggregation.download_codec.target:
        registry.require_known("codecs", "aggregation.download_codec.name", download)
    return ResolvedAlgorithm(
        algorithm=algorithm,
        outer=outer,
        outer_options=outer_options,
        reducer=reducer,
        reducer_options=settings.aggregation.reducer.options,
        local=_local(settings, algorithm),
        codec=codec,
        codec_options=settings.aggregation.upload_codec.options,
        sync_every=settings.diloco.sync_every if algorithm.steps_driven else 0,
    )


def _refuse_streaming(settings: Settings, algorithm: str) -> None:
    """Refuse settings for fragments: the algorithm does not count steps, so no fragment would ever be synchronised.

    Raises:
        ConfigError: a setting for fragments does not have its default value.
    """
    for key in ("diloco.num_fragments", "diloco.fragment_sync_delay", "diloco.fragment_update_alpha"):
        if settings.at(key) != default_of(key):
            raise ConfigError(
                f"{key} is {settings.at(key)}, but in {algorithm!r} the worker's script decides when a round ends.",
                f"Leave {key} out, or use algorithm.name = 'diloco', which counts local steps.",
            )


def _outer_options(settings: Settings, algorithm: Algorithm, outer: OwnName | Callable[..., Any]) -> dict[str, Any]:
    """Return the options of the outer optimizer: those in the settings, else the defaults of the algorithm.

    The algorithm's defaults are used only for the outer optimizer that the algorithm itself names.

    Raises:
        ConfigError: the learning rate or the momentum is out of range, or a momentum is set for an optimizer without
            one.
    """
    options = settings.algorithm.outer_optimizer.options
    lr, momentum = options.get("lr"), options.get("momentum")
    if lr is not None and not (type(lr) in (int, float) and 0 < lr < math.inf):
        raise ConfigError(f"algorithm.outer_optimizer.lr is {lr!r}.", "Use a number above 0.")
    if momentum is not None:
        if type(momentum) not in (int, float) or not 0 <= momentum < 1:
            raise ConfigError(f"algorithm.outer_optimizer.momentum is {momentum!r}.", "Use a number from 0 to below 1.")
        if isinstance(outer, OwnName) and outer.text in _INSTEAD_OF_MOMENTUM:
            raise ConfigError(
                f"algorithm.outer_optimizer.momentum is {momentum:g}, but {outer} has no momentum.",
                f"Leave momentum out, or {_INSTEAD_OF_MOMENTUM[outer.text]}.",
            )
    defaults = dict(algorithm.outer_options) if outer == OwnName(algorithm.outer) else {}
    if options.get("momentum") == 0:
        defaults.pop("nesterov", None)  # torch refuses Nesterov without momentum
    return defaults | options


def _delayed(settings: Settings, outer: OwnName | Callable[..., Any], options: dict[str, Any]) -> dict[str, Any]:
    """Convert options of SGD to options of delayed Nesterov.

    Raises:
        ConfigError: the outer optimizer is not SGD, or has an option that delayed Nesterov does not have.
    """
    if outer != OwnName("sgd"):
        name = outer.text if isinstance(outer, OwnName) else registry.label_of(outer)
        raise ConfigError(
            f"async.momentum_every is {settings.async_.momentum_every}, but the outer optimizer is {name!r}: "
            "delayed Nesterov exists only for SGD.",
            "Leave out either async.momentum_every or algorithm.outer_optimizer.",
        )
    for key, value in options.items():
        if key not in ("lr", "momentum") and not (key == "nesterov" and value):
            raise ConfigError(
                f"algorithm.outer_optimizer has {key} = {value!r}, an option that delayed Nesterov "
                "(async.momentum_every) does not have.",
                "Its options are lr and momentum.",
            )
    lr, momentum = options.get("lr", 1.0), options.get("momentum", 0.0)
    first = settings.async_.sync_rounds_first if settings.async_.enabled else 0
    return {"lr": lr, "momentum": momentum, "delay": settings.async_.momentum_every, "undelayed": first}


def _local(settings: Settings, algorithm: Algorithm) -> dict[str, Any] | None:
    known = algorithm.local_options
    for key, value in settings.algorithm.options.items():
        if key not in known:
            has = f"Its settings are {', '.join(known)}." if known else "Leave it out."
            raise ConfigError(
                f"algorithm.{key} is set, but {algorithm.name} has no such setting.",
                registry.nearest(key, known, has),
            )
        if type(value) not in (int, float) or not (math.isfinite(value) and value >= 0):
            raise ConfigError(f"algorithm.{key} is {value!r}.", "Use a number of at least 0.")
    return known | settings.algorithm.options if algorithm.local else None


def local_rule(name: ReceivedName, options: Mapping[str, Any] | None, package: str) -> LocalRule | None:
    """Return the local rule of the run's algorithm, as this program has registered it or a package has installed it.

    Args:
        name: name of the run's algorithm, as the server sent it.
        options: options of the local rule, from the server; None: the algorithm has no local rule, so the result is
            None.
        package: name and version of the package that contains the algorithm at the server; empty if unknown.

    Raises:
        ConfigError: the algorithm is not installed at this site, or the installed one does not fit these options.
    """
    if options is None:
        return None
    install = f"Install {package}" if package else f"Install the package with the entry point {name!r}"
    install += " of the group atoll.algorithms at this site, as at the server." if not package else " at this site."
    install += f" Or call atoll.register('algorithms', {name!r}, …) in the script before it joins."
    if not registry.is_known("algorithms", name.text):
        raise ConfigError(
            f"The run's algorithm {name!r} corrects local training, but it is not installed at this site.", install
        )
    algorithm = registry.resolve_received("algorithms", name)
    if not isinstance(algorithm, Algorithm) or algorithm.local is None:
        raise ConfigError(f"The run's {name!r} corrects local training, but this site's {name!r} does not.", install)
    rule = algorithm.local
    return registry.construct(lambda: rule(**options), f"The options {dict(options)!r} do not fit {name!r}", install)
