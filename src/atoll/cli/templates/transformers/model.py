"""The model. The server builds the first version from here, every site its own. Yours may come `from_pretrained`."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

CONTEXT = 64
"""Tokens, here bytes, that the model sees at a time."""


def build(width: int = 64, layers: int = 2) -> GPT2LMHeadModel:
    """A GPT-2 of bytes, made here and not downloaded; what `model = "model:build"` in run.toml calls."""
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=256, n_positions=CONTEXT, n_embd=width, n_layer=layers, n_head=4, bos_token_id=0, eos_token_id=0
        )
    )
