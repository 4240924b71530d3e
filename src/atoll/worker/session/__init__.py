"""A worker's membership in a run: join, heartbeats, tickets, retries, the ranks of one site, and leaving."""
