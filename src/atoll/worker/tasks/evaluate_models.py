"""Cross-site evaluation at a site: evaluate models on the site's data, and send the site's own model to the server.

Each model is downloaded to disk, and deleted after its evaluation.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import nn

from atoll.blobs.model_file import packed_state
from atoll.blobs.object_file import pack_object
from atoll.errors import AtollError, BadRequest, SchemaMismatch, TransferError, TransferStalled, UsageError
from atoll.posix import no_sync, replace_file, require_regular
from atoll.protocol import messages
from atoll.protocol import task_messages as tm
from atoll.tensors.chunks import assign_run_, runs_of
from atoll.tensors.dtypes import dtype_name
from atoll.tensors.layout import safetensors_header
from atoll.tensors.lazy_tensors import LazyState, LazyTensor
from atoll.tensors.module_tensors import Tensors, named_tensors
from atoll.tensors.payload import Packed
from atoll.tensors.reference import TensorRef, new_id
from atoll.transport.object_client import EXPIRES_S, chosen_cut, fetch_lazily, idle_timeout, send
from atoll.transport.object_server import UnpublishedObject, outgoing
from atoll.worker.arguments import number
from atoll.worker.exchange.encode_update import AnswerFilters
from atoll.worker.exchange.participation import Participation
from atoll.worker.log_lines import LOG
from atoll.worker.session.session import Session

Evaluate = Callable[[Any], Mapping[str, Any]]


class Models:
    """The handlers of one site for cross-site evaluation.

    Args:
        site: the site's name.
        session: the site's session; None: no server asks for evaluations.
        filters: filters that are applied to the site's own model before it is sent.
        local: returns the model that the site submitted last; None: this process trains no model.
        folder: the folder in which a model is stored during its evaluation; None: the folder for temporary files.
        load_kept: loads the tensors that the site keeps for itself into a module; None: this process has no such
            tensors.

    Attributes:
        give: the script's function that returns the site's model, set by `TaskWorker.submits`; None: use `local`.
        filled: the module into which models are loaded for evaluation, if any.
    """

    def __init__(
        self,
        site: str,
        session: Session | None,
        filters: AnswerFilters,
        local: Callable[[], Packed] | None,
        folder: Path | None,
        load_kept: Callable[[nn.Module], None] | None = None,
    ) -> None:
        self._load_kept = load_kept
        self._site, self._session, self._filters, self._local, self._folder = site, session, filters, local, folder
        self.give: Callable[[], Any] | None = None
        self.filled: nn.Module | None = None

    @property
    def _connection(self) -> Session:
        assert self._session is not None  # the task came from the server
        return self._session

    def evaluate(
        self, function: Evaluate, model: nn.Module | None, weight: float | None, payload: Any
    ) -> dict[str, Any]:
        """Handle the task `validate`: download a model, evaluate it, and return its metrics and the seconds needed.

        Args:
            function: the script's function that evaluates a model, set by `TaskWorker.evaluates`.
            model: the module to load the model into; None: pass a `LazyState` to the function.
            weight: the site's number of samples; None: unknown.
            payload: the task's payload, with the key and the name of the model.
        """
        begin_s = time.monotonic()
        state = self.downloaded(payload)
        kept = self._connection.schema.kept if self._load_kept else frozenset()
        try:
            if model is not None:
                fill_(model, state, str(payload.get("name")), kept)
                if self._load_kept is not None:
                    self._load_kept(model)
            return self.result(function(state if model is None else model), begin_s, weight)
        finally:
            state.release()

    def downloaded(self, payload: Any) -> LazyState:
        """Download the model of a task `validate` to disk, and return it; the caller releases it.

        Raises:
            UsageError, BadRequest: the payload names no model.
            TransferError: the model cannot be downloaded.
        """
        reference = payload.get("model") if isinstance(payload, dict) else None
        if reference is None:
            raise UsageError(
                "The payload of task 'validate' contains no model.",
                "worker.evaluates handles 'validate' for cross-site evaluation. Give your own task another "
                "name or its own handler.",
            )
        state = self._fetched(reference)
        self._connection.tell(state=f"evaluating {payload.get('name')}"[:64])
        return state

    def result(self, metrics: Any, begin_s: float, weight: float | None = None) -> dict[str, Any]:
        """Return the answer to a task `validate`, begun at `begin_s` of the monotonic clock."""
        found = self._connection.way_out.metrics(measured(metrics))
        return {"metrics": found, "seconds": time.monotonic() - begin_s, "weight": weight}

    def _fetched(self, model: Any) -> LazyState:
        connection = self._connection
        try:
            ref = (
                model if isinstance(model, TensorRef) else reference_to(connection, tm.ObjectKey.model_validate(model))
            )
        except ValidationError:
            raise BadRequest(
                "The task does not say which model to evaluate.", "Use the same Atoll release at server and site."
            ) from None
        timeout_s = idle_timeout(None, connection.info.idle_timeout_s)
        state = fetch_lazily(ref, self._folder, idle_timeout_s=timeout_s, counters=connection.counters)
        if not isinstance(state, LazyState):
            raise BadRequest(
                "The model to evaluate is not a flat dict of tensors.", "At its site, submit a flat dict of tensors."
            )
        return state

    def submit(self, payload: Any) -> dict[str, Any]:
        """Handle the task `submit_model`: upload the site's model, and return its key at the server."""
        with self._filters.applied(self._packed(), "submit_model") as packed:
            draft = outgoing(packed, chosen_cut(packed, None), self._folder, "The model")
            ref = uploaded(self._connection, draft, "model")
        return {"model": key_of(ref).model_dump()}  # no address: other sites may reach the server at another one

    def _packed(self) -> Packed:
        if self.give is not None:
            model = self.give()
            if model is None:
                raise UsageError(
                    f"The function given to worker.submits at site {self._site} returned None, not a model."
                )
            if model is self.filled:
                raise UsageError(
                    f"The model of site {self._site} is the module that worker.evaluates loads other models into.",
                    "Give worker.evaluates a separate module: model=copy.deepcopy(model).",
                )
            return packed_state(model) if isinstance(model, LazyState) else pack_object(model)
        if self._local is None:
            raise UsageError(
                f"Site {self._site} has no model to submit, because this process has not trained one.",
                "Register a function that returns the model: worker.submits(function).",
            )
        return self._local()


