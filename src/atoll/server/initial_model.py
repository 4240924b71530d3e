"""Build or read a run's initial model (from a module, code or safetensors files), check it, write it as version 0."""

from __future__ import annotations

import functools
import json
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from torch import Tensor, nn

from atoll import registry
from atoll.config import Settings
from atoll.errors import ConfigError
from atoll.posix import require_regular
from atoll.runtime import seeded
from atoll.server.saved_state import ENTRY, OF_OUTER, OF_VERSION
from atoll.tensors.arrays import as_tensor, require_model
from atoll.tensors.buffer_rules import run_schema
from atoll.tensors.chunks import CHUNK_ELEMENTS, bytes_of, is_sound, run_of
from atoll.tensors.dtypes import torch_dtype
from atoll.tensors.layout import BUFFER_NAMES, TIED, Layout, chunks
from atoll.tensors.module_tensors import Marked, Tensors, named_tensors, schema_of, unwrapped
from atoll.tensors.schema import NOTHING, Schema

NO_MODEL = {NOTHING: torch.zeros(1)}
"""Model of a run that has no rounds, only workflows. It has one element, because every state directory has a model."""


def initial_model(settings: Settings, given_model: nn.Module | Tensors | None) -> nn.Module | Tensors:
    """Return the initial model of a run, which becomes version 0.

    Args:
        settings: the run's settings.
        given_model: the model that a program passes; if None, `settings.model.source` names the model.

    Raises:
        ConfigError: no model is named, or the named object is not a model; the remedy says how to name one.
        UsageError: `given_model` is not a model.
    """
    if given_model is not None:
        require_model(given_model)
        return given_model if isinstance(given_model, nn.Module | Marked) else unwrapped(given_model)
    if settings.model.source is None:
        raise ConfigError(
            "The run has no initial model.",
            'Set model.source to "my_models:build" (a function that returns an nn.Module), or to a .safetensors file.',
        )
    if settings.model.source.endswith((".pt", ".pth", ".bin", ".ckpt")):
        raise ConfigError(
            f"{settings.model.source!r} is a pickle, which can run any code when it is opened. Atoll never opens one.",
            "If you trust it, convert it once: safetensors.torch.save_file(model.state_dict(), 'model.safetensors').",
        )
    if files := _files(settings.model.source):
        return _from_files(files)
    with seeded(settings.run.seed):
        model = _built(settings)
    if isinstance(model, nn.Module):
        return model
    if isinstance(model, list | tuple):
        model = {str(place): each for place, each in enumerate(model)}
    if not isinstance(model, Mapping):
        raise ConfigError(
            f"{settings.model.source!r} returned an object of type {type(model).__name__}.",
            "Return an nn.Module; or arrays: a mapping name → array, or a list, which get the names 0, 1, 2 and so on.",
        )
    return unwrapped({str(name): as_tensor(str(name), value) for name, value in model.items()})


def _built(settings: Settings) -> Any:
    """Import the code that `model.source` names, and return the model that it builds, unchecked."""
    assert settings.model.source is not None
    model: Any = registry.load_attribute(settings.model.function)
    if not isinstance(model, nn.Module):
        if not callable(model):
            raise ConfigError(
                f"{settings.model.source!r} is of type {type(model).__name__}.",
                "Name a function that returns an nn.Module.",
            )
        model = registry.construct(
            functools.partial(model, **settings.model.args),
            f"{settings.model.source!r} cannot be called",
            "Set model.args to the keyword arguments of this function.",
        )
    return model


def is_code(settings: Settings) -> bool:
    """Return whether `model.source` names code that builds the model, not a file."""
    return settings.model.source is not None and not _files(settings.model.source)


def is_known(settings: Settings, given_model: nn.Module | Tensors | None, schema: Schema) -> bool:
    """Return whether the initial model has this schema, without computing the model's values.

    Return False if the schema differs, or if it is not known without the values: the function that builds the model may
    fail on torch's meta device.
    """
    known = _schema_without_values(settings, given_model)
    return known is not None and known.is_like(schema)


