"""What a site runs in a run with a workflow: a function for each task that the workflow sends."""

from typing import Any

import torch
from data import load
from model import build
from train import accuracy, train

import atoll


def main() -> None:
    model = build()
    with atoll.tasks() as worker:  # the address and the name come from ATOLL_SERVER and ATOLL_SITE
        train_data, test_data = load(worker.site)

        @worker.task("train")
        def train_here(state: dict[str, torch.Tensor]) -> dict[str, Any]:
            model.load_state_dict(state)
            train(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), train_data)
            return {"model": dict(model.state_dict()), "weight": len(train_data[0])}

        @worker.task("validate")
        def validate(state: dict[str, torch.Tensor]) -> dict[str, float]:
            model.load_state_dict(state)
            return {"accuracy": accuracy(model, test_data)}

        worker.run()  # until the workflow has returned


if __name__ == "__main__":
    main()
