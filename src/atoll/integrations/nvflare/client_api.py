"""The calls of NVFlare's Client API, over the rounds and the evaluation tasks of a run.

    init            atoll.join
    is_running      waits for the next round or task
    receive         its model, as an FLModel: params FULL, current_round from 0
    send            the trained model, with weight meta["NUM_STEPS_CURRENT_ROUND"]; or metrics, for an evaluation

The metrics that are sent with a trained model count as metrics of the model that was received.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from atoll.errors import AtollError, ConfigError, UsageError, public_api
from atoll.format_text import shown

if TYPE_CHECKING:
    from torch import Tensor

    from atoll.worker.training.federated_loop import Worker

STEPS = "NUM_STEPS_CURRENT_ROUND"
CONTROLS, CONTROL_CHANGE = "scaffold_c_global", "scaffold_c_diff"
"""Keys of `FLModel.meta` in NVFlare: the round's steps; SCAFFOLD's control variates, and how a site changes them."""
TASKS = ("train", "validate", "submit_model")
PARAMS = "ATOLL_FLARE_PARAMS"
MOST_LOGGED = 128
"""Names of logged numbers that travel with one update."""


def _is_round(work: Any) -> bool:
    return hasattr(work, "submit")


@public_api
class ClientAPI:
    """NVFlare's Client API for one process.

    Args:
        model_class: NVFlare's class `FLModel`, or Atoll's.
    """

    def __init__(self, model_class: Callable[..., Any]) -> None:
        self.model_class = model_class
        self._begin()

    def _begin(self) -> None:
        """Begin as before any call: a script may take part again after the end of a run."""
        self._worker: Worker | None = None
        self._work: Iterator[Any] = iter(())  # Round or Task
        self._open: Any = None  # the round or task that the next `send` answers
        self._model: Any = None  # the model of `_open`
        self._has_received = self._is_over = self._is_numpy = False
        self._like: dict[str, Tensor] = {}  # the received tensors' shapes and dtypes, on the device "meta"
        self._begin_s = 0.0
        self._logged: dict[str, float] = {}
        self._warned: set[str] = set()

    # -- take part

    def init(self, rank: str | int | None = None, config_file: object = None) -> None:
        """Join the run at ATOLL_SERVER, as the site ATOLL_SITE. `atoll worker` sets both.

        Args:
            rank: the process's rank; by default RANK. Only rank 0 can take part.
            config_file: has no meaning here.

        Raises:
            UsageError: this process has another rank.
            ConfigError: no server is configured, or the run's algorithm corrects local steps, for which NVFlare's
                Client API has no call.
            PeerError, ServerLost, ServerUnreachable, StateLocked: as for `atoll.join`.
        """
        if (rank := str(os.environ.get("RANK", "0") if rank is None else rank)) != "0":
            raise UsageError(
                f"flare.init() was called by rank {rank}; only rank 0 can take part.",
                "Call init, receive and send in rank 0 alone, and broadcast the model to the other ranks.",
            )
        has_torch = "torch" in sys.modules  # a script that trains with PyTorch has imported it by now
        framework = os.environ.get(PARAMS, "") or ("torch" if has_torch else "numpy")
        if framework not in ("torch", "numpy"):
            raise ConfigError(f"{PARAMS} is {framework!r}.", "Set it to torch or numpy, or leave it out.")
        from atoll.worker.log_lines import LOG
        from atoll.worker.training.federated_loop import join, takes_part

        if self._worker is not None and not self._is_over and not takes_part(None):
            LOG.warning("%s: flare.init() was called again, which changes nothing", self._worker.site)
            return
        worker = join(require_server=True)
        info = worker.info
        if info is not None and info.local is not None and info.algorithm.text != "scaffold":
            worker.leave()
            raise ConfigError(
                f"The run's algorithm, {info.algorithm}, corrects each local step, and NVFlare's Client API has no "
                "call for this.",
                "Use atoll.join and fl_round.correct in the script, or another algorithm for the run, such as fedavg.",
            )
        self._begin()
        self._worker, self._is_numpy = worker, framework == "numpy"
        self._work = worker.work(answers_all=True)
        atexit.register(self._leave_at_exit)

    def shutdown(self) -> None:
        """Leave the run. Idempotent."""
        self._leave(None)

    def clear(self) -> None:
        """Forget the received model, to free its memory. The round stays open until `send`."""
        self._model = None

    # -- rounds and tasks

    def is_running(self) -> bool:
        """Wait for the next round or task; return whether there is one.

        Raises:
            UsageError: `init` was not called, or `send` was not called after `receive`.
        """
        self._joined()
        if self._open is not None and self._has_received:
            raise self._owed()
        return self._next() is not None

    def receive(self, timeout: float | None = None) -> Any:
        """Wait for the next round or task. Return its model; None when the run is over.

        Until `send` is called, further calls return the same model.

        Args:
            timeout: has no meaning here: `is_running` waits already.

        Raises:
            UsageError: `init` was not called.
        """
        work = self._next()
        if work is None:
            return None
        if self._model is None:
            self._model = self._of_round(work) if _is_round(work) else self.model_class()
        self._has_received = True
        return self._model

    def send(self, model: Any, clear_cache: bool = True) -> None:
        """Send the trained model of a round, or what a task asks for. Return when the server has recorded it.

        Args:
            model: an `FLModel`. In a round, it needs `params`, FULL or DIFF, with the names and shapes of those that
                were received. For the task `validate` it needs `metrics`, and for `submit_model` FULL `params`.
            clear_cache: whether to remove the params from the sent and the received model, to free their memory.

        Raises:
            UsageError: `init` was not called, nothing was received since the last `send`, or the model lacks what is
                asked for.
            SchemaMismatch: `params` have other names, shapes or dtypes than those of the run's model.
        """
        self._joined()
        if not hasattr(model, "params_type"):
            raise UsageError(
                f"flare.send was called with an object of type {type(model).__name__}.",
                "Give an FLModel: flare.send(flare.FLModel(params=…)).",
            )
        work = self._open
        if self._is_over:
            raise UsageError(
                "flare.send was called, but the run is over.", "End the loop when flare.is_running() returns False."
            )
        if work is None or not self._has_received:
            kind = " of type DIFF" if model.params_type == "DIFF" else ""
            raise UsageError(
                f"A model{kind} was sent, but none was received since the last send.",
                "Call flare.receive() once before each flare.send().",
            )
        if _is_round(work):
            self._submit(work, model)
        else:
            self._answer(work, model)
        for each in (model, self._model) if clear_cache else ():
            if each is not None:
                each.params = each.optimizer_params = None
        self._open, self._model, self._has_received = None, None, False

    def is_train(self) -> bool:
        """Return whether a round is open."""
        return self.get_task_name() == "train"

    def is_evaluate(self) -> bool:
        """Return whether the server asks for metrics of a model, in a cross-site evaluation."""
        return self.get_task_name() == "validate"

    def is_submit_model(self) -> bool:
        """Return whether the server asks for the site's own model, in a cross-site evaluation."""
        return self.get_task_name() == "submit_model"

    def get_task_name(self) -> str:
        """Return `train`, `validate` or `submit_model`; empty if neither a round nor a task is open."""
        return "" if self._open is None else "train" if _is_round(self._open) else self._open.name

    def log(self, key: str, value: Any, data_type: Any, **kwargs: Any) -> None:
        """Log a number, or several by name. The last one under each name is sent with the next trained model.

        Other values are not sent; a warning says so once.
        """
        site, kind = self._joined().site, getattr(data_type, "value", data_type)
        from atoll.worker.arguments import number
        from atoll.worker.log_lines import LOG

        prefix, named = ("", {key: value}) if not isinstance(value, Mapping) else (f"{key}/", value)
        if kind == "METRICS":
            prefix = ""
        problem = f"a value of type {kind} is not sent to the server, such as {key!r}"
        if kind in ("SCALAR", "SCALARS", "METRIC", "METRICS"):
            numbers = {f"{prefix}{name}": number(each) for name, each in named.items()}
            if len(self._logged | numbers) <= MOST_LOGGED:
                self._logged |= numbers
                return
            problem = f"{key!r} is not sent: an update takes at most {MOST_LOGGED} logged numbers"
            kind = MOST_LOGGED
        if kind not in self._warned:
            self._warned.add(kind)
            LOG.warning("%s: %s", site, problem)

    # -- what this site is

    def system_info(self) -> dict[str, str]:
        """Return the id of the run as `job_id`, and the site's name as `site_name`."""
        return {"job_id": self.get_job_id(), "site_name": self.get_site_name()}

    def get_config(self) -> dict[str, Any]:
        """Return what NVFlare's configuration says of the exchange."""
        exchange = {
            f"{kind}_task_name": name for kind, name in zip(("train", "eval", "submit_model"), TASKS, strict=True)
        }
        formats = {"transfer_type": "FULL", "exchange_format": "numpy" if self._is_numpy else "pytorch"}
        return {"TASK_EXCHANGE": exchange | formats, **self.system_info()}

    def get_job_id(self) -> str:
        """Return the id of the run."""
        info = self._joined().info
        return info.run if info is not None else ""

    def get_site_name(self) -> str:
        """Return the site's name."""
        return self._joined().site

    # -- how

    def _joined(self) -> Worker:
        if self._worker is None:
            raise UsageError("This process takes part in no run yet.", "Call flare.init() first.")
        return self._worker

    def _next(self) -> Any:
        """Return the open round or task, or wait for the next one. At the end of the run, leave and return None."""
        self._joined()
        while self._open is None and not self._is_over:
            work = next(self._work, None)
            if work is None:
                self._leave(None)
            elif _is_round(work) or work.name in TASKS[1:]:
                self._open, self._model = work, None
                if self.is_evaluate():
                    self._open_evaluation(work)
            else:
                work.fail(f"a script on NVFlare's Client API answers validate and submit_model, not {work.name!r}")
        return self._open

    def _open_evaluation(self, task: Any) -> None:
        """Download the model of a task `validate`. If it cannot be had, answer that the task has failed."""
        from atoll.worker.log_lines import LOG

        self._begin_s = time.monotonic()
        try:
            state = self._joined().models.downloaded(task.payload)
            try:
                self._model = self.model_class(params_type="FULL", params=self._native(dict(state)))
            finally:
                state.release()
        except AtollError as error:
            LOG.error("%s: the model of a task cannot be downloaded: %s", self.get_site_name(), error)
            task.fail(error)
            self._open = None

    def _of_round(self, round_: Any) -> Any:
        from atoll.algorithms.scaffold import CONTROL

        params, info = round_.state_dict(), self._joined().info
        self._like = {name: tensor.to("meta") for name, tensor in params.items()}
        controls = round_.global_state(CONTROL) if info is not None and info.local is not None else {}
        return self.model_class(
            params_type="FULL",
            params=self._native(params),
            current_round=round_.number - 1,
            total_rounds=(info.rounds or None) if info is not None else None,
            meta={CONTROLS: self._native(controls)} if controls else {},
        )

    def _native(self, tensors: dict[str, Tensor]) -> dict[str, Any]:
        from atoll.tensors.arrays import to_numpy

        return dict(to_numpy(tensors)) if self._is_numpy else dict(tensors)

    def _submit(self, round_: Any, model: Any) -> None:
        from atoll.worker.arguments import weight_of

        meta = model.meta or {}
        steps = meta.get(STEPS, 1.0)
        try:
            weight = weight_of(steps)
        except UsageError:
            raise UsageError(
                f"meta[{STEPS!r}] is {shown(steps)}.", "Give the number of local steps, which is the update's weight."
            ) from None
        round_.submit(
            self._tensors(round_, model),
            weight=weight,
            steps=int(weight) if STEPS in meta and weight.is_integer() else 0,
            metrics=self._logged | given if isinstance(given := model.metrics or {}, dict) else given,
            groups=self._groups(round_, meta),
        )
        self._logged = {}

    def _tensors(self, round_: Any, model: Any) -> dict[str, Tensor]:
        """Return a trained model's params as tensors. Round them to the run's dtypes, as far as nothing else changes.

        To a difference, the received model is added; it is read from the site's disk again.
        """
        import torch

        found = self._params(model)
        for name, tensor in found.items():
            wanted = self._like.get(name)
            if wanted is not None and torch.can_cast(tensor.dtype, wanted.dtype):
                found[name] = tensor.to(wanted.dtype)
        if model.params_type == "DIFF":
            base = round_.state_dict()
            fits = {name for name in found if name in base and base[name].shape == found[name].shape}
            found |= {name: base[name] + found[name] for name in fits}
        return found

    def _params(self, model: Any) -> dict[str, Tensor]:
        from atoll.tensors.arrays import as_tensor

        if not isinstance(model.params, Mapping) or not model.params:
            given = "none" if not model.params else f"of type {type(model.params).__name__}"
            raise UsageError(
                f"{self._what()} asks for a model, but the params that were sent are {given}.",
                "Send them: flare.FLModel(params=model.state_dict()).",
            )
        return {name: as_tensor(str(name), value).detach().cpu() for name, value in model.params.items()}

    def _groups(self, round_: Any, meta: Mapping[str, Any]) -> dict[str, dict[str, Any]] | None:
        """Return how SCAFFOLD's control variates of this site change; None if the run's algorithm has none."""
        from atoll.algorithms.scaffold import CONTROL

        info = self._joined().info
        if info is None or info.local is None:
            return None
        if CONTROL_CHANGE not in meta:
            raise UsageError(
                f"The run's algorithm is {info.algorithm}, but the model was sent without meta[{CONTROL_CHANGE!r}].",
                "Train with NVFlare's PTScaffoldHelper and send get_delta_controls(), or run fedavg.",
            )
        unchanged = {name: tensor.zero_() for name, tensor in round_.global_state(CONTROL).items()}
        return {CONTROL: unchanged | dict(meta[CONTROL_CHANGE])}

    def _answer(self, task: Any, model: Any) -> None:
        from atoll.worker.arguments import finite_metrics

        worker = self._joined()
        if task.name == "validate":
            if model.params or not model.metrics:
                raise UsageError(
                    f"{self._what()} asks for metrics, but the model was sent "
                    f"{'with params' if model.params else 'without metrics'}.",
                    "If flare.is_evaluate(): send flare.FLModel(metrics={…}) of the received model, untrained.",
                )
            metrics, begin_s = finite_metrics(model.metrics, worker.site), self._begin_s
            worker.answer_with(task, lambda _: worker.models.result(metrics, begin_s))
            return
        if model.params_type == "DIFF":
            raise UsageError(f"{self._what()} asks for a model, but params_type is DIFF.", "Send FULL params.")
        params = self._params(model)
        worker.models.give = lambda: params
        worker.answer_with(task, worker.models.submit)

    def _what(self) -> str:
        return f"Round {self._open.number}" if _is_round(self._open) else f"Task {self._open.name!r}"

    def _owed(self) -> UsageError:
        return UsageError(
            f"{self._what()} was received, but nothing was sent.", "Call flare.send(model) once for each receive."
        )

    def _leave(self, error: BaseException | None) -> None:
        if self._worker is not None and not self._is_over:
            self._is_over, self._open, self._model, self._has_received = True, None, None, False
            atexit.unregister(self._leave_at_exit)
            self._worker.leave(error)

    def _leave_at_exit(self) -> None:
        """Leave the run when the process ends, and say why: its uncaught error, or a model that was never sent."""
        from atoll.worker.log_lines import LOG
        from atoll.worker.session.leave_at_exit import what_ends

        error = what_ends()
        if error is None and self._open is not None and self._has_received:
            error = self._owed()
            LOG.warning("%s: %s", self.get_site_name(), error)
        self._leave(error)