def _schema_without_values(settings: Settings, given_model: nn.Module | Tensors | None) -> Schema | None:
    """Return the schema of the initial model without computing its values; None if that fails.

    If the model is a file, only the file's header is read. A function that builds the model is called on torch's meta
    device, where tensors have no storage.
    """
    try:
        if given_model is None and settings.model.source is not None and (files := _files(settings.model.source)):
            return run_schema(_one_model(files, _header), settings.model.buffers, values=False)
        with warnings.catch_warnings(), torch.device("meta"):
            warnings.simplefilter("ignore")  # torch warns that loaded weights are not copied to meta tensors
            return run_schema(initial_model(settings, given_model), settings.model.buffers, values=False)
    except Exception:  # a user's function may raise anything
        return None


def loaded_model(settings: Settings, loaded: Tensors, schema: Schema | None = None) -> Tensors:
    """Return the tensors that a persistor loaded, as a model with the run's tied names and buffers.

    A mapping of tensors does not say which names are tied and which tensors are buffers. The schema does. Without
    `schema` and without the setting `model.source`, return the tensors unchanged.

    Args:
        loaded: the tensors that the persistor's `load` returned, by name.
        schema: the model's schema; None: take it from the model that `model.source` names.

    Raises:
        ConfigError: tied names have different values.
        SchemaMismatch: the tensors do not fit the run's model.
    """
    if schema is None and settings.model.source is None:
        return loaded
    schema = schema or _schema_without_values(settings, None) or schema_for(settings, initial_model(settings, None))
    source = f"load() of the persistor {settings.model.persistor.path!r}"
    tensors = dict(unwrapped(loaded, {spec.name for spec in schema.tensors} | {name for name, _ in schema.aliases}))
    for name, owner in schema.aliases:
        one, other = tensors.pop(name, None), tensors.get(owner)
        same = one is other or (one is not None and other is not None and one.dtype == other.dtype)
        if one is not None and other is not None and not (same and torch.equal(one.cpu(), other.cpu())):
            raise ConfigError(
                f"{source} gave different values for {name!r} and {owner!r}, which are tied (one tensor) in "
                "the run's model.",
                "Give both with the same values, or only one of them.",
            )
        if one is not None and other is None:
            tensors[owner] = one
    # in the model's order; tensors that the model lacks come last, and the error of require_equal names them
    ordered = {spec.name: tensors.pop(spec.name) for spec in schema.tensors if spec.name in tensors} | tensors
    ordered |= {name: ordered[owner] for name, owner in schema.aliases if owner in ordered}
    model = Marked(ordered, {spec.name: spec.is_buffer for spec in schema.tensors})
    schema_of(model).require_equal(schema, mine=source, theirs="the run")
    return model


def _header(path: Path) -> Marked:
    """Return tensors with the names, shapes and dtypes of a file, but without its values.

    Each tensor uses the memory of one element.
    """
    from safetensors import safe_open

    require_regular(path)
    with safe_open(path, framework="pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        tensors = {
            name: torch.empty((), dtype=torch_dtype(found.get_dtype())).expand(found.get_shape())
            for name, found in slices.items()
        }
    return _with_buffers(path, tensors, lambda one, other: one.shape == other.shape and one.dtype == other.dtype)


def _with_buffers(path: Path, tensors: dict[str, Tensor], same: Callable[[Tensor, Tensor], bool]) -> Marked:
    """Return a file's tensors as a model. If Atoll exported the file, its metadata lists tied names and buffers.

    If the file is a saved state, its model is returned, without the state of the run.

    If the file has all listed buffers, its other tensors are parameters. If a listed buffer is missing, the file was
    changed after the export, so the tensors that are not listed may be buffers or parameters.

    Args:
        path: a safetensors file, with or without this metadata.
        tensors: the file's tensors by name. Tied names get the same tensor object.
        same: function that compares two tensors. Names with different tensors are not tied, even if they are listed.
    """
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
    if ENTRY in metadata:
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith((OF_VERSION, OF_OUTER))}
    tied, buffers = _json(metadata.get(TIED)), _json(metadata.get(BUFFER_NAMES))
    for name, owner in tied.items() if isinstance(tied, dict) else ():
        if name in tensors and owner in tensors and same(tensors[name], tensors[owner]):
            del tensors[name]
            tensors[name] = tensors[owner]  # inserted again, so that the name comes after its owner
    if not isinstance(buffers, list) or not all(isinstance(name, str) for name in buffers):
        return Marked(unwrapped(tensors), {})  # not an export of Atoll: names may have the prefixes of wrappers
    whole = all(name in tensors for name in buffers)
    return Marked(tensors, {name: name in buffers for name in tensors if whole or name in buffers})


