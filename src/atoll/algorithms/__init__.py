"""Algorithms, one per file. To write your own algorithm, import its building blocks from here."""

from atoll.algorithms.base import Algorithm, Correction, LocalContext, LocalRule, Moved, Runs

__all__ = ["Algorithm", "Correction", "LocalContext", "LocalRule", "Moved", "Runs"]
