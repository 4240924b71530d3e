"""Algorithms, one per file. To write your own algorithm, import its building blocks from here."""

from atoll.algorithms.base import Algorithm, ChangeReader, Correction, ElementReader, LocalContext, LocalRule

__all__ = ["Algorithm", "ChangeReader", "Correction", "ElementReader", "LocalContext", "LocalRule"]
