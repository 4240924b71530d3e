"""What the sites of crash images train, and how; their scripts import it, and the tests do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from kit.models import SITES, local_step, train_, wide_model
from torch import nn

import atoll

SITE_SCRIPT = """
import os
import sys

sys.path.insert(0, {here!r})
from crash_model import {part}

{part}(os.environ["ATOLL_SERVER"], os.environ["ATOLL_SITE"], "workers", lambda line: print(line, flush=True))
"""


def take_rounds(url: str, site: str, workers: str | Path, say: Callable[[str], object]) -> nn.Module:
    """A site's part in a federated run; says what it has trained and submitted; returns the run's model."""
    model = wide_model()
    with atoll.join(url, site=site, folder=workers) as worker:
        for fl_round in worker:
            fl_round.load_into(model)
            train_(model, site, fl_round.number)
            say(f"trained {site} {fl_round.number}")
            fl_round.submit(model, weight=SITES[site], metrics={"loss": 1.0 / fl_round.number})
            say(f"submitted {site} {fl_round.number}")
        return worker.load_into(model)


def take_corrected_rounds(url: str, site: str, workers: str | Path, say: Callable[[str], object]) -> nn.Module:
    """The same with SGD, corrected by the run's algorithm."""
    model = wide_model()
    with atoll.join(url, site=site, folder=workers) as worker:
        for fl_round in worker:
            fl_round.load_into(model)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            with fl_round.correct(model, optimizer):
                for step in range(2):
                    local_step(model, optimizer, site, step)
            say(f"trained {site} {fl_round.number}")
            fl_round.submit(model, weight=SITES[site])
            say(f"submitted {site} {fl_round.number}")
        return worker.load_into(model)


def take_steps(url: str, site: str, workers: str | Path, say: Callable[[str], object]) -> nn.Module:
    """A site's part in a DiLoCo run. Its gradients are of site and parameters alone, as after a restart."""
    model = wide_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with atoll.DiLoCo(model, optimizer, server=url, site=site, folder=workers, weight=SITES[site]) as diloco:
        while not diloco.finished:
            local_step(model, optimizer, site, 0)
    return model
