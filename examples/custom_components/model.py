"""The model. The server builds the first version from here, and every site builds its own to train."""

from torch import Tensor, nn


class Net(nn.Module):
    """A small convolutional network for 8×8 pictures in ten classes."""

    def __init__(self, channels: int = 16) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.head = nn.Linear(channels * 4 * 4, 10)

    def forward(self, pictures: Tensor) -> Tensor:
        return self.head(self.features(pictures).flatten(1))


def build(channels: int = 16) -> nn.Module:
    """What `model.source = "model:build"` in run.toml calls; keyword arguments come from `model.args`."""
    return Net(channels)
