"""A model ↔ its named tensors and its schema. Nothing is copied: the tensors are the model's own."""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Container, Iterable, Mapping

import torch
from torch import Tensor, nn

from atoll.errors import UsageError
from atoll.tensors.arrays import require_model
from atoll.tensors.dtypes import dtype_name, torch_dtype
from atoll.tensors.schema import BUFFERS, FLOATS, PARAMS, Schema, TensorSpec

Tensors = Mapping[str, Tensor]

_BUFFER_NAMES = ("*running_mean", "*running_var", "*num_batches_tracked")
"""What a plain mapping (a file, a state dict) cannot say of itself: the buffers of batch normalisation."""
PLAIN = (Tensor, nn.Parameter)
"""The classes of nearly all tensors: those of a class of its own may keep their elements elsewhere."""


class Told(dict[str, Tensor]):
    """A mapping that comes with a word on which of its tensors are buffers.

    Attributes:
        buffers: name → whether it is one, of those of which it was told.
    """

    def __init__(self, tensors: Tensors, buffers: Mapping[str, bool]) -> None:
        super().__init__(tensors)
        self.buffers = dict(buffers)


class Parameters:
    """Finds the parameter behind an entry of a model's state: by identity, since wrappers change names.

    Activation checkpointing, for one, names parameters differently in `named_parameters` and in `state_dict`. A state
    that was detached is found by its memory.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._by_id = {id(each): each for each in _parameters_of(model)}

    def behind(self, tensor: object) -> nn.Parameter | None:
        """Return the parameter; None for buffers and others."""
        found = self._by_id.get(id(tensor))
        if found is not None or not isinstance(tensor, Tensor) or id(tensor) in self._buffers:
            return found
        return None if is_sharded(tensor) or not tensor.numel() else self._by_memory.get(memory_of(tensor))

    @functools.cached_property
    def _buffers(self) -> set[int]:
        return {id(each) for module in self._model.modules() for each in module._buffers.values()}

    @functools.cached_property
    def _by_memory(self) -> dict[object, nn.Parameter]:
        return {memory_of(each): each for each in self._by_id.values() if each.numel() and not is_sharded(each)}


def _parameters_of(model: nn.Module) -> Iterable[nn.Parameter]:
    """Return those that the model says it has."""
    own = (model.named_parameters, model._named_members)
    if [getattr(each, "__func__", None) for each in own] != [nn.Module.named_parameters, nn.Module._named_members]:
        return [each for _, each in model.named_parameters(remove_duplicate=False)]
    # what that would give, in a third of the time: a model is asked twice in every round
    return [each for module in model.modules() for each in module._parameters.values() if each is not None]


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that travel, under the names by which they travel; tied ones once, by their first name."""
    parameters, names = Parameters(model), dict[int, str]()
    found: dict[str, nn.Parameter] = {}
    for name, tensor in state_of(model).items():
        parameter = parameters.behind(tensor)
        if parameter is not None and names.setdefault(id(parameter), name) == name:
            found[name] = parameter
    return found


def without_ddp(model: nn.Module) -> nn.Module:
    """Return what DistributedDataParallel holds, also where that was compiled; any other model is returned as it is."""
    inner = model
    while _is_compiled(inner):
        inner = inner.get_submodule(_COMPILED)
    return without_ddp(inner.module) if isinstance(inner, nn.parallel.DistributedDataParallel) else model


_COMPILED = "_orig_mod"
"""The name of the module that `torch.compile` has wrapped."""


def _is_compiled(module: nn.Module) -> bool:
    return type(module).__name__ == "OptimizedModule" and _COMPILED in module._modules


def state_of(model: nn.Module) -> dict[str, object]:
    """Return the model's own tensors, under the names that they have where nothing is compiled."""
    state: dict[str, object] = model.state_dict(keep_vars=True)
    if not any(_COMPILED in name for name in state) or not any(map(_is_compiled, model.modules())):
        return state
    return {".".join(part for part in name.split(".") if part != _COMPILED): value for name, value in state.items()}


_WRAPPERS = (_COMPILED, "_checkpoint_wrapped_module")
"""Names of what `torch.compile` and activation checkpointing put between a module and its parameters."""


def unwrapped(tensors: Tensors, known: Container[str] = ()) -> Tensors:
    """Return a mapping under the names that its tensors have where nothing is compiled or checkpointed.

    Args:
        known: names that stay as they are.

    Raises:
        UsageError: two names become one.
    """
    found: dict[str, str] = {}
    for name in tensors:
        *parents, last = name.split(".") if name not in known else [name]
        plain = ".".join([*(part for part in parents if part not in _WRAPPERS), last])
        if (other := found.setdefault(plain, name)) != name:
            raise UsageError(
                f"{other!r} and {name!r} are both {plain!r} where nothing is compiled or checkpointed.",
                "Give the tensors of one model, each once.",
            )
    if all(plain == name for plain, name in found.items()):
        return tensors
    return {plain: tensors[name] for plain, name in found.items()}


