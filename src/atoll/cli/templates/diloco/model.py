"""The model. The server builds the first version from here, and every worker builds its own to train."""

import torch
from torch import Tensor, nn

CONTEXT = 64
"""Bytes that the model sees at a time."""


class ByteTransformer(nn.Module):
    """A small language model of bytes."""

    def __init__(self, width: int = 64, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.places = nn.Embedding(CONTEXT, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        self.head.weight = self.bytes.weight  # tied: it travels once
        nn.init.normal_(self.bytes.weight, std=0.02)

    def forward(self, text: Tensor) -> Tensor:
        length = text.shape[1]
        mask = torch.triu(torch.full((length, length), float("-inf"), device=text.device), diagonal=1)
        hidden = self.bytes(text) + self.places(torch.arange(length, device=text.device))
        return self.head(self.norm(self.layers(hidden, mask=mask, is_causal=True)))


def build(width: int = 64) -> nn.Module:
    """What `model = "model:build"` in run.toml calls; keyword arguments come from `model_args`."""
    return ByteTransformer(width)
