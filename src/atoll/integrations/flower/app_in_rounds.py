"""The ClientApp of a Flower app in the rounds of one of Atoll's algorithms, as it is.

    a round       message `evaluate` with the round's model: its metrics. Then `train`: the update, its weight, metrics
    validate      message `evaluate` with a model of a cross-site evaluation

Messages have the records that Flower's own strategies send, replies those that they take:

    arrays    config {"server-round": 1, …}      →      one ArrayRecord    one MetricRecord {"num-examples": 10, …}
    fitins.parameters    fitins.config           →      fitres.parameters, num_examples, metrics     NumPyClient
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from flwr.app import ConfigRecord, RecordDict
from torch import Tensor

from atoll.errors import ConfigError, SchemaMismatch, UsageError
from atoll.format_text import listed, number_of
from atoll.integrations.flower.app_folder import Config, RecordKeys, flat
from atoll.integrations.flower.records import array_record, tensor_of
from atoll.protocol.messages import RunInfo
from atoll.tensors.dtypes import torch_dtype
from atoll.tensors.lazy_tensors import LazyTensor
from atoll.tensors.schema import PARAMS
from atoll.worker.arguments import weight_of
from atoll.worker.training.federated_loop import Round, Worker

TRAIN, EVALUATE = "train", "evaluate"
SERVER_ROUND = ("server-round", "server_round")
FEDPROX, MU = "fedprox", ("proximal-mu", "proximal_mu")
"""The only correction that a ClientApp applies by itself: Flower's FedProx, too, only tells it the factor.

Of two names, the second one is that in the older kind of app.
"""
NOT_IMPLEMENTED = 4
"""Status of a NumPyClient's reply if it has no `evaluate`."""

Items = list[tuple[str, Tensor | LazyTensor]]
"""A model: its tensors by name, in order."""
Ask = Callable[[str, str, RecordDict], RecordDict]
"""A function (id of the message, its type, its content) that returns the content of the ClientApp's reply."""


class _HeardConfig(ConfigRecord):
    """A configuration that knows whether the ClientApp has read a value of it.

    Attributes:
        expected: the key of the value; empty if none has to be read.
        heard: whether it was read.
    """

    expected, heard = "", False

    def expects(self, key: str, value: float) -> None:
        """Add a value that has to be read."""
        self[key], self.expected = value, key

    def __getitem__(self, item: str) -> Any:
        self.heard |= item == self.expected
        return super().__getitem__(item)

    def items(self) -> Any:
        """Return all items, which counts as reading them."""
        self.heard = True
        return super().items()


