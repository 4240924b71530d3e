"""Runs in the situations that the page has to show, each a real server with sites that stand still there.

with prepared("late", folder) as world:     # world.url has the page; world.server.settings the state directory
    ...
python -m kit.prepared_runs FOLDER          # a picture of the page of each, light and dark, on a laptop and a phone
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

import atoll
from atoll.errors import AtollError
from atoll.testing.run import wait_until
from kit.admin import pause
from kit.wire import WireSite
from kit.world import World

NAMES = ("clinic-amber", "clinic-birch", "clinic-cedar", "clinic-delta")
START = {"weight": torch.zeros(256, 64), "bias": torch.zeros(64)}
BEATS: dict[str, Any] = {"network.heartbeat_interval_s": 0.5, "network.heartbeat_timeout_s": 60.0}
TRAIN_S = (0.1, 0.12, 0.25, 0.15)
"""Seconds that each site spends on a round."""

Losses = Callable[[int], float]
Make = Callable[[Path], World]


def falls(number: int) -> float:
    """A loss that falls as that of a run that learns."""
    return 0.25 + 0.75 * 0.8**number


def rises(number: int) -> float:
    """A loss that falls, and then grows without end."""
    return falls(number) if number < 5 else falls(4) * 1.4 ** (number - 4)


def run(folder: Path, names: tuple[str, ...] = NAMES, **settings: Any) -> World:
    return World(folder, dict(START), names, **{"rounds": 30, "run.name": "ward-triage"} | BEATS | settings)


def play(world: World, rounds: range, losses: Losses = falls, *, training_s: tuple[float, ...] = TRAIN_S) -> None:
    """All sites take part in these rounds, each in a thread, as sites do that train for different times."""
    world.join(*(name for name in world.weights if name not in world.sites))
    for number in rounds:
        threads = [
            threading.Thread(target=train, args=(world, name, number, losses, pause_s, place))
            for place, (name, pause_s) in enumerate(zip(world.sites.all(), training_s, strict=False))
        ]
        for each in threads:
            each.start()
        for each in threads:
            each.join()


def train(world: World, name: str, number: int, losses: Losses, pause_s: float, place: int = 0) -> None:
    """A site's part in a round; the pause stands for its local steps."""
    world.pull(name)
    world.ended.wait(pause_s)
    world.submit(name, 0.01 * (place + 1), steps=20, metrics=metrics_of(number, losses, place))


def metrics_of(number: int, losses: Losses, place: int) -> dict[str, float]:
    loss = losses(number) * (1 + 0.06 * (place - 1.5)) + 0.01 * ((number * (place + 3)) % 5)
    return {"loss": loss, "accuracy": max(0.0, 1 - 0.7 * loss)}


def training(world: World, *names: str) -> None:
    """These sites have a ticket, and train."""
    world.pull(*names)


@contextmanager
def prepared(situation: str, folder: Path) -> Iterator[World]:
    """The run in a situation, until the end of the block."""
    world = SITUATIONS[situation](folder)
    try:
        yield world
    finally:
        with suppress(AtollError):
            world.close()


def healthy(folder: Path) -> World:
    world = run(folder, **{"rounds.best_metric": "accuracy"}).start()
    play(world, range(1, 13))
    training(world, *NAMES)
    world.submit(NAMES[0], 0.01, steps=20, metrics=metrics_of(13, falls, 0))
    return world


def late(folder: Path) -> World:
    """Three sites wait for the fourth, whose round takes many times as long as before."""
    world = run(folder).start()
    play(world, range(1, 11))
    training(world, *NAMES)
    for place in (0, 1, 3):
        world.submit(NAMES[place], 0.01, steps=20, metrics=metrics_of(11, falls, place))
    wait_until(lambda: "as long as usual" in said(world), "the round to be late", 30)
    return world


def dead(folder: Path) -> World:
    """A site has not been heard for longer than the server waits."""
    world = run(folder, **{"network.heartbeat_timeout_s": 2.0, "rounds.min_sites": 3}).start()
    lost = WireSite(world.url, NAMES[3])
    world.join(*NAMES[:3])
    for number in range(1, 9):
        play_with(world, lost, number)
    training(world, *NAMES[:3])
    wait_until(lambda: any(each.state == "dead" for each in world.status.workers), "the site to be dead", 30)
    return world


def play_with(world: World, wire: WireSite, number: int) -> None:
    """A round of the sites that have joined, and of one that sends no heartbeats."""
    training(world, *world.sites.all())
    update = wire.train(0.02)
    update.push()
    status, reply = update.complete(metrics=metrics_of(number, falls, 3), steps=20)
    assert status == 200, reply
    for place, name in enumerate(world.sites.all()):
        world.submit(name, 0.01, steps=20, metrics=metrics_of(number, falls, place))


def diverging(folder: Path) -> World:
    world = run(folder).start()
    play(world, range(1, 13), rises)
    training(world, *NAMES)
    return world


def nan(folder: Path) -> World:
    """The updates of one site have NaN, and are refused."""
    world = run(folder).start()
    wire = WireSite(world.url, NAMES[2])
    names = (NAMES[0], NAMES[1], NAMES[3])
    world.join(*names)
    for number in range(1, 7):
        play_with(world, wire, number)
    training(world, *names)
    update = wire.train(float("nan"))
    status, _ = update.put(0)
    assert status == 422
    return world


