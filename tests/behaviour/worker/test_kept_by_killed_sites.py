"""`worker.state` of sites that are killed, and of simulated ones: the same bits as of sites that nothing happens to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from harness.processes import Nursery
from kit import ForkedSite
from kit.servers import new_simulation
from kit.world import World, require_equal
from safetensors.torch import load_file
from state_site import build
from torch import Tensor

pytestmark = [pytest.mark.covers("X46"), pytest.mark.slow]
SCRIPT = Path(__file__).with_name("state_site.py")
ROUNDS = 5


def by_hand(sites: tuple[str, ...]) -> dict[str, Tensor]:
    """The result: w ← the mean of w + m, where m ← 0.9 · m + 0.1 · w + 0.01 · round at each site."""
    means, w = {site: torch.full((5,), float(len(site))) for site in sites}, torch.zeros(5)
    for number in range(1, ROUNDS + 1):
        means = {site: 0.9 * mean + 0.1 * w + 0.01 * number for site, mean in means.items()}
        w = torch.stack([w + mean for mean in means.values()]).mean(0)
    return {"w": w}


@pytest.mark.parametrize(
    "places",
    [
        # with the state written and not the update; with both, and nothing acknowledged; acknowledged
        ["outbox.seal=kill", "outbox.sealed=kill", "worker.acknowledged=kill"],
        ["worker.write=kill@1", "worker.write=kill@2", "worker.write=kill@3", "worker.acknowledged=kill@2"],
    ],
    ids=["around the update", "amid the files"],
)
def test_a_killed_site_keeps_its_state_once(nursery: Nursery, tmp_path: Path, places: list[str]) -> None:
    """A site that is killed anywhere finds the state of its last update that counts: each round is in it once."""
    with World(tmp_path, build(), "a", rounds=ROUNDS) as world:
        site, found = ForkedSite(nursery, tmp_path, world.url, "a", SCRIPT), list[dict[str, object]]()
        for place in [*places, ""]:
            process = site.start(place)
            assert process.wait(60) == (-9 if place else 0), process.output()
            found += [json.loads(line) for line in process.output().splitlines() if line.startswith("{")]
        world.server.run()
    assert world.counted == [("a", number) for number in range(1, ROUNDS + 1)]
    for each in found:
        assert each["found"] == list(range(1, int(str(each["round"]))))
    torch.testing.assert_close(world.result, by_hand(("a",)))


@pytest.mark.parametrize("engine", ["local", "ray"])
def test_a_simulated_site_has_the_state_of_a_real_one(
    nursery: Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    """The same script gives the same bits in a simulation, of which a process is killed, as with real sites."""
    if engine == "ray":
        pytest.importorskip("ray", reason="Ray is not installed: pip install 'atoll[ray]'")
    sites, mark = ("a", "bb"), tmp_path / "killed"
    with World(tmp_path, build(), sites, rounds=ROUNDS) as world:
        started = [ForkedSite(nursery, tmp_path, world.url, name, SCRIPT).start() for name in sites]
        assert [each.wait(60) for each in started] == [0, 0]
        world.server.run()
    torch.testing.assert_close(world.result, by_hand(sites))
    told = {"algorithm.name": "fedavg", "disk.state_dir": tmp_path / "simulated", "rounds.total": ROUNDS}
    monkeypatch.setenv("KILL_ONCE", str(mark))
    simulation = new_simulation(
        build(), script=f"{SCRIPT}:train", sites=list(sites), engine=engine, processes=2, **told
    )
    require_equal(load_file(simulation.run().model), world.result)
    assert mark.exists() or engine == "ray"  # actors have the environment with which this process first began Ray
