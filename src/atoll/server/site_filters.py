"""Which of the server's filters are whose: from the run file, or from a program."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from atoll import registry
from atoll.config import Settings
from atoll.errors import ConfigError, UsageError
from atoll.filters.base import Filter, require_filters

Given = Sequence[Filter] | Mapping[str, Sequence[Filter]]
"""Filters for every site, or by the name of a site."""


class SiteFilters:
    """Which filters each site's updates pass through; each site has copies of its own, since filters keep state.

    Args:
        settings: `task_result_filters`, in their order.
        given: by a program, in place of these.

    Raises:
        ConfigError: an entry is not understood. UsageError: what a program gave is no filter, or both are there.
    """

    def __init__(self, settings: Settings, given: Given = ()) -> None:
        if given and settings.task_result_filters:
            raise UsageError("Server got filters, and its settings have task_result_filters.", "Give one of them.")
        if given:
            by_site: Mapping[str, Sequence[Filter]] = given if isinstance(given, Mapping) else {"": given}
            self._entries = [
                (each, frozenset([site] if site else []))
                for site, filters in by_site.items()
                for each in require_filters(filters)
            ]
        else:
            self._entries = [_made(entry) for entry in settings.task_result_filters]
        self._of: dict[str, tuple[Filter, ...]] = {}

    def __bool__(self) -> bool:
        return bool(self._entries)

    def __str__(self) -> str:
        """Which filter is whose, for the log."""
        return ", ".join(
            f"{each!r} of {', '.join(sorted(sites)) if sites else 'every site'}" for each, sites in self._entries
        )

    def of(self, site: str) -> tuple[Filter, ...]:
        """Those of one site, in their order."""
        found = self._of.get(site)
        if found is None:
            mine = [copy.copy(each) for each, sites in self._entries if not sites or site in sites]
            found = self._of.setdefault(site, tuple(mine))
        return found


def _made(entry: Mapping[str, Any]) -> tuple[Filter, frozenset[str]]:
    path, args, sites = entry.get("path"), entry.get("args", {}), entry.get("sites", [])
    understood = isinstance(path, str) and isinstance(args, Mapping | list) and isinstance(sites, list)
    if not understood or not entry.keys() <= {"path", "args", "sites"}:
        raise ConfigError(
            f"task_result_filters has {dict(entry)!r}, which is not understood.",
            'Write {path = "norm_clip", args = {max_norm = 1.0}, sites = ["clinic-a"]}; args and sites are optional.',
        )
    made = registry.load("filters", str(path))
    try:
        filter_ = made(*args) if isinstance(args, list) else made(**args)
    except TypeError as error:
        raise ConfigError(
            f"task_result_filters: {path!r} with args = {args!r}: {error}.", "Give the arguments that it has."
        ) from error
    if not isinstance(filter_, Filter):
        raise ConfigError(
            f"task_result_filters: {path!r} makes a {type(filter_).__name__}, which is no filter.",
            "Derive it from atoll.filters.Filter.",
        )
    return filter_, frozenset(map(str, sites))