def _json(text: str | None) -> object:
    try:
        return json.loads(text or "null")
    except ValueError:
        return None


def _files(model: str) -> list[Path]:
    """Return the safetensors files of a model: one file, or all files in a folder. Return [] if `model` names code.

    Raises:
        ConfigError: the folder has no safetensors file.
    """
    path = Path(model)
    if path.is_dir():
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise ConfigError(
                f"The folder {model!r} has no .safetensors file.",
                "If you trust the files in it, convert them: safetensors.torch.save_file(state, 'model.safetensors').",
            )
        return files
    return [path] if model.endswith(".safetensors") else []


def _from_files(files: Sequence[Path]) -> Marked:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    def load(path: Path) -> Marked:
        try:
            require_regular(path)
            return _with_buffers(path, load_file(path), torch.equal)
        except FileNotFoundError:
            raise ConfigError(f"The initial model {str(path)!r} does not exist.", "Correct model.source.") from None
        except OSError as error:
            wrong = f"The initial model {str(path)!r} cannot be read ({error.strerror or error})."
            raise ConfigError(wrong, "Set model.source to a safetensors file that this user may read.") from error
        except SafetensorError as error:
            raise ConfigError(f"{str(path)!r} is not a safetensors file: {error}.") from error

    return _one_model(files, load)


def _one_model(files: Sequence[Path], load: Callable[[Path], Marked]) -> Marked:
    """Return the tensors of several files as one model. A large model is often saved in several files.

    Raises:
        ConfigError: two of the files have a tensor of the same name.
    """
    model = Marked({}, {})
    for path in files:
        tensors = load(path)
        if twice := model.keys() & tensors.keys():
            raise ConfigError(
                f"The tensor {min(twice)!r} is in {path.name} and also in another model file in the folder "
                f"{str(path.parent)!r}.",
                "Give one file, or a folder with the parts of one model.",
            )
        model.update(tensors)
        model.buffers |= tensors.buffers
    return model


def schema_for(settings: Settings, model: nn.Module | Tensors) -> Schema:
    """Return the schema of the initial model, with the rules of its buffers.

    Raises:
        ConfigError: the model has no float parameter that is sent, or `model.buffers` does not fit the model.
    """
    schema = run_schema(model, settings.model.buffers)
    if not any(spec.group == "params" and spec.numel for spec in schema.tensors):
        raise ConfigError("The initial model has no float parameters.", "Use a model that can be trained.")
    return schema


def write_version(fd: int, layout: Layout, header: bytes, model: nn.Module | Tensors) -> list[bytes]:
    """Write a model into the file of version 0, and return the BLAKE3 of each part.

    Args:
        fd: descriptor of the file.
        layout: layout of a version.
        header: first bytes of the file.
        model: the model.

    Raises:
        ConfigError: a value is not finite; the message names the tensor.
    """
    tensors = named_tensors(model)[0]
    digests: list[bytes] = []
    for part in layout.parts:
        hasher = blake3()
        head = header[part.start : part.stop]
        hasher.update(head)
        os.pwrite(fd, head, part.start)
        offset = part.start + len(head)
        for piece, start, stop in chunks(part, CHUNK_ELEMENTS):
            spec = piece.segment.spec
            if spec.is_extra:
                run = torch.zeros(stop - start, dtype=torch_dtype(spec.dtype))
            else:
                run = run_of(tensors[spec.name], start, stop).cpu()
            if not is_sound(spec, run):
                raise ConfigError(
                    f"The initial model's tensor {spec.name!r} contains NaN or Inf.", "Check how it is initialised."
                )
            data = bytes_of(run)
            hasher.update(data)
            os.pwrite(fd, data, offset)
            offset += len(data)
        digests.append(hasher.digest())
    return digests
