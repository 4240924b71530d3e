"""Start a whole run with one call: a recipe writes the run's settings into a file (run file) and executes the run.

    recipe = FedAvgRecipe(
        name="digits", model=Net(), min_sites=2, num_rounds=5, train_script="train.py"
    )
    result = recipe.execute(SimEnv(sites=2))  # or LocalEnv(sites=2), ServerEnv("http://host:8512")
    print(result.model, result.metrics)

There is a recipe for each algorithm or family of algorithms. docs/algorithms/ explains the algorithms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from atoll import registry
from atoll.errors import UsageError, public_api
from atoll.recipes.environments import LocalEnv, ServerEnv, SimEnv
from atoll.recipes.recipe import Recipe, RunResult, setting

__all__ = [
    "DiLoCoRecipe",
    "FedAvgRecipe",
    "FedOptRecipe",
    "FedProxRecipe",
    "LocalEnv",
    "Recipe",
    "RunResult",
    "ScaffoldRecipe",
    "ServerEnv",
    "SimEnv",
    "SwarmRecipe",
]

OPTIMIZERS = {"sgd": "fedavgm", "adam": "fedadam", "yogi": "fedyogi", "adagrad": "fedadagrad"}
"""Name of FedOpt's server optimizer → name of the algorithm in the run file."""


@public_api
@dataclass(eq=False)
class FedAvgRecipe(Recipe):
    """A run with federated averaging: the new model is the weighted mean of the sites' models."""

    algorithm: ClassVar[str] = "fedavg"


@public_api
@dataclass(eq=False)
class FedProxRecipe(Recipe):
    """A run with FedProx: FedAvg with a loss term that pulls each site's model towards the global model.

    Args:
        mu: μ, the strength of this term; the best values in the FedProx paper are between 0.001 and 1.
    """

    algorithm: ClassVar[str] = "fedprox"
    mu: float = setting("algorithm.mu", 0.01)


@public_api
@dataclass(eq=False)
class FedOptRecipe(Recipe):
    """A run with FedOpt: FedAvg with an adaptive optimizer or momentum at the server.

    Args:
        server_optimizer: the server's optimizer: `adam`, `yogi`, `adagrad`, or `sgd` (with momentum).
        server_lr: learning rate of the server's optimizer; by default the algorithm's own.
    """

    server_optimizer: str = field(default="adam", kw_only=True)
    server_lr: float | None = setting("algorithm.outer_optimizer.lr")

    @property
    def algorithm(self) -> str:  # type: ignore[override]
        """The name of the algorithm, as in the run file.

        Raises:
            UsageError: `server_optimizer` is unknown. The message suggests the nearest name.
        """
        if self.server_optimizer not in OPTIMIZERS:
            raise UsageError(
                f"FedOptRecipe: server_optimizer is {self.server_optimizer!r}.",
                registry.nearest(str(self.server_optimizer), OPTIMIZERS, f"Use one of {', '.join(OPTIMIZERS)}."),
            )
        return OPTIMIZERS[self.server_optimizer]


@public_api
@dataclass(eq=False)
class ScaffoldRecipe(Recipe):
    """A run with SCAFFOLD, for sites with very different data: control variates correct each site's local steps.

    Args:
        server_lr: the server's learning rate, η_g; by default 1.
    """

    algorithm: ClassVar[str] = "scaffold"
    server_lr: float | None = setting("algorithm.outer_optimizer.lr")


@public_api
@dataclass(eq=False)
class DiLoCoRecipe(Recipe):
    """A run with DiLoCo: low-communication training, in which sites synchronise every `sync_every` local steps.

    Args:
        sync_every: local steps between two synchronisations, H.
        outer_lr: learning rate of the outer optimizer; by default 0.7.
        outer_momentum: momentum of the outer optimizer; by default 0.9.
    """

    algorithm: ClassVar[str] = "diloco"
    sync_every: int = setting("diloco.sync_every", 500)
    outer_lr: float | None = setting("algorithm.outer_optimizer.lr")
    outer_momentum: float | None = setting("algorithm.outer_optimizer.momentum")


@public_api
@dataclass(eq=False)
class SwarmRecipe(Recipe):
    """A swarm: the sites take turns in aggregating the updates, and no update goes to the server (docs/swarm.md).

    Args:
        algorithm: the name of the algorithm, as in the run file; any algorithm that needs no code of your own.
        aggregators: the sites that aggregate, in this order; by default all sites, in a random order that depends on
            the seed.
    """

    algorithm: str = field(default="fedavg", kw_only=True)  # type: ignore[misc]
    aggregators: str | Sequence[str] = field(default=(), kw_only=True)

    def choices(self) -> dict[str, Any]:
        """Return the settings that enable the swarm, and that name its aggregators if they were given."""
        names = self.aggregators
        named = {"swarm.aggregators": (names,) if isinstance(names, str) else tuple(names)} if names else {}
        return {"swarm.enabled": True} | named
