"""What a client of NVIDIA FLARE's hello-pt does: measure the global model, train it, send it back.

docs/from-nvflare.md goes through it line by line.
"""

import argparse

import torch
from data import load
from model import SimpleNetwork
from torch import nn
from torch.utils.data import DataLoader

import atoll


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader) -> float:
    model.eval()
    right = sum(int((model(pictures).argmax(dim=1) == labels).sum()) for pictures, labels in loader)
    return right / len(loader.dataset)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dataset", choices=["digits", "cifar10"], default="digits")
    parser.add_argument("--data", default="cifar-10-batches-bin", help="folder of CIFAR-10's binary version")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch_size", type=int, default=32)
    given = parser.parse_args()
    train_data, test_data = load(given.dataset, given.data)
    test_loader = DataLoader(test_data, batch_size=256)
    model = SimpleNetwork()

    atoll.functional.init()
    while atoll.functional.is_running():
        received = atoll.functional.receive(into=model)
        accuracy = evaluate(model, test_loader)

        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        model.train()
        total = 0.0
        with received.correct(model, optimizer):  # for SCAFFOLD and FedProx; FedAvg needs no such line
            for _ in range(given.epochs):
                for pictures, labels in DataLoader(train_data, batch_size=given.batch_size, shuffle=True):
                    optimizer.zero_grad()
                    loss = nn.functional.cross_entropy(model(pictures), labels)
                    loss.backward()
                    optimizer.step()
                    total += loss.item() * len(labels)

        mean = total / given.epochs / len(train_data)
        print(f"round {received.number}: accuracy {accuracy:.3f} of the global model, loss {mean:.3f}", flush=True)
        atoll.functional.send(model, weight=len(train_data), metrics={"accuracy": accuracy, "train_loss": mean})


if __name__ == "__main__":
    main()
