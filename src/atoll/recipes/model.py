"""What a recipe's `model` and `initial_ckpt` may be, and the initial model as the file that a run file names."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atoll.config import Settings
from atoll.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from torch import nn

    from atoll.tensors.module_tensors import Tensors

FILE = "initial.safetensors"
"""Beside the run file."""

HOW = 'Give an nn.Module, "my_models:build", {"class_path": "my_models.Net"} or a safetensors file.'


class InitialModel:
    """The initial model of a run.

    Args:
        model: an `nn.Module`, what the setting `model` may be, or None.
        checkpoint: a safetensors file with its weights, or None.

    Raises:
        UsageError: neither is given, or `model` is something else.
    """

    def __init__(self, model: Any, checkpoint: str | Path | None) -> None:
        if model is None and checkpoint is None:
            raise UsageError("The recipe has no initial model: model and initial_ckpt are None.", HOW)
        if isinstance(model, type):
            raise UsageError(f"model is the class {model.__name__}, not a model.", f"Make one: {model.__name__}().")
        if isinstance(model, Path):
            model = str(model)
        path = model.get("class_path") if isinstance(model, Mapping) else model
        if isinstance(path, str) and path.startswith("__main__"):
            raise UsageError(
                f"model is {path!r}: the server is another program, whose __main__ is not this script.",
                "Put the model into a module of its own, which the train script imports, too.",
            )
        if checkpoint is not None and isinstance(model, str) and ":" not in model:
            raise UsageError(f"model is {model!r}, and initial_ckpt is {str(checkpoint)!r}.", "Give one of them.")
        self._model, self._checkpoint = model, None if checkpoint is None else str(checkpoint)
        self._is_module = not isinstance(model, str | Mapping | None)
        if self._is_module and not callable(getattr(model, "state_dict", None)):
            raise UsageError(f"model is a {type(model).__name__}.", HOW)

    @property
    def _is_written(self) -> bool:
        """Whether the run file names a file that `write` makes."""
        return self._is_module or (self._checkpoint is not None and self._model is not None)

    def settings(self, folder: Path) -> dict[str, Any]:
        """What it is in the settings, where the run file lies in `folder`."""
        return {"model": str(folder / FILE) if self._is_written else self._checkpoint or self._model}

    def write(self, folder: Path, settings: Settings) -> None:
        """Write the file that the run file names, where it names one that is made.

        Raises:
            ConfigError: the weights are not those of the model, or the file is none.
        """
        if self._is_written:
            save(folder / FILE, self.tensors(settings), self._weights())

    def tensors(self, settings: Settings) -> nn.Module | Tensors:
        """The model as the server sees it; its values are those of the checkpoint only where there is nothing else."""
        from atoll.server.model import initial_model

        if self._is_module:
            module: nn.Module = self._model
            return module
        own = self._model or self._checkpoint
        args = {} if isinstance(own, Mapping) else {"model_args": settings.model_args}
        return initial_model(Settings.build({"model": own, "seed": settings.seed, **args}), None)

    def _weights(self) -> Tensors | None:
        if self._checkpoint is None:
            return None
        from atoll.server.model import initial_model

        state = initial_model(Settings.build({"model": self._checkpoint}), None)
        if not isinstance(state, Mapping):
            raise ConfigError(
                f"initial_ckpt is {self._checkpoint!r}, which names code.",
                "Give a safetensors file; model may be code.",
            )
        return state


def save(path: Path, model: nn.Module | Tensors, weights: Tensors | None = None) -> None:
    """Write a model as a file that says which names are buffers and which are tied; it appears whole or not at all.

    Args:
        weights: values in place of the model's own.

    Raises:
        ConfigError: they are not those of the model.
    """
    from torch import nn

    from atoll.server.exports import export_header
    from atoll.tensors.chunks import bytes_of
    from atoll.tensors.module_tensors import Told, named_tensors, schema_of, unwrapped
    from atoll.tensors.schema import BUFFERS

    model = model if isinstance(model, nn.Module) else unwrapped(model)
    schema, (owners, aliases) = schema_of(model), named_tensors(model)
    if weights is not None:
        given = {name: weights[name] for name in owners if name in weights}  # in the model's order
        given |= {name: weights[name] for name in weights if name not in given and name not in aliases}
        told = Told(given, {spec.name: spec.group == BUFFERS for spec in schema.tensors})
        told |= {name: told[owner] for name, owner in aliases.items() if owner in told}
        schema_of(told).require_equal(schema, mine="initial_ckpt", theirs="model")
        owners = given
    header, order = export_header(schema)
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as file:
        file.write(header)
        for spec in order:
            file.write(bytes_of(owners[spec.name].detach().cpu().contiguous()))
    os.replace(temporary, path)
