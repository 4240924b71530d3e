"""Two hostile sites of ten: the accuracy that is left with the mean and with each robust reducer, on real digits.

Every run is a real server with ten sites that pull and submit over HTTP, one after the other. Bars: a reducer ends
within two points of the run without the hostile sites, for every attack that it is meant for.

    python bench/quality/byzantine.py
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "demo"))

import torch
from dealt_digits import digits
from demo_data import Images
from results import FOLDER, Gate, write
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.func import functional_call

import atoll
from atoll.errors import UpdateRefused

matplotlib.use("Agg")
import matplotlib.pyplot as plt

SITES, HOSTILE = 10, 2
BATCH, EPOCHS, RATE = 16, 2, 0.05
POINTS = 2.0

State = dict[str, Tensor]

REDUCERS: dict[str, dict[str, Any]] = {
    "mean": {},
    "clipped_mean": {},
    "median": {},
    "trimmed_mean": {"trim": 0.2},
}


def build() -> nn.Module:
    """A CNN for [N, 1, 8, 8] without buffers, which a norm does not bound: GroupNorm instead of BatchNorm."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.GroupNorm(4, 16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.GroupNorm(4, 32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(512, 10),
    )


def sign_flip(start: State, honest: State, _: torch.Generator) -> State:
    """x + 3·(x − y): away from where training leads."""
    return {name: start[name] + 3 * (start[name] - honest[name]) for name in start}


def large_norm(start: State, honest: State, _: torch.Generator) -> State:
    """The honest change, a hundred times as long and backwards."""
    return {name: start[name] + 100 * (start[name] - honest[name]) for name in start}


def noise(start: State, _: State, generator: torch.Generator) -> State:
    """Gaussian noise of standard deviation 1 in every parameter."""
    return {name: value + torch.randn(value.shape, generator=generator) for name, value in start.items()}


ATTACKS: dict[str, Callable[[State, State, torch.Generator], State]] = {
    "sign_flip": sign_flip,
    "large_norm": large_norm,
    "noise": noise,
}
MEANT_FOR = {
    "clipped_mean": ["large_norm", "noise"],
    "median": list(ATTACKS),
    "trimmed_mean": list(ATTACKS),
}
"""The norm of a flipped update is that of three honest ones: clipping bounds it, and does not see that it is wrong."""


