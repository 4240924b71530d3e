"""The settings of a run that are in effect, each with its source."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from atoll.algorithms.resolve import ResolvedAlgorithm
from atoll.config import Settings
from atoll.config.run_file import source_of, to_toml
from atoll.config.settings import FIELDS, GROUPS, default_of
from atoll.format_text import without_credentials
from atoll.protocol.status_messages import SettingInEffect
from atoll.rounds.state import Rules


def settings_in_effect(settings: Settings, algorithm: ResolvedAlgorithm | None) -> Iterator[tuple[str, Any, str]]:
    """Yield each setting as (`group.key`, value in effect, source), in the order of the groups.

    Args:
        settings: the settings, which know what has set them.
        algorithm: the run's algorithm, which has defaults of its own; None if the run has none.
    """
    chosen = chosen_by(algorithm, settings) if algorithm is not None else {}
    values = settings.by_key() | chosen
    for key in sorted(values, key=lambda key: list(GROUPS).index(key.partition(".")[0])):
        default = f"default of {settings.algorithm}" if key in chosen else "default"
        if key in FIELDS and key not in chosen and values[key] != default_of(key):
            default = "the program"
        yield key, values[key], source_of(key, settings.source) or default


def setting_shown(key: str, value: Any, source: str) -> SettingInEffect:
    """Return a setting as a message: its value as TOML."""
    return SettingInEffect(key=key, value="" if value is None else without_credentials(to_toml(value)), source=source)


def chosen_by(algorithm: ResolvedAlgorithm, settings: Settings) -> dict[str, Any]:
    """Return the settings with defaults that depend on the algorithm: `group.key` → value in effect, often the user's.

    Tables that the user gave by `path` are left out.
    """
    values: dict[str, Any] = {f"algorithm.{option}": value for option, value in (algorithm.local or {}).items()}
    values["rounds.min_sites"] = Rules.from_settings(settings, needs_all=algorithm.needs_all).min_sites
    tables: dict[str, dict[str, Any]] = {
        "aggregation.reducer": {"name": str(algorithm.reducer), **algorithm.reducer_options},
        "aggregation.upload_codec": {"name": str(algorithm.codec), **algorithm.codec_options},
    }
    if not settings.async_.momentum_every:  # else the outer optimizer is made of both
        tables["algorithm.outer_optimizer"] = {"name": algorithm.outer_name, **algorithm.outer_options}
    return values | {key: table for key, table in tables.items() if not settings.at(key).path}
