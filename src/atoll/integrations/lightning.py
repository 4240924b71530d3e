"""Lightning: each `trainer.fit` is a round of a federated run, or DiLoCo around the optimizer, as the server chose.

    trainer = Trainer(max_epochs=1)
    atoll.lightning.patch(trainer)                      # ATOLL_SERVER, ATOLL_SITE; alone without a server
    while atoll.lightning.is_running(trainer):
        trainer.fit(module, datamodule)

The same with a Trainer of `lightning.pytorch` and of `pytorch_lightning`; neither is imported before it is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.errors import UsageError
from atoll.filters.base import Filter
from atoll.worker.border import border

if TYPE_CHECKING:
    from atoll.integrations.lightning_callback import AtollCallback

__all__ = ["AtollCallback", "is_running", "patch", "rounds"]


def __getattr__(name: str) -> Any:
    if name == "AtollCallback":
        from atoll.integrations.lightning_callback import AtollCallback

        return AtollCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@border
def patch(
    trainer: Any,
    server: str | None = None,
    site: str | None = None,
    *,
    weight: float | Callable[[], float] | None = None,
    steps: int | Callable[[], int] | None = None,
    folder: str | Path | None = None,
    labels: dict[str, str] | None = None,
    filters: Sequence[Filter] = (),
) -> AtollCallback:
    """Let every `trainer.fit` from here on be a round of a run; the arguments are `AtollCallback`'s.

    Each fit trains `max_epochs` (or `max_steps`) further epochs.

    Raises:
        UsageError: it is no Trainer, or patched already.
    """
    from atoll.integrations.lightning_callback import AtollCallback

    if not hasattr(trainer, "callbacks") or not hasattr(trainer, "fit_loop"):
        raise UsageError(f"{type(trainer).__name__} is not a Lightning Trainer.", "Give the Trainer that fits.")
    if any(isinstance(callback, AtollCallback) for callback in trainer.callbacks):
        raise UsageError("This Trainer takes part in a run already.", "Patch it once, or give it one AtollCallback.")
    callback = AtollCallback(server, site, weight=weight, steps=steps, folder=folder, labels=labels, filters=filters)
    trainer.callbacks.insert(0, callback)  # before the others, which then see the global model
    return callback


def is_running(trainer: Any) -> bool:
    """Whether the run has another round for this Trainer; waits until it opens. When it has none, the module that was
    fitted last holds the result.

    Without a server: True before the first fit, then False.

    Raises:
        UsageError: the Trainer takes part in no run.
    """
    from atoll.integrations.lightning_callback import AtollCallback

    found = [callback for callback in trainer.callbacks if isinstance(callback, AtollCallback)]
    if len(found) != 1:
        raise UsageError(
            f"The Trainer has {len(found)} callbacks of Atoll.", "Call atoll.lightning.patch(trainer) first, once."
        )
    return found[0].is_running(trainer)


def rounds(trainer: Any) -> Iterator[int]:
    """1, 2, … while the run goes on: `for round in atoll.lightning.rounds(trainer): trainer.fit(module)`."""
    number = 0
    while is_running(trainer):
        number += 1
        yield number
