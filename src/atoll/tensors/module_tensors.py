"""Find the named tensors of a model, and describe them as a schema. Tensors are not copied."""

from __future__ import annotations

import fnmatch
import functools
import logging
from collections.abc import Container, Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from atoll.errors import UsageError
from atoll.tensors.arrays import require_model
from atoll.tensors.dtypes import dtype_name, torch_dtype
from atoll.tensors.schema import BUFFERS, FLOATS, PARAMS, Schema, TensorSpec

LOG = logging.getLogger("atoll")

Tensors = Mapping[str, Tensor]

_BUFFER_NAMES = ("*running_mean", "*running_var", "*num_batches_tracked")
"""Names of batch normalisation's buffers. In a plain mapping (a file, a state dict), buffers are known only by name."""
PLAIN = (Tensor, nn.Parameter)
"""The usual classes of tensors. Tensors of other classes may keep their elements elsewhere."""
GRADIENTS = ("grad", "main_grad", "decoupled_grad")
"""Attributes in which optimizers look for a parameter's gradient: torch's, Megatron's and Transformer Engine's."""
_OTHER_GRADIENTS = frozenset(GRADIENTS) - {"grad"}


class Marked(dict[str, Tensor]):
    """The tensors of a model by name, marked as buffers or parameters. For example, the content of a model file.

    Attributes:
        buffers: name → whether the tensor is a buffer. For a name that is missing here, this is unknown.
    """

    def __init__(self, tensors: Tensors, buffers: Mapping[str, bool]) -> None:
        super().__init__(tensors)
        self.buffers = dict(buffers)


class Parameters:
    """Finds the parameter of a model that belongs to an entry of its `state_dict`.

    Objects are compared, not names, because wrappers change names. For example, activation checkpointing names
    parameters differently in `named_parameters` and in `state_dict`. An entry that was detached from its parameter is
    recognised by its memory.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._by_id = {id(each): each for each in _parameters_of(model)}

    def parameter_of(self, tensor: object) -> nn.Parameter | None:
        """Return the parameter for this entry of the `state_dict`; None if the entry is a buffer or something else."""
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
    """Return the model's parameters. Tied ones may occur twice.

    If the model's class overrides how torch finds parameters, use `model.named_parameters`.
    """
    own = (model.named_parameters, model._named_members)
    if [getattr(each, "__func__", None) for each in own] != [nn.Module.named_parameters, nn.Module._named_members]:
        return [each for _, each in model.named_parameters(remove_duplicate=False)]
    # the same result in a third of the time, because this runs twice in every round
    return [each for module in model.modules() for each in module._parameters.values() if each is not None]


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return name → parameter, with the names that Atoll sends: those of `state_dict`, without compile prefixes.

    A tied parameter occurs once, under its first name.
    """
    parameters, names = Parameters(model), dict[int, str]()
    found: dict[str, nn.Parameter] = {}
    for name, tensor in state_of(model).items():
        parameter = parameters.parameter_of(tensor)
        if parameter is not None and names.setdefault(id(parameter), name) == name:
            found[name] = parameter
    return found


def without_ddp(model: nn.Module) -> nn.Module:
    """Return the module inside a (possibly compiled) `DistributedDataParallel`; return other models unchanged."""
    inner = model
    while _is_compiled(inner):
        inner = inner.get_submodule(_COMPILED)
    return without_ddp(inner.module) if isinstance(inner, nn.parallel.DistributedDataParallel) else model


_COMPILED = "_orig_mod"
"""The attribute of `torch.compile`'s wrapper that holds the original module."""


def _is_compiled(module: nn.Module) -> bool:
    return type(module).__name__ == "OptimizedModule" and _COMPILED in module._modules


def state_of(model: nn.Module) -> dict[str, object]:
    """Return the model's `state_dict` with the model's own tensors, without `torch.compile`'s prefix in the names."""
    state: dict[str, object] = model.state_dict(keep_vars=True)
    if not any(_COMPILED in name for name in state) or not any(map(_is_compiled, model.modules())):
        return state
    return {".".join(part for part in name.split(".") if part != _COMPILED): value for name, value in state.items()}


