"""A small convolutional network for 32×32 pictures of three colours in ten classes."""

import torch
from torch import Tensor, nn


class SimpleNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *(nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
        )
        self.classes = nn.Sequential(nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10))

    def forward(self, pictures: Tensor) -> Tensor:
        return self.classes(torch.flatten(self.features(pictures), 1))
