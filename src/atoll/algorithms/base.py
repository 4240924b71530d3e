"""What an algorithm is: a small frozen value, one paper a page. No torch here.

worker    w ← local training from w_v, corrected as `local` says;  u = w_v − w   (the pseudo-gradient)
server    g = reduce(u_1 … u_k)           per group of tensors, as `reduce` says
          w_{v+1} = outer step of w_v along g
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Algorithm:
    """One member of the family.

    Attributes:
        name: in the run file.
        citation: title, authors, arXiv number.
        outer: name of the outer optimizer (`registry.TABLES["outer"]`).
        outer_options: its keyword arguments.
        reduce: group → reducer, for floating point tensors; integers and flags always take `max`.
        local: how a worker corrects local training: `correction` names it, the rest are its numbers.
        codec: how `params` travel unless the run file says otherwise.
        on_missed: what a DiLoCo loop does that missed a round: `rebase` keeps its local steps, `reset` loses them and
            says so. A federated loop begins every round anew.
        own_reducer: whether its reducer of `params` is what makes it, so that no other may take its place.
        steps_driven: whether a round is `sync_every` local steps (else the worker's own script decides).
    """

    name: str
    citation: str
    outer: str
    outer_options: Mapping[str, Any]
    reduce: Mapping[str, str] = field(default_factory=lambda: {"params": "mean", "buffers": "mean"})
    local: Mapping[str, Any] = field(default_factory=dict)
    codec: str = "none"
    on_missed: Literal["rebase", "reset"] = "reset"
    own_reducer: bool = False
    steps_driven: bool = False
