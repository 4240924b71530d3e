"""Split one data set over sites, look at what each site has, and load small data sets that are on this machine.

    parts = atoll.data.dirichlet(dataset, sites=5, alpha=0.3, seed=1)
    print(parts.table())                       # how many examples of which label each site has
    mine = parts.subset("site-0002")           # or parts["site-0002"]: the indices

Splits are for experiments: real sites have their own data. Each site can compute the whole split and take its part:
the same seed gives the same split on every machine. Importing this module needs NumPy alone.
"""

from __future__ import annotations

from atoll.data.load import FASHION_MNIST, Speech, digits, fashion_mnist, plays
from atoll.data.partition import Partition
from atoll.data.split import by_attribute, dirichlet, holdout, iid, natural, quantity_skew, shards

__all__ = [
    "FASHION_MNIST",
    "Partition",
    "Speech",
    "by_attribute",
    "digits",
    "dirichlet",
    "fashion_mnist",
    "holdout",
    "iid",
    "natural",
    "plays",
    "quantity_skew",
    "shards",
]
