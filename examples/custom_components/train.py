"""What a site runs: take the global model, measure it, train it on what lies here, give back what it became."""

import torch
from data import Pictures, load
from model import build
from torch import nn

import atoll

EPOCHS = 2
BATCH = 32


def train(model: nn.Module, optimizer: torch.optim.Optimizer, data: Pictures) -> float:
    """Plain PyTorch; returns the mean loss of the last epoch."""
    pictures, labels = data
    model.train()
    for _ in range(EPOCHS):
        losses = []
        for batch in torch.randperm(len(pictures)).split(BATCH):
            loss = nn.functional.cross_entropy(model(pictures[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return sum(losses) / len(losses)


@torch.no_grad()
def accuracy(model: nn.Module, data: Pictures) -> float:
    pictures, labels = data
    model.eval()
    return (model(pictures).argmax(dim=1) == labels).float().mean().item()


def main() -> None:
    model = build()
    with atoll.join() as worker:  # the address comes from ATOLL_SERVER; without one, this trains one round, alone
        train_data, test_data = load(worker.site)
        for fl_round in worker:
            fl_round.load_into(model)
            before = accuracy(model, test_data)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
            loss = train(model, optimizer, train_data)
            print(
                f"round {fl_round.number}: accuracy {before:.3f} of the global model, local loss {loss:.3f}", flush=True
            )
            fl_round.submit(model, weight=len(train_data[0]), metrics={"accuracy": before, "loss": loss})


if __name__ == "__main__":
    main()
