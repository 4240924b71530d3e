"""The settings that decide the values of a version, in the audit log: by what rules each version was made.

Only what was set is recorded, with the version of Atoll, which has the defaults of the rest.

A server adds an entry `rules` when it starts, if they differ from those of the last such entry. `atoll verify` makes
its plan from them. It never loads code that a state directory names, so it computes no round in which such code took
part.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from typing import Any

from atoll.aggregation.plan import Plan, cpu_capability, torch_build
from atoll.config import Settings
from atoll.config.run_file import flat
from atoll.config.settings import FROZEN
from atoll.registry import Name, label_of, without_arguments
from atoll.store.store import Store
from atoll.tensors.fragments import Split

_GROUPS = ("algorithm", "aggregation", "async", "diloco", "rounds", "swarm")
_CODE_FOR_SITES = ("rounds.config_function",)
"""Code that changes what sites are told, and not how their updates are reduced."""


class CodeNeeded(Exception):
    """Raised if the program's own code made a version. The text says which code."""


def record_rules(plan: Plan, store: Store, *, has_filters: bool) -> None:
    """Add the rules of this start to the audit log, if they are others than before.

    Args:
        plan: the plan of the run.
        store: its store.
        has_filters: whether filters at the server change updates.
    """
    values = flat(plan.settings.model_dump(mode="json", by_alias=True, exclude_unset=True, fallback=_name_of))
    kept = {
        key: value
        for key, value in values.items()
        if (key in FROZEN or key.partition(".")[0] in _GROUPS) and key not in _CODE_FOR_SITES
    }
    code = [] if isinstance(plan.algorithm.outer, Name) else ["an outer optimizer that its program passed"]
    code += ["filters at the server"] if has_filters else []
    rules = {"settings": kept, "code": code, **made_by()}
    last = store.journal.rows("SELECT detail_json FROM audit WHERE what = 'rules' ORDER BY seq DESC LIMIT 1")
    if not last or json.loads(last[0][0]) != json.loads(json.dumps(rules)):
        with store.journal.transaction():
            store.audit.append("rules", **rules)


@functools.cache
def made_by() -> dict[str, str]:
    """Return what decides the bits of a version beside its settings: Atoll with its defaults, torch, and the CPU."""
    return {"atoll": version("atoll"), "torch": torch_build(), "cpu": cpu_capability()}


def _name_of(value: object) -> str:
    """Return the name of code that a program passed in a setting, in the form that settings in a file name code."""
    return f"{getattr(without_arguments(value), '__module__', '')}:{label_of(value)}"


def recorded_plan(rules: Mapping[str, Any], split: Split, number: int) -> Plan:
    """Return the plan of a round, by the rules in effect when its version was made.

    Args:
        rules: the values of an entry `rules` of the audit log.
        split: the model's schema and fragments.
        number: number of the round.

    Raises:
        CodeNeeded: the program's own code took part.
        ConfigError: a component of the run is not installed here.
    """
    if code := [*rules["code"], *_code_in(rules["settings"])]:
        raise CodeNeeded(", ".join(code))
    return Plan.make(Settings.build(rules["settings"]), split).with_codec_of(number).of_round(number)


def _code_in(value: Any) -> Iterator[str]:
    """Yield the texts in settings that may name code, such as `module:attribute`."""
    if isinstance(value, str) and ":" in value:
        yield value
    elif isinstance(value, Mapping | list):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _code_in(each)
