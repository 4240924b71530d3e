"""A run's settings on top of its algorithm's defaults → what the run does, and the local rule that a site has of it.

No torch here; the optimizer's own arguments are checked where it is built (`atoll.outer_optimizers`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from atoll import registry
from atoll.algorithms.base import Algorithm, LocalRule
from atoll.config import Settings
from atoll.errors import ConfigError

_INSTEAD_OF_MOMENTUM = {
    "adam": "set the decay of its averages: outer_options = {betas = [0.9, 0.99]}",
    "adamw": "set the decay of its averages: outer_options = {betas = [0.9, 0.99]}",
    "yogi": "set the decay of its averages: outer_options = {betas = [0.9, 0.99]}",
    "adagrad": "choose outer_optimizer = 'sgd', or 'rmsprop'",
}
"""Outer optimizers without momentum → what to do instead."""


@dataclass(frozen=True)
class ResolvedAlgorithm:
    """An algorithm with the run's own choices.

    Attributes:
        algorithm: what does not change by settings: groups, and what becomes of missed rounds.
        outer: name or `module:attribute` of the outer optimizer; or itself, where a program has given it.
        outer_options: its keyword arguments.
        reducer: name or `module:attribute` of what reduces `params`.
        reducer_options: its keyword arguments.
        local: the options of its local rule; None: it has none.
        codec: how `params` travel.
        codec_options: its keyword arguments.
        sync_every: local steps of a round; 0 where the worker decides.
    """

    algorithm: Algorithm
    outer: str | Callable[..., Any]
    outer_options: dict[str, Any]
    reducer: str
    reducer_options: dict[str, Any]
    local: dict[str, Any] | None
    codec: str
    codec_options: dict[str, Any]
    sync_every: int

    @property
    def name(self) -> str:
        return self.algorithm.name

    @property
    def keeps(self) -> tuple[str, ...]:
        """The groups that a site keeps between rounds."""
        return self.algorithm.keeps

    @property
    def needs_all(self) -> bool:
        """Whether a round needs all sites unless the settings say otherwise: of federated algorithms."""
        return not self.algorithm.steps_driven

    @property
    def outer_name(self) -> str:
        """What people call the outer optimizer."""
        return self.outer if isinstance(self.outer, str) else name_of(self.outer)


def resolve(settings: Settings, outer_given: Callable[..., Any] | None = None) -> ResolvedAlgorithm:
    """What a run with these settings does.

    Args:
        outer_given: the outer optimizer, in place of the setting's.

    Raises:
        ConfigError: an unknown algorithm, optimizer or codec (the nearest name is offered), an option given twice, or
            momentum for an optimizer that has none.
    """
    algorithm = registry.load("algorithms", settings.algorithm)
    if not isinstance(algorithm, Algorithm):
        raise ConfigError(
            f"algorithm = {settings.algorithm!r} is a {type(algorithm).__name__}, not an algorithm.",
            "It has to name a value of atoll.algorithms.base.Algorithm.",
        )
    if ":" not in settings.algorithm and algorithm.name != settings.algorithm:
        raise ConfigError(
            f"The entry point {settings.algorithm!r} gives an algorithm named {algorithm.name!r}.",
            "Give both one name: sites load the algorithm by it.",
        )
    has_state = bool(algorithm.beside or algorithm.keeps)
    if settings.ranks > 1 and has_state:
        raise ConfigError(
            f"ranks is {settings.ranks}, and algorithm is {settings.algorithm!r}: the tensors that it keeps beside the "
            "model are not sharded so far.",
            "Set ranks = 1 and train without sharding, or choose another algorithm.",
        )
    if not algorithm.steps_driven:
        _require_whole(settings)
        if settings.dylu:
            raise ConfigError(
                f"dylu is set, but in {settings.algorithm!r} the worker's script decides when a round ends.",
                "Leave dylu out, or choose algorithm = 'diloco', which counts local steps.",
            )
    outer = outer_given or settings.outer_optimizer or algorithm.outer
    if isinstance(outer, str):
        _require_known("outer", "outer_optimizer", outer)
    reducer = settings.reducer or algorithm.reduce["params"]
    _require_known("reducers", "reducer", reducer)
    own = algorithm.reduce["params"]
    if algorithm.own_reducer and reducer != own:
        raise ConfigError(
            f"reducer = {reducer!r} would take the place of {own!r}, which is what makes {algorithm.name}.",
            "Leave reducer out, or choose it with algorithm = 'fedavg'.",
        )
    if settings.mode == "async" and has_state:
        raise ConfigError(
            f"algorithm is {settings.algorithm!r}, and mode is 'async': the tensors that it keeps change by rounds.",
            "Set mode = 'sync', or choose another algorithm.",
        )
    _require_known("staleness", "staleness_weight", settings.staleness_weight)
    outer_options = _outer_options(settings, algorithm, outer)
    if settings.dn_buffer_size:
        outer, outer_options = "delayed_nesterov", _delayed(settings, outer, outer_options)
    codec = settings.codec or algorithm.codec
    _require_known("codecs", "codec", codec)
    _require_known("codecs", "downlink_codec", settings.downlink_codec or "none")
    return ResolvedAlgorithm(
        algorithm=algorithm,
        outer=outer,
        outer_options=outer_options,
        reducer=reducer,
        reducer_options=dict(settings.reducer_options),
        local=_local(settings, algorithm),
        codec=codec,
        codec_options=dict(settings.codec_options),
        sync_every=settings.sync_every if algorithm.steps_driven else 0,
    )


def _require_whole(settings: Settings) -> None:
    """Refuse to stream where the site's script decides when a round ends: then no fragment is ever due."""
    for name in ("num_fragments", "tau", "alpha"):
        value = getattr(settings, name)
        if value != type(settings).model_fields[name].default:
            raise ConfigError(
                f"{name} is {value}, but in {settings.algorithm!r} the worker's script decides when a round ends.",
                f"Leave {name} out, or choose algorithm = 'diloco', which counts local steps.",
            )


