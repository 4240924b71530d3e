"""Start a whole run with one call: a recipe writes a run file for one algorithm and executes the run.

recipe = FedAvgRecipe(
    name="digits", model=Net(), min_sites=2, num_rounds=5, train_script="train.py"
)
result = recipe.execute(SimEnv(sites=2))  # or LocalEnv(sites=2), ServerEnv("http://host:8512")
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
from atoll.recipes.environments import LocalEnv, ServerEnv, SimEnv
from atoll.recipes.recipe import Recipe, RunResult

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
