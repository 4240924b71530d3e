"""The site's data: put your own here. These are made so that sites differ: most pictures of one are of two classes.

Where the sites' data are alike, FedAvg does as well as SCAFFOLD, with half the bytes.
"""

import zlib

import torch
from torch import Tensor

Pictures = tuple[Tensor, Tensor]
"""Pictures [N, 1, 8, 8], and labels [N]."""

OWN_SHARE = 0.8
"""Of a site's pictures, those of its own two classes."""


def load(site: str, count: int = 512) -> Pictures:
    """What a site trains on."""
    own = torch.Generator().manual_seed(zlib.crc32(site.encode()))
    classes = torch.randperm(10, generator=own)[:2]
    mine = classes[torch.randint(2, (count,), generator=own)]
    any_class = torch.randint(10, (count,), generator=own)
    labels = torch.where(torch.rand(count, generator=own) < OWN_SHARE, mine, any_class)
    return _pictures(labels, own), labels


def held_out(count: int = 500) -> Pictures:
    """What every site measures the global model on: all classes alike."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(10, (count,), generator=generator)
    return _pictures(labels, generator), labels


def _pictures(labels: Tensor, generator: torch.Generator) -> Tensor:
    patterns = torch.randn(10, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    return patterns[labels] + 2.0 * torch.randn(len(labels), 1, 8, 8, generator=generator)
