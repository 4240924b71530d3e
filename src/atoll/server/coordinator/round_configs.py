"""What sites are told for a round: the setting `rounds.config`, and what the user's function says to each site.

The function runs once for a round and a site. Its answer is in the journal before a site gets it, so a server that is
started again says the same. If the function fails, so does the run: no site trains with values that were not chosen.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from atoll import registry
from atoll.config import Settings
from atoll.config.round_config import config_of_round, fault_in
from atoll.errors import ConfigError, RunFailed
from atoll.server.coordinator.run_core import RunCore
from atoll.server.coordinator.user_code import LAZY

LOG = logging.getLogger("atoll.server")

ConfigFunction = Callable[[int, str], Mapping[str, Any]]
"""(number of the round, name of the site) → configuration."""

TIMEOUT_S = 60.0
"""Seconds within which the function has to answer for all sites of a round."""
KEPT_ROUNDS = 2
"""Rounds of a site for which the journal keeps what the function said."""


def config_function(settings: Settings, given: ConfigFunction | None = None) -> ConfigFunction | None:
    """Return the function of a run: the one that a program passed, else the one that the settings name; else None.

    Raises:
        ConfigError: it cannot be loaded, or cannot be called with a round and a site.
    """
    name = settings.rounds.function
    found = given if given is not None else registry.load_attribute(name) if name else None
    if found is None:
        return None
    shown = f"rounds.config_function = {settings.rounds.config_function!r}" if given is None else "config"
    if not callable(found) or any(is_lazy(found) for is_lazy in LAZY):
        raise ConfigError(f"{shown} is {found!r}.", "Use a plain function of a round and a site that returns a dict.")
    try:
        inspect.signature(found).bind(1, "site")
    except ValueError:  # a builtin without a signature
        pass
    except TypeError as error:
        raise ConfigError(
            f"{shown} cannot be called with a round and a site: {error}.",
            "Write it as: def config(round, site): return {…}",
        ) from None
    function: ConfigFunction = found
    return function


class RoundConfigs:
    """The configurations of the sites for each round.

    Args:
        run: the run.
        function: the user's function; None: only the setting counts.

    Attributes:
        has_function: whether there is such a function, so that `prepare` may have something to ask.
    """

    def __init__(self, run: RunCore, function: ConfigFunction | None) -> None:
        self._run, self._function, self.has_function = run, function, function is not None
        self._told: dict[str, dict[int, dict[str, Any]]] = {}  # site → round → what the function has said
        self._asking = asyncio.Lock()

    def of(self, site: str, number: int) -> dict[str, Any]:
        """Return the configuration of a site for a round; `prepare` has been called for it."""
        table = config_of_round(self._run.settings.rounds.config, number)
        return table | self._told[site][number] if self._function is not None else table

    def are_ready(self, site: str, number: int) -> bool:
        """Return whether `of` can be called."""
        return self._function is None or number in self._told.get(site, ())

    async def prepare(self, sites: Iterable[str], number: int) -> None:
        """Ask the function what to tell sites in a round, unless that is known. If it fails, the run fails.

        Raises:
            RunFailed: the function raised, did not return, or returned what sites cannot get.
        """
        if all(self.are_ready(site, number) for site in sites):
            return
        async with self._asking:
            missing = [site for site in dict.fromkeys(sites) if not self.are_ready(site, number)]
            for site in list(missing):
                if (recorded := self._run.store.run_log.config_of(site, number)) is not None:
                    self._keep(site, number, recorded)
                    missing.remove(site)
            if not missing:
                return
            try:
                found = await self._asked(missing, number)
            except RunFailed as error:
                self._run.fail(error)
                raise
            with self._run.store.journal.transaction():
                for site, config in found.items():
                    self._run.store.run_log.keep_config(site, number, config, since=number - KEPT_ROUNDS + 1)
            for site, config in found.items():
                self._keep(site, number, config)

    def _keep(self, site: str, number: int, config: dict[str, Any]) -> None:
        earlier = self._told.get(site, {})
        self._told[site] = {key: value for key, value in earlier.items() if key > number - KEPT_ROUNDS} | {
            number: config
        }

    async def _asked(self, sites: list[str], number: int) -> dict[str, dict[str, Any]]:
        function, at = self._function, [sites[0]]
        assert function is not None

        def ask() -> dict[str, dict[str, Any]]:
            found = {}
            for at[0] in sites:
                config = function(number, at[0])
                told = config_of_round(self._run.settings.rounds.config, number)
                if fault := fault_in(config) or fault_in(told | dict(config)):
                    raise ConfigError(f"sites cannot get what it returned: {fault}")
                found[at[0]] = dict(config)
            return found

        what = "The configuration function (rounds.config_function)"
        try:
            return await self._run.user_threads.run(ask, what, "rounds.config_function", TIMEOUT_S)
        except TimeoutError:
            how = f"it did not return within {TIMEOUT_S:g} s"
        except ConfigError as error:
            how = error.message.rstrip(".")
        except Exception as error:
            LOG.error("%s failed in round %d for %s", what, number, at[0], exc_info=error)
            how = repr(error)
        raise RunFailed(
            f"{what} failed in round {number} for site {at[0]}: {how}.",
            f"Correct the function, and start the run again: the run goes on with round {number}.",
        )
