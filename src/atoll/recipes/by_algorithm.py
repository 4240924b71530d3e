"""The recipes, one for each algorithm or family of them; their pages are docs/algorithms/."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from atoll import registry
from atoll.errors import UsageError, public_api
from atoll.recipes.recipe import Recipe, setting

OPTIMIZERS = {"sgd": "fedavgm", "adam": "fedadam", "yogi": "fedyogi", "adagrad": "fedadagrad"}
"""FedOpt's server optimizer → the algorithm of the run file."""


@public_api
@dataclass(eq=False)
class FedAvgRecipe(Recipe):
    """Federated averaging: the mean of what the sites trained, by weight."""

    algorithm: ClassVar[str] = "fedavg"


@public_api
@dataclass(eq=False)
class FedProxRecipe(Recipe):
    """FedAvg with a term that draws each site towards the global model.

    Args:
        mu: how strongly, μ; the paper's best lie between 0.001 and 1.
    """

    algorithm: ClassVar[str] = "fedprox"
    mu: float = setting("algorithm.mu", 0.01)


@public_api
@dataclass(eq=False)
class FedOptRecipe(Recipe):
    """FedAvg with an optimizer at the server.

    Args:
        server_optimizer: `adam`, `yogi`, `adagrad`, or `sgd` with momentum.
        server_lr: its learning rate; by default the algorithm's.
    """

    server_optimizer: str = field(default="adam", kw_only=True)
    server_lr: float | None = setting("algorithm.outer_optimizer.lr")

    @property
    def algorithm(self) -> str:  # type: ignore[override]
        """Return the algorithm of the run file.

        Raises:
            UsageError: there is no such optimizer; the nearest is named.
        """
        if self.server_optimizer not in OPTIMIZERS:
            raise UsageError(
                f"FedOptRecipe: server_optimizer is {self.server_optimizer!r}.",
                registry.nearest(str(self.server_optimizer), OPTIMIZERS, f"It may be {', '.join(OPTIMIZERS)}."),
            )
        return OPTIMIZERS[self.server_optimizer]


@public_api
@dataclass(eq=False)
class ScaffoldRecipe(Recipe):
    """SCAFFOLD: each site corrects its steps by the mean direction of all; for sites with very different data.

    Args:
        server_lr: η_g; by default 1.
    """

    algorithm: ClassVar[str] = "scaffold"
    server_lr: float | None = setting("algorithm.outer_optimizer.lr")


@public_api
@dataclass(eq=False)
class DiLoCoRecipe(Recipe):
    """Low-communication training: sites synchronise every `sync_every` local steps.

    Args:
        sync_every: H.
        outer_lr: of the outer optimizer; by default 0.7.
        outer_momentum: of the outer optimizer; by default 0.9.
    """

    algorithm: ClassVar[str] = "diloco"
    sync_every: int = setting("diloco.sync_every", 500)
    outer_lr: float | None = setting("algorithm.outer_optimizer.lr")
    outer_momentum: float | None = setting("algorithm.outer_optimizer.momentum")


@public_api
@dataclass(eq=False)
class SwarmRecipe(Recipe):
    """Rounds that sites aggregate, another one each time: no update goes through the server (docs/swarm.md).

    Args:
        algorithm: of the rounds; any that needs no code of your own.
        aggregators: sites that aggregate, in turn; by default all of them, in an order that the seed draws.
    """

    algorithm: str = field(default="fedavg", kw_only=True)  # type: ignore[misc]
    aggregators: str | Sequence[str] = field(default=(), kw_only=True)

    def choices(self) -> dict[str, Any]:
        """Return that sites aggregate, and which ones where that is given."""
        given = self.aggregators
        named = {"swarm.aggregators": (given,) if isinstance(given, str) else tuple(given)} if given else {}
        return {"swarm.enabled": True} | named
