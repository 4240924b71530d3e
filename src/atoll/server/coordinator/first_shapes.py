"""The shapes of buffers with the rule `first`: the first update decides them, before version 1 is made.

Observers of quantisation and other modules learn the shapes of their buffers from the data. If a site's buffers have
other shapes than the run's, it asks for a ticket with its shapes. If nothing depends on the run's shapes yet, the
server takes the site's: it writes version 0 again, and expires the tickets of that round, because their updates have
another layout. Else the site is refused.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass

from atoll.aggregation.plan import Plan
from atoll.errors import Busy, SchemaMismatch
from atoll.format_text import size
from atoll.protocol import messages
from atoll.rounds.state import State
from atoll.server.coordinator.run_core import RunCore
from atoll.store.store import Store

LOG = logging.getLogger("atoll.server")

MOST_BYTES = 2**26
"""Limit for buffers with new shapes, in bytes; a larger model raises it to its own size."""


@dataclass(frozen=True)
class NewShapes:
    """The shapes that a site's first update has given to buffers.

    Attributes:
        site: the site.
        fragment: the fragment that has the buffers.
        shapes: name of a buffer → its shape.
    """

    site: str
    fragment: int
    shapes: Mapping[str, tuple[int, ...]]

    def __str__(self) -> str:
        few = [f"{name} {list(shape)}" for name, shape in sorted(self.shapes.items())[:8]]
        more = f" and {len(self.shapes) - len(few)} more" if len(self.shapes) > len(few) else ""
        return f"{', '.join(few)}{more}"


class FirstShapes:
    """The shapes that a run takes over from a site's first update. It then begins again with them.

    Attributes:
        taken: the shapes; None: the run has those of its initial model.
    """

    def __init__(self, run: RunCore) -> None:
        self._run = run
        self.taken: NewShapes | None = None

    @property
    def to_take_over(self) -> NewShapes | None:
        """The shapes with which the run begins again after this server; None if it does not, or has failed."""
        return self.taken if self._run.failed is None else None

    def require(self, site: str, message: messages.TicketRequest) -> None:
        """Check the shapes of a site's buffers. If the run takes them over, begin again with them.

        Raises:
            SchemaMismatch: the run cannot have these shapes.
            Busy: it takes them over, and the site has to ask again.
        """
        if not message.shapes:
            return
        asked = NewShapes(site, message.fragment, {name: tuple(shape) for name, shape in message.shapes.items()})
        run = self._run
        found = new_shapes(run.plan, run.store, run.state, asked, has_workflows=run.has_workflows)
        if found is None:
            return
        if self.taken is None:
            LOG.info("%s has the first update, which decides the shapes of buffers: %s", site, found)
            self.taken = found
            run.begins_again.set()
        self.require_settled()

    def require_settled(self) -> None:
        """Raise an error while the run takes over other shapes or another codec.

        Raises:
            Busy: it does, and the site has to ask again.
        """
        if self._run.begins_again.is_set():
            busy = Busy("The server writes its files again, for other shapes or another codec.", "Ask again.")
            busy.retry_after_s = 0.2  # sites then log no warning
            raise busy


def new_shapes(plan: Plan, store: Store, state: State, asked: NewShapes, *, has_workflows: bool) -> NewShapes | None:
    """Return the shapes that the run takes over from a site; None if it has them already.

    Args:
        plan: plan of the run.
        store: store of the run.
        state: state of the rounds.
        asked: the site, the fragment that it is about to submit, and the shapes that its buffers have.
        has_workflows: whether the run has workflows, in which sites also work on tasks.

    Raises:
        SchemaMismatch: a buffer cannot have this shape in this run; the message says why.
    """
    specs = {spec.name: spec for spec in plan.fragments[asked.fragment].schema.tensors}
    changed: dict[str, tuple[int, ...]] = {}
    for name, shape in asked.shapes.items():
        spec = specs.get(name)
        if spec is not None and spec.shape == shape:
            continue
        why = _why_not(plan, store, state, asked.fragment, has_workflows)
        if name not in plan.schema.first or spec is None:
            why = "it is no buffer with the rule first"
        if why:
            raise SchemaMismatch(
                f"Worker {asked.site} has the buffer {name!r} with the shape {list(shape)}, but the run has "
                f"{list(spec.shape) if spec else 'none'}, and {why}.",
                "Give it the same shape at all sites, for example by one batch before training. Or let each site keep "
                f'its own: start a new run with model.buffers = {{"{name}" = "keep"}}.',
            )
        changed[name] = shape
    nbytes = sum(math.prod(shape) * specs[name].item_bytes for name, shape in changed.items())
    found = NewShapes(asked.site, asked.fragment, changed)
    if nbytes > max(MOST_BYTES, plan.schema.nbytes):
        raise SchemaMismatch(
            f"Worker {asked.site} has {size(nbytes)} of buffers with shapes from its data ({found}), but at most "
            f"{size(MOST_BYTES)} are allowed, or the size of the model if that is more.",
            'Set "keep" for them in model.buffers of a new run.',
        )
    return found if changed else None


def _why_not(plan: Plan, store: Store, state: State, fragment: int, has_workflows: bool) -> str:
    """Return why the shapes of a fragment's buffers can no longer change; empty if they can."""
    if store.versions.next_number(fragment) > 1:  # also if the head is version 0 again, because version 1 is lost
        return "the first update has decided the shapes before version 1"
    if any(ticket.state == "accepted" for ticket in state.rounds[fragment].tickets.values()):
        return "another site has submitted the first update, which decides the shapes"
    if store.run_log.has_first_shapes(fragment):
        return "another site had the first update, which decides the shapes"
    if plan.is_swarm or has_workflows or plan.values.ranks > 1 or not plan.values.in_files:
        return (
            "the shapes are those of the initial model in a swarm, with workflows, with model.ranks and with "
            "disk.in_files = false"
        )
    return ""