def _outer_options(settings: Settings, algorithm: Algorithm, outer: str | Callable[..., Any]) -> dict[str, Any]:
    """Defaults belong to the algorithm's own optimizer; another one starts from its own."""
    given = dict(settings.outer_options)
    for option, setting in (("lr", "outer_lr"), ("momentum", "outer_momentum")):
        value = getattr(settings, setting)
        if value is None:
            continue
        if option in given:
            raise ConfigError(f"{setting} is {value:g}, and outer_options has {option!r} as well.", "Give one of them.")
        if option == "momentum" and isinstance(outer, str) and outer in _INSTEAD_OF_MOMENTUM:
            raise ConfigError(
                f"outer_momentum is {value:g}, but {outer} has no momentum.",
                f"Leave it out, or {_INSTEAD_OF_MOMENTUM[outer]}.",
            )
        given[option] = value
    defaults = dict(algorithm.outer_options) if outer == algorithm.outer else {}
    if given.get("momentum") == 0:
        defaults.pop("nesterov", None)  # there is nothing left that Nesterov's rule could look ahead along
    return defaults | given


def _delayed(settings: Settings, outer: str | Callable[..., Any], options: dict[str, Any]) -> dict[str, Any]:
    """The options of SGD as those of delayed Nesterov."""
    if outer != "sgd":
        name = outer if isinstance(outer, str) else name_of(outer)
        raise ConfigError(
            f"dn_buffer_size is {settings.dn_buffer_size}, but the outer optimizer is {name!r}: what delayed Nesterov "
            "applies between two steps of momentum is a share of SGD's step, and has no counterpart there.",
            "Leave dn_buffer_size out, or outer_optimizer.",
        )
    for key, value in options.items():
        if key not in ("lr", "momentum") and not (key == "nesterov" and value):
            raise ConfigError(
                f"outer_options has {key} = {value!r}, which delayed Nesterov (dn_buffer_size) does not.",
                "It has lr and momentum.",
            )
    lr, momentum = options.get("lr", 1.0), options.get("momentum", 0.0)
    first = settings.sync_rounds_first if settings.mode == "async" else 0
    return {"lr": lr, "momentum": momentum, "delay": settings.dn_buffer_size, "undelayed": first}


def _local(settings: Settings, algorithm: Algorithm) -> dict[str, Any] | None:
    known = algorithm.local_options
    for key, value in settings.local_options.items():
        if key not in known:
            has = f"It has {', '.join(known)}." if known else "Leave local_options out."
            raise ConfigError(
                f"local_options has {key!r}, which {algorithm.name} does not.", registry.nearest(key, known, has)
            )
        if type(value) not in (int, float) or not (math.isfinite(value) and value >= 0):
            raise ConfigError(f"local_options: {key} = {value!r}.", "It is a number, at least 0.")
    return known | settings.local_options if algorithm.local else None


def local_rule(name: str, options: Mapping[str, Any] | None, package: str) -> LocalRule | None:
    """Return how a site corrects local training: by a rule that is installed here, loaded by its name alone.

    Args:
        name: of the run's algorithm.
        options: of its local rule, as the server gives them; None: sites train plainly.
        package: that has it at the server, with its version; empty: none is known.

    Raises:
        ConfigError: this site does not have it, or has another one of that name.
    """
    if options is None:
        return None
    install = f"Install {package}" if package else f"Install the package that has the entry point {name!r}"
    install += " at this site, in the group atoll.algorithms, as at the server." if not package else " at this site."
    if name not in registry.names("algorithms"):
        raise ConfigError(
            f"The run's algorithm {name!r} corrects local training, and this site does not have it.", install
        )
    algorithm = registry.load("algorithms", name)
    if not isinstance(algorithm, Algorithm) or algorithm.local is None:
        raise ConfigError(f"The algorithm {name!r} that is installed here does not correct local training.", install)
    rule = algorithm.local
    return registry.made(lambda: rule(**options), f"The options {dict(options)!r} of {name!r} do not fit", install)


def name_of(given: Callable[..., Any]) -> str:
    """What people call code that a program has given."""
    return str(getattr(given, "__qualname__", repr(given)))


def _require_known(kind: str, setting: str, name: str) -> None:
    """Refuse an unknown name without importing what it stands for."""
    known = registry.names(kind)
    if name in known or ":" in name:
        return
    raise ConfigError(f"{setting} = {name!r} is not one of {', '.join(known)}.", registry.nearest(name, known))
