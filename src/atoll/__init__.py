"""Atoll trains one PyTorch model across sites that share neither their data nor a fast network.

    with atoll.DiLoCo(model, optimizer, server="http://host:8512", sync_every=500):
        ...                                    # any training loop

    with atoll.join("http://host:8512", site="clinic-a") as worker:
        for round in worker:                   # the global model, pulled in place; then train and submit
            ...

    atoll.lightning.patch(trainer)             # each trainer.fit is a round

Importing this module is cheap: each name below brings what it needs when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from atoll._version import VERSION as __version__
    from atoll.config import Settings
    from atoll.errors import AtollError
    from atoll.server.embed import Server
    from atoll.worker.client import Client
    from atoll.worker.diloco import DiLoCo
    from atoll.worker.federated import join

__all__ = ["AtollError", "Client", "DiLoCo", "Server", "Settings", "__version__", "join"]

_HOMES = {
    "AtollError": "atoll.errors:AtollError",
    "Client": "atoll.worker.client:Client",
    "DiLoCo": "atoll.worker.diloco:DiLoCo",
    "Server": "atoll.server.embed:Server",
    "Settings": "atoll.config:Settings",
    "__version__": "atoll._version:VERSION",
    "join": "atoll.worker.federated:join",
}


_ROOMS = {"lightning"}
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
