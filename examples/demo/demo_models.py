"""The models of the demo: a byte-level transformer, and a small CNN for digits."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

CONTEXT_BYTES = 128


class Block(nn.Module):
    """Pre-norm attention and feed-forward; tensors are [B, T, D]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.feed_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.grow, self.shrink = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        batch, length, width = x_BTD.shape
        qkv = self.qkv(self.attention_norm(x_BTD)).view(batch, length, 3, self.heads, width // self.heads)
        q_BHTd, k_BHTd, v_BHTd = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q_BHTd, k_BHTd, v_BHTd, is_causal=True)
        x_BTD = x_BTD + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        fed: Tensor = self.shrink(functional.gelu(self.grow(self.feed_norm(x_BTD))))
        return x_BTD + fed


class ByteTransformer(nn.Module):
    """Predicts the next byte; the output head is the embedding (tied)."""

    def __init__(self, width: int = 128, layers: int = 5, heads: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.position = nn.Embedding(CONTEXT_BYTES, width)
        blocks = [Block(width, heads) for _ in range(layers)]
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        with torch.no_grad():
            for block in blocks:  # residual branches add up over the depth
                block.out.weight.div_((2 * layers) ** 0.5)
                block.shrink.weight.div_((2 * layers) ** 0.5)
        self.head.weight = self.embedding.weight

    def forward(self, bytes_BT: Tensor) -> Tensor:
        """Logits [B, T, 256] for bytes [B, T], T at most `CONTEXT_BYTES`."""
        x_BTD = self.embedding(bytes_BT) + self.position.weight[: bytes_BT.shape[1]]
        logits: Tensor = self.head(self.norm(self.blocks(x_BTD)))
        return logits

    def loss(self, windows_BT: Tensor) -> Tensor:
        """Mean negative log-likelihood in nats per byte of windows [B, T + 1]."""
        logits = self(windows_BT[:, :-1])
        return functional.cross_entropy(logits.reshape(-1, 256), windows_BT[:, 1:].reshape(-1))


def byte_transformer() -> ByteTransformer:
    """About 1 M parameters."""
    return ByteTransformer()


def adamw(model: nn.Module, lr: float = 1e-3) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95))


@torch.no_grad()
def validation_loss(model: ByteTransformer, windows_NT: Tensor, batch: int = 32) -> float:
    """Nats per byte over all windows [N, T + 1]; the mode is put back."""
    was_training = model.training
    model.eval()
    total = sum(model.loss(part).item() * len(part) for part in torch.split(windows_NT, batch))
    model.train(was_training)
    return total / len(windows_NT)


def digits_net() -> nn.Module:
    """A CNN with batch normalisation for 8×8 images [N, 1, 8, 8] in ten classes."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(512, 10),
    )


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Share of right answers; the mode is put back."""
    was_training = model.training
    model.eval()
    right: float = (model(images).argmax(dim=1) == labels).double().mean().item()
    model.train(was_training)
    return right