STALLS = 2
"""Number of stalls after which an upload fails. A single stall may be temporary."""


def uploaded(connection: Session, draft: UnpublishedObject, what: str) -> TensorRef:
    """Upload an answer or a model that is too large for a message. Return a reference to the object at the server.

    Args:
        connection: the site's session with the server.
        draft: the object to upload, on disk; closed at the end.
        what: what the object is, for errors.

    Raises:
        TransferError: the upload has stalled `STALLS` times.
    """
    stalls, server, key = 0, connection.http.server, new_id()
    timeout_s = idle_timeout(None, connection.info.idle_timeout_s)

    def upload() -> TensorRef:
        nonlocal stalls
        try:
            return send(draft, server, expires_s=EXPIRES_S, idle_timeout_s=timeout_s, key=key)
        except TransferStalled as error:
            stalls += 1
            if stalls < STALLS:
                raise
            raise TransferError(
                f"The upload of the {what} of site {connection.site} to {server} failed: {error.message}",
                error.remedy,
            ) from error

    try:
        return connection.patiently(upload, None, f"send its {what}")
    finally:
        draft.close()


def reference_to(connection: Session, key: tm.ObjectKey) -> TensorRef:
    """Return the reference with which an object at the server can be downloaded, made from the object's key."""
    return connection.http.reference(key.object, key.secret, key.digest, key.expires_at)


def key_of(ref: TensorRef) -> tm.ObjectKey:
    """Return the server's key of an object that this site has uploaded."""
    return tm.ObjectKey(object=ref.object, secret=ref.secret, digest=ref.digest, expires_at=ref.expires_at)


def fill_(model: nn.Module, state: LazyState, name: str, kept: Collection[str] = ()) -> None:
    """Load a model from disk into a module, in place, piece by piece.

    Args:
        model: the module.
        state: the model on disk.
        name: name of the model, for errors.
        kept: names of tensors that each site keeps for itself; they are not loaded.

    Raises:
        SchemaMismatch: the tensors differ in name, shape or dtype. The message names the first difference.
    """
    tensors, tied = named_tensors(model)
    aliases = {alias: owner for alias, owner in tied.items() if alias in state}  # a file may lack a further name
    what = f"The model {name}"
    for one, other, where in (
        ({**tensors, **aliases}, state, "only the module has"),
        (state, {**tensors, **aliases}, "only the model has"),
    ):
        lacking = next((key for key in one if key not in other and key not in kept), None)
        if lacking is not None:
            raise SchemaMismatch(
                f"{what} does not fit the module of worker.evaluates: {where} {lacking!r}.",
                "Give worker.evaluates a module of the model's class.",
            )
    tensors = {key: tensor for key, tensor in tensors.items() if key not in kept}
    for key, tensor in tensors.items():
        lazy: LazyTensor = state.ref(key)
        if lazy.shape != tensor.shape or lazy.dtype != tensor.dtype:
            stored, needed = (f"{dtype_name(each.dtype)}{list(each.shape)}" for each in (lazy, tensor))
            raise SchemaMismatch(
                f"{what} does not fit the module of worker.evaluates: {key!r} is {stored} in the model, {needed} in "
                "the module.",
                "Give worker.evaluates a module of the model's class.",
            )
    with torch.no_grad():
        for key, tensor in tensors.items():
            offset = 0
            for run in state.ref(key).runs():
                assign_run_(tensor, offset, run)
                offset += run.numel()


