"""The rules of buffers: how the server makes the next value of each buffer from the values of the sites.

    mean     the weighted mean; of integers, their maximum  running statistics, and other floats
    max      the largest value                              counters, and other integers
    sum      the value plus the changes of all sites        counts over all sites
    first    the value of the first site, by name           flags, masks, generator states, unit vectors, Inf
    keep     each site's own value, which is never sent     batch normalisation in FedBN; tensors without elements

The setting `model.buffers` maps patterns of names to rules. For other buffers, `_usual` chooses one. In a schema, the
rule is part of a tensor's group, so every place that aggregates knows it. A float buffer that starts as zeros and ones
may be a flag or a statistic, so its rule `flags` decides by the values: `first` while they are 0 or 1, else `mean`.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from atoll.errors import ConfigError
from atoll.tensors.chunks import is_finite
from atoll.tensors.module_tensors import Tensors, named_tensors, schema_of
from atoll.tensors.schema import BUFFERS, KEPT, PARAMS, Schema, TensorSpec

UNIT = 1e-3
"""Largest difference between 1 and the norm of a unit vector."""

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
        ConfigError: a rule cannot be used for a tensor that its pattern matches.
    """
    schema = schema_of(model, () if isinstance(model, nn.Module) else rules, values=values)
    tensors = named_tensors(model)[0] if values else {}
    quantisers = dict(_of_quantisers(schema.tensors))

    def ruled(spec: TensorSpec) -> TensorSpec:
        rule, value = rule_for(spec, rules), tensors.get(spec.name)
        if spec.group == PARAMS:
            return replace(spec, group=f"{PARAMS}.{rule}") if rule else spec
        if rule:
            _require_usable(spec, rule, value)
        rule = rule or quantisers.get(spec.name) or _usual(spec, value)
        return spec if rule == spec.rule else replace(spec, group=f"{BUFFERS}.{rule}")

    return replace(schema, tensors=tuple(map(ruled, schema.tensors)))


def rule_for(spec: TensorSpec, rules: Mapping[str, str]) -> str | None:
    """Return the rule that the setting `model.buffers` has for a tensor; None if it has none.

    Of all rules, a parameter can have only `keep`, and a tensor that is no float cannot have `mean`.
    """
    rule = next((rule for pattern, rule in rules.items() if fnmatchcase(spec.name, pattern)), None)
    is_parameter = spec.group in (PARAMS, KEPT[0])
    return None if (is_parameter and rule != "keep") or (rule == "mean" and not spec.is_float) else rule


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
    if not spec.is_float:
        return "max"
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


def _is_of_unit_vectors(name: str, value: Tensor) -> bool:
    """Return whether a float buffer holds unit vectors, such as the singular vectors of spectral norm.

    The mean of two unit vectors is shorter than they are.
    """
    if value.dim() < 2 and name.endswith(("_u", "_v")):
        return True
    if value.numel() < 2:
        return False
    wide = value.detach().to(torch.float64)
    dims = {0, value.dim() - 1}
    return any(bool(((torch.linalg.vector_norm(wide, dim=dim) - 1).abs() <= UNIT).all()) for dim in dims)


def described(schema: Schema) -> str:
    """Return a text with the rules of all buffers that are neither running statistics nor counters; empty if none."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for spec in schema.tensors:
        is_counter = spec.name.endswith("num_batches_tracked") and spec.rule == "max"
        if spec.is_kept or (spec.is_buffer and not is_counter and not (is_statistic(spec) and spec.rule == "mean")):
            found[spec.rule].append(spec.name)
    texts = []
    for rule, names in sorted(found.items()):
        more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        texts.append(f"{shown_rule(rule)}: {', '.join(names[:NAMED])}{more}")
    return "; ".join(texts)


def shown_rule(rule: str) -> str:
    """Return the rule of a buffer for messages."""
    return "first (mean where a site's value is neither 0 nor 1)" if rule == "flags" else rule


def without_effect(schema: Schema, rules: Mapping[str, str]) -> Iterator[str]:
    """Yield a warning for each entry of the setting `model.buffers` that sets a rule which its tensors cannot have.

    A pattern may match parameters besides buffers: only one that matches no buffer at all is meant for a parameter.

    Args:
        schema: schema of the run's model.
        rules: pattern of names → rule.
    """
    for pattern, rule in rules.items():
        specs = [spec for spec in schema.tensors if fnmatchcase(spec.name, pattern)]
        if specs and rule != "keep" and all(spec.group in (PARAMS, KEPT[0]) for spec in specs):
            name = repr(specs[0].name)
            yield f'model.buffers sets "{rule}" for {name}, which is a parameter; a parameter can only have "keep"'
        for spec in specs:
            is_first = next(each for each in rules if fnmatchcase(spec.name, each)) == pattern
            if is_first and rule == "mean" and spec.dtype in ("BOOL", "U8"):
                yield (
                    f'model.buffers sets "mean" for {spec.name!r}, but {spec.dtype} has no mean: it keeps the rule '
                    f"{shown_rule(spec.rule)}"
                )
