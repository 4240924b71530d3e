"""From the updates of a round to the next version: decode, reduce, step, write."""
