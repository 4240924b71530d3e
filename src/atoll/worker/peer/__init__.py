"""A worker's part in a swarm: pull versions and updates from other workers, serve its own, and aggregate."""
