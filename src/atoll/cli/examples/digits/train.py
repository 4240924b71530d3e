"""What each site runs: it trains on its own images, which never leave it, and submits the trained model.

Each site has mostly some of the ten digits, so none of them could learn all ten alone.

atoll run run.toml --sites 3                                 a server and three sites on this machine
atoll worker --server URL --site NAME -- python train.py     one site of a real run, with its own data
python train.py                                              alone, without a server
"""

import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import atoll

EPOCHS = 2
BATCH = 32

Images = tuple[Tensor, Tensor]
"""Images [N, 64] with values from 0 to 1, and their labels [N]."""


def build() -> nn.Module:
    """Build the model. Every site calls this. So does the server, for the initial model."""
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def load_data(number: int, sites: int) -> tuple[Images, Images]:
    """Return the images of one site, and public ones to measure the model with. Put your data here.

    Args:
        number: the site's place among all sites, from 1.
        sites: the number of sites.
    """
    file = np.load(Path(__file__).with_name("digits.npz"))
    images, labels = torch.tensor(file["images"]).flatten(1) / 16, torch.tensor(file["labels"]).long()
    public = torch.arange(len(labels)) >= 1500
    rare = torch.arange(len(labels)) % 20 == 0  # a few images are spread evenly, the others go by their digit
    owner = torch.where(rare, torch.arange(len(labels)) // 20, labels) % sites
    mine = ~public & (owner == number - 1)
    return (images[mine], labels[mine]), (images[public], labels[public])


def train(model: nn.Module, optimizer: torch.optim.Optimizer, data: Images) -> float:
    """Train for `EPOCHS` epochs, and return the mean loss of the last epoch."""
    images, labels = data
    for _ in range(EPOCHS):
        losses = []
        for batch in torch.randperm(len(images)).split(BATCH):
            loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return sum(losses) / len(losses)


@torch.no_grad()
def accuracy(model: nn.Module, data: Images) -> float:
    """Return the share of images that the model labels correctly, from 0 to 1."""
    images, labels = data
    return (model(images).argmax(dim=1) == labels).float().mean().item()


def main() -> None:
    """Take part in every round of the run; without a server, train one round alone."""
    mine, public = load_data(int(os.environ.get("ATOLL_SITE_NUMBER", "1")), int(os.environ.get("ATOLL_SITES", "3")))
    model = build()
    with atoll.join() as worker:
        for fl_round in worker:
            fl_round.load_into(model)
            before = accuracy(model, public)  # of the global model, before this site trains it
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
            with fl_round.correct(model, optimizer):  # FedProx and SCAFFOLD need it; FedAvg does nothing here
                loss = train(model, optimizer, mine)
            fl_round.submit(model, weight=len(mine[0]), metrics={"accuracy": before, "loss": loss})


if __name__ == "__main__":
    main()
