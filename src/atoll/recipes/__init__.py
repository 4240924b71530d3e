"""One call per algorithm, for people who come from recipes; each writes a run file and equals it.

recipe = FedAvgRecipe(
    name="digits", model=Net(), min_clients=2, num_rounds=5, train_script="train.py"
)
result = recipe.execute(SimEnv(num_clients=2))  # or LocalEnv(num_clients=2), ServerEnv("http://host:8512")
print(result.model, result.metrics)
"""

from __future__ import annotations

from atoll.recipes.by_algorithm import (
    DiLoCoRecipe,
    FedAvgRecipe,
    FedOptRecipe,
    FedProxRecipe,
    ScaffoldRecipe,
    SwarmRecipe,
)
from atoll.recipes.local import LocalEnv
from atoll.recipes.recipe import Recipe
from atoll.recipes.remote import ServerEnv
from atoll.recipes.result import RunResult
from atoll.recipes.simulated import SimEnv

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
