"""What a site says once: parameters that travel in vain, and a link whose delay fragments make worse."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from harness.proxy import Pace, Proxy
from kit.sites import diloco
from kit.world import World
from torch import nn

from atoll.testing.run import wait_until
from atoll.worker.session import session


def base_and_head() -> nn.Sequential:
    """A base of 4 kB that is not trained, and a head of 40 B that is."""
    model = nn.Sequential(nn.Linear(32, 31), nn.Linear(31, 1, bias=False))
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    return model


def test_frozen_parameters_in_updates_are_reported_once(tmp_path: Path) -> None:
    """If frozen parameters are sent in each update, the log and the status say so once, with their bytes."""
    # A site may have frozen them after it loaded the model.
    torch.manual_seed(0)
    with World(tmp_path, base_and_head(), "a", rounds=2) as world:
        model = base_and_head().requires_grad_(True)
        with world.worker() as worker:
            for fl_round in worker:
                fl_round.load_into(model)
                for parameter in model[0].parameters():
                    parameter.requires_grad_(False)
                fl_round.submit(model)
        said = [line for line in world.log if "does not train" in line]
    at_site, at_server = said
    assert at_server == at_site.replace("a: ", "a reports: ", 1)
    assert at_site.startswith("a: 4.1 kB of the 4.2 kB that travel each way in a round are parameters")
    assert "such as 0.weight" in at_site


@pytest.mark.parametrize("frozen", ["", "keep"])
def test_trained_parameters_cause_no_such_report(tmp_path: Path, frozen: str) -> None:
    """Trained parameters, and frozen ones that stay at the site, cause no report about frozen parameters."""
    model = base_and_head() if frozen else base_and_head().requires_grad_(True)
    rules = {"model.buffers": {"0.*": frozen}} if frozen else {}
    with World(tmp_path, model, "a", rounds=1, **rules) as world:
        with world.worker() as worker:
            for fl_round in worker:
                fl_round.load_into(model)
                fl_round.submit(model)
    assert "does not train" not in world.text


def test_diloco_reports_frozen_parameters_once(tmp_path: Path) -> None:
    model = base_and_head()
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    world = World(tmp_path, model, "a", algorithm="diloco", rounds=2, H=1)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(1, 32)).sum().backward()
        optimizer.step()

    world.train_steps(model, optimizer, step)
    said = [line for line in world.log if line.startswith("a: 4.1 kB of the 4.2 kB that travel")]
    assert len(said) == 1


@pytest.mark.parametrize(("fragments", "tau", "is_said"), [(2, 0, True), (2, 1, False), (1, 0, False)])
def test_warns_of_fragments_without_overlap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fragments: int, tau: int, is_said: bool
) -> None:
    """On a link with delay, the server warns if fragments are synchronised without overlap, and gives the measured
    delay.
    """
    # A fast link, or overlap, needs no warning.
    monkeypatch.setattr(session, "HEARTBEAT_GAP_S", 0.01)
    beats = {"network.heartbeat_interval_s": 0.05, "network.heartbeat_timeout_s": 60.0}
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    world = World(tmp_path, model, "a", algorithm="diloco", rounds=0, H=4, K=fragments, tau=tau, **beats)
    with world, Proxy(world.server.port, Pace(delay_s=0.03, bytes_per_s=1e9)) as link:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with diloco(link.url, tmp_path, "a", model, optimizer):
            beats_so_far = link.count("POST .*/heartbeat")
            wait_until(lambda: link.count("POST .*/heartbeat") >= beats_so_far + 6, "heartbeats")
            if is_said:
                wait_until(lambda: "an exchange with" in str(world.status.warnings), "the warning at the server")
    said = [line for line in world.log if line.startswith("a: an exchange with the server takes")]
    assert len(said) == is_said
    for line in said:
        delay_ms = int(line.split(" ms")[0].rsplit(" ", 1)[1])
        assert 60 <= delay_ms < 1000
        assert "training waits for two of them every 2 steps, because diloco.num_fragments is 2 without overlap" in line


def test_the_status_has_seconds_that_a_link_costs(tmp_path: Path) -> None:
    """A round waits at least for one exchange with the server, which takes two delays of 30 ms."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    world = World(tmp_path, model, "a", algorithm="diloco", rounds=0, H=2)
    with world, Proxy(world.server.port, Pace(delay_s=0.03, bytes_per_s=1e9)) as link:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with diloco(link.url, tmp_path, "a", model, optimizer):
            for _ in range(6):
                optimizer.step()
            (site,) = world.status.workers
            assert site.waited_s >= 2 * 0.06  # the third round's wait is told with the next update