def named_tensors(
    model: nn.Module | Tensors, *, values: bool = True, sharded: bool = False
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors that travel, each once, and the further names of tied ones.

    Args:
        model: a module (its `state_dict` decides the names), or a mapping name → tensor.
        values: whether they must have values; else tensors on the meta device will do.
        sharded: whether they may be DTensors; `atoll.tensors.fsdp_shards` knows what to make of those.

    Returns:
        (name → the model's own tensor, further name → owner's name).

    Raises:
        UsageError: an entry is not a dense tensor of a dtype that travels; it is named.
    """
    owners, aliases = _owned(model, values=values, sharded=sharded)
    return {name: tensor.detach() for name, tensor in owners.items()}, aliases


def _owned(model: nn.Module | Tensors, *, values: bool, sharded: bool) -> tuple[dict[str, Tensor], dict[str, str]]:
    """As `named_tensors`, with the very objects that the model holds."""
    require_model(model)
    state: Mapping[str, object] = state_of(model) if isinstance(model, nn.Module) else model
    owners: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    begin_at: dict[int, list[str]] = {}  # where in memory → which owners
    for name, tensor in state.items():
        if name.endswith("_extra_state") and isinstance(model, nn.Module) and not isinstance(tensor, Tensor):
            continue
        _require_dense(name, tensor, values, sharded)
        assert isinstance(tensor, Tensor)
        there = begin_at.setdefault(_begin(tensor), [])
        owner = next((each for each in there if _is_tied(tensor, state[each])), None) if there else None
        if owner is not None:
            aliases[name] = owner
            continue
        there.append(name)
        owners[name] = tensor
    return owners, aliases


def schema_of(
    model: nn.Module | Tensors, buffers: Iterable[str] = (), *, values: bool = True, sharded: bool = False
) -> Schema:
    """Return the schema of a model.

    Args:
        model: as `named_tensors`.
        buffers: shell patterns of further names that are averaged as buffers rather than stepped.
        values, sharded: as `named_tensors`.

    Returns:
        Parameters of a float dtype in the group `params`, everything else in `buffers`. Of a plain mapping's tensors
        those are buffers of which it was told so; else the names of batch normalisation are known.
    """
    owners, aliases = _owned(model, values=values, sharded=sharded)
    told: Mapping[str, bool] = model.buffers if isinstance(model, Told) else {}
    if isinstance(model, nn.Module):
        parameters = Parameters(model)
        told = {name: parameters.behind(tensor) is None for name, tensor in owners.items()}
    patterns = tuple(buffers)

    def group(name: str, dtype: str) -> str:
        is_buffer = told[name] if name in told else _matches(name, _BUFFER_NAMES)
        return BUFFERS if is_buffer or dtype not in FLOATS or _matches(name, patterns) else PARAMS

    specs = []
    for name, tensor in owners.items():
        dtype = dtype_name(tensor.dtype)
        specs.append(TensorSpec(name, dtype, tuple(tensor.shape), group(name, dtype)))
    return Schema.build(specs, aliases)


def fits(model: nn.Module | Tensors, schema: Schema) -> dict[str, Tensor] | None:
    """Return the tensors of a model that has this schema, ten times faster than `schema_of`; None: it may have another.

    A mapping cannot say which of its tensors are buffers, nor which are tied: what the schema says is taken over.
    """
    tensors, aliases = _owned(model, values=True, sharded=False)
    parameters = None
    if isinstance(model, nn.Module):
        if tuple(sorted(aliases.items())) != schema.aliases:
            return None
        parameters = Parameters(model)
    else:
        tied = dict(schema.aliases)
        tensors = {name: tensor for name, tensor in tensors.items() if name not in tied}
    if len(tensors) != len(schema.tensors):
        return None
    for spec in schema.tensors:
        tensor = tensors.get(spec.name)
        if tensor is None or tensor.shape != spec.shape or tensor.dtype != torch_dtype(spec.dtype):
            return None
        is_parameter = parameters is not None and parameters.behind(tensor) is not None
        if parameters is not None and (spec.group == PARAMS) != (is_parameter and spec.is_float):
            return None
    return {name: tensor.detach() for name, tensor in tensors.items()}


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def _begin(tensor: Tensor) -> int:
    """Return where it begins in memory; tied tensors agree in it, and few others do."""
    if is_sharded(tensor):  # here it may have no elements, and so no address: tied ones are one parameter
        return id(tensor)
    return tensor.data_ptr() or tensor.untyped_storage()._cdata


def _is_tied(tensor: Tensor, owner: object) -> bool:
    """Return whether two that begin at the same place are one; those that hold nothing have nothing to share."""
    if not isinstance(owner, Tensor) or tensor.numel() == 0:
        return False
    if is_sharded(tensor) or is_sharded(owner):
        return tensor is owner
    return memory_of(tensor) == memory_of(owner)


def memory_of(tensor: Tensor) -> tuple[object, ...]:
    """Return what two tensors have in common if they are the same elements of one memory, on any device."""
    where: object = tensor.data_ptr()
    if not where:  # of a device that tells no addresses (meta, XLA), but the object that stands for the memory
        where = (tensor.untyped_storage()._cdata, tensor.storage_offset())
    return (tensor.device, where, tuple(tensor.shape), tensor.stride(), tensor.dtype)


def is_sharded(tensor: Tensor) -> bool:
    """Return whether it is a DTensor, a class that takes long to import."""
    return type(tensor) not in PLAIN and hasattr(tensor, "placements")


def _require_dense(name: str, tensor: object, values: bool, sharded: bool) -> None:
    if not isinstance(tensor, Tensor):
        raise UsageError(f"{name!r} is a {type(tensor).__name__}, not a tensor.", "Leave it out of the mapping.")
    odd = tensor.is_quantized or tensor.is_nested or tensor.layout != torch.strided
    if type(tensor) in PLAIN and not (odd or tensor.is_meta):
        return  # nearly all of them
    if odd:
        layout = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        what = "quantised" if tensor.is_quantized else layout
        raise UsageError(f"{name!r} is a {what} tensor, which does not travel.", "Convert it to a dense one first.")
    if is_sharded(tensor) and not sharded:
        raise UsageError(
            f"{name!r} is a DTensor.",
            "Sharded models train with atoll.DiLoCo; elsewhere call full_tensor() on it first.",
        )
    if values and tensor.is_meta:
        raise UsageError(f"{name!r} is on the meta device: it has no values.", "Call model.to_empty(device=...) first.")
