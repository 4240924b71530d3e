"""The rules of buffers: how the server makes the next value of each buffer from the values of the sites.

    mean     the weighted mean; of integers, their maximum  running statistics, and other floats
    max      the largest value                              counters: integers of one element
    sum      the value plus the changes of all sites        counts over all sites
    first    the value of the first site, by name           flags, masks, other integers, unit vectors, Inf
    keep     each site's own value, which is never sent     batch normalisation in FedBN; tensors without elements

The setting `model.buffers` maps patterns of names to rules. For other buffers, `_usual` chooses one. In a schema, the
rule is part of a tensor's group, so every place that aggregates knows it. A float buffer that starts as zeros and ones
may be a flag or a statistic, so its rule `flags` decides by the values, for the whole buffer: `first` while all values
at all sites are 0 or 1, else `mean`.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from atoll.errors import ConfigError
from atoll.registry import nearest
from atoll.tensors.chunks import is_finite
from atoll.tensors.module_tensors import Tensors, named_tensors, schema_of
from atoll.tensors.schema import BUFFERS, KEPT, PARAMS, Schema, TensorSpec

UNIT = 1e-3
"""Largest difference between 1 and the norm of a unit vector, if its dtype is not coarser."""

NAMED = 8
"""Largest number of buffers that one log line names for each rule."""


def run_schema(model: nn.Module | Tensors, rules: Mapping[str, str], *, values: bool = True) -> Schema:
    """Return the schema of a run's initial model, with the rule of each buffer.

    Args:
        model: the initial model.
        rules: the setting `model.buffers`: pattern of names → rule. The first matching pattern counts. In a mapping, a
            matching tensor is a buffer.
        values: whether the model has values. If not, rules that depend on values are left out.

    Raises:
        ConfigError: a rule cannot be used for a tensor that its pattern matches, or "keep" has no effect.
    """
    schema = schema_of(model, () if isinstance(model, nn.Module) else rules, values=values)
    tensors = named_tensors(model)[0] if values else {}
    require_kept(schema, rules)
    quantisers = dict(_of_quantisers(schema.tensors))

    def ruled(spec: TensorSpec) -> TensorSpec:
        rule, value = rule_for(schema, spec, rules), tensors.get(spec.name)
        if spec.group == PARAMS:
            return replace(spec, group=f"{PARAMS}.{rule}") if rule else spec
        if rule:
            _require_usable(spec, rule, value)
        rule = rule or quantisers.get(spec.name) or _usual(spec, value)
        return spec if rule == spec.rule else replace(spec, group=f"{BUFFERS}.{rule}")

    return replace(schema, tensors=tuple(map(ruled, schema.tensors)))


def rule_for(schema: Schema, spec: TensorSpec, rules: Mapping[str, str]) -> str | None:
    """Return the rule that the setting `model.buffers` has for a tensor; None if it has none.

    A pattern may match any name of a tied tensor. Of all rules, a parameter can have only `keep`, and a tensor that is
    no float cannot have `mean`.

    Args:
        schema: the schema that contains the tensor.
        spec: the tensor.
        rules: pattern of names → rule.
    """
    rule = next((rule for pattern, rule in rules.items() if _matches(schema.names[spec.name], pattern)), None)
    is_parameter = spec.group in (PARAMS, KEPT[0])
    return None if (is_parameter and rule != "keep") or (rule == "mean" and not spec.is_float) else rule


def _matches(names: Iterable[str], pattern: str) -> bool:
    return any(fnmatchcase(name, pattern) for name in names)


def _matched(schema: Schema, rules: Mapping[str, str]) -> Iterator[tuple[str, str, list[TensorSpec], list[TensorSpec]]]:
    """Yield (pattern, rule, the tensors that match it, those of them that match no earlier pattern)."""
    taken: set[str] = set()
    for pattern, rule in rules.items():
        found = [spec for spec in schema.tensors if _matches(schema.names[spec.name], pattern)]
        yield pattern, rule, found, [spec for spec in found if spec.name not in taken]
        taken |= {spec.name for spec in found}


def require_kept(schema: Schema, rules: Mapping[str, str]) -> None:
    """Check that each pattern with the rule `keep` has an effect: otherwise, what should stay at a site would be sent.

    Raises:
        ConfigError: a pattern matches no tensor, or only tensors that earlier patterns match.
    """
    for pattern, rule, found, own in _matched(schema, rules):
        if rule != "keep" or own:
            continue
        if found:
            raise ConfigError(
                f'model.buffers sets "keep" for {pattern!r}, but earlier patterns match all its tensors, for example '
                f"{found[0].name!r}, so they would be sent.",
                "The first matching pattern counts: put this one before the others.",
            )
        raise ConfigError(
            f'model.buffers sets "keep" for {pattern!r}, which matches no tensor of the model.', _near(schema, pattern)
        )


def _near(schema: Schema, pattern: str) -> str:
    names = [name for each in schema.names.values() for name in each]
    return nearest(pattern, names, "Print the names: `[name for name in model.state_dict()]`.")


def _require_usable(spec: TensorSpec, rule: str, value: Tensor | None) -> None:
    """Check that a rule that the settings name can be used for a buffer.

    Raises:
        ConfigError: it cannot; the message says why.
    """
    why = ""
    if rule == "sum" and spec.dtype in ("BOOL", "U8", "I8"):
        why = f"its dtype {spec.dtype} is too small for a sum"
    elif rule in ("mean", "sum") and value is not None and not is_finite(value):
        why = f"it contains NaN or Inf, so its {rule} would, too"
    if why:
        raise ConfigError(
            f'model.buffers sets "{rule}" for {spec.name!r}, but {why}.',
            'Set "first" or "keep" for it, in a pattern before the others.',
        )


def _of_quantisers(specs: Sequence[TensorSpec]) -> Iterator[tuple[str, str]]:
    """Yield (name, rule) of the buffers of torch's observers and fake quantisers, which belong together.

    A scale and a zero point are useful only with the range from which they were computed, so all come from one site. If
    the first batch decides the shape (one scale for each channel), they stay at the site, which computes them anew.
    """
    inside: defaultdict[str, set[str]] = defaultdict(set)
    for spec in specs:
        module, _, leaf = spec.name.rpartition(".")
        inside[module].add(leaf)
    is_one = [
        module
        for module, leaves in inside.items()
        if "fake_quant_enabled" in leaves or {"min_val", "max_val"} <= leaves
    ]
    for module in sorted(is_one, key=len, reverse=True):  # a fake quantiser contains its observer, so it comes later
        prefix = f"{module}." if module else ""
        names = re.compile(rf"{re.escape(prefix)}(activation_post_process\.)?[^.]+")
        own = [spec for spec in specs if spec.group != PARAMS and names.fullmatch(spec.name)]
        rule = "first" if all(spec.numel for spec in own) else "keep"
        yield from ((spec.name, rule) for spec in own)


def _usual(spec: TensorSpec, value: Tensor | None) -> str:
    """Return the rule of a buffer for which the settings name none.

    Args:
        spec: the buffer.
        value: its value in the initial model; None if it is not known.
    """
    if not spec.numel:
        return "keep"  # the first batch decides the shape, which may differ between sites
    if spec.dtype in ("BOOL", "U8"):
        return "first"
    if not spec.is_float:  # several integers are seldom counters, but often a queue, indices, or a generator's state
        return "max" if spec.numel == 1 or is_counter(spec) else "first"
    if value is None or bool(value.isnan().any()):  # NaN is refused
        return "mean"
    if not is_finite(value):
        return "first"
    if is_statistic(spec):
        return "mean"
    if _is_of_unit_vectors(spec.name, value):
        return "first"
    wide = value.to(torch.float32)  # torch compares no 8-bit floats
    return "flags" if bool(((wide == 0) | (wide == 1)).all()) else "mean"


def is_statistic(spec: TensorSpec) -> bool:
    """Return whether a buffer is a float running statistic by its name, such as those of batch normalisation."""
    return spec.is_float and spec.name.rpartition(".")[2].startswith(("running_", "moving_"))


def is_counter(spec: TensorSpec) -> bool:
    """Return whether a buffer is a counter of batches by its name, as in batch normalisation."""
    return not spec.is_float and spec.name.endswith("num_batches_tracked")


def _is_of_unit_vectors(name: str, value: Tensor) -> bool:
    """Return whether a float buffer holds unit vectors, along any of its dimensions, or several of them together.

    The mean of two unit vectors is shorter than they are. Singular vectors, as of spectral norm, are such vectors.
    """
    if value.dim() < 2 and name.endswith(("_u", "_v")):
        return True
    wide, most = value.detach().to(torch.float64), max(UNIT, torch.finfo(value.dtype).eps / 2)
    dims = [dim for dim, size in enumerate(value.shape) if size > 1]  # along a size of 1, every ±1 would be a vector
    chosen = itertools.chain.from_iterable(itertools.combinations(dims, count + 1) for count in range(len(dims)))
    return any(bool(((torch.linalg.vector_norm(wide, dim=dim) - 1).abs() <= most).all()) for dim in chosen)


def described(schema: Schema) -> str:
    """Return a text with the rules of all buffers that are neither running statistics nor counters; empty if none."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for spec in schema.tensors:
        is_usual = (is_counter(spec) and spec.rule == "max") or (is_statistic(spec) and spec.rule == "mean")
        if spec.is_kept or (spec.is_buffer and not is_usual):
            found[spec.rule].append(spec.name)
    return "; ".join(f"{shown_rule(rule)}: {_some(names)}" for rule, names in sorted(found.items()))


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")


