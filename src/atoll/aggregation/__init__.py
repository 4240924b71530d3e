"""Making the next version from the updates of a round: decode, reduce, step, write."""