_WRAPPERS = (_COMPILED, "_checkpoint_wrapped_module")
"""Attributes of the wrappers of `torch.compile` and activation checkpointing that hold the wrapped module."""


def unwrapped(tensors: Tensors, known: Container[str] = ()) -> Tensors:
    """Remove the prefixes of `torch.compile` and activation checkpointing from the names of a mapping.

    Args:
        tensors: name → tensor.
        known: names that stay unchanged.

    Raises:
        UsageError: two names would become the same.
    """
    found: dict[str, str] = {}
    for name in tensors:
        *parents, last = name.split(".") if name not in known else [name]
        plain = ".".join([*(part for part in parents if part not in _WRAPPERS), last])
        if (other := found.setdefault(plain, name)) != name:
            raise UsageError(
                f"{other!r} and {name!r} both become {plain!r} when the prefixes of torch.compile and activation "
                "checkpointing are removed.",
                "Pass the tensors of one model, each only once.",
            )
    if all(plain == name for plain, name in found.items()):
        return tensors
    return {plain: tensors[name] for plain, name in found.items()}


def named_tensors(model: nn.Module | Tensors, *, sharded: bool = False) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return a model's tensors, each once, and the further names of tied tensors.

    Args:
        model: a module; the names are those of its `state_dict`. Or a mapping name → tensor.
        sharded: whether DTensors are allowed. `atoll.tensors.fsdp_shards` handles them.

    Returns:
        (name → the model's own tensor, detached; further name → owner's name).

    Raises:
        UsageError: an entry is not a dense tensor. The message names the entry.
    """
    owners, aliases = _owned(model, values=True, sharded=sharded)
    return {name: tensor.detach() for name, tensor in owners.items()}, aliases


def _owned(model: nn.Module | Tensors, *, values: bool, sharded: bool) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return what `named_tensors` returns, but not detached. Allow tensors on the meta device if `values` is False."""
    require_model(model)
    state: Mapping[str, object] = state_of(model) if isinstance(model, nn.Module) else model
    owners: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    begin_at: dict[int, list[str]] = {}  # address in memory → names of the owners that begin there
    for name, tensor in state.items():
        if name.endswith("_extra_state") and isinstance(model, nn.Module) and not isinstance(tensor, Tensor):
            _say_left_out(name)
            continue
        _require_dense(name, tensor, values, sharded)
        assert isinstance(tensor, Tensor)
        same_begin = begin_at.setdefault(_begin(tensor), [])
        owner = next((each for each in same_begin if _is_tied(tensor, state[each])), None) if same_begin else None
        if owner is not None:
            aliases[name] = owner
            continue
        same_begin.append(name)
        owners[name] = tensor
    return owners, aliases


@functools.cache  # once in a process for each name, because every round looks for the tensors
def _say_left_out(name: str) -> None:
    LOG.warning(
        "%s is not sent and not exported, because its get_extra_state returns no tensor. To share it, return a tensor; "
        "load an export with strict=False.",
        name,
    )


