"""The server's filters for each site and task, from the run file or from a program."""

from __future__ import annotations

import copy
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

from atoll import registry
from atoll.config import Settings, filter_of
from atoll.errors import ConfigError, UsageError
from atoll.filters.base import ByTask, Filter, for_tasks

LOG = logging.getLogger("atoll.server")

Given = Sequence[Filter] | Mapping[str, ByTask]
"""Filters that a program passes: a list for all sites, or site → list for all tasks, or site → task → list."""

Setting = Literal["workflow.result_filters", "workflow.payload_filters"]

_ARGUMENT = {"workflow.result_filters": "filters", "workflow.payload_filters": "data_filters"}
"""Setting → argument of `Server` that replaces it."""

_Entry = tuple[Filter, frozenset[str], frozenset[str]]
"""A filter, its sites and its tasks; an empty set means all."""


class SiteFilters:
    """The filters of each site, either for what the site sends or for the task payloads that it gets.

    Each site gets its own copies of the filters, because filters keep state.

    Args:
        settings: the run's settings. The value of `setting` lists the filters in the order of application.
        given: filters that a program passes in place of the setting.
        setting: `workflow.result_filters` for what sites send, `workflow.payload_filters` for payloads to sites.

    Raises:
        ConfigError: an entry of the setting is malformed.
        UsageError: `given` has an object that is not a filter, or both `given` and the setting have filters.
    """

    def __init__(self, settings: Settings, given: Given = (), setting: Setting = "workflow.result_filters") -> None:
        entries: tuple[dict[str, Any], ...] = settings.at(setting)
        if given and entries:
            raise UsageError(f"Server got {_ARGUMENT[setting]}, but its settings have {setting}.", "Use one of them.")
        self._setting, self._warned_of = setting, set[str]()
        self._entries = [_construct(entry, setting) for entry in entries]
        by_site: Mapping[str, ByTask] = given if isinstance(given, Mapping) else {"": given}
        for site, filters in by_site.items():
            sites = frozenset([site] if site else [])
            self._entries += [(each, sites, tasks) for each, tasks in for_tasks(filters)]
        self._of: dict[str, list[_Entry]] = {}

    def __bool__(self) -> bool:
        return bool(self._entries)

    def __str__(self) -> str:
        """Describe each filter with its sites and tasks, for the log."""
        return ", ".join(
            f"{each!r} of {', '.join(sorted(sites)) if sites else 'every site'}"
            + (f" in {', '.join(sorted(tasks))}" if tasks else "")
            for each, sites, tasks in self._entries
        )

    @property
    def tasks(self) -> list[str]:
        """Names of all tasks that filters are limited to, sorted."""
        return sorted({task for _, _, tasks in self._entries for task in tasks})

    def warn_of_strangers(self, sites: Collection[str]) -> None:
        """Warn about each site that a filter names, but that is not in `sites`: the name may be misspelt.

        Warn only once per site.
        """
        named = {site for _, wanted, _ in self._entries for site in wanted}
        for site in sorted(named.difference(sites, self._warned_of)):
            self._warned_of.add(site)
            hint = registry.nearest(site, sites, f"Sites that have taken part: {', '.join(sorted(sites)) or 'none'}.")
            LOG.warning("%s contains a filter for site %r, which has not taken part. %s", self._setting, site, hint)

    def warn_of_unsent(self, names: Collection[str]) -> None:
        """Warn about each filter for a task that the server did not send.

        Args:
            names: names of the tasks that the server sent.
        """
        for task in sorted(set(self.tasks).difference(names)):
            hint = registry.nearest(task, names, f"Tasks that were sent: {', '.join(sorted(names)) or 'none'}.")
            LOG.warning("%s contains a filter for task %r, which was not sent. %s", self._setting, task, hint)

    def of(self, site: str, task: str = "") -> tuple[Filter, ...]:
        """Return the filters of one site and task, in the order of application.

        Args:
            site: name of the site.
            task: name of the task; empty for an update, which gets only the filters that are not limited to tasks.
        """
        own = self._of.get(site)
        if own is None:
            copies = [(_own(each), sites, tasks) for each, sites, tasks in self._entries if not sites or site in sites]
            own = self._of.setdefault(site, copies)
        return tuple(each for each, _, tasks in own if not tasks or task in tasks)


def _own(filter_: Filter) -> Filter:
    """Return a copy of a filter. Attributes that cannot be copied, such as locks, stay shared."""
    filter_copy = copy.copy(filter_)
    memo: dict[int, Any] = {id(filter_): filter_copy}
    for name, value in list(vars(filter_copy).items()):
        trial = dict(memo)  # a failed deepcopy leaves partial copies in its memo
        try:
            vars(filter_copy)[name] = copy.deepcopy(value, trial)
        except Exception as error:
            LOG.debug("%r: all sites share its attribute %s, which cannot be copied: %s", filter_, name, error)
        else:
            memo = trial
    return filter_copy


def _construct(entry: Mapping[str, Any], setting: Setting) -> _Entry:
    path, args, sites, tasks = entry.get("path"), entry.get("args", {}), entry.get("sites", []), entry.get("tasks", [])
    understood = isinstance(path, str) and isinstance(args, Mapping | list)
    understood = understood and isinstance(sites, list) and isinstance(tasks, list)
    if not understood or not entry.keys() <= {"path", "args", "sites", "tasks"}:
        raise ConfigError(
            f"{setting} has {dict(entry)!r}, which is not a valid filter table.",
            'Write {path = "norm_clip", args = {max_norm = 1.0}, sites = ["clinic-a"]}; only path is required.',
        )
    kind = registry.load("filters", filter_of(entry))
    registry.require_kinds(kind, args if isinstance(args, Mapping) else {}, f"{setting}: {path!r}")
    filter_ = registry.construct(
        lambda: kind(*args) if isinstance(args, list) else kind(**args),
        f"{setting}: {path!r} with args = {args!r}",
        "Use only arguments that the filter has.",
    )
    if not isinstance(filter_, Filter):
        raise ConfigError(
            f"{setting}: {path!r} creates an object of type {type(filter_).__name__}, which is not a filter.",
            "Derive it from atoll.filters.Filter.",
        )
    return filter_, frozenset(map(str, sites)), frozenset(map(str, tasks))
