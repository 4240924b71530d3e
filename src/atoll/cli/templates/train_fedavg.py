"""Federated training of one site: pull the global model, train on what lies here, submit.

python train.py                                              trains alone, without a server
atoll worker --server URL --site NAME -- python train.py     takes part in a run
"""

import zlib

import torch
from model import build
from torch import Tensor, nn

import atoll

EPOCHS = 2
BATCH = 32


def load_data(site: str) -> tuple[Tensor, Tensor]:
    """Your site's data goes here. These are made: ten shared patterns, and noise of its own."""
    patterns = torch.randn(10, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    own = torch.Generator().manual_seed(zlib.crc32(site.encode()))
    labels = torch.randint(10, (512,), generator=own)
    return patterns[labels] + 2.0 * torch.randn(512, 1, 8, 8, generator=own), labels


def train(model: nn.Module, optimizer: torch.optim.Optimizer, images: Tensor, labels: Tensor) -> float:
    """A few epochs of plain PyTorch; returns the mean loss of the last one."""
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
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    model.eval()
    return (model(images).argmax(dim=1) == labels).float().mean().item()


def main() -> None:
    model = build()
    with atoll.join() as worker:  # the address comes from ATOLL_SERVER; without one, this trains alone
        images, labels = load_data(worker.site)
        train_images, train_labels, test_images, test_labels = images[:400], labels[:400], images[400:], labels[400:]
        for fl_round in worker:
            fl_round.load_into(model)
            before = accuracy(model, test_images, test_labels)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
            with fl_round.correct(model, optimizer):  # FedProx and SCAFFOLD need it; for FedAvg it changes nothing
                loss = train(model, optimizer, train_images, train_labels)
            print(
                f"round {fl_round.number}: accuracy {before:.3f} with the global model, local loss {loss:.3f}",
                flush=True,
            )
            fl_round.submit(model, weight=len(train_images), metrics={"accuracy": before, "loss": loss})


if __name__ == "__main__":
    main()
