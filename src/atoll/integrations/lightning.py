"""Lightning: each `trainer.fit` is a round of a federated run, or DiLoCo around the optimizer, as the server chose.

    trainer = Trainer(max_epochs=1)
    atoll.integrations.lightning.patch(trainer)                      # ATOLL_SERVER, ATOLL_SITE; alone without a server
    while atoll.integrations.lightning.is_running(trainer):
        trainer.fit(module, datamodule)

The same with a Trainer of `lightning.pytorch` and of `pytorch_lightning`; neither is imported before it is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Unpack

from atoll.errors import UsageError, public_api

if TYPE_CHECKING:
    from atoll.integrations.lightning_callback import AtollCallback
    from atoll.integrations.trainer_driver import SiteOptions

__all__ = ["AtollCallback", "evaluates", "is_running", "patch", "rounds"]


def __getattr__(name: str) -> Any:
    if name == "AtollCallback":
        from atoll.integrations.lightning_callback import AtollCallback

        return AtollCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@public_api
def patch(
    trainer: Any,
    server: str | None = None,
    site: str | None = None,
    *,
    steps: int | Callable[[], int] | None = None,
    **options: Unpack[SiteOptions],
) -> AtollCallback:
    """Make every `trainer.fit` from now on a round of a run; the arguments are `AtollCallback`'s.

    Each fit trains `max_epochs` (or `max_steps`) further epochs.

    Raises:
        UsageError: it is no Trainer, or is patched already. ConfigError: as `AtollCallback`.
    """
    from atoll.integrations.lightning_callback import AtollCallback

    if not hasattr(trainer, "callbacks") or not hasattr(trainer, "fit_loop"):
        raise UsageError(f"{type(trainer).__name__} is not a Lightning Trainer.", "Give the Trainer that fits.")
    if any(isinstance(callback, AtollCallback) for callback in trainer.callbacks):
        raise UsageError("This Trainer takes part in a run already.", "Patch it once, or give it one AtollCallback.")
    callback = AtollCallback(server, site, steps=steps, **options)
    trainer.callbacks.insert(0, callback)  # before the others, which then see the global model
    return callback


def is_running(trainer: Any) -> bool:
    """Return whether the run has another round for this Trainer; wait until it opens.

    When the run has none, the module that was fitted last holds the result.
    Without a server: True before the first fit, then False.

    Raises:
        UsageError: the Trainer takes part in no run, or as several sites.
    """
    return _callback_of(trainer).is_running(trainer)


def _callback_of(trainer: Any) -> AtollCallback:
    from atoll.integrations.lightning_callback import AtollCallback
    from atoll.integrations.trainer_driver import require_alone

    found = [callback for callback in trainer.callbacks if isinstance(callback, AtollCallback)]
    if not found:
        raise UsageError(
            "The Trainer has 0 callbacks of Atoll.", "Call atoll.integrations.lightning.patch(trainer) first, once."
        )
    require_alone(found)
    return found[0]


@public_api
def evaluates(trainer: Any, module: Any, dataloaders: Any = None, *, datamodule: Any = None) -> None:
    """Take part in cross-site evaluation: each model is measured by `trainer.validate`, within `is_running`.

    Call it after `patch`, before the first fit.

    Args:
        module: gets each model in turn; it may be the one that is fitted, which gets its round's model again.
        dataloaders, datamodule: as `trainer.validate` takes them; by default the module's own.

    Raises:
        UsageError: the Trainer takes part in no run, or has begun to; or it has several ranks.
    """
    callback = _callback_of(trainer)
    if trainer.world_size > 1:
        raise UsageError(
            f"The Trainer has {trainer.world_size} ranks, and models are evaluated at one.",
            "Evaluate in a script of one rank: atoll.tasks and worker.evaluates.",
        )
    if callback.driver.on_join or callback.driver.worker is not None or callback.driver.diloco is not None:
        raise UsageError("The Trainer has begun, or evaluates already.", "Call it once, before the first fit.")

    def measure(model: Any) -> dict[str, float]:
        callback.measuring = True
        try:
            found = trainer.validate(model, dataloaders, datamodule=datamodule, verbose=False)
        finally:
            callback.measuring = False
        return {name: float(value) for each in found for name, value in each.items()}

    callback.driver.on_join.append(lambda worker: worker.evaluates(measure, model=module))


def rounds(trainer: Any) -> Iterator[int]:
    """Count 1, 2, … while the run goes on: `for number in lightning.rounds(trainer): trainer.fit(module)`."""
    number = 0
    while is_running(trainer):
        number += 1
        yield number
