"""Aggregation: make the next version of the model from the updates of a round (decode, reduce, outer step, write)."""
