"""Lightning: each `trainer.fit` is a round of a federated run, or a part of a DiLoCo run, depending on the run.

    trainer = Trainer(max_epochs=1)
    atoll.integrations.lightning.patch(trainer)                      # reads ATOLL_SERVER and ATOLL_SITE
    while atoll.integrations.lightning.is_running(trainer):
        trainer.fit(module, datamodule)

Without a server, the script trains alone. Trainers of both `lightning.pytorch` and `pytorch_lightning` work; neither
package is imported before it is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Unpack

from atoll.errors import UsageError, public_api

if TYPE_CHECKING:
    from atoll.integrations.lightning_callback import AtollCallback
    from atoll.integrations.trainer_driver import SiteOptions

__all__ = ["AtollCallback", "evaluates", "is_running", "patch", "rounds", "skip"]


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
    """Add an `AtollCallback` to the Trainer, so that each later `trainer.fit` is a round of a run.

    The arguments other than `trainer` are those of `AtollCallback`.

    Each fit trains `max_epochs` further epochs, or `max_steps` further steps.

    Raises:
        UsageError: `trainer` is not a Lightning Trainer, or already has an `AtollCallback`.
        ConfigError: see `AtollCallback`.
    """
    from atoll.integrations.lightning_callback import AtollCallback

    if not hasattr(trainer, "callbacks") or not hasattr(trainer, "fit_loop"):
        raise UsageError(f"{type(trainer).__name__} is not a Lightning Trainer.", "Pass the Trainer used for fit.")
    if any(isinstance(callback, AtollCallback) for callback in trainer.callbacks):
        raise UsageError("This Trainer already takes part in a run.", "Call patch once, or use one AtollCallback.")
    callback = AtollCallback(server, site, steps=steps, **options)
    trainer.callbacks.insert(0, callback)  # first, so that all other callbacks see the global model
    return callback


def is_running(trainer: Any) -> bool:
    """Wait for the next round. Return True when it opens, or False if the run has no further round.

    After the last round, the run's result is loaded into the module that was fitted last. Without a server, the
    function returns True before the first fit and False afterwards.

    Raises:
        UsageError: the Trainer has no Atoll callback, or several.
    """
    return _callback_of(trainer).is_running(trainer)


@public_api
def skip(trainer: Any) -> None:
    """Sit out the round, for example because this site has no data for it. Call this in place of `trainer.fit`.

    Called within a fit, it sits out the fit's round: the fit goes on, but nothing of it is sent.

    Raises:
        UsageError: the Trainer has no Atoll callback, or several; or it has several ranks or a DiLoCo run, and has not
            been fitted yet.
    """
    _callback_of(trainer).skip(trainer)


def _callback_of(trainer: Any) -> AtollCallback:
    from atoll.integrations.lightning_callback import AtollCallback
    from atoll.integrations.trainer_driver import require_alone

    found = [callback for callback in trainer.callbacks if isinstance(callback, AtollCallback)]
    if not found:
        raise UsageError("The Trainer has no AtollCallback.", "Call atoll.integrations.lightning.patch(trainer) first.")
    require_alone(found)
    return found[0]


@public_api
def evaluates(trainer: Any, module: Any, dataloaders: Any = None, *, datamodule: Any = None) -> None:
    """Take part in cross-site evaluation: while `is_running` waits, `trainer.validate` evaluates models of all sites.

    Call this after `patch` and before the first fit.

    Args:
        trainer: the patched Trainer.
        module: the module into which each model is loaded. It can be the module that is fitted: after the evaluation,
            the round's model is loaded into it again.
        dataloaders: validation data for `trainer.validate`; by default the module's own.
        datamodule: datamodule for `trainer.validate`, in place of `dataloaders`.

    Raises:
        UsageError: the Trainer has no Atoll callback or several ranks, or was fitted before; or this is a second call.
    """
    callback = _callback_of(trainer)
    if trainer.world_size > 1:
        raise UsageError(
            f"The Trainer has {trainer.world_size} ranks, but models can be evaluated only with one rank.",
            "Evaluate in a script with one rank, with atoll.tasks and worker.evaluates.",
        )
    if callback.driver.on_join or callback.driver.worker is not None or callback.driver.diloco is not None:
        raise UsageError("evaluates() was called a second time or after fit.", "Call it once, before fit.")

    def measure(model: Any) -> dict[str, float]:
        callback.measuring = True
        try:
            found = trainer.validate(model, dataloaders, datamodule=datamodule, verbose=False)
        finally:
            callback.measuring = False
        return {name: float(value) for each in found for name, value in each.items()}

    callback.driver.on_join.append(lambda worker: worker.evaluates(measure, model=module))


def rounds(trainer: Any) -> Iterator[int]:
    """Yield 1, 2, … as long as the run has rounds: `for number in lightning.rounds(trainer): trainer.fit(module)`."""
    number = 0
    while is_running(trainer):
        number += 1
        yield number
