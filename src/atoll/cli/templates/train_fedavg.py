"""The script of every site: load the global model, evaluate it, train it on the site's data, and submit it.

python train.py                                              trains alone, without a server
atoll worker --server URL --site NAME -- python train.py     takes part in a run
"""

import zlib

import torch
from torch import Tensor, nn

import atoll

EPOCHS = 2
BATCH = 32

Images = tuple[Tensor, Tensor]
"""Images [N, 1, 8, 8], and their labels [N]."""


def build(hidden: int = 64) -> nn.Module:
    """Build the model. Every site calls this. So does the server, with `model.args`, for the initial model."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.BatchNorm1d(hidden), nn.ReLU(), nn.Linear(hidden, 10))


def load_data(site: str) -> tuple[Images, Images]:
    """Return a site's training and test data. Put your data here; this example is ten patterns with noise.

    To give each site a part of one data set: `atoll.data.dirichlet(dataset, ["a", "b"], alpha=0.3).subset(site)`.
    """
    patterns = torch.randn(10, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    own = torch.Generator().manual_seed(zlib.crc32(site.encode()))
    labels = torch.randint(10, (512,), generator=own)
    images = patterns[labels] + 2.0 * torch.randn(512, 1, 8, 8, generator=own)
    train, test = atoll.data.holdout(labels, 0.2)
    return (images[train], labels[train]), (images[test], labels[test])


def train(model: nn.Module, optimizer: torch.optim.Optimizer, data: Images) -> float:
    """Train for `EPOCHS` epochs, and return the mean loss of the last epoch."""
    images, labels = data
    model.train()
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
    model.eval()
    return (model(images).argmax(dim=1) == labels).float().mean().item()


def main() -> None:
    """Take part in every round of the run; without a server, train one round alone."""
    model = build()
    with atoll.join() as worker:  # the address comes from ATOLL_SERVER; without it, this trains one round alone
        train_data, test_data = load_data(worker.site)
        for fl_round in worker:
            fl_round.load_into(model)
            before = accuracy(model, test_data)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
            with fl_round.correct(model, optimizer):  # FedProx and SCAFFOLD need it; FedAvg does nothing here
                loss = train(model, optimizer, train_data)
            print(f"round {fl_round.number}: accuracy {before:.3f} of the global model, loss {loss:.3f}", flush=True)
            fl_round.submit(model, weight=len(train_data[0]), metrics={"accuracy": before, "loss": loss})


if __name__ == "__main__":
    main()
