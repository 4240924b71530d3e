"""The model that a site submitted last, as it was before it left: a file that is there when others want to evaluate it.

    local.safetensors     beside base and outbox; replaced with every update, whole or not at all

It is written only in runs that say they will ask for it, in runs of some MiB. After a kill it is there again.
"""

from __future__ import annotations

import itertools

from atoll.blobs.model_file import packed_state
from atoll.errors import AtollError, UsageError
from atoll.posix import replace_file
from atoll.tensors.chunks import runs_of
from atoll.tensors.layout import safetensors_header
from atoll.tensors.lazy_tensors import LazyState
from atoll.tensors.module_tensors import Tensors
from atoll.tensors.payload import Packed
from atoll.worker.exchange.participation import Participation
from atoll.worker.log_lines import LOG

NAME = "local.safetensors"


def keep_local(place: Participation, tensors: Tensors, round_number: int) -> None:
    """Write the model of this round; where that fails training goes on, and the site has none."""
    path, temporary = place.folder / NAME, place.folder / f".{NAME}.tmp"
    specs = place.session.schema.model.tensors
    header = safetensors_header(specs, {"format": "pt", "round": str(round_number)})
    runs = itertools.chain.from_iterable(runs_of(tensors[spec.name].detach()) for spec in specs)
    try:
        replace_file(path, itertools.chain([header], runs), temporary=temporary, sync=lambda _: None)
    except OSError as error:
        path.unlink(missing_ok=True)  # an older one would pass for this round's
        LOG.warning(
            "%s: the model of round %d could not be kept for later workflows: %s",
            place.site,
            round_number,
            error.strerror,
        )


def local_model(place: Participation) -> Packed:
    """The model as it travels, read in runs.

    Raises:
        UsageError: there is none.
    """
    if place.exchange.filters:
        raise UsageError(
            f"Site {place.site} has filters for what it submits, and its model as it is would leave without passing "
            "them.",
            "Say with worker.submits(function) which model may leave; it passes the filters as an answer does.",
        )
    path = place.folder / NAME
    try:
        state = LazyState.open(path)
    except (OSError, AtollError):
        raise UsageError(
            f"Site {place.site} has no model: none of this run is kept there. A site keeps what it submits while the "
            "run's list has a cross_site_evaluation that asks for it.",
            "Say with worker.submits(function) which model it has, train with that list, or leave sites' models out "
            "(site_models = false, --no-site-models).",
        ) from None
    return packed_state(state, dict(place.session.schema.model.aliases))
