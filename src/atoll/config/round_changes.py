"""Settings that change within a run, from a round on: the tables `[[rounds.changes]]`.

[[rounds.changes]]
from_round = 100
diloco.sync_every = 250
algorithm.outer_optimizer.lr = 0.35
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from atoll.config.run_file import merged
from atoll.errors import ConfigError

CODEC = "aggregation.upload_codec"
CHANGEABLE = ("diloco.sync_every", "algorithm.outer_optimizer.lr", CODEC)
"""The settings that may change within a run."""
FROM = "from_round"


class Change(NamedTuple):
    """What changes from a round on.

    Attributes:
        from_round: number of the first round with these values.
        values: `group.key` → new value.
    """

    from_round: int
    values: dict[str, Any]

    def __str__(self) -> str:
        return f"from round {self.from_round} on: {', '.join(f'{key} = {each!r}' for key, each in self.values.items())}"


def changes_of(tables: Sequence[Mapping[str, Any]]) -> list[Change]:
    """Return the changes in the setting `rounds.changes`, in order.

    Raises:
        ConfigError: a table has no round or a wrong one, sets nothing, or sets something that cannot change.
    """
    found = list[Change]()
    for table in tables:
        first, least = table.get(FROM), found[-1].from_round + 1 if found else 2
        if type(first) is not int or first < least:
            raise ConfigError(
                f"rounds.changes: {FROM} is {first!r}.",
                f"Give each table the number of its first round, in rising order; here, at least {least}. What holds "
                "from round 1 on are the settings themselves.",
            )
        values = dict(_leaves(merged({key: value for key, value in table.items() if key != FROM})))
        wrong = next((key for key in values if key not in CHANGEABLE), None if values else "nothing")
        if wrong is not None:
            raise ConfigError(
                f"rounds.changes sets {wrong} from round {first} on.",
                f"Within a run, these can change: {', '.join(CHANGEABLE)}.",
            )
        found.append(Change(first, values))
    return found


def _leaves(table: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping) and f"{before}{key}" != CODEC:  # a codec changes as a whole
            yield from _leaves(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


def require_kept_changes(recorded: Sequence[Change], given: Sequence[Change], begun: int, where: str) -> None:
    """Check that a start changes nothing in rounds that have begun.

    Args:
        recorded: the changes that the run has so far.
        given: those of this start.
        begun: number of the newest round that has begun.
        where: the run and where it is, for the error.

    Raises:
        ConfigError: a change up to this round differs. The message names it.
    """
    before, now = ([each for each in changes if each.from_round <= begun] for changes in (recorded, given))
    if before != now:
        first = next(each for each in [*before, *now] if each not in before or each not in now)
        has, sets = ("has", "leaves this out") if first in before else ("does not have", "sets it")
        raise ConfigError(
            f"{where} {has} in rounds.changes: {first}; but this start {sets}, and round {begun} has begun.",
            f"Keep the tables up to round {begun}, and add a table from round {begun + 1} or later on.",
        )
