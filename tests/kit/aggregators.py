"""Sources of aggregators, for files whose path a run has as `aggregation.aggregator.path`."""

from __future__ import annotations

MEAN = """
def mean(updates):
    total = sum(update.weight for update in updates)
    for name in updates[0].tensors:
        result = None
        for update in updates:
            tensor = update.tensors[name].float()
            if result is None:
                result = tensor * (update.weight / total)
            else:
                result.add_(tensor, alpha=update.weight / total)
        yield name, result
"""
"""The built-in weighted mean, written by hand."""
