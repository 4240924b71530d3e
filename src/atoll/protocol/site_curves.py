"""Curves of the sites of a run: one number of each site's updates over the rounds, decimated for a chart."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints

from atoll.protocol.messages import METRIC_CHARS, Count, Many, Message, Shown
from atoll.protocol.status_messages import GLOBAL, SiteRound

NUMBERS = tuple(name for name in SiteRound.model_fields if name not in ("site", "metrics"))
OF_METRIC = "metrics."
MOST_POINTS = 1000
SomeSite = Annotated[str, StringConstraints(pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]{0,63})?$")]
"""Name of a site; or empty."""
Value = Annotated[
    str,
    StringConstraints(
        max_length=len(OF_METRIC) + METRIC_CHARS, pattern=rf"^({'|'.join(NUMBERS)}|(metrics|global)\.[^\n]+)$"
    ),
]


class SiteCurvesQuery(Message):
    """Which curves a client asks for."""

    fragment: Count = 0
    value: Value = Field(
        "metrics.loss",
        description=f"metrics.NAME, or one of: {', '.join(NUMBERS)}; or {GLOBAL}NAME: a metric of the server's "
        "evaluation, of the rounds that have it, without curves of sites.",
    )
    first: Count = Field(0, description="Only rounds that led to this version or a later one.")
    last: Count | None = Field(None, description="Only rounds that led to this version or an earlier one.")
    points: int = Field(
        200,
        ge=2,
        le=MOST_POINTS,
        description="Maximum number of rounds: if there are more, so many are chosen evenly, with the first and the "
        "last. The same range gives the same rounds.",
    )
    site: SomeSite = Field("", description="Only this site, and only rounds with an update of it.")
    after: SomeSite = Field("", description="Only sites after this one, in the order of their names.")


class SiteCurve(Message):
    """The values of one site, one for each round of `SiteCurves`; null: the site has none in this round."""

    site: Shown
    values: Many[float | None]


class SiteCurves(Message):
    """The curves of some sites. Sites without any value in these rounds are left out."""

    versions: Many[Count] = Field(description="Versions that the rounds led to, in order.")
    rounds: Many[Count] = Field(description="Number of each of these rounds.")
    mean: Many[float | None] = Field(
        default_factory=list,
        description="Of a metric, its mean in each of these rounds, or the server's value; else empty.",
    )
    curves: Many[SiteCurve]
    after: Shown = Field(
        "",
        description="If not empty, there are more sites: ask again with this `after`, and with `last` at the last of "
        "`versions`, because the run may have gone on.",
    )