def full(folder: Path) -> World:
    """The disk has less space than the server must keep free; a site waits to send."""
    world = run(folder).start()
    play(world, range(1, 7))
    world.restart(**{"disk.min_free_bytes": 2**50})
    training(world, *NAMES)
    threading.Thread(target=submit_in_vain, args=(world, NAMES[0]), daemon=True).start()
    wait_until(lambda: "waits for the disk" in said(world), "an upload to be refused", 30)
    return world


def submit_in_vain(world: World, name: str) -> None:
    """The site sends its update again and again, until the run ends."""
    with suppress(AtollError):
        world.submit(name, 0.01)


def waiting(folder: Path) -> World:
    return run(folder).start()


def hostile(folder: Path) -> World:
    """Names and texts that would be markup, escapes or very long."""
    world = run(folder, names=("x" * 64, "a.b_c-d"), **{"run.name": "<b>bold</b>"}).start()
    wire = WireSite(world.url, "evil", host='<img src=x onerror="document.title=1">', labels={"<i>": "\u202e</script>"})
    world.join("a.b_c-d")
    training(world, "a.b_c-d")
    update = wire.train(0.01)
    update.push()
    bad = {"<script>document.title='taken'</script>": 0.5, "loss": 0.7, "=1+1": 2.0}
    assert update.complete(metrics=bad)[0] == 200
    world.submit("a.b_c-d", 0.01, metrics={"loss": 0.6})
    world.wait(1)
    return world


def asynchronous(folder: Path) -> World:
    world = run(folder, **{"async.enabled": True, "rounds": 60}).start()
    play(world, range(1, 9))
    training(world, *NAMES)
    return world


def paused(folder: Path) -> World:
    world = run(folder).start()
    play(world, range(1, 9))
    training(world, *NAMES)
    pause(world)
    for place, name in enumerate(NAMES):
        world.submit(name, 0.01, steps=20, metrics=metrics_of(9, falls, place))
    wait_until(lambda: "is paused" in said(world), "the pause", 30)
    return world


def swarm(folder: Path) -> World:
    """Workers aggregate; one site holds the ninth round up."""
    names = NAMES[:3]
    world = run(folder, names=names, **{"swarm.enabled": True, "network.heartbeat_timeout_s": 30.0}).start()
    for place, name in enumerate(names):
        threading.Thread(target=swarm_site, args=(world, name, place), daemon=True).start()
    wait_until(lambda: world.status.fragments[0].round == 9, "round 9", 60)
    wait_until(lambda: len(world.status.fragments[0].waiting_for) == 1, "the last site", 30)
    return world


def swarm_site(world: World, name: str, place: int) -> None:
    """The site takes part until round 9, in which the second one trains until the world ends."""
    with suppress(AtollError), atoll.join(world.url, site=name, folder=world.workers, swarm=True) as worker:
        for fl_round in worker:
            world.ended.wait(None if fl_round.number == 9 and place == 1 else 0.2)
            moved = {key: value + 0.01 * (place + 1) for key, value in fl_round.state_dict().items()}
            fl_round.submit(moved, steps=20, metrics=metrics_of(fl_round.number, falls, place))


def evaluate(model: Any) -> dict[str, float]:
    """What the server finds of a version: the further the model has moved, the better it is."""
    moved = float(model["bias"].mean())
    return {"loss": 0.3 + 0.6 * 0.01 ** min(moved, 1.0), "calibration": 0.5 + 0.4 * min(moved, 1.0)}


def finished(folder: Path) -> World:
    """A run that is over, while its server is still there for a site that has not fetched the result.

    Its server has evaluated every second version.
    """
    settings = {"rounds": 12, "rounds.best_metric": "loss", "server.evaluate_every": 2}
    world = run(folder, **settings, evaluate=evaluate).start()
    play(world, range(1, 13))
    wait_until(lambda: world.status.finished, "the run to be finished", 30)
    return world


SITUATIONS: dict[str, Make] = {
    "healthy": healthy,
    "late": late,
    "dead": dead,
    "diverging": diverging,
    "nan": nan,
    "full": full,
    "waiting": waiting,
    "paused": paused,
    "hostile": hostile,
    "swarm": swarm,
    "async": asynchronous,
    "finished": finished,
}


def said(world: World) -> str:
    """The sentence at the top of the status."""
    headline = world.status.headline
    return headline.text if headline is not None else ""


def pictures(out: Path, names: list[str]) -> None:
    from kit.browser import browser

    out.mkdir(parents=True, exist_ok=True)
    with browser() as chrome:
        for name in names or list(SITUATIONS):
            with tempfile.TemporaryDirectory() as folder, prepared(name, Path(folder)) as world:
                print(f"{name}: {world.status.headline}", flush=True)
                for look, about in {
                    "light": {},
                    "dark": {"dark": True},
                    "phone": {"width": 390, "height": 844},
                }.items():
                    chrome.set_look(**about)  # type: ignore[arg-type]
                    chrome.open(world.url)
                    chrome.log()
                    chrome.wait("#sentence", " ")
                    time.sleep(1.5)  # the curves are drawn
                    chrome.picture(out / f"{name}-{look}.png", whole=True)
                if lines := chrome.log():
                    print(*lines, sep="\n")


if __name__ == "__main__":
    pictures(Path(sys.argv[1]), sys.argv[2:])
