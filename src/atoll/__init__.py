"""Atoll trains one PyTorch model across sites that share neither their data nor a fast network.

    with atoll.DiLoCo(model, optimizer, server="http://host:8512", sync_every=500):
        ...                                    # any training loop

    with atoll.join("http://host:8512", site="clinic-a") as worker:
        for round in worker:                   # the global model, pulled in place; then train and submit
            ...

    ref = atoll.publish({"w": tensor})         # in one process
    state = atoll.fetch(ref)                   # in another

    with atoll.tasks("http://host:8512", site="clinic-a") as worker:
        ...                                    # answer what a workflow at the server asks for

    atoll.lightning.patch(trainer)             # each trainer.fit is a round

    atoll.Simulation(model, client=train, workers=200, rounds=10).run()    # virtual workers, on this machine

    atoll.recipes.FedAvgRecipe(…).execute(atoll.recipes.LocalEnv(num_clients=2))    # a run in one call

Importing this module is cheap: each name below brings what it needs when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from atoll._version import VERSION as __version__
    from atoll.config import Settings
    from atoll.errors import AtollError
    from atoll.server.serve import Server
    from atoll.simulate.simulation import Simulation
    from atoll.tensors.lazy_tensors import resolve
    from atoll.tensors.reference import TensorRef
    from atoll.worker.correction.by_hand import FedProx, Scaffold
    from atoll.worker.objects.object_client import Publisher, fetch, publish, withdraw
    from atoll.worker.tasks.task_loop import tasks
    from atoll.worker.training.client import Client
    from atoll.worker.training.diloco_loop import DiLoCo
    from atoll.worker.training.federated_loop import join
    from atoll.worker.training.functional_loop import init, is_running, receive, send

__all__ = [
    "AtollError",
    "Client",
    "DiLoCo",
    "FedProx",
    "Publisher",
    "Scaffold",
    "Server",
    "Settings",
    "Simulation",
    "TensorRef",
    "__version__",
    "fetch",
    "init",
    "is_running",
    "join",
    "publish",
    "receive",
    "resolve",
    "send",
    "tasks",
    "withdraw",
]

_HOMES = {
    "AtollError": "atoll.errors:AtollError",
    "Client": "atoll.worker.training.client:Client",
    "DiLoCo": "atoll.worker.training.diloco_loop:DiLoCo",
    "FedProx": "atoll.worker.correction.by_hand:FedProx",
    "Publisher": "atoll.worker.objects.object_client:Publisher",
    "Scaffold": "atoll.worker.correction.by_hand:Scaffold",
    "Server": "atoll.server.serve:Server",
    "Settings": "atoll.config:Settings",
    "Simulation": "atoll.simulate.simulation:Simulation",
    "TensorRef": "atoll.tensors.reference:TensorRef",
    "__version__": "atoll._version:VERSION",
    "fetch": "atoll.worker.objects.object_client:fetch",
    "init": "atoll.worker.training.functional_loop:init",
    "is_running": "atoll.worker.training.functional_loop:is_running",
    "join": "atoll.worker.training.federated_loop:join",
    "publish": "atoll.worker.objects.object_client:publish",
    "receive": "atoll.worker.training.functional_loop:receive",
    "resolve": "atoll.tensors.lazy_tensors:resolve",
    "send": "atoll.worker.training.functional_loop:send",
    "tasks": "atoll.worker.tasks.task_loop:tasks",
    "withdraw": "atoll.worker.objects.object_client:withdraw",
}


_ROOMS = {"lightning", "payloads", "recipes"}
"""Modules that are brought when they are first used, as `import atoll.lightning` does."""


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in _ROOMS:
        return import_module(f"atoll.{name}")
    if name not in _HOMES:
        import difflib

        close = difflib.get_close_matches(name, __all__, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise AttributeError(f"module 'atoll' has no attribute {name!r}.{hint}")
    home, _, attribute = _HOMES[name].partition(":")
    value = getattr(import_module(home), attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_ROOMS})
