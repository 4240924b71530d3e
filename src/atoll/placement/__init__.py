"""Where a fragment is aggregated, on the server or on a worker: what both need for the one pass."""
