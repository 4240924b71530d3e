"""The model. The server builds the initial one from here, and every worker builds its own to train."""

from torch import nn


def build(hidden: int = 64) -> nn.Module:
    """A small network for 8×8 images in ten classes; keyword arguments come from `model_args` in run.toml."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, hidden),
        nn.BatchNorm1d(hidden),
        nn.ReLU(),
        nn.Linear(hidden, 10),
    )
