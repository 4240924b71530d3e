"""A user's persistor: an object that loads the initial model or saves versions.

    load()                    return the initial model as name → tensor, or None to use the model in the settings
    save(state, info)         save a version, given as name → tensor; called at the end of the run and, if
                              `disk.export_every` = n is set, at the beginning and every n rounds
    save_best(state, info)    save the best version so far

A persistor has at least one of these methods. `state` is a copy of the model, which the method may keep. `save` and
`save_best` run in a separate thread, one call at a time, and no round waits for them. Their errors are logged and do
not end the run. If several best versions are found during a call, only the newest is passed on.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch import Tensor

from atoll import registry
from atoll.aggregation.plan import Plan
from atoll.blobs.model_file import ModelFile
from atoll.config import Settings
from atoll.errors import ConfigError, Gone
from atoll.posix import require_regular
from atoll.rounds.early_stopping import Measurement
from atoll.store.store import Store
from atoll.tensors.lazy_tensors import resolve
from atoll.tensors.module_tensors import Tensors
from atoll.tensors.schema import Schema

LOG = logging.getLogger("atoll.server")

METHODS = ("load", "save", "save_best")


_Read = Callable[[], tuple[dict[str, Tensor], dict[str, Any]] | None]


class Persistor:
    """Calls the user's own object that loads and saves models (setting `model.persistor`). Without one, does nothing.

    Raises:
        ConfigError: the persistor is not found, cannot be created, or has none of `load`, `save` and `save_best`.
    """

    def __init__(self, settings: Settings) -> None:
        self.name = str(settings.model.persistor)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="atoll-persistor")
        self._user: Any = None
        if (path := settings.model.persistor.target) is None:
            return
        found = kind = registry.load_attribute(path)
        if isinstance(found, type):
            found = registry.construct(
                lambda: kind(**settings.model.persistor.options),
                f"The persistor {self.name!r} cannot be created",
                "Write its keyword arguments next to the path in model.persistor.",
            )
        if not any(callable(getattr(found, method, None)) for method in METHODS):
            raise ConfigError(
                f"The persistor {self.name!r} is of type {type(found).__name__} with none of load, save and save_best.",
                "Use a class that has at least one of these methods.",
            )
        self._user = found

    def load(self) -> Tensors | None:
        """Return the initial model that the persistor loads; None if it has no `load`, or `load` returns None.

        Raises:
            ConfigError: `load` raised, or did not return a mapping name → tensor.
        """
        if not hasattr(self._user, "load"):
            return None
        try:
            loaded = resolve(self._user.load())
        except (Exception, SystemExit) as error:
            LOG.error("load() of the persistor %r failed", self.name, exc_info=error)
            raise ConfigError(
                f"load() of the persistor {self.name!r} failed: {type(error).__name__}: {error}.",
                "See the traceback in the log.",
            ) from error
        if loaded is None:
            return None
        if not isinstance(loaded, Mapping) or not all(isinstance(value, Tensor) for value in loaded.values()):
            raise ConfigError(
                f"load() of the persistor {self.name!r} must return a dict of tensors, but returned an "
                f"object of type {type(loaded).__name__}.",
                "Return a dict of tensors, as state_dict() does, or None to use the model in the settings.",
            )
        return loaded

    def save(self, plan: Plan, store: Store, heads: Sequence[int], *, final: bool = False) -> Future[None]:
        """Queue a call of the persistor's `save`.

        Args:
            plan: plan of the run.
            store: store of the run.
            heads: for each fragment, the version to save. The smallest of these numbers is passed to the persistor.
            final: whether the version is the run's result.

        Returns:
            A future that is done when the call has ended, even if the call has failed.
        """
        read = functools.partial(_tensors, plan, store, tuple(heads))
        return self._thread.submit(self._call, "save", plan, min(heads), {"final": final}, read)

    def save_best(self, plan: Plan, store: Store, best: Measurement, path: Path, metric: str) -> None:
        """Queue a call of the persistor's `save_best`. Skip it if a better version is found before the call begins.

        Args:
            plan: plan of the run.
            store: store of the run.
            best: the best version so far.
            path: the file of the best version; a newer one replaces it.
            metric: name of the metric by which the version is the best.
        """
        if hasattr(self._user, "save_best"):
            read = functools.partial(_exported, plan, store, path, best.version)
            self._thread.submit(self._call, "save_best", plan, best.version, {"best": {metric: best.value}}, read)

    def idle(self) -> Future[None]:
        """Return a future that is done when all calls queued so far have ended."""
        return self._thread.submit(lambda: None)

    def close(self) -> None:
        """Wait for the running call, and drop the queued calls."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _call(self, method: str, plan: Plan, version: int, more: Mapping[str, object], read: _Read) -> None:
        call = getattr(self._user, method, None)
        if call is None:
            return
        try:
            if (found := read()) is None:
                return
            state, summary = found
            info = {
                "run": plan.settings.run.name,
                "version": version,
                "round": summary.get("round", 0),
                "metrics": summary.get("metrics", {}),
                "workers": [each["site"] for each in summary.get("sites", [])],
                "sites": {
                    each["site"]: {"weight": each["weight"], "metrics": each["metrics"]}
                    for each in summary.get("sites", [])
                },
            }
            call(state, {**info, **more})
        except Gone as error:
            LOG.error("the persistor %r was too slow to save version %d: %s", self.name, version, error)
        except (Exception, SystemExit) as error:
            LOG.error(
                "%s() of the persistor %r failed at version %d: %s: %s. The run continues.",
                method,
                self.name,
                version,
                type(error).__name__,
                error,
                exc_info=error,
            )


def _tensors(plan: Plan, store: Store, heads: tuple[int, ...]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return a version's model (name → tensor), and the summary of its round. Tied names have the same tensor."""
    state: dict[str, Tensor] = {}
    summary: dict[str, Any] = {}
    for fragment, (planned, version) in enumerate(zip(plan.fragments, heads, strict=True)):
        with store.versions.pin(fragment, version, with_state=planned.downlink is not None) as pin:
            file = ModelFile(planned.version, pin.fd, pin.state_fd)
            state |= {spec.name: file.tensor(spec) for spec in planned.schema.model.tensors}
        summary = store.run_log.summary(fragment, pin.row.summary_json)
    model = plan.schema.model
    return _in_order(model, state), summary


def _exported(plan: Plan, store: Store, path: Path, version: int) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """Return the best version's model (name → tensor), read from its file, and the summary of its round.

    Return None if the file has another version by now.
    """
    from safetensors import safe_open

    model = plan.schema.model
    require_regular(path)
    with safe_open(path, framework="pt") as file:
        if file.metadata()["version"] != str(version):
            return None
        state = {spec.name: file.get_tensor(spec.name).clone() for spec in model.tensors}
    summaries = [row.summary_json for row in store.run_log.history(None, 0) if row.version == version]
    return _in_order(model, state), store.run_log.summary(0, "".join(summaries))


def _in_order(model: Schema, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: state[owner] for name, owner in [*((each.name, each.name) for each in model.tensors), *model.aliases]}
