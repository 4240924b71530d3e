"""A worker's part in a swarm: exchange versions and updates with other workers, and aggregate updates."""