def schema_of(
    model: nn.Module | Tensors, buffers: Iterable[str] = (), *, values: bool = True, sharded: bool = False
) -> Schema:
    """Return the schema of a model.

    Args:
        model: a module, or a mapping name → tensor.
        buffers: shell patterns of parameter names. Matching parameters are treated as buffers: the server averages
            their values, and the outer optimizer does not step them. A pattern may match any name of a tied parameter.
        values: whether tensors must have values. If False, tensors on the meta device are allowed.
        sharded: whether DTensors are allowed.

    Returns:
        The schema: float parameters are in the group `params`, all other tensors in `buffers`. In a mapping,
        `Marked.buffers` decides. For a name without an entry there, the tensor is a buffer if batch normalisation uses
        this name for a buffer, else a parameter.
    """
    owners, aliases = _owned(model, values=values, sharded=sharded)
    is_buffer_of: Mapping[str, bool] = model.buffers if isinstance(model, Marked) else {}
    if isinstance(model, nn.Module):
        parameters = Parameters(model)
        is_buffer_of = {name: parameters.parameter_of(tensor) is None for name, tensor in owners.items()}
    patterns = tuple(buffers)
    declared = {aliases.get(name, name) for name in (*owners, *aliases) if _matches(name, patterns)}

    def group(name: str, dtype: str) -> str:
        is_buffer = is_buffer_of[name] if name in is_buffer_of else _matches(name, _BUFFER_NAMES)
        return BUFFERS if is_buffer or dtype not in FLOATS or name in declared else PARAMS

    specs = []
    for name, tensor in owners.items():
        dtype = dtype_name(tensor.dtype)
        specs.append(TensorSpec(name, dtype, tuple(tensor.shape), group(name, dtype)))
    return Schema.build(specs, aliases)


def fits(model: nn.Module | Tensors, schema: Schema) -> dict[str, Tensor] | None:
    """Return the tensors of a model if its schema is like `schema`. This is ten times faster than `schema_of`.

    If the model is a mapping, only names, shapes and dtypes are compared, because a mapping does not show which tensors
    are buffers or tied. Tensors that the site keeps for itself are not compared.

    Returns:
        name → tensor, detached; None if the schema may be different.
    """
    tensors, aliases = _owned(model, values=True, sharded=False)
    parameters = None
    if isinstance(model, nn.Module):
        if not aliases.items() >= {*schema.aliases}:  # the run may lack a further name of a tied tensor
            return None
        parameters = Parameters(model)
    else:
        tied = dict(schema.aliases)
        tensors = {name: tensor for name, tensor in tensors.items() if name not in tied}
    if len(tensors.keys() - schema.kept) != len(schema.tensors) - len(schema.kept):
        return None
    for spec in schema.tensors:
        if spec.is_kept:
            continue
        tensor = tensors.get(spec.name)
        if tensor is None or tensor.shape != spec.shape or tensor.dtype != torch_dtype(spec.dtype):
            return None
        is_parameter = parameters is not None and parameters.parameter_of(tensor) is not None
        if parameters is not None and (spec.group == PARAMS) != (is_parameter and spec.is_float):
            return None
    return {name: tensor.detach() for name, tensor in tensors.items()}


def put_(model: nn.Module | Tensors, values: Tensors) -> None:
    """Give tensors of a model other values, in place if a tensor has the value's shape, else as a new buffer.

    The extra state of a module is passed to its method `set_extra_state`.

    Args:
        model: a module, or a dict name → tensor.
        values: name → value, which a new buffer uses without a copy. Names that the model lacks are ignored.

    Raises:
        UsageError: a parameter has another shape.
    """
    state = state_of(model) if isinstance(model, nn.Module) else model
    with torch.no_grad():
        for name, value in values.items():
            tensor = state.get(name)
            if not isinstance(tensor, Tensor):
                continue
            if isinstance(model, nn.Module) and is_extra_state(name):
                _module_at(model, name).set_extra_state(value)
            elif tensor.shape == value.shape:
                tensor.copy_(value)
            elif isinstance(model, dict):
                model[name] = value
            elif isinstance(model, nn.Module):
                _replace(model, name, tensor, value.to(tensor.device))


def is_extra_state(name: str) -> bool:
    """Return whether an entry of a `state_dict` is what a module's `get_extra_state` returned."""
    return name.rpartition(".")[2] == "_extra_state"


def _module_at(model: nn.Module, name: str) -> nn.Module:
    """Return the module that has the `state_dict` entry `name`, which has no compile prefixes."""
    path = name.split(".")[:-1]
    module: nn.Module = next(
        module
        for found, module in model.named_modules(remove_duplicate=False)
        if [part for part in found.split(".") if part not in ("", _COMPILED)] == path and not _is_compiled(module)
    )
    return module


