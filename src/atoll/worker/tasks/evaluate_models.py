"""A site's part in cross-site evaluation: it evaluates models, and gives its own.

A model comes to disk, straight from who has it, and goes when it was evaluated. The site's own is served from here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import nn

from atoll.blobs.model_file import packed_state
from atoll.blobs.object_file import pack_object
from atoll.errors import AtollError, AuthError, BadRequest, Gone, SchemaMismatch, TransferError, UsageError
from atoll.protocol import task_messages as tm
from atoll.tensors.chunks import assign_run_
from atoll.tensors.dtypes import dtype_name
from atoll.tensors.lazy_tensors import LazyState, LazyTensor
from atoll.tensors.module_tensors import named_tensors
from atoll.tensors.payload import Packed
from atoll.tensors.reference import TensorRef
from atoll.transport.object_server import written
from atoll.transport.tls import is_loopback
from atoll.worker.arguments import number
from atoll.worker.exchange.encode_update import AnswerFilters
from atoll.worker.log_lines import LOG
from atoll.worker.objects.object_client import Publisher, cut_as_told, fetch_lazily, idle_timeout, send, withdraw
from atoll.worker.session.connection import Connection

Evaluate = Callable[[Any], Mapping[str, Any]]

EXPIRES_S = 7 * 86400.0
"""Of a site's model: it is withdrawn when the evaluation is over, or the site leaves."""
OUT_OF_REACH = (TransferError, Gone, AuthError)
"""Another site's model cannot be had from there; it may be had by the server."""


class Models:
    """The models that come and go at one site.

    Args:
        local: gives the model that it has trained last.
        folder: where others lie while they are evaluated.
        ref_to: makes a reference of the key to an object at the server.

    Attributes:
        give: gives the site's model, in place of `local`.
        filled: the module that others' models are put into.
        publisher: serves it.
    """

    def __init__(
        self,
        connection: Connection,
        filters: AnswerFilters,
        local: Callable[[], Packed] | None,
        folder: Path | None,
        ref_to: Callable[[tm.ObjectKey], TensorRef],
    ) -> None:
        self._connection, self._filters, self._local, self._folder = connection, filters, local, folder
        self._ref_to = ref_to
        self.give: Callable[[], Any] | None = None
        self.filled: nn.Module | None = None
        self.publisher: Publisher | None = None
        self._own: Publisher | None = None
        self._served: list[tuple[Publisher | None, TensorRef]] = []

    # -- others' models

    def evaluate(self, function: Evaluate, model: nn.Module | None, payload: Any) -> dict[str, Any]:
        """Answer `validate`: metrics, or that the model cannot be reached."""
        place, name = (payload.get("model"), payload.get("name")) if isinstance(payload, dict) else (None, None)
        if place is None:
            raise UsageError(
                "Task 'validate' came without a model.",
                "worker.evaluates is for cross-site evaluation; a task of your own has another name, or a handler.",
            )
        begin_s = time.monotonic()
        state: Any = None
        try:
            state = self._fetched(place)
        except OUT_OF_REACH as error:
            if not isinstance(place, TensorRef):
                raise
            LOG.warning("%s: the model of %s is out of reach: %s", self._connection.site, name, error)
            return {"unreachable": str(error)}
        self._connection.tell(state=f"evaluating {name}"[:64])
        with_model: Any = state
        try:
            if model is not None:
                fill_(model, state, str(name))
                with_model = model
            metrics = measured(function(with_model))
        finally:
            state.release()
        return {"metrics": metrics, "seconds": time.monotonic() - begin_s}

    def _fetched(self, place: Any) -> LazyState:
        connection = self._connection
        try:
            ref = place if isinstance(place, TensorRef) else self._ref_to(tm.ObjectKey.model_validate(place))
        except ValidationError:
            raise BadRequest("The task names no model.", "Use the same Atoll version on both sides.") from None
        timeout_s = idle_timeout(None, connection.info.idle_timeout_s)
        state = fetch_lazily(ref, self._folder, idle_timeout_s=timeout_s, counters=connection.counters)
        if not isinstance(state, LazyState):
            raise BadRequest("What came is no model: no flat dict of tensors.", "Look at what its site submits.")
        return state

    # -- its own

    def submit(self, payload: Any) -> dict[str, Any] | None:
        """Answer `submit_model`: where the model can be pulled."""
        asked = payload if isinstance(payload, dict) else {}
        if asked.get("withdraw"):
            self.withdraw()
            return None
        through_server = bool(asked.get("through_server"))
        if not through_server:
            self.withdraw()
        packed = self._packed()
        with self._filters.behind(packed, "submit_model") as packed:
            publisher = None if through_server else self._publisher()
            if publisher is not None:
                ref = publisher.publish_packed(packed, expires_s=EXPIRES_S)
                self._served.append((publisher, ref))
                return {"model": ref}
            ref = self._sent(packed)
        self._served.append((None, ref))
        key = tm.ObjectKey(object=ref.object, secret=ref.secret, digest=ref.digest, expires_at=ref.expires_at)
        return {"model": key.model_dump()}  # others may reach the server by another name

    def _packed(self) -> Packed:
        if self.give is not None:
            given = self.give()
            if given is None:
                raise UsageError(f"Site {self._connection.site} gives no model.")
            if given is self.filled:
                raise UsageError(
                    f"Site {self._connection.site} would give the module that the models of others are put into.",
                    "Give worker.evaluates a module of its own: model=copy.deepcopy(model).",
                )
            return packed_state(given) if isinstance(given, LazyState) else pack_object(given)
        if self._local is None:
            raise UsageError(
                f"Site {self._connection.site} has no model: this process has trained none.",
                "Say with worker.submits(function) which model it has.",
            )
        return self._local()

    def _publisher(self) -> Publisher | None:
        """Who serves it from here; None: nobody can, as other machines do not reach this process."""
        if self.publisher is not None:
            return self.publisher
        if not is_loopback(self._connection.http.host):
            return None
        if self._own is None:
            self._own = Publisher(folder=self._folder)
        return self._own

    def _sent(self, packed: Packed) -> TensorRef:
        connection = self._connection
        timeout_s = idle_timeout(None, connection.info.idle_timeout_s)
        draft = written(packed, cut_as_told(packed, None), self._folder)
        try:
            return connection.patiently(
                lambda: send(draft, connection.http.server, expires_s=EXPIRES_S, idle_timeout_s=timeout_s),
                None,
                "send its model",
            )
        finally:
            draft.close()

    def withdraw(self) -> None:
        """Keep it for nobody any more."""
        served, self._served = self._served, []
        for publisher, ref in served:
            try:
                publisher.withdraw(ref) if publisher is not None else withdraw(ref)
            except AtollError as error:  # it expires
                LOG.debug("%s: a model was not withdrawn: %s", self._connection.site, error)

    def close(self) -> None:
        """Withdraw all, and stop serving. Idempotent."""
        self.withdraw()
        own, self._own = self._own, None
        if own is not None:
            own.close()


