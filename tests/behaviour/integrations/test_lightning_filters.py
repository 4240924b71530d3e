"""Filters of a site that trains with Lightning: what its fits send passes through them, whatever the algorithm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning_world import DILOCO, Tiny, fit_rounds, serve, trainer_of
from safetensors.torch import load_file

import atoll.integrations.lightning
from atoll.errors import UsageError
from atoll.filters import NormClip

pytestmark = pytest.mark.usefixtures("each_package")


@pytest.mark.covers("T8", "S1", "S5")
@pytest.mark.parametrize("style", ["patch", "callback"])
@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold", "diloco"])
def test_what_a_fit_sends_passes_the_sites_filters(tmp_path: Path, algorithm: str, style: str) -> None:
    """Three steps move w by 1 − 0.9³ = 0.271, and from 0.1 by 0.9 · 0.271: each time by 0.1 behind the filter.

    SCAFFOLD of one site: c is c_1, so that both rounds train as FedAvg does. DiLoCo: three steps are a round.
    """
    with serve(tmp_path, algorithm, **{"rounds.total": 2}, **DILOCO if algorithm == "diloco" else {}) as server:
        where: dict[str, Any] = {"server": server.url, "site": "a", "folder": tmp_path, "filters": [NormClip(0.1)]}
        if style == "patch":
            trainer = trainer_of()
            atoll.integrations.lightning.patch(trainer, **where)
        else:
            trainer = trainer_of(callbacks=[atoll.integrations.lightning.AtollCallback(**where)])
        module = Tiny()
        fit_rounds(trainer, module)
        assert server.wait(60)
        assert load_file(server.exports / "model.safetensors")["w"].item() == pytest.approx(0.2)
    assert module.w.item() == pytest.approx(0.2)
    assert module.steps == 6


@pytest.mark.covers("T8", "X3")
def test_what_is_no_filter_is_refused_before_it_trains() -> None:
    with pytest.raises(UsageError, match="'drop' is not a filter"):
        atoll.integrations.lightning.patch(trainer_of(), "http://127.0.0.1:1", "a", filters=["drop"])  # type: ignore[list-item]