class AppInRounds:
    """Trains and evaluates models with a ClientApp.

    Args:
        worker: the site's part in the run.
        client_app: the ClientApp.
        keys: names in the app's records.
        ask: sends a message to the ClientApp.
        keeping: takes a name of what the ClientApp does, and keeps `context.state` at the end of a `with` block.
    """

    def __init__(
        self,
        worker: Worker,
        client_app: Any,
        keys: RecordKeys,
        ask: Ask,
        keeping: Callable[[str], AbstractContextManager[None]],
    ) -> None:
        self._worker, self._keys, self._ask, self._keeping, self._number = worker, keys, ask, keeping, 0
        self._is_legacy = getattr(client_app, "_call", None) is not None  # made of a `client_fn`
        functions = getattr(client_app, "_registered_funcs", (f"{TRAIN}.default", f"{EVALUATE}.default"))
        self._trains = self._is_legacy or f"{TRAIN}.default" in functions
        self._evaluates = self._is_legacy or f"{EVALUATE}.default" in functions
        schema = worker.schema
        self._dtypes = {spec.name: torch_dtype(spec.dtype) for spec in schema.tensors}
        self._dtypes |= {name: self._dtypes[owner] for name, owner in schema.aliases}
        is_numbered = all(name.isdecimal() for name in self._dtypes)
        self._order = sorted(self._dtypes, key=int) if is_numbered else list(self._dtypes)
        params = [spec.name for spec in schema.tensors if spec.group == PARAMS]
        self._tied = [name for name, _ in schema.aliases]
        self._is_by_name = len(params) > 1 and not is_numbered and params == sorted(params)

    def require_trains(self, info: RunInfo) -> None:
        """Check that the ClientApp, as it is, can train in a run.

        Raises:
            ConfigError: the run's algorithm needs more, or the app does not train.
        """
        if not self._trains:
            raise ConfigError("The ClientApp has no function for the message 'train'.", "Decorate one: @app.train().")
        if info.local is not None and info.algorithm.text != FEDPROX:
            raise ConfigError(
                f"The run's algorithm, {info.algorithm}, corrects each local step, and the messages of a Flower app "
                "have no place for this.",
                "Use another algorithm for the run, such as fedavg, fedprox or fedadam; or write the site's loop with "
                "atoll.join and fl_round.correct.",
            )
        if self._is_legacy:
            self._require_order()

    # -- what a run asks for

    def train(self, fl_round: Round) -> None:
        """Let the ClientApp evaluate and train a round's model, and submit the result.

        Raises:
            ConfigError: the ClientApp failed, or does not apply the algorithm's correction.
            UsageError: its reply lacks what the round needs.
            SchemaMismatch: its arrays are not those of the run's model.
        """
        state, info = fl_round.state_dict(), self._worker.info
        tensors: Items = [(name, state.pop(name)) for name in self._order]
        self._number, told = fl_round.number, flat(fl_round.config)
        name = f"{fl_round.ticket} {fl_round.base.digest}"
        with self._keeping(name):  # both messages at once: a site that is killed meanwhile begins with the first again
            measured = self._measured(f"{name} {EVALUATE}", tensors, told)
            config = self._config(told)
            if info is not None and info.local is not None:
                config.expects(MU[self._is_legacy], info.local["mu"])
            content = self._content(TRAIN, tensors, config)
            del tensors
            reply = self._ask(f"{name} {TRAIN}", TRAIN, content)
        if config.expected and not config.heard:
            raise ConfigError(
                f"The run's algorithm is fedprox, but the ClientApp has not read {config.expected!r} from its config.",
                "Add FedProx's term to the loss, with this factor, or run fedavg.",
            )
        del content
        numbers = self._numbers(reply)
        weight, steps = self._weight(numbers), self._steps(numbers)
        fl_round.is_corrected = True
        fl_round.submit(
            self._tensors(reply),
            weight=weight,
            steps=steps,
            metrics={f"{TRAIN}.{key}" if key in measured else key: value for key, value in numbers.items()} | measured,
        )

    def validate(self, task: str, payload: Any) -> dict[str, Any]:
        """Answer a task of a cross-site evaluation: let the ClientApp evaluate a model.

        Raises:
            UsageError: the ClientApp evaluates no models, or the payload names none.
            ConfigError: the ClientApp failed.
            TransferError: the model cannot be downloaded.
        """
        models, begin_s = self._worker.models, time.monotonic()
        state = models.downloaded(payload)
        try:
            order = self._order if state.keys() == self._dtypes.keys() else list(state)
            with self._keeping(task):  # tensors are read when the app asks for them
                tensors: Items = [(name, state.ref(name)) for name in order]
                measured = self._measured(task, tensors, {}, with_weight=True)
        finally:
            state.release()
        if not measured:
            raise UsageError("The ClientApp evaluates no models.", "Give it a function: @app.evaluate().")
        weight = measured.pop(self._weight_key, None)
        return models.result(measured, begin_s, None if weight is None else weight_of(weight))

    # -- messages and replies

    @property
    def _weight_key(self) -> str:
        return "num_examples" if self._is_legacy else self._keys.weighted_by_key

    def _config(self, told: Config) -> _HeardConfig:
        return _HeardConfig({SERVER_ROUND[self._is_legacy]: self._number, **told})

    def _content(self, kind: str, tensors: Items, config: ConfigRecord) -> RecordDict:
        names = (self._keys.arrayrecord_key, self._keys.configrecord_key)
        if self._is_legacy:
            names = ("fitins.parameters", "fitins.config")
            if kind == EVALUATE:
                names = ("evaluateins.parameters", "evaluateins.config")
        return RecordDict(dict(zip(names, (array_record(tensors), config), strict=True)))

    def _measured(self, message: str, tensors: Items, told: Config, *, with_weight: bool = False) -> dict[str, float]:
        """Return the metrics of a model; none if the ClientApp has no function for this."""
        if not self._evaluates:
            return {}
        reply = self._ask(message, EVALUATE, self._content(EVALUATE, tensors, self._config(told)))
        if self._is_legacy and reply["evaluateres.status"]["code"] == NOT_IMPLEMENTED:
            self._evaluates = False
            return {}
        found = self._numbers(reply)
        return {key: value for key, value in found.items() if with_weight or key != self._weight_key}

    def _numbers(self, reply: RecordDict) -> dict[str, Any]:
        """Return all numbers of a reply; those of a list under `name.0`, `name.1` and so on."""
        records: list[Any] = [*reply.metric_records.values()]
        if self._is_legacy:
            records += [record for name, record in reply.config_records.items() if name.endswith(".metrics")]
        found: dict[str, Any] = {}
        for key, value in ((key, value) for record in records for key, value in record.items()):
            if isinstance(value, list):
                found |= {f"{key}.{place}": each for place, each in enumerate(value)}
            elif not isinstance(value, str | bytes):
                found[key] = value
        return found

    def _weight(self, numbers: dict[str, Any]) -> float:
        """Take the update's weight out of the numbers of a reply."""
        if self._weight_key not in numbers:
            raise UsageError(
                f"The ClientApp's reply to 'train' has no {self._weight_key!r}, which is the update's weight; it has "
                f"{listed(list(map(repr, numbers))) or 'no numbers'}.",
                "Add it to the MetricRecord, or name the key that your strategy has: "
                "--record-keys \"weighted_by_key='…'\".",
            )
        return weight_of(numbers.pop(self._weight_key))

    def _steps(self, numbers: dict[str, Any]) -> int:
        info, key = self._worker.info, self._keys.steps_key
        if info is not None and info.needs_steps and key not in numbers:
            raise UsageError(
                f"The run's algorithm, {info.algorithm}, divides by the number of local steps, and the ClientApp's "
                f"reply to 'train' has no {key!r}.",
                "Add it to the MetricRecord, name the key that has it (--record-keys \"steps_key='…'\"), or use "
                "another algorithm, such as fedavg.",
            )
        return int(numbers.pop(key, 0))

    def _tensors(self, reply: RecordDict) -> dict[str, Tensor]:
        """Return the update's tensors, rounded to the run's dtypes as far as nothing else changes.

        Raises:
            UsageError: the reply has not exactly one `ArrayRecord`, or one without names that cannot be assigned.
        """
        if len(reply.array_records) != 1:
            raise UsageError(
                f"The ClientApp's reply to 'train' has {number_of(len(reply.array_records), 'ArrayRecord')}, not one.",
                "Reply with the trained model, and nothing else, as an ArrayRecord.",
            )
        (record,) = reply.array_records.values()
        names = list(record)
        if names == [str(place) for place in range(len(names))] and record.keys() != self._dtypes.keys():
            self._require_order()
            if len(names) != len(self._order):
                raise SchemaMismatch(
                    f"The ClientApp's reply has {number_of(len(names), 'array')}, and the run's model "
                    f"{number_of(len(self._order), 'tensor')}: {listed(self._order)}.",
                    "Reply with as many arrays as the message had, in the same order.",
                )
            names = self._order
        found = {name: tensor_of(name, array) for name, array in zip(names, record.values(), strict=True)}
        for name, tensor in found.items():
            if name in self._dtypes and torch.can_cast(tensor.dtype, self._dtypes[name]):
                found[name] = tensor.to(self._dtypes[name])
        return found

    def _require_order(self) -> None:
        """Check that the run's tensors have an order, for a ClientApp that exchanges a list of arrays."""
        if self._tied:
            raise ConfigError(
                f"The ClientApp exchanges a list of arrays, which does not say where {self._tied[0]!r} is: this tensor "
                "is tied to another one.",
                "Exchange the state_dict with its names: ArrayRecord(model.state_dict()).",
            )
        if self._is_by_name:
            self._is_by_name = False
            self._worker.warn(
                f"the ClientApp exchanges a list of arrays, in this order: {listed(self._order)}. A safetensors file "
                "has its tensors by name; if your state_dict has another order, set model.source to the function "
                "that builds the model, or name the tensors of the file 0, 1, 2 and so on."
            )