def measured(metrics: Any) -> dict[str, float]:
    """Return the metrics that the script's function returned, as floats. They may be infinite or NaN.

    Raises:
        UsageError: `metrics` is not a dict of names and numbers, is empty, or has too many entries.
    """
    if not isinstance(metrics, Mapping) or not metrics:
        what = "nothing" if metrics is None or metrics == {} else f"an object of type {type(metrics).__name__}"
        raise UsageError(f"The function of worker.evaluates returned {what}.", 'Return metrics: {"loss": 0.1}.')
    if len(metrics) > messages.METRICS:
        raise UsageError(
            f"The function of worker.evaluates returned {len(metrics)} metrics; an evaluation may have at most "
            f"{messages.METRICS}.",
            "Return only the most important ones.",
        )
    found: dict[str, float] = {}
    for key, value in metrics.items():
        try:
            found[str(key)] = number(value)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            raise UsageError(f"The metric {key!r} is {value!r}, not a number.", "Return numbers only.") from None
    return found


# -- The model that a site submitted last, before filters and codec, for evaluation by other sites.
#
#     local.safetensors     beside base and outbox; each update replaces the file in one step
#
# The file is written in pieces of some MiB, and only if the run will ask for it. It survives a killed process.


LOCAL_MODEL = "local.safetensors"


def keep_local(participation: Participation, tensors: Tensors, round_number: int) -> None:
    """Write the model that is submitted in this round to the site's folder, for a later evaluation by other sites.

    The file is `LOCAL_MODEL`. If it cannot be written, log a warning and go on.

    Args:
        participation: the site's part in the run.
        tensors: the model's tensors by name.
        round_number: the number of the round.
    """
    path, temporary = participation.folder / LOCAL_MODEL, participation.folder / f".{LOCAL_MODEL}.tmp"
    specs = [spec for spec in participation.session.schema.model.tensors if not spec.is_kept]
    header = safetensors_header(specs, {"format": "pt", "round": str(round_number)})
    runs = itertools.chain.from_iterable(runs_of(tensors[spec.name].detach()) for spec in specs)
    try:
        replace_file(path, itertools.chain([header], runs), temporary=temporary, sync=no_sync)
    except OSError as error:
        path.unlink(missing_ok=True)  # otherwise an older model would be sent as that of this round
        LOG.warning(
            "%s: the model of round %d could not be stored for a later evaluation by other sites: %s",
            participation.site,
            round_number,
            error.strerror,
        )


def local_model(participation: Participation) -> Packed:
    """Return the model that the site submitted last, ready for sending. Its tensors are read from disk piece by piece.

    Args:
        participation: the site's part in the run.

    Raises:
        UsageError: no model was stored; or the site has filters, but the model was stored before they were applied.
    """
    if participation.exchange.local.filters:
        raise UsageError(
            f"Site {participation.site} has filters, but its stored model was saved before they were applied.",
            "Register worker.submits(function): the filters are applied to the model that the function returns.",
        )
    path = participation.folder / LOCAL_MODEL
    try:
        require_regular(path, own=True)
        state = LazyState.open(path)
    except (OSError, AtollError):
        raise UsageError(
            f"Site {participation.site} has no stored model of this run. A site stores its submitted model only if "
            "the run's workflows include a cross_site_evaluation that asks for the model.",
            "Register worker.submits(function), train with such a workflow, or evaluate without the sites' "
            "models (site_models = false, --no-site-models).",
        ) from None
    aliases = participation.session.schema.model.aliases
    return packed_state(state, {name: owner for name, owner in aliases if owner in state})
