"""A worker's part in a swarm: it pulls versions and updates from other workers, serves its own, and aggregates."""
