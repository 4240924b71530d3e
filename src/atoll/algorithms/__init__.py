"""Algorithms, one a file. What an algorithm of your own is made of is imported from here."""

from atoll.algorithms.base import Algorithm, Correction, LocalContext, LocalRule, Moved, Runs

__all__ = ["Algorithm", "Correction", "LocalContext", "LocalRule", "Moved", "Runs"]
