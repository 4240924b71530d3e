"""Which filters the server applies to which sites and tasks: from the run file, or from a program."""

from __future__ import annotations

import copy
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

from atoll import registry
from atoll.config import Settings
from atoll.errors import ConfigError, UsageError
from atoll.filters.base import ByTask, Filter, for_tasks

LOG = logging.getLogger("atoll.server")

Given = Sequence[Filter] | Mapping[str, ByTask]
"""Filters for every site, or by the name of a site: for every task, or by the name of a task."""

Setting = Literal["workflow.result_filters", "workflow.payload_filters"]

_ARGUMENT = {"workflow.result_filters": "filters", "workflow.payload_filters": "data_filters"}
"""What a program calls them."""

_Entry = tuple[Filter, frozenset[str], frozenset[str]]
"""A filter with its sites and its tasks; none for all."""


class SiteFilters:
    """Which filters each site's updates or payloads pass through.

    Each site has copies of its own, since filters keep state.

    Args:
        settings: has them by the name `setting`, in their order.
        given: by a program, in place of these.
        setting: of what comes from a site, or of what is sent to one.

    Raises:
        ConfigError: an entry is not understood. UsageError: what a program gave is no filter, or both are there.
    """

    def __init__(self, settings: Settings, given: Given = (), setting: Setting = "workflow.result_filters") -> None:
        entries: tuple[dict[str, Any], ...] = settings.at(setting)
        if given and entries:
            raise UsageError(f"Server got {_ARGUMENT[setting]}, and its settings have {setting}.", "Give one of them.")
        self._setting, self._told = setting, set[str]()
        self._entries = [_made(entry, setting) for entry in entries]
        by_site: Mapping[str, ByTask] = given if isinstance(given, Mapping) else {"": given}
        for site, filters in by_site.items():
            sites = frozenset([site] if site else [])
            self._entries += [(each, sites, tasks) for each, tasks in for_tasks(filters)]
        self._of: dict[str, list[_Entry]] = {}

    def __bool__(self) -> bool:
        return bool(self._entries)

    def __str__(self) -> str:
        """Each filter with its sites, for the log."""
        return ", ".join(
            f"{each!r} of {', '.join(sorted(sites)) if sites else 'every site'}"
            + (f" in {', '.join(sorted(tasks))}" if tasks else "")
            for each, sites, tasks in self._entries
        )

    @property
    def tasks(self) -> list[str]:
        """Names of the tasks that some are for."""
        return sorted({task for _, _, tasks in self._entries for task in tasks})

    def warn_of_strangers(self, sites: Collection[str]) -> None:
        """Warn once of each filter for a site that is not in `sites`: under a wrong name it filters nothing."""
        named = {site for _, wanted, _ in self._entries for site in wanted}
        for site in sorted(named.difference(sites, self._told)):
            self._told.add(site)
            hint = registry.nearest(site, sites, f"Those that have: {', '.join(sorted(sites)) or 'none'}.")
            LOG.warning("%s are for site %r, which has not taken part. %s", self._setting, site, hint)

    def warn_of_unsent(self, names: Collection[str]) -> None:
        """Warn of filters for tasks that were not sent; `names` are those that were."""
        for task in sorted(set(self.tasks).difference(names)):
            hint = registry.nearest(task, names, f"Those that were: {', '.join(sorted(names)) or 'none'}.")
            LOG.warning("%s are for task %r, which was not sent. %s", self._setting, task, hint)

    def of(self, site: str, task: str = "") -> tuple[Filter, ...]:
        """Return the filters of one site, in their order; those of a task if one is named."""
        mine = self._of.get(site)
        if mine is None:
            copies = [(_own(each), sites, tasks) for each, sites, tasks in self._entries if not sites or site in sites]
            mine = self._of.setdefault(site, copies)
        return tuple(each for each, _, tasks in mine if not tasks or task in tasks)


def _own(filter_: Filter) -> Filter:
    """Return a copy that shares with others only what cannot be copied, such as a lock."""
    mine = copy.copy(filter_)
    memo: dict[int, Any] = {id(filter_): mine}
    for name, value in list(vars(mine).items()):
        trial = dict(memo)  # one that fails leaves half a copy behind
        try:
            vars(mine)[name] = copy.deepcopy(value, trial)
        except Exception as error:
            LOG.debug("%r: all sites share its %s, which cannot be copied: %s", filter_, name, error)
        else:
            memo = trial
    return mine


def _made(entry: Mapping[str, Any], setting: Setting) -> _Entry:
    path, args, sites, tasks = entry.get("path"), entry.get("args", {}), entry.get("sites", []), entry.get("tasks", [])
    understood = isinstance(path, str) and isinstance(args, Mapping | list)
    understood = understood and isinstance(sites, list) and isinstance(tasks, list)
    if not understood or not entry.keys() <= {"path", "args", "sites", "tasks"}:
        raise ConfigError(
            f"{setting} has {dict(entry)!r}, which is not understood.",
            'Write {path = "norm_clip", args = {max_norm = 1.0}, sites = ["clinic-a"]}; all but path are optional.',
        )
    kind = registry.load("filters", str(path))
    filter_ = registry.made(
        lambda: kind(*args) if isinstance(args, list) else kind(**args),
        f"{setting}: {path!r} with args = {args!r}",
        "Give the arguments that it has.",
    )
    if not isinstance(filter_, Filter):
        raise ConfigError(
            f"{setting}: {path!r} makes a {type(filter_).__name__}, which is no filter.",
            "Derive it from atoll.filters.Filter.",
        )
    return filter_, frozenset(map(str, sites)), frozenset(map(str, tasks))
