"""Atoll's entry in a trainer's checkpoint, and the check that the entry still agrees with the site's folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from atoll.errors import UsageError
from atoll.worker.exchange.participation import Participation

KEYS = {"run", "site", "versions"}

WITHOUT = "Resume without the checkpoint: the run goes on from the server's state."


def checkpoint_of(place: Participation) -> dict[str, Any]:
    """Return the entry for a checkpoint, as JSON values.

    The entry holds the run's id, the site's name, and the version of each fragment that the site trains from.
    """
    notes = [exchange.base.note for exchange in place.exchanges]
    versions = [note.version if note is not None and note.complete else -1 for note in notes]
    return {"run": place.session.info.run, "site": place.site, "versions": versions}


def require_checkpoint(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of an entry that `checkpoint_of` returned, or of an empty mapping.

    Raises:
        UsageError: `state` has other keys.
    """
    if state and state.keys() != KEYS:
        raise UsageError(f"This is no state_dict of Atoll's: it has {', '.join(map(repr, state))}.", WITHOUT)
    return dict(state)


def require_same_run(state: Mapping[str, Any], run: str, site: str) -> None:
    """Check that a checkpoint belongs to this run and site. An empty checkpoint passes.

    Raises:
        UsageError: the checkpoint belongs to another run or site. The message names both.
    """
    if state and (state["run"], state["site"]) != (run, site):
        raise UsageError(
            f"The checkpoint is of site {state['site']!r} in run {state['run'][:8]}, and this is site {site!r} in run "
            f"{run[:8]}.",
            WITHOUT,
        )


def require_agrees(state: Mapping[str, Any], place: Participation) -> None:
    """Check that the site's folder is not older than a checkpoint. Call this before pulling.

    A newer folder is accepted: the site continued after the checkpoint, and will take the newest version.

    Raises:
        UsageError: the checkpoint belongs to another run or site, or the folder has an older version.
    """
    if not state:
        return
    here = checkpoint_of(place)
    require_same_run(state, here["run"], here["site"])
    for fragment, (then, now) in enumerate(zip(state["versions"], here["versions"], strict=False)):
        if now < then:
            has = f"version {now}" if now >= 0 else "no version"
            raise UsageError(
                f"The checkpoint trains from version {then} of fragment {fragment}, and the site's folder "
                f"{str(place.folder)!r} has {has}: it is another folder, or was restored from an older backup.",
                f"Give the folder that was there when the checkpoint was written. {WITHOUT}",
            )