def shown_rule(rule: str) -> str:
    """Return the rule of a buffer for messages."""
    return "first (mean if a site has a value that is neither 0 nor 1)" if rule == "flags" else rule


def without_effect(schema: Schema, rules: Mapping[str, str]) -> Iterator[str]:
    """Yield a warning for each entry of the setting `model.buffers` that has no effect on tensors that it matches.

    A pattern may match parameters besides buffers: only one that matches no buffer at all is meant for a parameter.

    Args:
        schema: schema of the run's model.
        rules: pattern of names → rule.
    """
    for pattern, rule, found, own in _matched(schema, rules):
        if not found:
            yield f"model.buffers contains {pattern!r}, which matches no tensor of the model. {_near(schema, pattern)}"
        elif not own:
            yield f'model.buffers sets "{rule}" for {pattern!r}, but earlier patterns match all its tensors'
        elif rule != "keep" and all(spec.group in (PARAMS, KEPT[0]) for spec in found):
            name = repr(own[0].name)
            yield f'model.buffers sets "{rule}" for {name}, which is a parameter; a parameter can only have "keep"'
        elif rule == "mean":
            unable: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
            for spec in own:
                if not spec.is_float:
                    unable[spec.dtype, spec.rule].append(repr(spec.name))
            for (dtype, usual), names in unable.items():
                keeps = "it keeps" if len(names) == 1 else "they keep"
                text = f"{dtype} has no mean: {keeps} the rule {shown_rule(usual)}"
                yield f'model.buffers sets "mean" for {_some(names)}, but {text}'