def train(model: nn.Module, start: State, data: Images, generator: torch.Generator) -> State:
    """Plain SGD from `start` for `EPOCHS`; what the parameters become."""
    state = {name: value.clone().requires_grad_() for name, value in start.items()}
    optimizer = torch.optim.SGD(state.values(), lr=RATE)
    images, labels = data
    for _ in range(EPOCHS):
        for batch in torch.randperm(len(labels), generator=generator).split(BATCH):
            loss = nn.functional.cross_entropy(functional_call(model, state, images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return {name: value.detach() for name, value in state.items()}


def accuracy(model: nn.Module, state: State, test: Images) -> float:
    """Percent."""
    with torch.no_grad():
        return 100 * (functional_call(model, state, test[0]).argmax(1) == test[1]).double().mean().item()


def run(folder: Path, reducer: str, attack: str | None, rounds: int, seed: int) -> list[float]:
    """One training; accuracy of the global model after every round. One that diverges stays at its last accuracy.

    Args:
        attack: of the last two sites; None: they do not take part.
    """
    torch.manual_seed(seed)
    model = build()
    sites, test = digits(SITES, seed, concentration=10.0)
    count = SITES if attack else SITES - HOSTILE
    generators = [torch.Generator().manual_seed(1000 * seed + index) for index in range(SITES)]
    found: list[float] = []
    settings = {
        "algorithm.name": "fedavg",
        "rounds.sites": count,
        "rounds.total": rounds,
        "network.port": 0,
        "disk.min_free_bytes": 0,
    }
    settings |= {
        "aggregation.reducer.name": reducer,
        "aggregation.reducer": REDUCERS[reducer],
        "aggregation.max_update_norm": 0.0,
    }
    with atoll.Server(
        model, settings={"algorithm.name": "diloco", **settings, "disk.state_dir": folder / "state"}
    ) as server:
        clients = [atoll.join(server.url, site=f"site-{i}", folder=folder / "w") for i in range(count)]
        try:
            for number, (index, client) in itertools.product(range(rounds), enumerate(clients)):
                fl_round = client.next_round()
                assert fl_round is not None
                start = fl_round.state_dict()
                if len(found) == number:
                    found.append(accuracy(model, start, test))
                becomes = train(model, start, sites[index], generators[index])
                if index >= SITES - HOSTILE:
                    assert attack is not None
                    becomes = ATTACKS[attack](start, becomes, generators[index])
                fl_round.submit(becomes, weight=len(sites[index][1]))
            for client in clients:
                client.next_round()
            server.wait(60)
            found.append(accuracy(model, load_file(server.exports / "model.safetensors"), test))
        except UpdateRefused:  # NaN or Inf: nothing comes of it any more
            found += [found[-1]] * (rounds + 1 - len(found))
        for client in clients:
            client.leave()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    cases = [("mean", None), *((reducer, attack) for attack in ATTACKS for reducer in REDUCERS)]
    curves: dict[str, list[list[float]]] = {}
    for reducer, attack in cases:
        name = f"{reducer} / {attack or 'no hostile site'}"
        for seed in range(options.seeds):
            with tempfile.TemporaryDirectory() as text:
                curves.setdefault(name, []).append(run(Path(text), reducer, attack, options.rounds, seed))
        print(f"{name:32} {' '.join(f'{curve[-1]:.1f}' for curve in curves[name])} %", flush=True)
    last = {name: statistics.mean(curve[-1] for curve in runs) for name, runs in curves.items()}
    clean = last["mean / no hostile site"]
    gates = [
        Gate(
            f"{reducer} under {attack}: points below the run without hostile sites",
            round(clean - last[f"{reducer} / {attack}"], 2),
            f"≤ {POINTS:g}",
            clean - last[f"{reducer} / {attack}"] <= POINTS,
        )
        for reducer, attacks in MEANT_FOR.items()
        for attack in attacks
    ]
    plot(curves, FOLDER / "byzantine.png")
    write(
        "byzantine",
        title=f"{HOSTILE} hostile sites of {SITES}: accuracy on digits after {options.rounds} rounds",
        command="python bench/quality/byzantine.py",
        settings={
            "rounds": options.rounds,
            "seeds": options.seeds,
            "batch": BATCH,
            "epochs": EPOCHS,
            "rate": RATE,
            "reducers": REDUCERS,
            "meant_for": MEANT_FOR,
        },
        figures=curves,
        gates=gates,
        header=["reducer", *ATTACKS],
        rows=[[reducer, *(round(last[f"{reducer} / {attack}"], 1) for attack in ATTACKS)] for reducer in REDUCERS],
        text=f"""Accuracy in percent, the mean of {options.seeds} seeds; {clean:.1f} with the eight honest sites alone.

Attacks: `sign_flip` x + 3·(x − y), `large_norm` x + 100·(x − y), `noise` x + N(0, 1). The clipped mean protects
against long updates. It only limits the harm of a flipped update of ordinary length.

Nothing was tuned: every reducer has the same sites, {EPOCHS} epochs a round, batch {BATCH} and rate {RATE:g}.
`trimmed_mean` leaves out 0.2 at each end, which is exactly the share of hostile sites. The other reducers do not know
the share.""",
    )


def plot(curves: dict[str, list[list[float]]], path: Path) -> None:
    """One panel for each attack: accuracy by round, the mean of the seeds."""
    figure, panels = plt.subplots(1, len(ATTACKS), figsize=(12, 3.6), sharey=True)
    for panel, attack in zip(panels, ATTACKS, strict=True):
        for name, runs in curves.items():
            reducer, _, case = name.partition(" / ")
            if case in (attack, "no hostile site"):
                mean = [statistics.mean(points) for points in zip(*runs, strict=True)]
                panel.plot(
                    mean, label=reducer if case == attack else "no hostile site", ls="-" if case == attack else ":"
                )
        panel.set_title(attack)
        panel.set_xlabel("round")
    panels[0].set_ylabel("accuracy, %")
    panels[-1].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