def fill_(model: nn.Module, state: LazyState, name: str) -> None:
    """A model from disk into a module, in place, in runs.

    Raises:
        SchemaMismatch: it is of another model; the first difference is named.
    """
    tensors, aliases = named_tensors(model)
    what = f"The model {name}"
    for one, other, where in (
        ({**tensors, **aliases}, state, "only the module has"),
        (state, {**tensors, **aliases}, "only it has"),
    ):
        lacking = next((key for key in one if key not in other), None)
        if lacking is not None:
            raise SchemaMismatch(f"{what} does not fit the module: {where} {lacking!r}.", "Give evaluates its class.")
    for key, tensor in tensors.items():
        lazy: LazyTensor = state.ref(key)
        if lazy.shape != tensor.shape or lazy.dtype != tensor.dtype:
            there, mine = (f"{dtype_name(each.dtype)}{list(each.shape)}" for each in (lazy, tensor))
            raise SchemaMismatch(f"{what} does not fit: {key!r} is {there}, in the module {mine}.", "Use its class.")
    with torch.no_grad():
        for key, tensor in tensors.items():
            at = 0
            for run in state.ref(key).runs():
                assign_run_(tensor, at, run)
                at += run.numel()


def measured(metrics: Any) -> dict[str, float]:
    """Metrics as numbers; also those that are not finite, which are shown so.

    Raises:
        UsageError: they are none.
    """
    if not isinstance(metrics, Mapping) or not metrics:
        what = "nothing" if metrics is None or metrics == {} else f"a {type(metrics).__name__}"
        raise UsageError(f"The function of worker.evaluates returned {what}.", 'Return a dict: {"loss": 0.1}.')
    found: dict[str, float] = {}
    for key, value in metrics.items():
        try:
            found[str(key)] = number(value)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            raise UsageError(f"The metric {key!r} is {value!r}.", "Give a number.") from None
    return found