def _replace(model: nn.Module, name: str, tensor: Tensor, value: Tensor) -> None:
    for module in model.modules():
        for leaf, buffer in module._buffers.items():
            if buffer is tensor:
                module._buffers[leaf] = value
                return
    raise UsageError(
        f"The parameter {name!r} of this site has the shape {tuple(tensor.shape)}, but the site has kept it with the "
        f"shape {tuple(value.shape)}.",
        "Build the same model as before, or join with another folder.",
    )


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def _begin(tensor: Tensor) -> int:
    """Return a number for the tensor's address in memory. The number is equal for tied tensors, rarely for others."""
    if is_sharded(tensor):  # this rank's shard may be empty, without an address; tied DTensors are one parameter
        return id(tensor)
    return tensor.data_ptr() or tensor.untyped_storage()._cdata


def _is_tied(tensor: Tensor, owner: object) -> bool:
    """Return whether two tensors with the same address are the same tensor. Empty tensors are never tied."""
    if not isinstance(owner, Tensor) or tensor.numel() == 0:
        return False
    if is_sharded(tensor) or is_sharded(owner):
        return tensor is owner
    return memory_of(tensor) == memory_of(owner)


def gradients_of(parameter: Tensor) -> list[Tensor]:
    """Return the gradients of a parameter: `grad`, and those elsewhere, such as Megatron's `main_grad`; each once.

    Only the thread that trains the model may call this.
    """
    attributes = parameter.__dict__
    if type(parameter) in PLAIN and (not attributes or _OTHER_GRADIENTS.isdisjoint(attributes)):
        return [] if parameter.grad is None else [parameter.grad]
    held = {id(each): each for each in (getattr(parameter, key, None) for key in GRADIENTS) if isinstance(each, Tensor)}
    if len(held) < 2:
        return list(held.values())
    return list({memory_of(each): each for each in held.values() if each.layout == torch.strided}.values())


def memory_of(tensor: Tensor) -> tuple[object, ...]:
    """Return a key that is equal for two tensors if they have the same elements in the same memory, on any device."""
    where: object = tensor.data_ptr()
    if not where:  # the device has no addresses (meta, XLA): use the id of its storage object
        where = (tensor.untyped_storage()._cdata, tensor.storage_offset())
    return (tensor.device, where, tuple(tensor.shape), tensor.stride(), tensor.dtype)


def is_sharded(tensor: Tensor) -> bool:
    """Return whether a tensor is a DTensor, without importing that class, because the import is slow."""
    return type(tensor) not in PLAIN and hasattr(tensor, "placements")


def is_expanded(tensor: Tensor) -> bool:
    """Return whether elements of a tensor share memory, as after `expand()`. Such tensors cannot be filled in place."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.numel() > 0 and any(size > 1 and not step for size, step in sizes)


def _require_dense(name: str, tensor: object, values: bool, sharded: bool) -> None:
    if not isinstance(tensor, Tensor):
        raise UsageError(f"{name!r} is of type {type(tensor).__name__}, not a tensor.", "Leave it out of the mapping.")
    if is_lazy(tensor):
        raise UsageError(f"{name!r} is a lazy tensor, which has no shape yet.", "Call the model once, on one sample.")
    odd = tensor.is_quantized or tensor.is_nested or tensor.layout != torch.strided
    if type(tensor) in PLAIN and not (odd or tensor.is_meta):
        return  # the fast path for nearly all tensors
    if odd:
        layout = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        what = "quantised" if tensor.is_quantized else layout
        raise UsageError(f"{name!r} is a {what} tensor, which Atoll cannot send.", "Make it dense first.")
    if is_sharded(tensor) and not sharded:
        raise UsageError(
            f"{name!r} is a sharded tensor (DTensor), which is not allowed here.",
            "Train sharded models with atoll.DiLoCo; elsewhere call full_tensor() on the tensor first.",
        )
    if values and tensor.is_meta:
        raise UsageError(f"{name!r} is on the meta device: it has no values.", "Call model.to_empty(device=...) first.")
