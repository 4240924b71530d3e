"""The training loops of a worker: federated rounds, the same loop as plain functions, and DiLoCo."""
