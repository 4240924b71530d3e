"""Atoll trains one PyTorch model across sites that share neither their data nor a fast network.

    with atoll.join("http://host:8512", site="clinic-a") as worker:
        for fl_round in worker:
            loss = train(fl_round.load_into(model))            # the global model, in place
            fl_round.submit(model, weight=len(dataset), metrics={"loss": loss})

    with atoll.DiLoCo(model, optimizer, server="http://host:8512", sync_every=500):
        ...                                                    # any training loop

    atoll.integrations.lightning.patch(trainer)                # each call of trainer.fit is a round

    atoll.Simulation(model, settings, script=train, sites=200).run()     # many sites on this machine

    atoll.run(model, train, sites=3, settings=settings)    # a few sites as threads of this program: in a notebook

Public modules: `atoll.recipes` starts a run in one call. `atoll.data` splits a data set over sites. `atoll.objects`
passes tensors by reference. `atoll.functional` has functions for scripts that have no loop over rounds. `atoll.testing`
helps to test plugins and scripts. The base classes for your own extensions are in `atoll.algorithms`, `codecs`,
`filters`, `outer_optimizers` and `reducers`.

Importing this module is fast: each name imports its dependencies on first use.
"""

from __future__ import annotations

TYPE_CHECKING = False  # not from `typing`, which takes a third of the time of `import atoll`
if TYPE_CHECKING:
    from typing import Any

    from atoll.config import Settings
    from atoll.errors import AtollError
    from atoll.registry import register
    from atoll.server.serve import Server
    from atoll.simulate.simulation import Simulation
    from atoll.simulate.site_threads import run
    from atoll.tensors.lazy_tensors import resolve
    from atoll.tensors.reference import TensorRef
    from atoll.worker.tasks.answer_tasks import tasks
    from atoll.worker.training.diloco_loop import DiLoCo
    from atoll.worker.training.federated_loop import join

__version__: str

__all__ = [
    "AtollError",
    "DiLoCo",
    "Server",
    "Settings",
    "Simulation",
    "TensorRef",
    "__version__",
    "join",
    "register",
    "resolve",
    "run",
    "tasks",
]

_HOMES = {
    "AtollError": "atoll.errors:AtollError",
    "DiLoCo": "atoll.worker.training.diloco_loop:DiLoCo",
    "Server": "atoll.server.serve:Server",
    "Settings": "atoll.config:Settings",
    "Simulation": "atoll.simulate.simulation:Simulation",
    "TensorRef": "atoll.tensors.reference:TensorRef",
    "join": "atoll.worker.training.federated_loop:join",
    "register": "atoll.registry:register",
    "resolve": "atoll.tensors.lazy_tensors:resolve",
    "run": "atoll.simulate.site_threads:run",
    "tasks": "atoll.worker.tasks.answer_tasks:tasks",
}


_MODULES = {
    "algorithms",
    "codecs",
    "data",
    "errors",
    "filters",
    "functional",
    "integrations",
    "objects",
    "outer_optimizers",
    "recipes",
    "reducers",
    "testing",
}
"""Public submodules; each is imported on first use."""


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in _MODULES:
        return import_module(f"atoll.{name}")
    if name == "__version__":
        from importlib.metadata import version

        return version("atoll")
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
    return sorted({*globals(), *__all__, *_MODULES})
