"""What a trainer's checkpoint holds of a site's part in a run, and whether it still agrees with the site's folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from atoll.errors import UsageError
from atoll.worker.exchange.participation import Participation

KEYS = {"run", "site", "versions"}

WITHOUT = "Resume without the checkpoint: the run goes on from the server's state."


def checkpoint_of(place: Participation) -> dict[str, Any]:
    """Return the run, the site, and the version of each fragment that the site trains from; values of JSON."""
    notes = [exchange.base.note for exchange in place.exchanges]
    versions = [note.version if note is not None and note.complete else -1 for note in notes]
    return {"run": place.session.info.run, "site": place.site, "versions": versions}


def require_checkpoint(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `checkpoint_of` made.

    Raises:
        UsageError: it is something else.
    """
    if state and state.keys() != KEYS:
        raise UsageError(f"This is no state_dict of Atoll's: it has {', '.join(map(repr, state))}.", WITHOUT)
    return dict(state)


def require_same_run(state: Mapping[str, Any], run: str, site: str) -> None:
    """Refuse a checkpoint of another run or site.

    Raises:
        UsageError: both are named.
    """
    if state and (state["run"], state["site"]) != (run, site):
        raise UsageError(
            f"The checkpoint is of site {state['site']!r} in run {state['run'][:8]}, and this is site {site!r} in run "
            f"{run[:8]}.",
            WITHOUT,
        )


def require_agrees(state: Mapping[str, Any], place: Participation) -> None:
    """Refuse a checkpoint that disagrees with the site's folder, before anything is pulled.

    A folder that is ahead agrees: the site went on after the checkpoint, and takes the newest version.

    Raises:
        UsageError: the checkpoint is of another run or site, or the folder has not come as far as the checkpoint.
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
